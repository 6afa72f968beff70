"""Files and folders as a collection of documents: every readable file is read, or an error names it.

A row of a .jsonl file is a document; a row with "paragraphs" (HotpotQA) is one document per paragraph.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from ragkv.documents import Document, unique
from ragkv.errors import DocumentError
from ragkv.formats import READERS, read_file
from ragkv.progress import Progress

SUFFIXES = ", ".join(READERS)


def read_paths(
    paths: Sequence[str | Path], progress: Progress | None = None, *, skip_unreadable: bool = False
) -> list[Document]:
    """Reads files and, in sorted order, all files below folders whose suffix has a reader.

    Below a folder, hidden files and files of other kinds are passed over; links that leave it are not
    followed (with a warning). Repeats of the same document are read once.

    Args:
        paths: files and folders; one that is named twice is read once.
        progress: told after each file.
        skip_unreadable: warn about a file that cannot be read and go on, instead of stopping there.

    Raises:
        DocumentError: a path does not exist, a folder holds nothing to read, a file cannot be read.
    """
    files = find_files(paths)
    documents: list[Document] = []
    for done, path in enumerate(files, 1):
        try:
            documents += read_file(path)
        except DocumentError as error:
            if not skip_unreadable:
                raise
            warnings.warn(str(error), stacklevel=2)
        if progress:
            progress("reading", done, len(files))
    if not documents:
        raise DocumentError(f"none of {len(files)} files could be read: see the warnings")
    return unique(documents)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that `read_paths` reads, each once, those of one folder sorted.

    Raises:
        DocumentError: a path does not exist, is of an unknown kind, or is a folder with nothing to read.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    if not paths:
        raise DocumentError("no documents given: name files or folders")
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        for file in _files_below(path) if path.is_dir() else [_checked_file(path)]:
            found.setdefault(_real(file), file)
    return list(found.values())


def _checked_file(path: Path) -> Path:
    if not path.exists():
        raise DocumentError(f"{path}: no such file or folder: check the path")
    if path.suffix.lower() not in READERS:
        raise DocumentError(f'{path}: cannot read "{path.suffix}" files: convert it to one of {SUFFIXES}')
    return path


def _files_below(folder: Path) -> list[Path]:
    files = sorted(_walk(folder), key=lambda path: path.parts)
    if not files:
        raise DocumentError(f"{folder}: no files to read: put {SUFFIXES} files there")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    root = _real(folder)
    for where, folders, names in os.walk(folder, onerror=_refuse):
        links = [name for name in folders if Path(where, name).is_symlink()]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names + links:
            path = Path(where, name)
            if name.startswith("."):
                continue
            if path.is_symlink() and not _real(path).is_relative_to(root):
                warnings.warn(f"{path}: leaves {folder}, not followed: name it by itself", stacklevel=2)
            elif path.suffix.lower() in READERS and not path.is_dir():
                yield path


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # unlike Path.resolve, no error for links that point at each other


def _refuse(error: OSError) -> None:
    raise DocumentError(f"{error.filename}: {error.strerror}: check the folder's permissions") from error
