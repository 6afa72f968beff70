"""One copy of each model per process: whoever asks for the same weights gets the same model, loaded on first use."""

import threading
from dataclasses import dataclass, field

import torch

from ragkv.models import LoadedModel, load
from ragkv.progress import Progress


@dataclass
class _Entry:
    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: LoadedModel | None = None


Key = tuple[str, str | None, torch.dtype | None, str | None]
_entries: dict[Key, _Entry] = {}
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


def unload(model: str | None = None) -> int:
    """Forget the shared copies of a model (or of all); memory is freed once no engine holds them.

    Returns:
        How many copies were forgotten.
    """
    with _entries_lock:
        keys = [key for key in _entries if model is None or key[0] == model]
        return sum(_entries.pop(key).loaded is not None for key in keys)
