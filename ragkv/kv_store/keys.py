"""What names a block of K/V: everything that its numbers depend on, and nothing else.

A chain of hashes: the root stands for the model (weights, configuration with its rotation, dtype) and the namespace,
and each link for the tokens of one more block. Equal keys mean equal K/V; policies and budgets are no part of it.
"""

import hashlib
import json
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

_SAMPLED = 64  # numbers of each weight: a sum says nothing of their order
_NOT_IDENTITY = {"_name_or_path", "transformers_version", "architectures", "_attn_implementation", "dtype"}

DiskDType = Literal["model", "int8"]

_digests: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()
_digests_lock = threading.Lock()


def model_digest(model: PreTrainedModel) -> str:
    """The identity of a model in hex, computed once: a name or a folder says too little, for weights get replaced.

    It covers the configuration, the release of transformers that computes, and of every weight its dtype, its shape, a
    checksum and a sample of its numbers. Weights must not change while the model is in use.
    """
    with _digests_lock:
        if model not in _digests:
            _digests[model] = _model_digest(model)
        return _digests[model]


def _model_digest(model: PreTrainedModel) -> str:
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_IDENTITY}
    digest = hashlib.sha256(json.dumps([transformers.__version__, config], sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        numbers = weight.detach().reshape(-1)
        whole = len(numbers) * numbers.element_size() // 8 * 8 // numbers.element_size()
        digest.update(_sum_of_bits(numbers[:whole]).to_bytes(8, "little", signed=True))
        digest.update(_bytes(numbers[whole:]))
        last = max(0, len(numbers) - 1)
        sample = torch.linspace(0, last, min(_SAMPLED, len(numbers)), dtype=torch.float64).long()
        digest.update(_bytes(numbers[sample.to(numbers.device)]))
    return digest.hexdigest()


def _sum_of_bits(numbers: Tensor) -> int:
    """Of numbers read as 64-bit integers: modulo 2**64, so exact in any order and the same on any device."""
    if numbers.storage_offset() * numbers.element_size() % 8:
        numbers = numbers.clone()
    return int(numbers.view(torch.int64).sum()) if len(numbers) else 0


def _bytes(numbers: Tensor) -> bytes:
    return numbers.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Owner:
    """Whose blocks they are: one namespace on one model.

    Attributes:
        model: the model's digest.
        disk_dtype: how files hold the numbers: what was rounded to "int8" is never taken for what was not.
        rope_regime: of the prompts, as from `ragkv.backend.rope_regime`; None has no blocks.
        name: what reports call it.
    """

    model: str
    namespace: str
    block_size: int
    disk_dtype: DiskDType = "model"
    rope_regime: int | None = 0
    name: str = field(default="", compare=False)

    @property
    def root(self) -> str:
        """The key at which the chains of this owner begin."""
        whose = [self.model, self.namespace, self.block_size, self.disk_dtype, self.rope_regime]
        return hashlib.sha256(json.dumps(whose).encode()).hexdigest()

    def chain(self, ids: Sequence[int]) -> list[str]:
        """The keys of a prompt's blocks, in order; the last one may be shorter than the others."""
        keys = [self.root]
        for start in range(0, len(ids), self.block_size):
            keys.append(child_key(keys[-1], ids[start : start + self.block_size]))
        return keys[1:]


def owner_of(
    model: PreTrainedModel,
    namespace: str,
    block_size: int,
    disk_dtype: DiskDType = "model",
    rope_regime: int | None = 0,
) -> Owner:
    """The owner of what this model reads in this namespace."""
    name = Path(str(model.config.name_or_path)).name or type(model).__name__
    return Owner(model_digest(model), namespace, block_size, disk_dtype, rope_regime, name)


def child_key(parent: str, tokens: Sequence[int]) -> str:
    """The key of the block of these tokens behind the block (or root) `parent`."""
    return hashlib.sha256(bytes.fromhex(parent) + struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()
