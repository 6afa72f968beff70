"""Blocks in a folder under a bound of bytes, for any number of processes and for the time after a restart.

A file is named by its key, so two processes that write the same block write the same file. Writers take turns under a
lock and replace files whole; readers need none. Whatever goes wrong is a warning: a store may forget, never fail.
"""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from ragkv.errors import ConfigError
from ragkv.kv_store.block_file import UnusableBlock, encode_block, read_block, write_whole
from ragkv.kv_store.blocks import Block
from ragkv.kv_store.folder_files import BlockPath, block_path, clear_owner, list_owners, scan, write_manifest
from ragkv.kv_store.keys import Owner
from ragkv.kv_store.usage import Usage, add_usage

_LOCK_TIMEOUT_S = 60.0


class BlockFolder:
    """Blocks by key. Threads and processes may share one.

    Attributes:
        max_bytes: the bound on all files together; what was used longest ago goes first, and ends before beginnings.
            A folder that holds more already is not cut down, it only grows no more.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"kv_dir={str(path)!r} is a file: name a folder, which is created if need be")
        self.path, self.max_bytes = path, max_bytes
        self._lock = FileLock(path / ".lock")
        self._unusable: set[Path] = set()
        self._warned = False

    def get(self, owner: Owner, parent: str, tokens: Sequence[int], key: str) -> Block | None:
        """The block of this key, mapped into memory; None, perhaps with a warning, if there is none to be trusted."""
        path = block_path(self.path, owner, key)
        try:
            return read_block(path, parent, tokens)
        except FileNotFoundError:
            return None
        except UnusableBlock as error:
            self._unusable.add(path)
            warnings.warn(f"{path} is not used: {error}", stacklevel=2)
            return None

    def put(
        self, owner: Owner, chain: Sequence[str], ids: Sequence[int], blocks: Sequence[Block], usage: Usage
    ) -> set[str]:
        """Keep the blocks of a prompt from its beginning, and mark them as used now.

        Args:
            chain: the keys of the blocks.
            ids: the prompt's tokens.
            usage: what there is to add to the folder's counts; blocks evicted are added here.

        Returns:
            The keys that are new.
        """
        new: set[str] = set()

        def write() -> None:
            try:
                evictions = self._write(owner, chain, ids, blocks, new)
            finally:
                self._touch(owner, chain)
            tokens = sum(block.tokens for key, block in zip(chain, blocks, strict=True) if key in new)
            created = Usage(created_tokens=tokens, evictions=evictions)
            add_usage(self.path, usage + created)

        self._under_lock(write)
        return new

    def has(self, owner: Owner, key: str) -> bool:
        """Whether there is a file of this key, be it usable or not."""
        return block_path(self.path, owner, key).exists()

    def used(self, owner: Owner, chains: Sequence[Sequence[str]], usage: Usage) -> None:
        """Mark blocks that were found as used now, and add to the folder's counts."""
        for chain in chains:
            self._touch(owner, chain)
        self._under_lock(lambda: add_usage(self.path, usage))

    def clear(self, namespace: str | None = None) -> None:
        """Remove all blocks, or those of one namespace. Files that are none of ours stay.

        A subfolder whose manifest cannot be read may be anyone's, and stays where only one namespace is cleared; a
        warning says so.
        """

        def remove() -> None:
            for manifest in list_owners(self.path):
                if namespace in (None, manifest.namespace):
                    clear_owner(manifest.folder)
                elif manifest.namespace is None:
                    warnings.warn(
                        f"{manifest.folder} does not say whose it is, and stays: a prompt of its namespace names it "
                        "again, and clearing all namespaces removes it",
                        stacklevel=5,
                    )

        if self.path.is_dir():
            self._under_lock(remove)

    def _under_lock(self, write: Callable[[], None]) -> None:
        """Do it; an error of the disk, or a lock that others hold for long, becomes a warning."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
                write()
        except Timeout:
            warnings.warn(f"{self.path} is busy for {_LOCK_TIMEOUT_S:.0f} s: nothing was changed there", stacklevel=3)
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"{self.path} cannot be written ({reason}): what was there stays", stacklevel=3)

    def _write(
        self, owner: Owner, chain: Sequence[str], ids: Sequence[int], blocks: Sequence[Block], new: set[str]
    ) -> int:
        """Write what is missing, as far as there is room, and return how many blocks had to go for it."""
        paths = [block_path(self.path, owner, key) for key in chain]
        missing = [n for n, path in enumerate(paths) if path in self._unusable or not path.exists()]
        if not missing:
            return 0
        files, own = scan(self.path), set(paths)
        held = sum(file.size for file in files)
        if held > self.max_bytes and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.path} holds {held} bytes, more than kv_disk_bytes={self.max_bytes}: it grows no more, what is "
                "new takes the place of what was used longest ago; raise the bound, or clear the folder",
                stacklevel=5,
            )
        # The bound of one caller is no reason to throw away what another, with a higher one, has put there.
        room = _Room(max(0, self.max_bytes - held), [file for file in files if file.path not in own])
        write_manifest(self.path, owner)
        for n in missing:
            start = n * owner.block_size
            parent = chain[n - 1] if n else owner.root
            data = encode_block(blocks[n], parent, ids[start : start + owner.block_size], owner.disk_dtype)
            # Others go only once the file is there: a disk that is full must not cost what it holds.
            if not write_whole(paths[n], data, partial(room.make, len(data))):
                break
            self._unusable.discard(paths[n])
            new.add(chain[n])
        return room.evictions

    def _touch(self, owner: Owner, chain: Sequence[str]) -> None:
        """Beginnings are marked as used after their ends, so that they outlive them."""
        now = time.time_ns()
        for n, key in enumerate(chain):
            with suppress(OSError):
                os.utime(block_path(self.path, owner, key), ns=(now - 1000 * n, now - 1000 * n))


class _Room:
    """Free bytes below the bound, and the files that may go for more, those unused for longest at the end."""

    def __init__(self, free: int, files: Sequence[BlockPath]) -> None:
        self.evictions = 0
        self._free = free
        self._files = sorted(files, key=lambda file: file.used_ns, reverse=True)

    def make(self, needed: int) -> bool:
        """Take `needed` bytes, evicting files for them; False if there is no room for so much."""
        while self._free < needed and self._files:
            file = self._files.pop()
            with suppress(OSError):  # some systems do not let go of a file that is being read
                file.path.unlink(missing_ok=True)
                self._free += file.size
                self.evictions += 1
        if self._free < needed:
            return False
        self._free -= needed
        return True
