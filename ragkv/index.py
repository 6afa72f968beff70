"""Passages and their embeddings, searched by cosine similarity (faiss, exact).

The same passages, vectors and query always give the same hits in the same order.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

from ragkv.chunking import split_document, split_text
from ragkv.documents import Document, unique
from ragkv.embedding import Embedder, Vectors
from ragkv.errors import ConfigError, DocumentError
from ragkv.index_files import read_index, write_index
from ragkv.progress import Progress


@dataclass(frozen=True)
class Hit:
    """A passage that a search found: cosine similarity in [-1, 1], rank from 1."""

    document: Document
    score: float
    rank: int


class Index:
    """Passages with unit vectors, and the embedder that queries go through.

    Args:
        passages: at least one, ids all different.
        vectors: one unit vector for each passage, float32 of shape (len(passages), dimension).
        embedder: the model that made the vectors.
    """

    def __init__(self, passages: Sequence[Document], vectors: Vectors, embedder: Embedder) -> None:
        self.passages = tuple(passages)
        self._embedder = embedder
        self._vectors = vectors
        self._faiss = faiss.IndexFlatIP(self._vectors.shape[1])
        self._faiss.add(self._vectors)

    def __len__(self) -> int:
        return len(self.passages)

    @classmethod
    def build(
        cls,
        documents: Iterable[Document],
        embedder: Embedder,
        *,
        max_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> "Index":
        """Cuts documents into passages and embeds them.

        Args:
            documents: at least one; exact repeats count once.
            embedder: counts tokens and embeds.
            max_tokens: length of the longest passage; by default, and at most, what the embedder reads whole.
            progress: told of "splitting" (documents) and "embedding" (passages).

        Raises:
            ConfigError: `max_tokens` is out of bounds.
            DocumentError: there are no documents, or two share an id.
        """
        limit = passage_limit(embedder, max_tokens)
        whole = unique(documents)
        passages: list[Document] = []
        for done, document in enumerate(whole, 1):
            passages += split_document(document, embedder.count_tokens, limit)
            if progress:
                progress("splitting", done, len(whole))
        passages = unique(passages)
        return cls(passages, _embed(embedder, [passage.text for passage in passages], progress), embedder)

    def search(self, query: str, k: int) -> list[Hit]:
        """The `k` passages most like the query (all, if there are fewer), best first; ties in passage order.

        One longer than the embedder reads is cut up like a document, and the vectors of its parts averaged.

        Raises:
            ConfigError: the query is blank or `k` below one.
        """
        if not query.strip():
            raise ConfigError("the query is blank: ask something")
        if k < 1:
            raise ConfigError(f"k={k} must be at least 1")
        parts = split_text(query, self._embedder.count_tokens, self._embedder.max_tokens)
        vectors = _embed(self._embedder, parts)
        if vectors.shape[1] != self._vectors.shape[1]:
            sizes = f"{self._vectors.shape[1]} dimensions, {self._embedder.name} gives {vectors.shape[1]}"
            raise DocumentError(f"the index has {sizes}: rebuild it from the documents")
        ranked = self._rank(vectors.mean(axis=0, keepdims=True), min(k, len(self)))
        return [Hit(self.passages[at], score, rank) for rank, (score, at) in enumerate(ranked, 1)]

    def _rank(self, vector: Vectors, k: int) -> list[tuple[float, int]]:
        """(score, position) of the k best rows, ordered by score, then by position."""
        fetched = k
        while True:
            scores, positions = self._faiss.search(_normalise(vector), fetched)
            # faiss may keep any of the rows that tie for the last place: fetch until the tie is inside.
            if fetched == len(self) or scores[0, -1] < scores[0, k - 1]:
                break
            fetched = min(2 * fetched, len(self))
        order = np.lexsort((positions[0], -scores[0]))[:k]
        return [(float(scores[0, at]), int(positions[0, at])) for at in order]

    def retrieve(self, query: str, token_budget: int, count_tokens: Callable[[Document], int]) -> list[Document]:
        """The best-ranked passages that fit into `token_budget` prompt tokens, best first.

        Stops at the first passage that does not fit: none is cut, and none skipped for a shorter, worse one.

        Args:
            query: what the passages should help to answer.
            token_budget: tokens for all passages together.
            count_tokens: tokens of a passage as it will stand in the prompt, header included.

        Raises:
            ConfigError: not even the best passage fits.
        """
        chosen: list[Document] = []
        used = 0
        for hit in self.search(query, len(self)):
            needed = count_tokens(hit.document)
            if used + needed > token_budget:
                if not chosen:
                    best = f"the {needed} tokens of the best passage"
                    raise ConfigError(f"token_budget={token_budget} is less than {best}: raise it")
                break
            chosen.append(hit.document)
            used += needed
        return chosen

    def save(self, folder: str | Path) -> None:
        """Writes the index; one that is there already is replaced at once, or not at all.

        Raises:
            DocumentError: the folder cannot be written, or holds something else.
        """
        write_index(Path(folder), self.passages, self._vectors, self._embedder.name)

    @classmethod
    def load(cls, folder: str | Path, embedder: Embedder) -> "Index":
        """Reads an index that `save` wrote.

        Raises:
            DocumentError: there is none, it is damaged, or another embedder or version of ragkv wrote it.
        """
        return cls(*read_index(Path(folder), embedder.name), embedder)


def passage_limit(embedder: Embedder, max_tokens: int | None) -> int:
    """Tokens of the longest passage: `max_tokens`, or what the embedder reads whole.

    Raises:
        ConfigError: `max_tokens` is below one, or more than the embedder reads.
    """
    if max_tokens is None:
        return embedder.max_tokens
    if not 1 <= max_tokens <= embedder.max_tokens:
        raise ConfigError(
            f"max_tokens={max_tokens} is outside 1..{embedder.max_tokens}, which {embedder.name} reads whole"
        )
    return max_tokens


def _embed(embedder: Embedder, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
    if not texts:
        raise DocumentError("no documents to index: give at least one")
    vectors = embedder.encode(texts, progress)
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise ConfigError(f"{embedder.name} gave shape {vectors.shape} or non-finite values for {len(texts)} texts")
    return _normalise(vectors)


def _normalise(vectors: Vectors) -> Vectors:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(norms == 0, 1, norms), dtype=np.float32)
