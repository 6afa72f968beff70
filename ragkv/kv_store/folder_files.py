"""How a folder of blocks is laid out: a subfolder per owner, in it a manifest for people and one file per block.

Names say what is ours: whatever has another name is left alone and never read.
"""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ragkv.kv_store.block_file import FORMAT, STAGED, write_whole
from ragkv.kv_store.keys import Owner

MANIFEST = "manifest.json"
_OWNER_NAME = re.compile(r"[0-9a-f]{32}")
_BLOCK_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


@dataclass(frozen=True)
class BlockPath:
    """A file of a block: its size in bytes, and when it was used last in nanoseconds."""

    path: Path
    size: int
    used_ns: int


@dataclass(frozen=True)
class Manifest:
    """A subfolder and whose it is; the names are None where no readable manifest says so."""

    folder: Path
    model: str | None
    namespace: str | None


def block_path(folder: Path, owner: Owner, key: str) -> Path:
    """Where the block of this key belongs."""
    return folder / owner.root[:32] / f"{key}.safetensors"


def write_manifest(folder: Path, owner: Owner) -> None:
    """Make the subfolder of an owner and say in it whose it is."""
    subfolder = folder / owner.root[:32]
    subfolder.mkdir(mode=0o700, exist_ok=True)
    if _read_manifest(subfolder).namespace is not None:
        return
    about = {"format": FORMAT, "model": owner.name, "namespace": owner.namespace, "block_size": owner.block_size}
    write_whole(subfolder / MANIFEST, json.dumps(about, indent=1).encode())


def list_owners(folder: Path) -> list[Manifest]:
    """The subfolders that are ours."""
    if not folder.is_dir():
        return []
    return [_read_manifest(path) for path in sorted(folder.iterdir()) if _OWNER_NAME.fullmatch(path.name)]


def _read_manifest(folder: Path) -> Manifest:
    try:
        about = json.loads((folder / MANIFEST).read_bytes())
        return Manifest(folder, str(about["model"]), str(about["namespace"]))
    except (OSError, ValueError, TypeError, KeyError):
        return Manifest(folder, None, None)


def blocks_in(owner_folder: Path) -> list[BlockPath]:
    """The files of blocks in a subfolder."""
    found = []
    with suppress(OSError), os.scandir(owner_folder) as entries:
        for entry in entries:
            if _BLOCK_NAME.fullmatch(entry.name):
                with suppress(OSError):  # another process has removed it
                    status = entry.stat()
                    found.append(BlockPath(Path(entry.path), status.st_size, status.st_mtime_ns))
    return found


def scan(folder: Path) -> list[BlockPath]:
    """The files of all blocks. The caller holds the lock, so what is half written has been given up, and is removed."""
    found = []
    for owner in list_owners(folder):
        for abandoned in owner.folder.glob(f".*{STAGED}"):
            abandoned.unlink(missing_ok=True)
        found += blocks_in(owner.folder)
    return found


@dataclass(frozen=True)
class Contents:
    """What a folder holds of one owner; `model` and `namespace` are "?" where no readable manifest says them.

    Attributes:
        last_used: local time, to the second; empty where there are no blocks.
    """

    model: str
    namespace: str
    blocks: int
    bytes: int
    last_used: str


def contents(folder: Path) -> list[Contents]:
    """What a folder holds, owner by owner."""
    return [_contents(owner, blocks_in(owner.folder)) for owner in list_owners(folder)]


def _contents(owner: Manifest, files: Sequence[BlockPath]) -> Contents:
    used = max((file.used_ns for file in files), default=0)
    return Contents(
        model="?" if owner.model is None else owner.model,
        namespace="?" if owner.namespace is None else owner.namespace,
        blocks=len(files),
        bytes=sum(file.size for file in files),
        last_used=datetime.fromtimestamp(used / 1e9).isoformat(" ", "seconds") if used else "",
    )


def clear_owner(owner_folder: Path) -> None:
    """Remove what is ours in a subfolder, and the subfolder if nothing else is in it."""
    for path in [block.path for block in blocks_in(owner_folder)] + list(owner_folder.glob(f".*{STAGED}")):
        path.unlink(missing_ok=True)
    (owner_folder / MANIFEST).unlink(missing_ok=True)
    with suppress(OSError):
        owner_folder.rmdir()
