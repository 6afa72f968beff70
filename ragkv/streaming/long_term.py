"""Long-term memory: exchanges that left the cache, embedded and kept per thread, recalled for the questions they fit.

The division that StreamingLLM asks for: the recent state in the loop, the past in an external store (faiss, exact).
"""

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np

from ragkv import paths
from ragkv.chunking import split_document
from ragkv.documents import Document
from ragkv.embedding import Embedder, Vectors
from ragkv.errors import ConfigError
from ragkv.index import Hit, Index
from ragkv.streaming.exchanges import Recalled, key_of
from ragkv.streaming.memory_folder import MemoryFolder

_MOST_PASSAGES = 64  # looked at for one question
_NONE: Vectors = np.empty((0, 0), np.float32)


class ThreadMemory:
    """What one thread of conversation has dropped. Threads and processes may share its folder.

    Args:
        embedder: embeds turns and questions.
        folder: where everything is kept, and found again; None keeps it in memory only.
        min_score: cosine similarity from which a passage fits a question.

    Raises:
        DocumentError: the folder holds something else, or was written with another embedder.
    """

    def __init__(self, embedder: Embedder, folder: Path | None = None, *, min_score: float = 0.2) -> None:
        self._embedder, self._min_score = embedder, min_score
        self._folder = None if folder is None else MemoryFolder(folder)
        self._version: bytes | None = None  # of the folder, when it was read or written last
        self._closed = False
        self._lock = threading.Lock()
        self._passages: list[Document] = []
        self._vectors: Vectors = _NONE
        self._index: Index | None = None
        with self._latest():
            pass

    @property
    def turns(self) -> int:
        """How many turns are kept."""
        return len({_key(passage) for passage in self._passages})

    @property
    def next_turn(self) -> int:
        """Number of the first turn that is later than all that are kept."""
        return max((int(str(passage.metadata["turn"])) + 1 for passage in self._passages), default=0)

    def add(self, turn: int, text: str) -> None:
        """Keep a turn, in passages that the embedder reads whole.

        What is there already, word for word, is not kept twice: a history may be read again.
        """
        key = key_of(text)
        if self._closed or self._has(key):
            return
        document = Document("", text, source=f"turn {turn}", metadata={"turn": turn, "key": key})
        new = split_document(document, self._embedder.count_tokens, self._embedder.max_tokens)
        vectors = self._embedder.encode([passage.text for passage in new])
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        with self._latest():
            if not (self._closed or self._has(key)):  # in the meantime
                known = self._vectors.reshape(-1, vectors.shape[1])
                self._write([*self._passages, *new], np.concatenate([known, vectors]))

    def recall(
        self,
        question: str,
        token_budget: int,
        count_tokens: Callable[[str], int],
        *,
        held: Collection[str] = (),
    ) -> list[Recalled]:
        """The passages most like the question, as many as fit into `token_budget`, in the order of their turns.

        One that does not fit is left out; the best one is cut instead, where the cut shows.

        Args:
            token_budget: tokens of all of them, as they stand in the prompt.
            count_tokens: tokens of a text.
            held: keys (`key_of`) of turns that are still in the cache, which needs no reminder of them.
        """
        chosen: list[Recalled] = []
        for hit in self._hits(question, held):
            if hit.score < self._min_score:
                break
            passage = Recalled(int(str(hit.document.metadata["turn"])), hit.document.text)
            passage = passage if chosen else passage.shortened(token_budget, count_tokens)
            needed = count_tokens(passage.line)
            if needed <= token_budget:
                chosen.append(passage)
                token_budget -= needed
        return sorted(chosen, key=lambda found: found.turn)

    def drop(self, keys: Collection[str]) -> None:
        """Forget turns, by their keys (`key_of`)."""
        if not keys:
            return
        with self._latest():
            kept = [i for i, passage in enumerate(self._passages) if _key(passage) not in keys]
            if len(kept) < len(self._passages):
                self._write([self._passages[i] for i in kept], self._vectors[kept])

    def delete(self) -> None:
        """Forget everything, on the disk too, and keep nothing more: a session that goes on with it has no memory.

        Raises:
            DocumentError: the folder cannot be deleted.
        """
        with self._lock:
            self._closed = True
            self._keep([], _NONE)
        if self._folder is not None:
            self._folder.remove()

    def _hits(self, question: str, held: Collection[str]) -> list[Hit]:
        with self._latest():
            if not self._passages:
                return []
            self._index = self._index or Index(self._passages, self._vectors, self._embedder)
            known = sum(_key(passage) in held for passage in self._passages)
            hits = self._index.search(question, _MOST_PASSAGES + known)
        return [hit for hit in hits if _key(hit.document) not in held]

    @contextmanager
    def _latest(self) -> Iterator[None]:
        """Alone with what is kept, by other processes too."""
        with self._lock, self._folder.locked() if self._folder and not self._closed else nullcontext():
            if self._folder is not None and not self._closed and self._folder.version() != self._version:
                self._keep(*(self._folder.read(self._embedder.name) if self._folder.version() else ([], _NONE)))
                self._version = self._folder.version()
            yield

    def _write(self, passages: list[Document], vectors: Vectors) -> None:
        if self._folder is not None:
            self._folder.write(passages, vectors, self._embedder.name)
            self._version = self._folder.version()
        self._keep(passages, vectors)

    def _keep(self, passages: list[Document], vectors: Vectors) -> None:
        self._passages, self._vectors, self._index = passages, vectors, None

    def _has(self, key: str) -> bool:
        return any(_key(passage) == key for passage in self._passages)


def _key(passage: Document) -> str:
    """Of the turn that a passage is from; earlier versions of ragkv did not note it down."""
    return str(passage.metadata.get("key", f"turn {passage.metadata['turn']}"))


class MemoryStore:
    """The memories of all threads, in a folder of their own each.

    Args:
        embedder: embeds turns and questions.
        folder: of all threads; ragkv's cache folder if left out.
        min_score: see `ThreadMemory`.
    """

    def __init__(self, embedder: Embedder, folder: Path | None = None, *, min_score: float = 0.2) -> None:
        if not -1 <= min_score <= 1:
            raise ConfigError(f"min_score={min_score}: must be in [-1, 1], a cosine similarity")
        self._embedder, self._min_score = embedder, min_score
        self._folder = paths.home() / "memory" if folder is None else folder
        self._threads: dict[str, ThreadMemory] = {}
        self._lock = threading.Lock()

    def thread(self, thread_id: str) -> ThreadMemory:
        """The memory of a thread, the same object at each call until it is deleted."""
        with self._lock:
            if thread_id not in self._threads:
                folder = self._folder_of(thread_id)
                self._threads[thread_id] = ThreadMemory(self._embedder, folder, min_score=self._min_score)
            return self._threads[thread_id]

    def delete(self, thread_id: str) -> None:
        """Forget a thread for good, one that is damaged or another embedder's too.

        A session of this process that still has its memory keeps nothing more there, and recalls nothing.

        Raises:
            DocumentError: its folder cannot be deleted.
        """
        with self._lock:
            memory = self._threads.pop(thread_id, None)
        if memory is not None:
            memory.delete()
        MemoryFolder(self._folder_of(thread_id)).remove()

    def _folder_of(self, thread_id: str) -> Path:
        # Thread ids are anybody's strings, so they are no names of folders.
        return self._folder / hashlib.sha256(thread_id.encode()).hexdigest()[:32]
