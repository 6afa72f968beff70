"""Whole histories in, new tokens read: sessions are found again by thread or by content, and edits are read afresh."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import EngineOf
from ragkv.chat_model import ChatReply, ChatRequest, stream_thread
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import Cancelled, ConfigError, PromptTooLong, ReplyTimeout
from ragkv.messages import Message
from ragkv.streaming import window
from ragkv.streaming.cache import StreamingCache, read
from ragkv.streaming.long_term import MemoryStore
from ragkv.streaming.threads import StreamingMemory
from ragkv.tools import ToolSpec
from test_streaming_long_term import HashingEmbedder
from tiny import tiny_engine

SHORT = SamplingParams(max_tokens=6)
WEATHER = ToolSpec(
    "weather", "The weather of a city.", {"properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
)
Reads = list[str]


@pytest.fixture
def engine(engine_of: EngineOf) -> Engine:
    return engine_of("llama")


@pytest.fixture
def reads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """The text of each forward pass."""
    seen: Reads = []

    def watched(model: Any, cache: StreamingCache, ids: Any) -> Any:
        seen.append(engine.tokenizer.decode(ids[0]))
        return read(model, cache, ids)

    monkeypatch.setattr(window, "read", watched)
    return seen


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _ask(
    memory: StreamingMemory, engine: Engine, history: list[Message], thread_id: str | None = None, **options: Any
) -> ChatReply:
    """Ask with the whole history, and put the reply behind it as a framework would."""
    request = ChatRequest(history, **{"sampling": SHORT, **options})
    reply = [event.reply for event in stream_thread(engine, request, memory, thread_id) if event.reply][-1]
    history.append({"role": "assistant", "content": f"{reply.text.strip()} "})
    return reply


@pytest.mark.parametrize("thread_id", ["a", None])
def test_only_what_is_new_is_read(engine: Engine, reads: Reads, thread_id: str | None) -> None:
    memory, history = StreamingMemory(window_length=300), [{"role": "system", "content": "Be brief."}]
    cost = []
    for number in range(12):
        history.append(_user(f"Question {number:02}?"))
        cost.append(_ask(memory, engine, history, thread_id).stats.prompt_tokens)
    assert len(set(cost)) == 1
    text = "".join(reads)
    assert text.count("Be brief.") == 1
    assert [text.count(f"Question {number:02}?") for number in range(12)] == [1] * 12


@pytest.mark.parametrize("thread_id", ["a", None])
def test_replies_are_those_of_one_session(engine: Engine, thread_id: str | None) -> None:
    memory, history = StreamingMemory(window_length=300), list[Message]()
    session = engine.session(memory.policy)
    for number in range(12):
        history.append(_user(f"Question {number}?"))
        session.append(_user(f"Question {number}?"))
        assert _ask(memory, engine, history, thread_id).text == session.generate(SHORT).text
    if thread_id:
        assert memory.session(thread_id).report() == session.report()


def test_threads_keep_apart(engine: Engine, reads: Reads) -> None:
    memory, histories = StreamingMemory(window_length=300), {name: list[Message]() for name in "ab"}
    for number in range(3):
        for name, history in histories.items():
            history.append(_user(f"Question {number} of {name}?"))
            _ask(memory, engine, history, name)
    text = "".join(reads)
    assert all(text.count(f"Question {number} of {name}?") == 1 for number in range(3) for name in "ab")
    assert memory.session("a") is not memory.session("b")
    assert memory.session("c") is None


@pytest.mark.parametrize("thread_id", ["a", None])
@pytest.mark.parametrize(
    "edit",
    [
        lambda history: history.__setitem__(0, _user("Another question?")),
        lambda history: history.__setitem__(1, {"role": "assistant", "content": "Another answer."}),
        lambda history: history.__delitem__(slice(0, 2)),
        lambda history: history.__delitem__(slice(-3, -1)),
    ],
)
def test_an_edited_history_is_read_again(
    engine: Engine, reads: Reads, thread_id: str | None, edit: Callable[[list[Message]], None]
) -> None:
    memory, history = StreamingMemory(window_length=300), list[Message]()
    for number in range(3):
        history.append(_user(f"Question {number}?"))
        _ask(memory, engine, history, thread_id)
    history.append(_user("Question 3?"))
    edit(history)
    edited, fresh = list(history), StreamingMemory(window_length=300)
    reads.clear()
    reply = _ask(memory, engine, history, thread_id)
    again = "".join(reads)
    assert reply.text == _ask(fresh, engine, edited, thread_id).text
    assert all(message["content"].strip() in again for message in edited[:-1] if message["role"] == "user")
    reads.clear()
    history.append(_user("Question 4?"))
    _ask(memory, engine, history, thread_id)
    assert "Question 3?" not in "".join(reads)


def test_the_same_call_twice_is_answered_alike(engine: Engine) -> None:
    memory = StreamingMemory(window_length=300)
    first, second = ([_user("Who?")] for _ in range(2))
    assert _ask(memory, engine, first, "a").text == _ask(memory, engine, second, "a").text
    assert memory.session("a").report().turns == 1


def test_a_history_longer_than_the_window_is_caught_up_with(engine: Engine, reads: Reads) -> None:
    memory, history = StreamingMemory(window_length=150), list[Message]()
    for number in range(20):
        history += [_user(f"Question {number:02}?"), {"role": "assistant", "content": f"Answer {number:02}."}]
    history.append(_user("And now?"))
    _ask(memory, engine, history, "a")
    text = "".join(reads)
    assert "Question 00?" not in text
    assert "Answer 19." in text
    assert memory.session("a").report().turns == 21


def test_tool_calls_and_results_go_on(engine: Engine, reads: Reads) -> None:
    """The reply that the framework sends back is a call with other ids."""
    memory, history = StreamingMemory(window_length=900), [_user("How is Rome?")]
    options = {"tools": [WEATHER], "sampling": SamplingParams(max_tokens=60)}
    for number in range(3):
        reply = _ask(memory, engine, history, "a", tool_choice="any", **options)
        (call,) = reply.tool_calls
        history[-1] = {"role": "assistant", "content": reply.text, "tool_calls": [{**call.to_openai(), "id": "other"}]}
        history.append({"role": "tool", "content": f"result {number}", "name": "weather", "tool_call_id": "other"})
    _ask(memory, engine, history, "a", **options)
    text = "".join(reads)
    assert [text.count(f"result {number}") for number in range(3)] == [1, 1, 1]
    assert text.count("How is Rome?") == 1
    assert memory.session("a").report().turns == 4


def test_a_broken_call_goes_on(engine: Engine, reads: Reads) -> None:
    """Whether the framework sends it back or not."""
    for thread_id, sent in (("a", {"invalid_tool_calls": ['<tool_call>\n{"name']}), ("b", {})):
        memory, history = StreamingMemory(window_length=900), [_user("How is Rome?")]
        reply = _ask(memory, engine, history, thread_id, tools=[WEATHER], tool_choice="any")
        assert (reply.finish_reason, len(reply.invalid_tool_calls)) == ("length", 1)
        history[-1] = {**history[-1], **sent}
        reads.clear()
        _ask(memory, engine, [*history, _user("And?")], thread_id, tools=[WEATHER], tool_choice="none")
        assert "How is Rome?" not in "".join(reads)


def test_a_schema_is_a_session_of_its_own(engine: Engine) -> None:
    memory, history = StreamingMemory(window_length=900), [_user("How is Rome?")]
    _ask(memory, engine, list(history), "a")
    schema = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}
    reply = _ask(memory, engine, list(history), "a", response_format=schema, sampling=SamplingParams(max_tokens=60))
    assert reply.text in ('{"sky": "blue"}', '{"sky": "grey"}', '{"sky":"blue"}', '{"sky":"grey"}')


def test_what_is_refused_changes_nothing(engine: Engine, reads: Reads) -> None:
    for thread_id in ("a", None):
        memory, history = StreamingMemory(window_length=100), [_user("Who?")]
        _ask(memory, engine, history, thread_id)
        with pytest.raises(PromptTooLong):
            _ask(memory, engine, [*history, _user("word " * 200)], thread_id)
        reads.clear()
        _ask(memory, engine, [*history, _user("And?")], thread_id)
        assert "Who?" not in "".join(reads)


def test_after_a_timeout_the_history_is_read_again(engine: Engine, reads: Reads) -> None:
    memory, history = StreamingMemory(window_length=900), [_user("Who?")]
    request = ChatRequest(history, SamplingParams(max_tokens=500))
    with pytest.raises(ReplyTimeout):
        list(stream_thread(engine, request, memory, "a", timeout_s=0.05))
    reads.clear()
    _ask(memory, engine, history, "a")
    assert "Who?" in "".join(reads)


def test_the_session_that_was_used_least_recently_goes_first(engine: Engine, reads: Reads) -> None:
    memory, histories = StreamingMemory(window_length=300, max_threads=2), {}
    for name in ("a", "b", "a", "c"):
        history = histories.setdefault(name, [])
        history.append(_user(f"Question of {name}?"))
        _ask(memory, engine, history, name)
    assert (memory.session("a") is None, memory.session("b") is None) == (False, True)
    histories["b"].append(_user("And?"))
    reads.clear()
    _ask(memory, engine, histories["b"], "b")
    assert "Question of b?" in "".join(reads)


def test_calls_of_one_thread_take_turns(engine: Engine) -> None:
    memory = StreamingMemory(window_length=300)
    with ThreadPoolExecutor(4) as threads:
        replies = list(threads.map(lambda _: _ask(memory, engine, [_user("Who?")], "a").text, range(8)))
    assert len(set(replies)) == 1


def test_a_call_that_waits_for_another_heeds_its_limits(engine: Engine) -> None:
    memory, cancel = StreamingMemory(window_length=300), threading.Event()
    request = ChatRequest([_user("Who?")], SHORT)
    held = stream_thread(engine, request, memory, "a")
    next(held)

    def call(**options: Any) -> None:
        list(stream_thread(engine, request, memory, "a", **options))

    with ThreadPoolExecutor(1) as other:
        with pytest.raises(ReplyTimeout):
            other.submit(call, timeout_s=0.2).result(timeout=30)
        waiting = other.submit(call, cancel=cancel)
        cancel.set()
        with pytest.raises(Cancelled, match="while another of its conversation went on"):
            waiting.result(timeout=30)
        with pytest.raises(ConfigError, match="unfinished reply, held where this call was made: finish or close it"):
            call()
        held.close()
        other.submit(call).result(timeout=30)


def test_conversations_at_the_same_time_do_not_mix(engine: Engine) -> None:
    def talk(name: str) -> list[str]:
        history = list[Message]()
        replies = []
        for number in range(4):
            history.append(_user(f"Question {number} of {name}?"))
            replies.append(_ask(memory, engine, history, name if name < "c" else None).text)
        return replies

    names = ["a", "b", "c", "d"]
    memory = StreamingMemory(window_length=150)
    alone = [talk(name) for name in names]
    memory = StreamingMemory(window_length=150)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(talk, names)) == alone


def test_what_leaves_a_thread_is_recalled_in_it(engine: Engine, reads: Reads, tmp_path: Path) -> None:
    store = MemoryStore(HashingEmbedder(), tmp_path)
    memory, histories = StreamingMemory(window_length=330, store=store, recall_tokens=200), {"a": [], "b": []}
    texts = [
        "My cat is called Tom.",
        *(f"{word} {word}s." for word in ("boat", "map", "wall", "plum", "tree", "well", "tea", "shoe", "gate")),
    ]
    for text in texts:
        for name, history in histories.items():
            history.append(_user(text if name == "a" else "Nothing."))
            _ask(memory, engine, history, name)
    reads.clear()
    for name, history in histories.items():
        history.append(_user("How is the cat called?"))
        _ask(memory, engine, history, name)
        assert memory.session(name).report().recalled_turns == ((0,) if name == "a" else ())
    assert "".join(reads).count("> [turn 0] user: My cat is called Tom.") == 1
    memory.forget("a")
    assert memory.session("a") is None
    assert store.thread("a").turns == 0 < store.thread("b").turns


def test_what_an_edit_took_out_is_not_recalled(engine: Engine, tmp_path: Path) -> None:
    store = MemoryStore(HashingEmbedder(), tmp_path)
    memory, history = StreamingMemory(window_length=150, store=store), list[Message]()
    for text in ("My cat is called Tom.", *(f"Something {number}." for number in range(6))):
        history.append(_user(text))
        _ask(memory, engine, history, "a")
    assert store.thread("a").recall("cat Tom", 99, lambda text: len(text.split()))
    history[0] = _user("My dog is called Rex.")
    history.append(_user("And now?"))
    _ask(memory, engine, history, "a")
    assert not store.thread("a").recall("cat Tom", 99, lambda text: len(text.split()))
    assert store.thread("a").recall("dog Rex", 99, lambda text: len(text.split()))


def test_another_model_reads_for_itself(engine: Engine) -> None:
    memory, other, history = StreamingMemory(window_length=300), tiny_engine("llama-mha"), [_user("Who?")]
    _ask(memory, engine, history, "a")
    history.append(_user("And?"))
    expected = _ask(StreamingMemory(window_length=300), other, list(history)).text
    assert _ask(memory, other, history, "a").text == expected


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_threads=0: must be at least 1"):
        StreamingMemory(max_threads=0)
    with pytest.raises(ConfigError, match="window_length=0"):
        StreamingMemory(window_length=0)
