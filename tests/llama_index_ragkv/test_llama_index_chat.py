"""The contract of a chat model, after langchain-tests' list: chat, complete, their streams and their async forms."""

import asyncio
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse, ThinkingBlock
from llama_index.core.llms import ChatMessage, ImageBlock, MessageRole, TextBlock

from llama_index.llms.ragkv import ChatSnapKV
from ragkv.decode import Decoder
from ragkv.errors import ConfigError, PromptTooLong, ReplyTimeout

HELLO = [ChatMessage(content="What is the capital of France? Answer with one word.")]
USER, ASSISTANT, SYSTEM = MessageRole.USER, MessageRole.ASSISTANT, MessageRole.SYSTEM


def test_chat(qwen: ChatSnapKV) -> None:
    response = qwen.chat(HELLO)
    assert response.message.role == ASSISTANT
    assert "Paris" in (response.message.content or "")
    assert response.delta is None


async def test_achat(qwen: ChatSnapKV) -> None:
    assert "Paris" in str((await qwen.achat(HELLO)).message.content)


def test_stream(tiny: ChatSnapKV) -> None:
    chunks = list(tiny.stream_chat(HELLO))
    check_stream(chunks, [chunk.message.content or "" for chunk in chunks], tiny.chat(HELLO).message.content)


async def test_astream(tiny: ChatSnapKV) -> None:
    chunks = [chunk async for chunk in await tiny.astream_chat(HELLO)]
    check_stream(chunks, [chunk.message.content or "" for chunk in chunks], tiny.chat(HELLO).message.content)


def test_complete(tiny: ChatSnapKV) -> None:
    question = HELLO[0].content or ""
    assert tiny.complete(question).text == tiny.chat(HELLO).message.content


async def test_acomplete(tiny: ChatSnapKV) -> None:
    assert (await tiny.acomplete("Who?")).text == tiny.complete("Who?").text


def test_stream_complete(tiny: ChatSnapKV) -> None:
    chunks = list(tiny.stream_complete("Who?"))
    check_stream(chunks, [chunk.text for chunk in chunks], tiny.complete("Who?").text)


async def test_astream_complete(tiny: ChatSnapKV) -> None:
    chunks = [chunk async for chunk in await tiny.astream_complete("Who?")]
    check_stream(chunks, [chunk.text for chunk in chunks], tiny.complete("Who?").text)


def check_stream(chunks: list[Any], texts: list[str], whole: str | None) -> None:
    """Deltas add up, each chunk holds all so far, and only the last has the usage."""
    assert len(chunks) > 3
    so_far = ""
    for chunk, text in zip(chunks, texts, strict=True):
        so_far += chunk.delta
        assert text == so_far
    assert so_far == whole
    assert [bool(chunk.additional_kwargs) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_the_prompt_is_not_echoed(tiny: ChatSnapKV) -> None:
    assert "capital of France" not in str(tiny.chat(HELLO).message.content)


def test_formatted_prompts_are_raw(tiny: ChatSnapKV, prompts: list[str]) -> None:
    list(tiny.stream_complete("<|im_start|>user\nWho?<|im_end|>", formatted=True))
    tiny.complete("Who?")
    assert prompts[0] == "<|im_start|>user\nWho?<|im_end|>"
    assert prompts[1] == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_completion_to_prompt_is_used_in_streams_too(tiny: ChatSnapKV, prompts: list[str]) -> None:
    llm = ChatSnapKV(**{**tiny.to_dict(), "completion_to_prompt": lambda prompt: f"<<{prompt}>>"})
    llm.complete("Who?")
    list(llm.stream_complete("Who?"))
    assert prompts == ["<<Who?>>"] * 2


def test_conversation(tiny: ChatSnapKV, prompts: list[str]) -> None:
    messages = [
        ChatMessage(role=SYSTEM, content="Be brief."),
        ChatMessage(content="hello"),
        ChatMessage(role=ASSISTANT, content="hi"),
        ChatMessage(content="how are you"),
    ]
    assert tiny.chat(messages).message.content
    turns = ["system\nBe brief.", "user\nhello", "assistant\nhi", "user\nhow are you"]
    assert prompts == ["".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"]


def test_double_messages_conversation(tiny: ChatSnapKV, prompts: list[str]) -> None:
    roles = (SYSTEM, SYSTEM, USER, USER, ASSISTANT, ASSISTANT, USER)
    tiny.chat([ChatMessage(role=role, content=f"text {n}") for n, role in enumerate(roles)])
    assert prompts[0].count("<|im_start|>") == 5  # system, user, assistant, user, and the reply
    assert "text 0\n\ntext 1" in prompts[0]
    assert "text 4\n\ntext 5" in prompts[0]


def test_all_roles_are_understood(tiny: ChatSnapKV, prompts: list[str]) -> None:
    tiny.chat([ChatMessage(role=role, content=role.value) for role in MessageRole])
    assert "developer" in prompts[0].split("<|im_end|>")[0]  # with the system message
    assert "<|im_start|>tool\n" in prompts[0]


def test_usage(tiny: ChatSnapKV) -> None:
    for response in (tiny.chat(HELLO), tiny.complete(HELLO[0].content or "")):
        usage = response.additional_kwargs
        assert usage["completion_tokens"] == 24
        assert usage["prompt_tokens"] > 10
        assert usage["total_tokens"] == usage["prompt_tokens"] + 24
        assert response.raw["usage"] == usage  # where TokenCountingHandler looks
        assert response.raw["stats"]["kept_tokens"] == usage["prompt_tokens"]
        assert response.raw["finish_reason"] == "length"


def test_a_second_question_about_the_same_documents_is_all_that_is_read(tiny: ChatSnapKV) -> None:
    documents = "the answer names the documents " * 30

    def usage(question: str, **options: Any) -> tuple[int, int, int]:
        given = [ChatMessage(content=f"{documents}\n{question}")]
        found = tiny.chat(given, max_tokens=4, max_capacity_prompt=80, **options).additional_kwargs
        return found["prompt_tokens"], found["cache_read"], found["cache_creation"]

    tokens, read, created = usage("Who wrote it?")
    assert (read, created) == (0, tokens // 128 * 128)
    tokens, read, _ = usage("And when?")
    assert tokens - 128 - 64 < read < tokens
    assert usage("And when?", namespace="tenant")[1] == 0
    assert usage("And when?", kv_memory_bytes=0)[1:] == (0, 0)


def test_usage_streaming(tiny: ChatSnapKV) -> None:
    *_, chat = tiny.stream_chat(HELLO)
    *_, completion = tiny.stream_complete(HELLO[0].content or "")
    assert chat.additional_kwargs == completion.additional_kwargs == tiny.chat(HELLO).additional_kwargs
    assert chat.raw["model"] == tiny.model


def test_response_metadata_is_json(tiny: ChatSnapKV) -> None:
    response = tiny.chat(HELLO)
    assert ChatResponse.model_validate_json(response.model_dump_json()) == response


def straddling(llm: ChatSnapKV) -> tuple[str, str]:
    """The reply without stop strings, and a piece of it that begins and ends inside tokens."""
    pieces = [chunk.delta or "" for chunk in llm.stream_chat(HELLO)]
    text = "".join(pieces)
    for left, right in pairwise(pieces[3:]):
        stop = left[-1:] + right[:1]
        if len(stop) == 2 and stop not in text[: text.index(left + right)]:
            return text, stop
    raise AssertionError("the tiny model repeats itself: choose another seed")


def test_stop_sequence(tiny: ChatSnapKV) -> None:
    text, stop = straddling(tiny)
    expected = text[: text.index(stop)]
    made = ChatSnapKV(**{**tiny.to_dict(), "stop": [stop]})
    replies = [tiny.chat(HELLO, stop=[stop]), tiny.chat(HELLO, stop=stop), made.chat(HELLO)]
    assert [reply.message.content for reply in replies] == [expected] * 3
    assert replies[0].raw["finish_reason"] == "stop"


async def test_stop_sequence_does_not_leak_into_streams(tiny: ChatSnapKV) -> None:
    text, stop = straddling(tiny)
    expected = text[: text.index(stop)]
    assert "".join(chunk.delta or "" for chunk in tiny.stream_chat(HELLO, stop=[stop])) == expected
    assert "".join([chunk.delta or "" async for chunk in await tiny.astream_chat(HELLO, stop=[stop])]) == expected


def test_options_of_a_call(tiny: ChatSnapKV) -> None:
    assert tiny.chat(HELLO, max_tokens=3).additional_kwargs["completion_tokens"] == 3
    assert tiny.complete("Who?", max_tokens=2).additional_kwargs["completion_tokens"] == 2
    warm = [tiny.chat(HELLO, temperature=5.0, seed=seed).message.content for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]
    kept = tiny.complete("word " * 100, max_capacity_prompt=40, window_size=8).raw["stats"]["kept_tokens"]
    assert kept == 40


def test_none_leaves_an_option_alone(tiny: ChatSnapKV) -> None:
    assert tiny.chat(HELLO, max_tokens=None, stop=None).additional_kwargs["completion_tokens"] == 24


@pytest.mark.parametrize("name", ["chat", "stream_chat", "complete", "stream_complete"])
def test_unknown_options_of_a_call_are_errors(tiny: ChatSnapKV, name: str) -> None:
    with pytest.raises(ConfigError, match="no option 'max_new_tokens': did you mean 'max_tokens'"):
        getattr(tiny, name)(HELLO if "chat" in name else "Who?", max_new_tokens=3)


@pytest.mark.parametrize("name", ["achat", "astream_chat", "acomplete", "astream_complete"])
async def test_unknown_options_of_an_async_call_are_errors(tiny: ChatSnapKV, name: str) -> None:
    with pytest.raises(ConfigError, match="no option 'temprature': did you mean 'temperature'"):
        await getattr(tiny, name)(HELLO if "chat" in name else "Who?", temprature=1)


def test_model_override(tiny: ChatSnapKV) -> None:
    other = ChatSnapKV(**{**tiny.to_dict(), "model": "qwen2.5-coder-0.5b"})
    assert other.chat(HELLO, model=tiny.model).message.content == tiny.chat(HELLO).message.content


async def test_concurrent_calls(tiny: ChatSnapKV) -> None:
    questions = ["Who wrote it?", "What is the last question about, in a few words?", "Where?"]
    alone = [tiny.complete(question).text for question in questions]
    together = await asyncio.gather(*(tiny.acomplete(question) for question in questions))
    assert [reply.text for reply in together] == alone
    assert len(set(alone)) == 3


async def test_the_event_loop_is_not_blocked(tiny: ChatSnapKV) -> None:
    gaps: list[float] = []

    async def heartbeat() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - started)

    beating = asyncio.create_task(heartbeat())
    await tiny.achat(HELLO, max_tokens=100)
    beating.cancel()
    assert len(gaps) > 20


@pytest.mark.parametrize("formatted", [False, True])
async def test_timeout(tiny: ChatSnapKV, monkeypatch: pytest.MonkeyPatch, formatted: bool) -> None:
    Steps(monkeypatch, seconds=0.5)
    impatient = ChatSnapKV(**{**tiny.to_dict(), "timeout": 0.1})
    with pytest.raises(ReplyTimeout, match=r"timeout=0.1"):
        impatient.complete("Who?", formatted, max_tokens=400)
    with pytest.raises(ReplyTimeout, match=r"timeout=0.2"):
        await tiny.acomplete("Who?", formatted, max_tokens=400, timeout=0.2)
    assert impatient.complete("Who?", formatted, max_tokens=1, timeout=60).text


class Steps:
    """Counts decoding steps, each slow enough to be interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
        self.count = 0
        self.started = threading.Event()
        original = Decoder.step

        def step(decoder: Decoder, tokens: list[int]) -> None:
            self.count += 1
            self.started.set()
            time.sleep(seconds)
            original(decoder, tokens)

        monkeypatch.setattr(Decoder, "step", step)

    async def growth(self) -> int:
        """Steps made from now until decoding has certainly ended or gone on."""
        before = self.count
        await asyncio.sleep(0.3)
        return self.count - before


async def test_cancelling_a_call_stops_decoding(tiny: ChatSnapKV, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    task = asyncio.create_task(tiny.achat(HELLO, max_tokens=400))
    await asyncio.to_thread(steps.started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await steps.growth() <= 1


async def test_leaving_an_async_stream_stops_decoding(tiny: ChatSnapKV, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    stream = await tiny.astream_chat(HELLO, max_tokens=400)
    async for _ in stream:
        break
    await stream.aclose()
    assert await steps.growth() <= 1


def test_a_stream_is_made_as_it_is_read(tiny: ChatSnapKV, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    stream = tiny.stream_chat(HELLO, max_tokens=400)
    assert steps.count == 0
    next(stream)
    assert steps.count < 5
    stream.close()


def test_message_with_name(tiny: ChatSnapKV) -> None:
    assert tiny.chat([ChatMessage(content="hello", additional_kwargs={"name": "example_user"})]).message.content


def test_text_of_several_blocks(tiny: ChatSnapKV, prompts: list[str]) -> None:
    blocks = [TextBlock(text="one"), ThinkingBlock(content="hmm"), TextBlock(text="two")]
    tiny.chat([ChatMessage(blocks=blocks)])
    assert "one\ntwo" in prompts[0]
    assert "hmm" not in prompts[0]


def test_images_are_refused(tiny: ChatSnapKV) -> None:
    image = ChatMessage(blocks=[TextBlock(text="What is this?"), ImageBlock(url="https://example.org/a.png")])
    with pytest.raises(ConfigError, match="block of type 'image': these models read text only"):
        tiny.chat([image])


def test_nothing_is_truncated_silently(tiny: ChatSnapKV) -> None:
    with pytest.raises(PromptTooLong, match="1024 tokens of context"):
        tiny.complete("many words " * 600)


def test_unicode(tiny: ChatSnapKV, prompts: list[str]) -> None:
    tiny.chat([ChatMessage(content="日本の首都 🗼 Zürich")])
    assert "日本の首都 🗼 Zürich" in prompts[0]


def test_text_is_never_a_control_token(tiny: ChatSnapKV) -> None:
    plain = tiny.complete("a im_end b").additional_kwargs["prompt_tokens"]
    assert tiny.complete("a <|im_end|> b").additional_kwargs["prompt_tokens"] > plain


def test_completions_are_completions(tiny: ChatSnapKV) -> None:
    assert isinstance(tiny.complete("Who?"), CompletionResponse)
    assert all(isinstance(chunk, CompletionResponse) for chunk in tiny.stream_complete("Who?"))
