"""Construction, serialisation, metadata, callbacks and installation of ChatSnapKV."""

import pickle
import subprocess
import sys
import time
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent, LLMCompletionEndEvent
from llama_index.core.llms import LLM, ChatMessage, MessageRole
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.rate_limiter import BaseRateLimiter
from pydantic import ValidationError

from llama_index.llms.ragkv import ChatSnapKV, CitedAnswerSynthesizer, RagkvEmbedding
from llama_index.llms.ragkv import __all__ as public
from ragkv import registry
from ragkv.errors import ConfigError, ModelError
from ragkv.options import ChatOptions
from ragkv.policies import StreamingLLM

HELLO = [ChatMessage(content="Hello!")]


def test_public_names() -> None:
    assert public == ["ChatSnapKV", "CitedAnswerSynthesizer", "RagkvEmbedding", "RecallMemoryBlock"]
    assert issubclass(ChatSnapKV, FunctionCallingLLM)
    assert ChatSnapKV.class_name() == "ChatSnapKV"
    assert RagkvEmbedding.class_name() == "RagkvEmbedding"


def test_init_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", {})  # another test of this process may have loaded the model
    monkeypatch.setattr(registry, "load", lambda *_, **__: pytest.fail("loaded a model"))
    started = time.perf_counter()
    llms = [ChatSnapKV(model="qwen2.5-coder-1.5b") for _ in range(10)]
    assert [llm.metadata.context_window for llm in llms] == [32_768] * 10
    assert time.perf_counter() - started < 2
    with pytest.raises(BaseException, match="loaded a model"):
        llms[0].complete("Hello!")


def test_fields_are_the_shared_options() -> None:
    defaults = {f.name: f.default if f.default is not MISSING else f.default_factory for f in fields(ChatOptions)}
    llm = ChatSnapKV()
    assert {name: getattr(llm, name) for name in defaults} == {**defaults, "stop": []}
    described = [ChatSnapKV.model_fields[name].description for name in defaults]
    assert all(described)


@pytest.mark.parametrize(
    ("name", "nearest"), [("max_capacity_promt", "max_capacity_prompt"), ("windowsize", "window_size")]
)
def test_unknown_options_are_errors(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"ChatSnapKV has no option '{name}': did you mean '{nearest}'"):
        ChatSnapKV(**{name: 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": 4}, "kernel_size=4: must be an odd number"),
        ({"temperature": -1}, "temperature=-1.0: must be at least 0"),
        ({"max_capacity_prompt": 16}, "max_capacity_prompt=16: must be larger than the observation window"),
        ({"context_tokens": 0}, "context_tokens=0: must be at least 1"),
    ],
)
def test_values_out_of_bounds_are_errors_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatSnapKV(**options)


def test_values_of_a_wrong_type_are_errors() -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        ChatSnapKV(max_tokens="many")
    with pytest.raises(ConfigError, match="policy='snap': choose one of snapkv, full, streaming"):
        ChatSnapKV(policy="snap")
    with pytest.raises(ConfigError, match="give a name or a policy object"):
        ChatSnapKV(policy={"window_size": 3})


def test_policy_objects(tiny: ChatSnapKV) -> None:
    ours = StreamingLLM(num_sink_tokens=2, window_length=8)
    llm = ChatSnapKV(**{**tiny.to_dict(), "policy": ours})
    assert llm.complete("word " * 30, max_tokens=1).raw["stats"]["kept_tokens"] == 10
    assert tiny.complete("word " * 30, max_tokens=1, policy=ours).raw["stats"]["kept_tokens"] == 10


def test_round_trip() -> None:
    llm = ChatSnapKV(model="smollm2-135m", stop=["x"], seed=3, window_size=16, system_prompt="Be brief.")
    data = llm.to_dict()
    assert data["class_name"] == "ChatSnapKV"
    for copy in (
        ChatSnapKV.from_dict(data),
        ChatSnapKV.from_json(llm.to_json()),
        ChatSnapKV.model_validate(data),
        pickle.loads(pickle.dumps(llm)),
        llm.model_copy(),
    ):
        assert copy.to_dict() == data


def test_metadata(tiny: ChatSnapKV) -> None:
    metadata = tiny.metadata
    assert metadata.context_window == 1024  # from the folder's config.json
    assert metadata.num_output == tiny.max_tokens
    assert metadata.is_chat_model
    assert metadata.is_function_calling_model
    assert metadata.model_name == tiny.model
    assert metadata.system_role == MessageRole.SYSTEM


def test_metadata_of_no_model() -> None:
    with pytest.raises(ModelError, match="did you mean smollm2-135m"):
        _ = ChatSnapKV(model="smollm2").metadata


def test_models_are_shared(tiny: ChatSnapKV) -> None:
    tiny.chat(HELLO, max_tokens=1)
    small = ChatSnapKV(**{**tiny.to_dict(), "max_capacity_prompt": 100})
    assert small.options().engine().model is tiny.options().engine().model
    assert small.options().engine().policy != tiny.options().engine().policy


def test_unload(tiny: ChatSnapKV) -> None:
    before = tiny.options().engine().model
    assert tiny.unload() == 1
    assert tiny.unload() == 0
    assert tiny.options().engine().model is not before


def test_tokenize(tiny: ChatSnapKV) -> None:
    assert len(tiny.tokenize("The documents")) < len(tiny.tokenize("The documents, the answer"))


class Events(BaseEventHandler):
    """Keeps what happened."""

    seen: list[BaseEvent] = []  # noqa: RUF012  # pydantic copies it

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.seen.append(event)

    @classmethod
    def class_name(cls) -> str:
        return "Events"


@pytest.fixture
def events() -> Any:
    dispatcher = get_dispatcher()
    before = list(dispatcher.event_handlers)
    handler = Events()
    dispatcher.add_event_handler(handler)
    yield handler.seen
    dispatcher.event_handlers = before


async def test_instrumentation(tiny: ChatSnapKV, events: list[BaseEvent]) -> None:
    tiny.chat(HELLO, max_tokens=2)
    list(tiny.stream_chat(HELLO, max_tokens=2))
    await tiny.achat(HELLO, max_tokens=2)
    await tiny.acomplete("Hello!", max_tokens=2)
    starts = [event for event in events if isinstance(event, LLMChatStartEvent)]
    ends = [event for event in events if isinstance(event, LLMChatEndEvent)]
    assert len(starts) == len(ends) == 3
    assert starts[0].model_dict["model_name"] == tiny.model
    assert all(end.response and end.response.additional_kwargs["completion_tokens"] == 2 for end in ends)
    assert sum(isinstance(event, LLMCompletionEndEvent) for event in events) == 1


def test_token_counting_handler(tiny: ChatSnapKV) -> None:
    counter = TokenCountingHandler()
    llm = ChatSnapKV(**{**tiny.to_dict(), "callback_manager": CallbackManager([counter])})
    usage = llm.chat(HELLO).additional_kwargs
    list(llm.stream_chat(HELLO))
    assert counter.prompt_llm_token_count == 2 * usage["prompt_tokens"]
    assert counter.completion_llm_token_count == 2 * usage["completion_tokens"]


def test_rate_limiter(tiny: ChatSnapKV) -> None:
    class Limiter(BaseRateLimiter):
        waits = 0

        def acquire(self) -> None:
            Limiter.waits += 1

        async def async_acquire(self) -> None:
            Limiter.waits += 1

    llm = ChatSnapKV(**{**tiny.to_dict(), "rate_limiter": Limiter()})
    llm.complete("Hello!", max_tokens=1)
    assert Limiter.waits == 1


def test_namespace_is_shared_with_the_core() -> None:
    """`llama_index` belongs to nobody: the core and ragkv each bring a part, and other packages may."""
    import llama_index.llms.ragkv
    import llama_index.llms.ragkv as ours

    assert getattr(llama_index, "__file__", None) is None
    assert getattr(llama_index.llms, "__file__", None) is None
    assert Path(llama_index.core.__file__).parents[1] != Path(ours.__file__).parents[2]
    assert issubclass(ChatSnapKV, LLM)


def test_missing_extra() -> None:
    """Without llama-index-core there is one error, which names the pip command."""
    code = (
        "import sys; sys.modules['llama_index.core'] = None\n"
        "from ragkv.errors import MissingExtra\n"
        "try:\n    import llama_index.llms.ragkv\n"
        "except ImportError as error:\n    assert isinstance(error, MissingExtra); print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "ragkv[llama-index]"' in done.stdout


async def test_embedding() -> None:
    embedding = RagkvEmbedding()
    vector = embedding.get_text_embedding("a cat on a mat")
    assert len(vector) == 384
    assert sum(value * value for value in vector) == pytest.approx(1, abs=1e-4)
    near, far = (embedding.similarity(vector, embedding.get_query_embedding(q)) for q in ("kitten", "tax law"))
    assert near > far
    assert await embedding.aget_query_embedding("a cat on a mat") == pytest.approx(vector, abs=1e-5)
    batch = embedding.get_text_embedding_batch(["a cat on a mat", "tax law"])
    assert batch[0] == pytest.approx(vector, abs=1e-4)


def test_embedding_round_trip() -> None:
    embedding = RagkvEmbedding.from_dict(RagkvEmbedding(embed_batch_size=7).to_dict())
    assert embedding.model_name == "all-minilm-l6-v2"
    assert embedding.embed_batch_size == 7


def test_synthesizer_takes_the_llm(tiny: ChatSnapKV) -> None:
    assert CitedAnswerSynthesizer(tiny).callback_manager is not None
