"""Indexes of files, kept in the cache folder: unchanged files are embedded once."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from ragkv import paths as cache_paths
from ragkv.documents import Document
from ragkv.embedding import Embedder
from ragkv.errors import DocumentError
from ragkv.index import Index, passage_limit
from ragkv.progress import Progress
from ragkv.readers import read_paths


def cached_index(
    paths: Sequence[str | Path],
    embedder: Embedder,
    *,
    max_tokens: int | None = None,
    progress: Progress | None = None,
    skip_unreadable: bool = False,
) -> Index:
    """The index of files and folders: read from the cache when nothing changed, else built and stored there.

    It depends on the documents' content, the embedder's name and the passage length. A stored index that
    is damaged is built again.

    Args:
        paths: files and folders, see `read_paths`.
        embedder: counts tokens and embeds.
        max_tokens: length of the longest passage, see `Index.build`.
        progress: told of "reading", and, when the index is built, "splitting" and "embedding".
        skip_unreadable: see `read_paths`.

    Raises:
        DocumentError: a file cannot be read, or the cache folder not be written.
        ConfigError: `max_tokens` is out of bounds.
    """
    documents = read_paths(paths, progress, skip_unreadable=skip_unreadable)
    limit = passage_limit(embedder, max_tokens)
    folder = cache_paths.home() / "indexes" / _key(documents, embedder.name, limit)
    if folder.exists():
        try:
            return Index.load(folder, embedder)
        except DocumentError:
            pass  # damaged or of another version: what follows replaces it
    index = Index.build(documents, embedder, max_tokens=limit, progress=progress)
    index.save(folder)
    return index


def _key(documents: Sequence[Document], embedder: str, max_tokens: int) -> str:
    digest = hashlib.sha256(json.dumps([embedder, max_tokens]).encode())
    for document in documents:
        digest.update(json.dumps(document.to_row(), sort_keys=True).encode())
    return digest.hexdigest()[:32]
