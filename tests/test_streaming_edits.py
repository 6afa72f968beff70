"""What a thread's long-term memory loses, and what it never loses: an edit is proven, all else is kept."""

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import EngineOf
from ragkv.chat_model import ChatRequest, stream_thread
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import ConfigError, PromptTooLong, ReplyTimeout
from ragkv.messages import Message
from ragkv.streaming.exchanges import edited_out
from ragkv.streaming.long_term import MemoryStore, ThreadMemory
from ragkv.streaming.threads import StreamingMemory
from test_streaming_long_term import HashingEmbedder
from test_streaming_threads import SHORT, WEATHER, _ask, _user
from tiny import tiny_engine

FIRST = "My cat is called Tom."


@pytest.fixture
def engine(engine_of: EngineOf) -> Engine:
    return engine_of("llama")


@pytest.mark.parametrize(
    ("now", "gone"),
    [
        ("abcd", ""),
        ("abcde", ""),
        ("abc", ""),  # forked behind what is known, with nothing new yet
        ("abX", "cd"),  # branched
        ("abXd", "c"),
        ("Xbcd", "a"),
        ("XbYd", "ac"),
        ("bcdX", ""),  # cut short
        ("dX", ""),
        ("Sdy", ""),  # summed up
        ("aSd", ""),  # summed up, but for its beginning
        ("S", ""),
        ("X", ""),  # another call altogether
        ("", ""),
    ],
)
def test_only_what_an_edit_replaced_is_gone(now: str, gone: str) -> None:
    assert edited_out("abcd", now) == set(gone)
    assert edited_out("", now) == set()


class Talk:
    """A thread of seven exchanges, of which the first have left the window of 150 tokens."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.store = engine, MemoryStore(HashingEmbedder(), folder)
        self.memory, self.history = StreamingMemory(window_length=150, store=self.store), list[Message]()
        for text in (FIRST, *(f"Something {number}." for number in range(6))):
            self.history.append(_user(text))
            _ask(self.memory, engine, self.history, "a")

    @property
    def kept(self) -> ThreadMemory:
        return MemoryStore(HashingEmbedder(), self.store._folder).thread("a")

    def broken_off(self, **options: float) -> None:
        request = ChatRequest([*self.history, _user("Now?")], SamplingParams(max_tokens=90))
        events = stream_thread(self.engine, request, self.memory, "a", **options)
        next(events)
        events.close()

    def timeout(self) -> None:
        with pytest.raises(ReplyTimeout):
            self.broken_off(timeout_s=1e-3)

    def too_long(self) -> None:
        with pytest.raises(PromptTooLong):
            _ask(self.memory, self.engine, [_user("Another?"), *self.history[1:], _user("word " * 200)], "a")

    def restarted_and_broken_off(self) -> None:
        self.memory = StreamingMemory(window_length=150, store=MemoryStore(HashingEmbedder(), self.store._folder))
        self.history[:-2] = []
        self.broken_off()

    def ask(self, history: list[Message], engine: Engine | None = None) -> None:
        _ask(self.memory, engine or self.engine, history, "a")


@pytest.mark.parametrize(
    "happens",
    [
        Talk.broken_off,
        Talk.timeout,
        Talk.too_long,
        Talk.restarted_and_broken_off,
        lambda talk: talk.ask([*talk.history[4:], _user("And?")]),
        lambda talk: talk.ask([*talk.history[-3:], _user("And?")]),
        lambda talk: talk.ask([_user("In short: boats."), *talk.history[-2:], _user("And?")]),
        lambda talk: talk.ask([_user("In short: boats.")]),
        lambda talk: talk.ask([*talk.history, _user("And?")], tiny_engine("llama-mha")),
        lambda talk: talk.ask([_user("Find a title for this conversation.")]),
    ],
)  # fmt: skip
def test_without_an_edit_nothing_is_lost(engine: Engine, tmp_path: Path, happens: Callable[[Talk], None]) -> None:
    """Not by a reply that breaks off, a history that is cut short or summed up, another model or another call."""
    talk = Talk(engine, tmp_path)
    before = talk.kept.turns
    assert before > 2
    happens(talk)
    talk.history.append(_user("And now?"))
    _ask(talk.memory, engine, talk.history, "a")
    assert talk.kept.turns >= before
    (first, *_) = talk.kept.recall("cat Tom", 99, lambda text: len(text.split()))
    assert FIRST in first.text


def test_what_a_history_does_not_bring_back_is_kept(engine: Engine, tmp_path: Path) -> None:
    """The exchanges that the session still had in its cache when the history was cut short."""
    talk = Talk(engine, tmp_path)
    assert talk.kept.turns < 7
    talk.ask([*talk.history[-2:], _user("And?")])
    assert talk.kept.turns == 7


@pytest.mark.parametrize("place", [0, 2, 12])
def test_what_a_branch_left_is_not_recalled(engine: Engine, tmp_path: Path, place: int) -> None:
    talk = Talk(engine, tmp_path)
    number = place // 2
    branch = [*talk.history[:place], _user("Nothing."), *(talk.history[place + 1 :] if number == 0 else [])]
    talk.ask([*branch, _user("And?")] if number == 0 else branch)
    talk.memory.flush()
    words = {word for found in talk.kept.recall("Something Tom", 999, lambda text: 1) for word in found.text.split()}
    assert ("Tom." in words) == (number > 0)
    still = {0: range(6), 1: range(0), 6: range(5)}[number]
    assert {f"{n}." for n in range(6)} & words == {f"{n}." for n in still}


def test_an_exchange_with_a_call_can_be_edited(engine: Engine, tmp_path: Path) -> None:
    """It is noted down as the framework sends it, so that it is found again."""
    store = MemoryStore(HashingEmbedder(), tmp_path)
    memory, history = StreamingMemory(window_length=400, store=store), [_user("How is Rome?")]
    options = {"tools": [WEATHER], "sampling": SamplingParams(max_tokens=120), "parallel_tool_calls": False}
    reply = _ask(memory, engine, history, "a", tool_choice="any", **options)
    history[-1] = {"role": "assistant", "content": "", "tool_calls": [call.to_openai() for call in reply.tool_calls]}
    history.append({"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": reply.tool_calls[0].id})
    _ask(memory, engine, history, "a", **{**options, "sampling": SHORT}, tool_choice="none")
    memory.flush()
    noted = [found.text for found in store.thread("a").recall("How is Rome?", 999, lambda text: 1)]
    assert noted[0] == "user: How is Rome?\nassistant: weather({'city': 'Rome'})"
    history[0] = _user("What is new?")
    _ask(memory, engine, [*history, _user("And?")], "a", **{**options, "sampling": SHORT}, tool_choice="none")
    assert "Rome?" not in str(store.thread("a").recall("How is Rome?", 999, lambda text: 1))


def test_a_thread_that_makes_room_is_kept(engine: Engine, tmp_path: Path) -> None:
    store = MemoryStore(HashingEmbedder(), tmp_path)
    memory = StreamingMemory(window_length=300, store=store, max_threads=1)
    _ask(memory, engine, [_user(FIRST)], "a")
    assert store.thread("a").turns == 0
    _ask(memory, engine, [_user("Who?")], "b")
    assert (store.thread("a").turns, store.thread("b").turns) == (1, 0)
    memory.flush()
    assert (store.thread("a").turns, store.thread("b").turns) == (1, 1)


def test_an_unfinished_reply_keeps_no_other_conversation_out_of_the_store(engine: Engine, tmp_path: Path) -> None:
    store = MemoryStore(HashingEmbedder(), tmp_path)
    memory = StreamingMemory(window_length=300, store=store)
    for thread in ("a", "b", "c"):
        _ask(memory, engine, [_user(FIRST)], thread)
    request = ChatRequest([_user("Who?")], SamplingParams(max_tokens=90))
    events = stream_thread(engine, request, memory, "b")
    next(events)
    with pytest.raises(ConfigError, match="unfinished reply"):
        memory.flush()
    assert (store.thread("a").turns, store.thread("c").turns) == (1, 1)
    events.close()
