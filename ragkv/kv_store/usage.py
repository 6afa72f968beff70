"""What a store did: counts that add up, in a process and, for a folder, over all processes that ever used it."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ragkv.kv_store.block_file import write_whole

_FILE = "usage.json"


@dataclass(frozen=True)
class Usage:
    """Counts since the beginning.

    Attributes:
        hits, misses: prompts of which a part was found, and of which nothing was.
        read_tokens, created_tokens: tokens whose K/V were taken from the store, and put into it.
        evictions: blocks that went to make room for others.
    """

    hits: int = 0
    misses: int = 0
    read_tokens: int = 0
    created_tokens: int = 0
    evictions: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Usage)))


def read_usage(folder: Path) -> Usage:
    """The counts kept in a folder; zeros where there are none that can be read."""
    try:
        found = json.loads((folder / _FILE).read_bytes())
        return Usage(**{field.name: int(found[field.name]) for field in fields(Usage)})
    except (OSError, ValueError, TypeError, KeyError):
        return Usage()


def add_usage(folder: Path, usage: Usage) -> None:
    """Add to the counts kept in a folder. The caller holds its lock."""
    write_whole(folder / _FILE, json.dumps(asdict(read_usage(folder) + usage)).encode())
