"""K/V of prompts that were read, to be taken up by later prompts that begin with the same tokens.

In: a model and token ids. Out: the longest stored prefix, in blocks of host memory or of a folder. What a policy keeps
of a prompt is no business of the store: it holds the full K/V, of which every question keeps its own part.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, get_args

from transformers import PreTrainedModel

from ragkv.backend import rope_regime
from ragkv.errors import ConfigError
from ragkv.kv_store.blocks import Block
from ragkv.kv_store.folder import BlockFolder
from ragkv.kv_store.keys import DiskDType, Owner, model_digest, owner_of
from ragkv.kv_store.memory import BlockMemory
from ragkv.kv_store.usage import Usage

MEMORY_BYTES, DISK_BYTES, BLOCK_SIZE = 2 * 2**30, 20 * 2**30, 128


@dataclass(frozen=True)
class Prefix:
    """The beginning of a prompt that a store has, in blocks."""

    owner: Owner
    blocks: tuple[Block, ...]

    @property
    def length(self) -> int:
        """Tokens."""
        return sum(block.tokens for block in self.blocks)


@dataclass(frozen=True)
class StoreInfo:
    """What a store holds in memory, and what it did in this process; for a folder see `ragkv cache info`."""

    blocks: int
    nbytes: int
    max_bytes: int
    usage: Usage


class KVStore:
    """A store in host memory, in a folder, or both; threads may share one, and processes a folder.

    Args:
        memory_bytes: bound on the blocks in memory; 0 leaves them to the folder alone.
        folder: where blocks outlive the process; None for nowhere.
        disk_bytes: bound on the folder's files.
        disk_dtype: "model" for files of exactly what was computed, "int8" for files of half the size, with which reuse
            is no longer exact.
        namespace: prompts of one namespace are never found from another.
        block_size: tokens per block; a prompt shares whole blocks with another.

    Raises:
        ConfigError: a bound is out of range, or the folder is a file.
    """

    def __init__(
        self,
        memory_bytes: int = MEMORY_BYTES,
        folder: str | Path | None = None,
        disk_bytes: int = DISK_BYTES,
        *,
        disk_dtype: DiskDType = "model",
        namespace: str = "",
        block_size: int = BLOCK_SIZE,
    ) -> None:
        if memory_bytes < 0 or disk_bytes < 0:
            raise ConfigError(f"memory_bytes={memory_bytes}, disk_bytes={disk_bytes}: neither may be negative")
        if block_size < 1:
            raise ConfigError(f"block_size={block_size}: must be at least 1")
        if disk_dtype not in get_args(DiskDType):
            raise ConfigError(f"disk_dtype={disk_dtype!r}: choose one of {', '.join(get_args(DiskDType))}")
        self.namespace, self.block_size, self.disk_dtype = namespace, block_size, disk_dtype
        self._keeps_tails = False
        self._memory = BlockMemory(memory_bytes)
        self._folder = None if folder is None else BlockFolder(Path(folder).expanduser().absolute(), disk_bytes)
        self._tally = _Tally()

    def within(self, namespace: str) -> Self:
        """The same store as another namespace sees it: bounds and counts in common, no prompt."""
        other = copy.copy(self)
        other.namespace = namespace
        return other

    def with_tails(self) -> Self:
        """The same store, which also keeps and finds the last block of a prompt if that is shorter than the others.

        Only the very same prompt has that block, so it is for texts that come again whole, such as documents.
        """
        other = copy.copy(self)
        other._keeps_tails = True
        return other

    def stored_tokens(self, length: int) -> int:
        """How many tokens of a prompt of this length are in blocks that the store keeps."""
        return length if self._keeps_tails else length // self.block_size * self.block_size

    @property
    def max_bytes(self) -> int:
        """Most bytes of K/V that can be kept of one prompt."""
        return max(self._memory.max_bytes, 0 if self._folder is None else self._folder.max_bytes)

    def longest_prefix(self, model: PreTrainedModel, ids: Sequence[int]) -> Prefix:
        """The longest beginning of a prompt that is stored."""
        owner = self._owner(model, ids)
        blocks: list[Block] = []
        parent = owner.root
        for key in owner.chain(ids[: self.stored_tokens(len(ids))]):
            block = self._memory.get(key)
            if block is None and self._folder is not None:
                start = len(blocks) * self.block_size
                block = self._folder.get(owner, parent, ids[start : start + self.block_size], key)
            if block is None:
                break
            blocks.append(block)
            parent = key
        return Prefix(owner, tuple(blocks))

    def known_tokens(self, model: PreTrainedModel, ids: Sequence[int]) -> int:
        """About how many tokens of a prompt `longest_prefix` would find: files are looked for, but not read."""
        owner = self._owner(model, ids)
        kept, known = self.stored_tokens(len(ids)), 0
        for key in owner.chain(ids[:kept]):
            if self._memory.get(key) is None and not (self._folder is not None and self._folder.has(owner, key)):
                break
            known = min(kept, known + self.block_size)
        return known

    def used(self, found: Sequence[tuple[Sequence[int], Prefix]]) -> None:
        """Mark what was found as used now, keep it in memory as far as there is room, and count it as one prompt's hit.

        Args:
            found: tokens and what `longest_prefix` gave for them, all on one side of the rotation's original length.
        """
        if not found:
            return
        usage = Usage(hits=1, read_tokens=sum(prefix.length for _, prefix in found))
        chains = [prefix.owner.chain(ids[: prefix.length]) for ids, prefix in found]
        for chain, (_, prefix) in zip(chains, found, strict=True):
            self._memory.put(prefix.owner, chain, prefix.blocks)
        if self._folder is not None:
            self._folder.used(found[0][1].owner, chains, usage)
        self._tally.add(usage)

    def put(self, ids: Sequence[int], prefix: Prefix, blocks: Sequence[Block], read_tokens: int) -> int:
        """Keep what was computed of a prompt, mark all of it as used, and count it unless it is shorter than a block.

        Args:
            ids: the prompt's tokens.
            prefix: what `longest_prefix` gave for it.
            blocks: those behind the prefix.
            read_tokens: tokens of the prefix that were not computed again.

        Returns:
            Tokens that were not stored before.
        """
        whole = [*prefix.blocks, *blocks]
        chain = prefix.owner.chain(ids[: sum(block.tokens for block in whole)])
        if not chain:
            return 0
        usage = Usage(hits=int(read_tokens > 0), misses=int(read_tokens == 0), read_tokens=read_tokens)
        new = self._memory.put(prefix.owner, chain, whole)
        if self._folder is not None:
            new |= self._folder.put(prefix.owner, chain, ids, whole, usage)
        behind = zip(chain[len(prefix.blocks) :], blocks, strict=True)
        created = sum(block.tokens for key, block in behind if key in new)
        self._tally.add(usage + Usage(created_tokens=created))
        return created

    def _owner(self, model: PreTrainedModel, ids: Sequence[int]) -> Owner:
        return owner_of(model, self.namespace, self.block_size, self.disk_dtype, rope_regime(model, len(ids)))

    def info(self) -> StoreInfo:
        """What is in memory, of all namespaces."""
        usage = self._tally.usage + Usage(evictions=self._memory.evictions)
        return StoreInfo(len(self._memory), self._memory.nbytes, self._memory.max_bytes, usage)

    def forget(self, model: PreTrainedModel) -> None:
        """Free the memory that this model's blocks take; the folder keeps them."""
        self._memory.clear(model=model_digest(model))

    def clear(self, namespace: str | None = None) -> None:
        """Remove everything from memory and folder, or all of one namespace."""
        self._memory.clear(namespace=namespace)
        if self._folder is not None:
            self._folder.clear(namespace)


class _Tally:
    """Counts that threads add to."""

    def __init__(self) -> None:
        self.usage = Usage()
        self._lock = threading.Lock()

    def add(self, usage: Usage) -> None:
        with self._lock:
            self.usage += usage
