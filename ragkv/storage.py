"""Large files and folders appear in the cache whole or not at all.

Work goes on in a staging folder beside the target, under a lock that other processes respect; what is
complete is flushed to the disk and renamed. A staging folder is removed on every way out, and one that a
killed process left behind is removed by the next.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from ragkv.errors import ModelError

MORE_SPACE = "free some space, or set RAGKV_HOME to a folder on a larger disk"


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of `target` against other threads and processes; waits while another holds it."""
    with disk_errors(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / f".{target.name}.lock")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """An empty folder on the disk of `target`, gone at the end. The caller holds the lock of `target`."""
    folder = target.parent / f".{target.name}.partial"
    with disk_errors(target.parent):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, target: Path) -> None:
    """Flush a staged file or folder to the disk, then rename it to `target`, which it replaces."""
    with disk_errors(target.parent):
        for file in sorted(staged.rglob("*")) if staged.is_dir() else [staged]:
            if file.is_file():
                _flush(file)
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(staged, target)
        if os.name == "posix":
            _flush(target.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file whole or not at all, for its owner alone; one that is there is replaced.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def require_space(folder: Path, needed: int, purpose: str) -> None:
    """Raise ModelError unless the disk of `folder` has `needed` bytes free."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ModelError(
            f"{purpose} needs {_megabytes(needed)} MB in {folder}, where {_megabytes(free)} MB are free: {MORE_SPACE}"
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a ModelError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk of {folder} is full ({_free_text(folder)})"
            raise ModelError(f"{reason}: {MORE_SPACE}") from error
        reason = f"cannot write to {folder} ({error.strerror or error})"
        raise ModelError(f"{reason}: set RAGKV_HOME to a folder that can be written") from error


def _free_text(folder: Path) -> str:
    try:
        return f"{_megabytes(shutil.disk_usage(folder).free)} MB free"
    except OSError:
        return "free space unknown"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f}"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
