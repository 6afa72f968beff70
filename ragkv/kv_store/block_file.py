"""One block as one safetensors file, which says what it is: nothing in it is trusted before it is checked.

The header holds the key, the key of the block before it, the tokens and a sha256 of the numbers, which are the model's
own or, where a store says so, in eight bits. No format here can hold code.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ragkv.kv_store.blocks import Block
from ragkv.kv_store.int8 import from_int8, to_int8
from ragkv.kv_store.keys import DiskDType, child_key

FORMAT = "ragkv-kv-1"
STAGED = ".partial"


class UnusableBlock(Exception):
    """A file is no block, or not the one it should be."""


def encode_block(block: Block, parent: str, tokens: Sequence[int], disk_dtype: DiskDType = "model") -> bytes:
    """The file of the block of these tokens behind `parent`."""
    states = {
        f"{layer}.{name}": states.contiguous()
        for layer, pair in enumerate(block.layers)
        for name, states in zip(("key", "value"), pair, strict=True)
    }
    dtype = str(block.layers[0][0].dtype).removeprefix("torch.")
    tensors = _in_eight_bits(states) if disk_dtype == "int8" else states
    return save(tensors, {**_expected(parent, tokens), "dtype": dtype, "sha256": _sha256(tensors, dtype)})


def write_whole(path: Path, data: bytes, agreed: Callable[[], bool] = lambda: True) -> bool:
    """Write a file whole or not at all, replacing what is there. The caller holds the folder's lock.

    Args:
        agreed: asked when the bytes are on the disk, where nothing but a name is wanting; False takes them back.

    Returns:
        What was agreed.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    staged = path.with_name(f".{path.name}{STAGED}")
    try:
        staged.write_bytes(data)
        if agreed():
            os.replace(staged, path)
            return True
        return False
    finally:
        staged.unlink(missing_ok=True)


def read_block(path: Path, parent: str, tokens: Sequence[int]) -> Block:
    """The block of these tokens behind `parent`, mapped into memory.

    Raises:
        UnusableBlock: the file is damaged, or holds something else.
        FileNotFoundError: there is none.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise UnusableBlock(f"it cannot be read ({error})") from error
    for name, value in _expected(parent, tokens).items():
        if header.get(name) != value:
            raise UnusableBlock(f"its {name} is not the one expected")
    dtype = header.get("dtype", "")
    if header.get("sha256") != _sha256(tensors, dtype):
        raise UnusableBlock("its numbers differ from their hash")
    return _block(tensors, dtype)


def _in_eight_bits(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, exact in states.items():
        tensors[name], tensors[f"{name}_scale"] = to_int8(exact)
    return tensors


def _block(tensors: Mapping[str, Tensor], dtype: str) -> Block:
    def states(name: str) -> Tensor:
        scale = tensors.get(f"{name}_scale")
        return tensors[name] if scale is None else from_int8(tensors[name], scale, getattr(torch, dtype))

    exact = "0.key_scale" not in tensors
    layers = sum(name.endswith(".key") for name in tensors)
    return Block(tuple((states(f"{n}.key"), states(f"{n}.value")) for n in range(layers)), mapped=exact)


def _expected(parent: str, tokens: Sequence[int]) -> dict[str, str]:
    """What the header of a block says about its place."""
    key = child_key(parent, tokens)
    return {"format": FORMAT, "key": key, "parent": parent, "tokens": json.dumps(list(tokens))}


def _sha256(tensors: Mapping[str, Tensor], dtype: str) -> str:
    """Over the model's dtype, and of all tensors the names, dtypes, shapes and numbers."""
    digest = hashlib.sha256(dtype.encode())
    for name, states in sorted(tensors.items()):
        digest.update(f"{name} {states.dtype} {tuple(states.shape)}".encode())
        digest.update(states.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
