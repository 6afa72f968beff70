"""Options, replies and bookkeeping of the LangChain chat model."""

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.load import dumpd, load
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.rate_limiters import BaseRateLimiter
from pydantic import ValidationError

from langchain_ragkv import ChatSnapKV
from langchain_ragkv._messages import to_langchain, to_ragkv
from ragkv import registry
from ragkv.citations import find_markers
from ragkv.documents import Document
from ragkv.errors import ConfigError, PromptTooLong, ReplyTimeout
from ragkv.messages import Segment
from ragkv.policies import SnapKV
from ragkv.prompt import CitePrompt
from ragkv.streaming.exchanges import text_of
from ragkv.tools import prepare_tool_messages
from tiny import tiny_model, tiny_tokenizer

QUESTION = "Who wrote the last question?"


class TestConstruction:
    def test_loads_nothing(self, loads: list[str]) -> None:
        llm = ChatSnapKV(model="tiny")
        llm.bind_tools([{"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}])
        llm.with_structured_output({"title": "T", "type": "object", "properties": {}})
        dumpd(llm)
        assert llm.profile is not None
        assert loads == []
        llm.invoke(QUESTION, max_tokens=1)
        assert loads != []

    @pytest.mark.parametrize(
        ("wrong", "right"),
        [("max_capacity_promt", "max_capacity_prompt"), ("model_name", "model"), ("max_new_tokens", "max_tokens")],
    )
    def test_an_unknown_name_is_an_error_that_suggests_the_nearest(self, wrong: str, right: str) -> None:
        with pytest.raises(ValidationError, match=f"ChatSnapKV has no option '{wrong}': did you mean '{right}'"):
            ChatSnapKV(**{wrong: 1})

    @pytest.mark.parametrize(
        "options", [{"temperature": -1}, {"kernel_size": 4}, {"max_capacity_prompt": 8}, {"policy": "snapvk"}]
    )
    def test_values_are_checked_at_once(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValidationError, match=f"{next(iter(options))}="):
            ChatSnapKV(**options)

    def test_names_that_every_langchain_model_takes(self) -> None:
        llm = ChatSnapKV(api_key="secret", max_retries=3, timeout=5)
        assert "secret" not in json.dumps(dumpd(llm))
        assert "secret" not in repr(llm)

    def test_one_copy_of_the_weights_whatever_the_budget_and_a_way_to_unload(self, tmp_path: Path) -> None:
        tiny_model("llama").save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        small = ChatSnapKV(model=str(tmp_path), max_capacity_prompt=70, max_tokens=2)
        large = ChatSnapKV(model=str(tmp_path), max_capacity_prompt=4096, max_tokens=2)
        small.invoke(QUESTION)
        large.invoke(QUESTION)
        loaded = small.options().engine().model
        assert large.options().engine().model is loaded
        assert small.unload() == 1
        assert large.options().engine().model is not loaded
        registry.unload(str(tmp_path))


class TestReplies:
    def test_text_usage_and_statistics(self, llm: ChatSnapKV) -> None:
        reply = llm.invoke(QUESTION)
        assert reply.text
        assert QUESTION not in reply.text
        prompt_tokens = llm.get_num_tokens_from_messages([HumanMessage(QUESTION)])
        assert reply.usage_metadata == {
            "input_tokens": prompt_tokens,
            "output_tokens": 24,
            "total_tokens": prompt_tokens + 24,
            "input_token_details": {"cache_read": 0, "cache_creation": 0},
        }
        stats = reply.response_metadata
        assert (stats["model_name"], stats["finish_reason"]) == ("tiny", "length")
        assert stats["kv_bytes_kept"] == stats["kv_bytes_full"] > 0
        assert stats["ttft_s"] > 0
        assert stats["decode_tokens_per_s"] > 0
        assert stats["kept_tokens"] == prompt_tokens

    def test_a_long_prompt_is_compressed(self, llm: ChatSnapKV) -> None:
        small = ChatSnapKV(model="tiny", max_capacity_prompt=70, max_tokens=4)
        stats = small.invoke("the answer names the documents " * 20).response_metadata
        assert stats["kept_tokens"] == 70
        assert stats["kv_bytes_kept"] < stats["kv_bytes_full"]

    def test_streamed_chunks_add_up_to_the_reply(self, llm: ChatSnapKV) -> None:
        chunks = list(llm.stream(QUESTION))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        reply = llm.invoke(QUESTION)
        assert whole.text == reply.text
        assert whole.usage_metadata == reply.usage_metadata
        assert sum(bool(chunk.text) for chunk in chunks) > 5
        assert [chunk.usage_metadata is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].chunk_position == "last"
        assert whole.response_metadata["finish_reason"] == "length"

    def test_a_second_question_about_the_same_documents_is_all_that_is_read(self, loads: list[str]) -> None:
        """K/V live in the process, not in the instance; another namespace has none of them."""
        documents = "the answer names the documents " * 30

        def details(question: str, **options: Any) -> Any:
            llm = ChatSnapKV(model="tiny", max_tokens=4, kv_memory_bytes=10**8, **options)
            usage = llm.invoke(f"{documents}\n{question}", max_capacity_prompt=80).usage_metadata
            assert usage is not None
            return usage["input_token_details"], usage["input_tokens"]

        first, tokens = details("Who wrote it?")
        assert (first["cache_read"], first["cache_creation"]) == (0, tokens // 128 * 128)
        second, tokens = details("And when?")
        assert tokens - 128 - 64 < second["cache_read"] < tokens
        assert details("And when?", namespace="tenant")[0]["cache_read"] == 0
        assert details("And when?", policy="full")[0]["cache_read"] == second["cache_read"]

    def test_usage_reaches_callbacks(self, llm: ChatSnapKV) -> None:
        counter = UsageMetadataCallbackHandler()
        llm.invoke(QUESTION, config={"callbacks": [counter]})
        list(llm.stream(QUESTION, config={"callbacks": [counter]}))
        assert counter.usage_metadata["tiny"]["output_tokens"] == 48

    def test_a_stop_string_ends_the_reply_and_is_not_in_it(self, llm: ChatSnapKV) -> None:
        text = llm.invoke(QUESTION).text
        stop = text[6:9]
        expected = text[: text.index(stop)]
        for reply in (llm.invoke(QUESTION, stop=[stop]), ChatSnapKV(**_options(llm), stop=[stop]).invoke(QUESTION)):
            assert (reply.text, reply.response_metadata["finish_reason"]) == (expected, "stop")
        assert "".join(chunk.text for chunk in llm.stream(QUESTION, stop=[stop])) == expected

    def test_streaming_makes_invoke_stream(self, llm: ChatSnapKV) -> None:
        streaming = ChatSnapKV(**_options(llm), streaming=True)
        assert streaming.invoke(QUESTION).text == llm.invoke(QUESTION).text

    def test_a_prompt_that_does_not_fit_is_an_error_with_counts(self, llm: ChatSnapKV) -> None:
        with pytest.raises(PromptTooLong, match=r"a prompt of \d{4} tokens and max_tokens=24"):
            llm.invoke("the answer names the documents " * 200)

    def test_timeout(self, llm: ChatSnapKV, slow_tokens: Any) -> None:
        with pytest.raises(ReplyTimeout, match=r"timeout=0\.1"):
            llm.invoke(QUESTION, timeout=0.1, max_tokens=200)
        assert slow_tokens.count <= 12
        assert ChatSnapKV(**_options(llm), timeout=30).invoke(QUESTION).text


class TestCalls:
    def test_options_of_one_call(self, llm: ChatSnapKV) -> None:
        usage = llm.invoke(QUESTION, max_tokens=3).usage_metadata
        assert usage is not None
        assert usage["output_tokens"] == 3
        assert llm.bind(max_tokens=5).invoke(QUESTION).usage_metadata["output_tokens"] == 5
        stats = llm.invoke("the answer names the documents " * 20, max_capacity_prompt=70).response_metadata
        assert stats["kept_tokens"] == 70

    def test_sampling(self, llm: ChatSnapKV) -> None:
        first, again, other = (llm.invoke(QUESTION, temperature=5.0, seed=seed).text for seed in (1, 1, 2))
        assert first == again != other
        assert llm.invoke(QUESTION).text == llm.invoke(QUESTION, temperature=5.0, top_k=1).text

    def test_another_model_for_one_call(self, llm: ChatSnapKV, loads: list[str]) -> None:
        assert llm.invoke(QUESTION, model="other").response_metadata["model_name"] == "other"
        assert loads == ["other"]

    def test_an_unknown_name_is_an_error(self, llm: ChatSnapKV) -> None:
        for call in (llm.invoke, lambda *args, **kwargs: list(llm.stream(*args, **kwargs))):
            with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
                call(QUESTION, max_token=3)
        with pytest.raises(ConfigError, match="did you mean 'temperature'"):
            llm.bind_tools([], temprature=0)

    def test_a_policy_object(self, llm: ChatSnapKV) -> None:
        own = ChatSnapKV(**_options(llm), policy=SnapKV(max_capacity_prompt=80))
        assert own.invoke("the answer names the documents " * 20).response_metadata["kept_tokens"] == 80


class TestMessages:
    def test_every_kind_in_any_order(self, llm: ChatSnapKV) -> None:
        call: Any = {"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}
        history: list[BaseMessage] = [
            AIMessage("Hello."),
            SystemMessage("Be brief."),
            HumanMessage("What is 1 + 2?", name="Ann"),
            AIMessage("", tool_calls=[call]),
            ToolMessage("b is missing", tool_call_id="c1", status="error"),
            SystemMessage("Be kind."),
            ChatMessage(role="user", content="Go on."),
            AIMessage([{"type": "reasoning", "reasoning": "secret"}, "Well, ", {"type": "text", "text": "3"}]),
        ]
        assert llm.invoke(history).text
        assert to_ragkv(history)[2]["name"] == "Ann"
        assert to_ragkv(history)[4]["status"] == "error"
        assert to_ragkv(history)[7]["content"] == "Well, 3"

    def test_calls_that_stand_in_the_content_alone(self) -> None:
        block = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
        [message] = to_ragkv([AIMessage([{"type": "text", "text": "One moment."}, block])])
        [call] = message["tool_calls"]
        assert (message["content"], call["id"]) == ("One moment.", "c1")
        assert call["function"] == {"name": "add", "arguments": {"a": 1}}
        listed: Any = [{"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}]
        assert len(to_ragkv([AIMessage([block], tool_calls=listed)])[0]["tool_calls"]) == 1

    def test_a_broken_call_is_shown_to_the_model(self) -> None:
        broken: Any = {"name": "add", "args": '{"a": ', "id": "c1", "error": "cut off", "type": "invalid_tool_call"}
        messages = to_ragkv([AIMessage("Well.", invalid_tool_calls=[broken])])
        (message,), _ = prepare_tool_messages(tiny_tokenizer(), messages)
        assert text_of(message) == 'Well.\n{"a": '

    @pytest.mark.parametrize(
        "block",
        [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"},
            {"type": "file", "base64": "AAAA", "mime_type": "application/pdf"},
        ],
    )
    def test_what_is_no_text_is_refused_by_name(self, llm: ChatSnapKV, block: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"type 'human' holds a block of type '(image|audio|file)"):
            llm.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, block])])
        with pytest.raises(ConfigError, match=r"type 'ai' holds a block of type '(image|audio|file)"):
            llm.invoke([AIMessage([block]), HumanMessage("Go on.")])
        with pytest.raises(ConfigError, match="a message of type 'remove'"):
            llm.invoke([RemoveMessage(id="1")])

    def test_segments_survive_the_way_through_langchain(self) -> None:
        messages = CitePrompt().messages("Who?", [Document("d", "Ann wrote it.", "Title")])
        through = to_langchain(messages)
        assert [message["content"] for message in to_ragkv(through)] == [message["content"] for message in messages]
        assert find_markers(through[-1].text)[0].numbers == (1,)
        through[-1].content += " Be brief."
        assert isinstance(to_ragkv(through)[-1]["content"], str)
        marked = [segment for segment in messages[-1]["content"] if isinstance(segment, Segment)]
        assert {segment.kind for segment in marked} == {"instruction", "header", "document", "question", "reply"}


class TestBookkeeping:
    def test_cache(self, llm: ChatSnapKV, generations: list[int]) -> None:
        cache = InMemoryCache()
        cached = ChatSnapKV(**_options(llm), cache=cache)
        assert cached.invoke(QUESTION).text == cached.invoke(QUESTION).text
        assert generations == [1]
        for budget in (70, 80):
            ChatSnapKV(**_options(llm), cache=cache, policy=SnapKV(max_capacity_prompt=budget)).invoke(QUESTION)
        assert generations == [1, 1, 1]

    def test_rate_limiter(self, llm: ChatSnapKV) -> None:
        class Limiter(BaseRateLimiter):
            acquired = 0

            def acquire(self, *, blocking: bool = True) -> bool:
                self.acquired += 1
                return True

            async def aacquire(self, *, blocking: bool = True) -> bool:
                return self.acquire()

        limiter = Limiter()
        limited = ChatSnapKV(**_options(llm), rate_limiter=limiter)
        limited.invoke(QUESTION)
        limited.batch([QUESTION, QUESTION])
        assert limiter.acquired == 3

    def test_tokens_are_counted_by_the_models_tokenizer(self, llm: ChatSnapKV) -> None:
        tokenizer = tiny_tokenizer()
        assert llm.get_token_ids(QUESTION) == tokenizer.encode(QUESTION, add_special_tokens=False)
        assert llm.get_num_tokens(QUESTION) == len(llm.get_token_ids(QUESTION))
        tool = {"name": "add", "description": "adds numbers", "parameters": {"type": "object", "properties": {}}}
        without, with_tool = (llm.get_num_tokens_from_messages([HumanMessage(QUESTION)], t) for t in (None, [tool]))
        assert len(llm.get_token_ids(QUESTION)) < without < with_tool

    def test_tracing_parameters_follow_the_call(self) -> None:
        llm = ChatSnapKV(model="m", temperature=0.5, stop=["x"])
        assert llm._get_ls_params(max_tokens=7) == {
            "ls_provider": "ragkv",
            "ls_model_type": "chat",
            "ls_model_name": "m",
            "ls_temperature": 0.5,
            "ls_max_tokens": 7,
            "ls_stop": ["x"],
        }
        assert llm._get_ls_params(stop=["y"])["ls_stop"] == ["y"]

    def test_serialisation_round_trip(self) -> None:
        llm = ChatSnapKV(model="m", max_capacity_prompt=512, window_size=16, stop=["x"], seed=3, timeout=9)
        again = load(dumpd(llm), allowed_objects=[ChatSnapKV], valid_namespaces=["langchain_ragkv"])
        assert again == llm
        assert again.asdict() == llm.asdict()
        assert llm.asdict()["max_capacity_prompt"] == 512
        assert ChatSnapKV(policy=SnapKV(80)).asdict()["policy"] == str(SnapKV(80))

    def test_profile(self) -> None:
        profile = ChatSnapKV(model="qwen2.5-coder-1.5b").profile
        assert profile is not None
        assert profile["max_input_tokens"] == 32768
        assert profile["tool_calling"]
        assert not profile["image_inputs"]
        assert "max_input_tokens" not in (ChatSnapKV(model="of/somebody").profile or {})

    def test_message_types(self, llm: ChatSnapKV) -> None:
        assert type(llm.invoke(QUESTION)) is AIMessage
        assert {type(chunk) for chunk in llm.stream(QUESTION)} == {AIMessageChunk}


def _options(llm: ChatSnapKV) -> dict[str, Any]:
    return {"model": llm.model, "max_tokens": llm.max_tokens}
