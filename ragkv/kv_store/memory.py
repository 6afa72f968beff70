"""Blocks in host memory under a bound of bytes; what was used longest ago goes first, and ends before beginnings."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.kv_store.blocks import Block
from ragkv.kv_store.keys import Owner


@dataclass(frozen=True)
class _Entry:
    block: Block
    owner: Owner


class BlockMemory:
    """Blocks by key. Threads may share one.

    Attributes:
        max_bytes: the bound; 0 keeps nothing.
        nbytes: bytes held.
        evictions: blocks that had to go so far.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = self.evictions = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Block | None:
        """The block of this key."""
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else entry.block

    def put(self, owner: Owner, chain: Sequence[str], blocks: Sequence[Block]) -> set[str]:
        """Keep the blocks of a prompt from its beginning, mark them as used now, and evict what is beyond the bound.

        No block is thereby ever younger than the one before it, so none is left behind that cannot be reached.

        Returns:
            The keys that are new.
        """
        new: dict[str, Block] = {}
        room = self.max_bytes
        for key, block in zip(chain, blocks, strict=True):
            room -= block.nbytes
            if room >= 0 and self.get(key) is None:
                new[key] = block.in_memory()
        with self._lock:
            for key, block in new.items():
                if key not in self._entries:
                    self._entries[key] = _Entry(block, owner)
                    self.nbytes += block.nbytes
            for key in reversed(chain):
                if key in self._entries:
                    self._entries.move_to_end(key)
            while self.nbytes > self.max_bytes:
                _, entry = self._entries.popitem(last=False)
                self.nbytes -= entry.block.nbytes
                self.evictions += 1
            return {key for key in new if key in self._entries}

    def clear(self, model: str | None = None, namespace: str | None = None) -> None:
        """Forget all blocks, or those of one model or one namespace."""
        with self._lock:
            for key, entry in list(self._entries.items()):
                if model in (None, entry.owner.model) and namespace in (None, entry.owner.namespace):
                    self.nbytes -= entry.block.nbytes
                    del self._entries[key]
