"""A folder of results: for one run and one process at a time, with JSON lines that outlive a kill."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from ragkv.errors import ConfigError, DocumentError
from ragkv_evals.config import check_same


def claim(folder: Path, settings: Mapping[str, object]) -> FileLock:
    """Make a folder that of a run, or go on with the run that it holds, and note the settings in config.json.

    Returns:
        A lock: as long as it lives, nobody else can claim the folder.

    Raises:
        ConfigError: it is claimed, or holds a run with other settings.
        DocumentError: its config.json is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = _locked(folder)
    try:
        _note(settings, folder)
    except BaseException:
        lock.release()
        raise
    return lock


def check_folder(folder: Path, settings: Mapping[str, object]) -> None:
    """Raise what `claim` would raise now; nothing is noted, and the folder stays free."""
    if (folder / ".lock").exists():
        _locked(folder).release()
    _compare(folder, settings)


def _locked(folder: Path) -> FileLock:
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise ConfigError(f"--out {folder} is in use by another run: let it end, or choose another folder") from error
    return lock


def _compare(folder: Path, settings: Mapping[str, object]) -> None:
    noted = folder / "config.json"
    if not noted.exists():
        return
    try:
        there = json.loads(noted.read_text())
    except ValueError as error:
        raise DocumentError(f"{noted}: no JSON ({error}); use another --out folder") from error
    check_same(settings, there, folder)


def _note(settings: Mapping[str, object], folder: Path) -> None:
    _compare(folder, settings)
    staged = folder / ".config.json"
    staged.write_text(json.dumps(settings, indent=1) + "\n")
    staged.replace(folder / "config.json")


def whole_lines(path: Path) -> list[str]:
    """The lines that were written to their ends; none if there is no file."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def open_behind(path: Path) -> IO[str]:
    """The file, open for more lines; what a kill left of its last one is cut off."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")
