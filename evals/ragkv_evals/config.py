"""What a run does, in words that a later run can compare itself with."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.environment import Environment
from ragkv.errors import ConfigError
from ragkv.placement import choose_device, choose_dtype
from ragkv.prompt import CitePrompt

_NOT_NOTED = ("cache_folder", "cache_bytes", "cache_free_bytes", "fetched_models", "advice", "memory_available_bytes")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's predictions.

    Attributes:
        data: name of the data file or folder, or "bundled"; `data_hash` is that of its content.
        context_tokens: lengths of the prompts; empty for the cases' own texts.
        depths: where gold documents stand, in percent; empty leaves it to the seed.
        limit: how many cases, drawn by the seed; None takes all.
        policies: names of what is compared.
        max_tokens: most tokens of a reply.
        shard: (i, n): every n-th example from the i-th on, i from 1.
        prompt_hash: of the texts around documents and question.
        shared_sets: whether questions share document sets, which are then read once.
        decode_together: whether the policies of an example are decoded as one batch, which leaves their speed unknown.
        must_cite: whether a grammar holds replies to the form of the citing prompt.
    """

    task: str
    data: str
    data_hash: str
    model: str
    dtype: str
    context_tokens: tuple[int, ...]
    depths: tuple[float, ...]
    limit: int | None
    seed: int
    policies: tuple[str, ...]
    max_tokens: int
    shard: tuple[int, int]
    prompt_hash: str
    shared_sets: bool = False
    decode_together: bool = False
    must_cite: bool = False

    def to_json(self) -> dict[str, Any]:
        """As it stands in config.json."""
        return dict(json.loads(json.dumps(asdict(self))))


def check_same(here: Mapping[str, Any], there: Mapping[str, Any], folder: Path) -> None:
    """Raise a ConfigError that names the first difference between this run and the one in the folder.

    A larger limit is none: it draws first what the smaller one drew.
    """
    for name in {**here, **there}:
        if name == "limit" and _grows(there.get(name), here.get(name)):
            continue
        if here.get(name) != there.get(name):
            raise ConfigError(
                f"--out {folder} holds a run with {name}={there.get(name)!r}, and this one has {here.get(name)!r}: "
                "choose another folder"
            )


def _grows(before: int | None, now: int | None) -> bool:
    return before is not None and (now is None or now > before)


def content_hash(path: Path) -> str:
    """Of a file, or of all files of a folder in the order of their names."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def dtype_name(device: str | None, dtype: str | None) -> str:
    """The dtype that a model gets; None is the fastest of the device, or of the fastest device."""
    return str(choose_dtype(choose_device(device), dtype)).removeprefix("torch.")


def machine() -> dict[str, object]:
    """What a run notes about where it took place: machine, threads and versions, but no folders."""
    return {name: value for name, value in Environment.detect().to_json().items() if name not in _NOT_NOTED}


def prompt_hash(prompt: CitePrompt, hints: Mapping[str, str] | None = None) -> str:
    """Of the texts around documents and question, those behind questions of some kinds included."""
    texts = [asdict(prompt), dict(hints)] if hints else asdict(prompt)
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
