"""One copy of each model per process: whoever asks for the same weights gets the same model, loaded on first use.

The same holds for stores of K/V: all that have the same bounds and folder are one, with a namespace each.
"""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ragkv.kv_store import DiskDType, KVStore
from ragkv.models import LoadedModel, load
from ragkv.progress import Progress


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: LoadedModel | None = None


Key = tuple[str, str | None, torch.dtype | None, str | None]
_entries: dict[Key, _Entry] = {}
_stores: dict[tuple[int, str | None, int, DiskDType], KVStore] = {}
_entries_lock = threading.Lock()


def shared_model(
    model: str,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """The process's copy of a model, ready to be served; budgets and other policies do not multiply it.

    Threads that ask at once wait for one load. Arguments and errors are those of `ragkv.models.load`.
    """
    key = (model, device, dtype, attn_implementation)
    with _entries_lock:
        entry = _entries.setdefault(key, _Entry())
    with entry.lock:
        if entry.loaded is None:
            entry.loaded = load(
                model, device=device, dtype=dtype, attn_implementation=attn_implementation, progress=progress
            )
        return entry.loaded


def shared_store(
    memory_bytes: int, folder: str | None, disk_bytes: int, disk_dtype: DiskDType, namespace: str
) -> KVStore:
    """The process's store with these bounds, as a namespace sees it. Arguments and errors are those of `KVStore`."""
    if folder is not None:
        folder = str(Path(folder).expanduser().absolute())
    key = (memory_bytes, folder, disk_bytes, disk_dtype)
    with _entries_lock:
        if key not in _stores:
            _stores[key] = KVStore(memory_bytes, folder, disk_bytes, disk_dtype=disk_dtype)
        return _stores[key].within(namespace)


def unload(model: str | None = None) -> int:
    """Forget the shared copies of a model (or of all); memory is freed once no engine holds them.

    K/V of theirs that the shared stores have in memory go at once; those in folders stay.

    Returns:
        How many copies were forgotten.
    """
    with _entries_lock:
        keys = [key for key in _entries if model is None or key[0] == model]
        copies = [loaded for key in keys if (loaded := _entries.pop(key).loaded) is not None]
        for store in _stores.values():
            for loaded in copies:
                store.forget(loaded.model)
        return len(copies)
