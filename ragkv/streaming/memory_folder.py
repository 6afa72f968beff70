"""Where a thread's long-term memory lies on the disk: an index that processes read and write one at a time.

Knows no turns: passages and vectors in, passages and vectors out.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from ragkv.documents import Document
from ragkv.embedding import Vectors
from ragkv.errors import DocumentError
from ragkv.index_files import MANIFEST, read_index, write_index

_LOCK_TIMEOUT_S = 60.0


class MemoryFolder:
    """A folder for one thread. All but `locked` and `remove` are for those who hold the lock.

    Args:
        path: of the folder; its parent has one lock for all folders in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(path.parent / ".memory.lock")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock against other threads and processes.

        Raises:
            DocumentError: there can be no lock, or another held it for a minute.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except Timeout as error:
            raise DocumentError(
                f"{self._path}: another process has held the lock for {_LOCK_TIMEOUT_S:g} s: wait for it, or end it"
            ) from error
        except OSError as error:
            raise DocumentError(f"{self._path}: cannot be locked ({error.strerror}): choose another folder") from error
        try:
            yield
        finally:
            self._lock.release()

    def version(self) -> bytes | None:
        """Differs whenever what is kept does; None if there is nothing.

        Raises:
            DocumentError: that cannot be told.
        """
        manifest = self._path / MANIFEST
        try:
            return manifest.read_bytes() if manifest.is_file() else None
        except OSError as error:
            raise DocumentError(f"{manifest}: cannot be read ({error.strerror}): allow it, or delete it") from error

    def read(self, embedder: str) -> tuple[list[Document], Vectors]:
        """Passages, and their vectors (count, dimension).

        Raises:
            DocumentError: the folder holds something else, is damaged, or was written with another embedder.
        """
        return read_index(self._path, embedder)

    def write(self, passages: Sequence[Document], vectors: Vectors, embedder: str) -> None:
        """Put these in the place of what is there; without any, nothing is there.

        Raises:
            DocumentError: the folder cannot be written.
        """
        if passages:
            write_index(self._path, passages, vectors, embedder)
        else:
            self._remove()

    def remove(self) -> None:
        """Delete the folder, whatever it holds; one that is not there is fine.

        Raises:
            DocumentError: it cannot be deleted.
        """
        with self.locked():
            self._remove()

    def _remove(self) -> None:
        try:
            shutil.rmtree(self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise DocumentError(f"{self._path}: cannot be deleted ({error.strerror}): delete it by hand") from error
