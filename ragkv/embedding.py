"""Texts as vectors: what an index asks of an embedding model, and the one from sentence-transformers.

The model is loaded at first use, because importing sentence-transformers takes seconds.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ragkv.errors import ModelError
from ragkv.progress import Progress

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Vectors = npt.NDArray[np.float32]

PACKAGED_MODEL = "all-minilm-l6-v2"
TEXTS_PER_REPORT = 256


class Embedder(Protocol):
    """An embedding model. Two embedders of the same name must give the same vectors."""

    @property
    def name(self) -> str:
        """Names the weights: an index opens only with the embedder that built it."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text that is embedded whole, special tokens not counted."""
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of the text, special tokens not counted."""
        ...

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        """Embeds texts: float32 of shape (len(texts), dimension)."""
        ...


class SentenceTransformerEmbedder:
    """A sentence-transformers model: the packaged one, a folder, or a model of the Hugging Face hub.

    Args:
        model: a folder or a hub id; the packaged all-MiniLM-L6-v2 when left out.
        device: a torch device such as "cpu"; chosen by sentence-transformers when left out.
    """

    def __init__(self, model: str | Path = PACKAGED_MODEL, *, device: str | None = None) -> None:
        self._source = model
        self._device = device

    @cached_property
    def name(self) -> str:
        """The packaged model's name, a hub id, or a folder's name with a hash of its files."""
        folder = Path(self._source)
        if self._source == PACKAGED_MODEL or not folder.is_dir():
            return str(self._source)
        return f"{folder.name}@{_fingerprint(folder)}"

    @cached_property
    def _model(self) -> "SentenceTransformer":
        from sentence_transformers import SentenceTransformer

        source = self._source
        if source == PACKAGED_MODEL:
            from ragkv import models

            source = models.fetch(PACKAGED_MODEL)
        try:
            model = SentenceTransformer(str(source), device=self._device)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:160]
            raise ModelError(f"{source}: not a sentence-transformers model ({reason}): check the name") from error
        if model.max_seq_length is None or model.get_embedding_dimension() is None:
            raise ModelError(f"{source}: does not state its sequence length and dimension: choose another model")
        return model

    @property
    def max_tokens(self) -> int:
        """The model's sequence length less its special tokens (254 for all-MiniLM-L6-v2)."""
        special_tokens: int = self._model.tokenizer.num_special_tokens_to_add()
        return (self._model.max_seq_length or 0) - special_tokens

    def count_tokens(self, text: str) -> int:
        """Tokens of the text, nothing cut off, special tokens not counted."""
        encoded = self._model.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return len(encoded["input_ids"])

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        """Embeds texts as unit vectors of shape (len(texts), dimension); the model cuts off longer texts."""
        vectors = np.empty((len(texts), self._model.get_embedding_dimension() or 0), dtype=np.float32)
        for start in range(0, len(texts), TEXTS_PER_REPORT):
            batch = list(texts[start : start + TEXTS_PER_REPORT])
            vectors[start : start + len(batch)] = self._model.encode(
                batch, normalize_embeddings=True, show_progress_bar=False
            )
            if progress:
                progress("embedding", start + len(batch), len(texts))
        return vectors


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
