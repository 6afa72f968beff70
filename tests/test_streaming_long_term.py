"""Long-term memory: what leaves the cache is found again, within a budget, and marked in the prompt."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from conftest import EngineOf
from ragkv.config import SamplingParams
from ragkv.embedding import Vectors
from ragkv.engine import Engine
from ragkv.errors import ConfigError, DocumentError
from ragkv.policies import StreamingLLM
from ragkv.progress import Progress
from ragkv.streaming import window
from ragkv.streaming.cache import read
from ragkv.streaming.exchanges import END_OF_RECALLED, RECALLED
from ragkv.streaming.long_term import MemoryStore, ThreadMemory

SHORT = SamplingParams(max_tokens=4)
OTHERS = ["wooden boats", "old maps", "stone walls", "ripe plums", "tall trees", "deep wells", "cold tea", "new shoes"]
OTHERS += ["iron gates", "long roads", "dark woods", "blue ink", "soft bread", "loud bells"]


class HashingEmbedder:
    """Bags of hashed words; not of unit length."""

    max_tokens = 12

    def __init__(self, name: str = "hashing") -> None:
        self.name = name

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        vectors = np.zeros((len(texts), 256), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                row[zlib.crc32(word.strip(".?:").encode()) % 256] += 1
        return vectors


def _words(text: str) -> int:
    return len(text.split())


def _memory(folder: Path | None = None) -> ThreadMemory:
    memory = ThreadMemory(HashingEmbedder(), folder)
    for turn, text in enumerate(["the cat is called Tom", "the dog is called Rex", "Rome was sunny", "the cat sleeps"]):
        memory.add(turn, text)
    return memory


def _recalled(memory: ThreadMemory, question: str, budget: int = 100, before: int = 9) -> list[int]:
    return [found.turn for found in memory.recall(question, budget, _words, before=before)]


def test_recall_finds_what_fits_in_the_order_of_the_turns() -> None:
    memory = _memory()
    assert _recalled(memory, "what is the cat called?") == [0, 1, 3]
    assert _recalled(memory, "sunny Rome") == [2]
    assert _recalled(memory, "quantum physics") == []
    assert _recalled(ThreadMemory(HashingEmbedder()), "anything") == []


def test_the_best_come_first_within_the_budget() -> None:
    memory = _memory()
    assert len(["[turn", "0]", "the", "cat", "is", "called", "Tom"]) == 7
    assert [_recalled(memory, "is the cat called Tom?", budget) for budget in (6, 7, 13, 14)] == [[], [0], [0], [0, 1]]


def test_turns_that_are_still_in_the_cache_are_not_recalled() -> None:
    assert _recalled(_memory(), "what is the cat called?", before=3) == [0, 1]
    assert _recalled(_memory(), "what is the cat called?", before=0) == []


def test_long_turns_are_kept_in_passages_and_nothing_twice() -> None:
    memory = _memory()
    memory.add(4, "A long story of a hare. " * 5 + "It ends with a tortoise. " + "And more of it comes. " * 5)
    assert memory.turns == 5
    (found,) = memory.recall("tortoise ends", 30, _words, before=9)
    assert "tortoise" in found.text
    assert _words(found.text) <= HashingEmbedder.max_tokens
    memory.add(5, "the cat is called Tom")
    assert memory.turns == 5
    memory.add(4, "the tortoise ends as a winner")
    assert _recalled(memory, "tortoise ends") == [4, 4]


def test_a_store_outlives_the_process_and_keeps_threads_apart(tmp_path: Path) -> None:
    store = MemoryStore(HashingEmbedder(), tmp_path)
    store.thread("a").add(0, "the cat is called Tom")
    store.thread("../b").add(0, "the dog is called Rex")
    assert all(path.parent == tmp_path for path in tmp_path.iterdir())
    again = MemoryStore(HashingEmbedder(), tmp_path)
    assert again.thread("a") is again.thread("a")
    assert [found.text for found in again.thread("a").recall("called", 9, _words, before=9)] == [
        "the cat is called Tom"
    ]
    again.delete("a")
    assert _recalled(again.thread("a"), "called") == []
    newest = MemoryStore(HashingEmbedder(), tmp_path)
    assert (newest.thread("a").turns, newest.thread("../b").turns) == (0, 1)
    with pytest.raises(DocumentError, match="was built with hashing, not other"):
        MemoryStore(HashingEmbedder("other"), tmp_path).thread("../b")


def test_a_score_out_of_bounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"min_score=2: must be in \[-1, 1\]"):
        MemoryStore(HashingEmbedder(), tmp_path, min_score=2)


@pytest.fixture
def engine(engine_of: EngineOf) -> Engine:
    return engine_of("llama")


def test_dropped_exchanges_are_recalled_for_the_question_they_fit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[int] = []
    monkeypatch.setattr(
        window, "read", lambda model, cache, new: (ids.extend(new[0].tolist()), read(model, cache, new))[1]
    )
    memory = ThreadMemory(HashingEmbedder())
    session = engine.session(StreamingLLM(4, 196), memory=memory, recall_tokens=120)
    for text in ("My cat is called Tom.", "Rome was sunny.", *OTHERS[:6]):
        session.append({"role": "user", "content": text})
        session.generate(SHORT)
    assert memory.turns == session.report().dropped_turns > 1
    assert session.report().recalled_turns == ()
    ids.clear()
    session.append({"role": "user", "content": "cat called?"})
    session.generate(SHORT)
    asked = engine.tokenizer.decode(ids)
    assert f"<|im_start|>user\n{RECALLED}[turn 0] user: My cat is called Tom.\nassistant:" in asked
    assert f"{END_OF_RECALLED}cat called?<|im_end|>" in asked
    assert session.report().recalled_turns == (0,)
    for text in OTHERS[6:]:
        session.append({"role": "user", "content": text})
        session.generate(SHORT)
    # What was recalled is not kept a second time with the turn that it was recalled for.
    assert _recalled(memory, "My cat is called Tom", budget=1000) == [0, 8]
    assert not any("Recalled" in found.text for found in memory.recall("cat called?", 1000, _words, before=99))


def test_what_is_recalled_never_makes_a_prompt_too_long(engine: Engine) -> None:
    memory = ThreadMemory(HashingEmbedder())
    memory.add(0, "the cat is called Tom")
    for length, expected in ((196, (0,)), (100, ())):
        session = engine.session(StreamingLLM(4, length), memory=memory, recall_tokens=500)
        session.append({"role": "user", "content": "How is the cat called?"})
        session.generate(SHORT)
        assert session.report().recalled_turns == expected


def test_fed_texts_are_kept_once_they_are_gone(engine: Engine) -> None:
    memory = ThreadMemory(HashingEmbedder())
    session = engine.session(StreamingLLM(4, 60), memory=memory)
    session.feed("disk three failed at noon " * 6)
    assert memory.turns == 0
    for _ in range(4):
        session.feed("all is well again now " * 4)
    assert set(_recalled(memory, "which disk failed?")) == {0}


def test_a_thread_that_begins_anew_keeps_what_it_had(engine: Engine) -> None:
    memory = ThreadMemory(HashingEmbedder())
    memory.add(6, "the cat is called Tom")
    session = engine.session(StreamingLLM(4, 196), memory=memory)
    session.append({"role": "user", "content": "cat called?"})
    session.generate(SHORT)
    assert (session.report().recalled_turns, session.report().turns, session.remembers(7)) == ((6,), 8, True)


def test_a_fork_leaves_the_memory_alone(engine: Engine) -> None:
    memory = ThreadMemory(HashingEmbedder())
    session = engine.session(StreamingLLM(4, 60), memory=memory)
    for _ in range(3):
        session.feed("all is well " * 4)
    kept, fork = memory.turns, session.fork()
    for _ in range(3):
        fork.feed("all is lost " * 4)
    assert memory.turns == kept > 0
