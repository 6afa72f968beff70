"""Long-term memory: exchanges that left the cache, embedded and kept per thread, recalled for the questions they fit.

The division that StreamingLLM asks for: the recent state in the loop, the past in an external store (faiss, exact).
"""

import hashlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ragkv import paths
from ragkv.chunking import split_document
from ragkv.documents import Document
from ragkv.embedding import Embedder, Vectors
from ragkv.errors import ConfigError
from ragkv.index import Index
from ragkv.index_files import MANIFEST, read_index, write_index
from ragkv.streaming.exchanges import Recalled

_MOST_PASSAGES = 64  # looked at for one question


class ThreadMemory:
    """What one thread of conversation has dropped.

    Args:
        embedder: embeds turns and questions.
        folder: where everything is kept, and found again; None keeps it in memory only.
        min_score: cosine similarity from which a passage fits a question.

    Raises:
        DocumentError: the folder holds something else, or was written with another embedder.
    """

    def __init__(self, embedder: Embedder, folder: Path | None = None, *, min_score: float = 0.2) -> None:
        self._embedder, self._folder, self._min_score = embedder, folder, min_score
        self._passages: list[Document] = []
        self._vectors: Vectors = np.empty((0, 0), np.float32)
        self._index: Index | None = None
        self._lock = threading.Lock()
        if folder is not None and (folder / MANIFEST).is_file():
            self._passages, self._vectors = read_index(folder, embedder.name)

    @property
    def turns(self) -> int:
        """How many turns are kept."""
        return len({passage.metadata["turn"] for passage in self._passages})

    @property
    def next_turn(self) -> int:
        """Number of the first turn that is later than all that are kept."""
        return max((int(str(passage.metadata["turn"])) + 1 for passage in self._passages), default=0)

    def add(self, turn: int, text: str) -> None:
        """Keep a turn, in passages that the embedder reads whole.

        What is there already, word for word, is not kept twice: a history may be read again.
        """
        document = Document("", text, source=f"turn {turn}", metadata={"turn": turn})
        new = split_document(document, self._embedder.count_tokens, self._embedder.max_tokens)
        if {passage.text for passage in new} <= {passage.text for passage in self._passages}:
            return
        vectors = self._embedder.encode([passage.text for passage in new])
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        with self._lock:
            self._passages = [*self._passages, *new]
            self._vectors = np.concatenate([self._vectors.reshape(-1, vectors.shape[1]), vectors])
            self._index = None
            if self._folder is not None:
                write_index(self._folder, self._passages, self._vectors, self._embedder.name)

    def recall(
        self, question: str, token_budget: int, count_tokens: Callable[[str], int], *, before: int
    ) -> list[Recalled]:
        """The passages most like the question, as many as fit into `token_budget`, in the order of their turns.

        Args:
            token_budget: tokens of all of them, as they stand in the prompt.
            count_tokens: tokens of a text.
            before: only turns with smaller numbers; the others are still in the cache.
        """
        with self._lock:
            if not self._passages:
                return []
            self._index = self._index or Index(self._passages, self._vectors, self._embedder)
            hits = self._index.search(question, _MOST_PASSAGES)
        chosen: list[Recalled] = []
        found = ((hit.score, Recalled(int(str(hit.document.metadata["turn"])), hit.document.text)) for hit in hits)
        for score, passage in found:
            needed = count_tokens(passage.line) if passage.turn < before else 0
            if score < self._min_score or needed > token_budget:
                break
            if needed:
                chosen.append(passage)
                token_budget -= needed
        return sorted(chosen, key=lambda found: found.turn)

    def delete(self) -> None:
        """Forget everything, on the disk too."""
        with self._lock:
            self._passages, self._vectors, self._index = [], np.empty((0, 0), np.float32), None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


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
        """The memory of a thread, the same object at each call."""
        with self._lock:
            if thread_id not in self._threads:
                # Thread ids are anybody's strings, so they are no names of folders.
                folder = self._folder / hashlib.sha256(thread_id.encode()).hexdigest()[:32]
                self._threads[thread_id] = ThreadMemory(self._embedder, folder, min_score=self._min_score)
            return self._threads[thread_id]

    def delete(self, thread_id: str) -> None:
        """Forget a thread for good."""
        self.thread(thread_id).delete()
        with self._lock:
            self._threads.pop(thread_id, None)
