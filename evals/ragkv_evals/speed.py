"""Prefill and decoding speed of ragkv, plain transformers and peers: one run, one model, the same tokens for all.

Every repeat reads all prompts, variants in turn, and then decodes all of them in turn, one given token each, so that
a slow moment of the machine hits all alike. Medians over the repeats. Only `ragkv_evals.speed_report` interprets.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import ClassVar, Protocol

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ragkv.attention import implementation_name
from ragkv.backend import forward
from ragkv.cache import kv_bytes
from ragkv.chat import Prompt
from ragkv.decode import Decoder
from ragkv.policies import FullKV, Observation, Policy, SnapKV
from ragkv.prefill import prefill
from ragkv_evals.peers.environment import PeerProcess

WINDOW_SIZE, KERNEL_SIZE = 32, 7  # the same for ragkv and peers

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Read:
    """A prompt that a variant has read.

    Attributes:
        seconds: of the prefill, compression included.
        compression_s: of scoring, selection and gathering alone, where they were timed.
        step: decodes one given token and returns the seconds it took.
    """

    seconds: float
    compression_s: float | None
    kv_bytes_full: int
    kv_bytes_kept: int
    step: Callable[[int], float]


class Variant(Protocol):
    """A way to read a prompt and decode on what is kept of it."""

    name: str
    compresses: bool

    def read(self, ids: Sequence[int], budget: int) -> Read:
        """Prefill; variants that do not compress ignore the budget (entries per KV head)."""


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Transformers:
    """The model as transformers runs it: one pass, its own attention and its own growing cache."""

    name, compresses = "transformers", False

    def __init__(self, model: PreTrainedModel, base: str) -> None:
        self._model, self._base = model, base

    def read(self, ids: Sequence[int], budget: int) -> Read:
        cache = DynamicCache(config=self._model.config)
        seconds = self._forward(ids, cache, 0)
        positions = count(len(ids))
        size = kv_bytes(cache)
        return Read(seconds, None, size, size, lambda token: self._forward([token], cache, next(positions)))

    def _forward(self, tokens: Sequence[int], cache: Cache, position: int) -> float:
        device = self._model.device
        self._model.set_attn_implementation(self._base)
        started = now(device)
        positions = torch.arange(position, position + len(tokens), device=device)
        forward(self._model, torch.tensor([tokens], device=device), cache, positions.unsqueeze(0))
        return now(device) - started


class Ragkv:
    """ragkv with a policy made for each budget."""

    def __init__(self, name: str, model: PreTrainedModel, base: str, policy: Callable[[int], Policy]) -> None:
        self.name, self.compresses = name, policy(2 * WINDOW_SIZE).protects
        self._model, self._policy, self._attention = model, policy, implementation_name(base)

    def read(self, ids: Sequence[int], budget: int) -> Read:
        self._model.set_attn_implementation(self._attention)
        device = self._model.device
        policy = _Stopwatch(self._policy(budget), device)
        started = now(device)
        read = prefill(self._model, Prompt(tuple(ids)), policy, on_layer=policy.layer_done)
        seconds = now(device) - started
        decoder = Decoder(self._model, [read])

        def step(token: int) -> float:
            self._model.set_attn_implementation(self._attention)
            begun = now(device)
            decoder.step([token])
            return now(device) - begun

        return Read(seconds, policy.seconds, read.kv_bytes_full, read.kv_bytes_kept, step)


class _Stopwatch:
    """A policy that times the compression of each layer, from the question for its budget to the end of the layer."""

    protects: ClassVar[bool] = False  # the prompts of a measurement mark no spans

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self.seconds = 0.0
        self._policy, self._device, self._started = policy, device, 0.0

    def budget(self, length: int, layer: int, num_layers: int) -> int:
        self._started = now(self._device)
        return self._policy.budget(length, layer, num_layers)

    def observation_window(self, question_tokens: int | None) -> int:
        return self._policy.observation_window(question_tokens)

    def score(self, observation: Observation) -> torch.Tensor:
        return self._policy.score(observation)

    def layer_done(self, done: int, layers: int) -> None:
        self.seconds += now(self._device) - self._started


class PeerVariant:
    """A system in an environment of its own, on the same tokens."""

    compresses = True

    def __init__(self, name: str, process: PeerProcess) -> None:
        self.name, self._process = name, process

    def read(self, ids: Sequence[int], budget: int) -> Read:
        reply = self._process.ask(op="prefill", ids=list(ids), budget=budget)

        def step(token: int) -> float:
            return float(self._process.ask(op="step", length=len(ids), token=token)["seconds"])

        return Read(reply["seconds"], None, reply["kv_bytes_full"], reply["kv_bytes_kept"], step)


def in_process_variants(model: PreTrainedModel, base: str) -> list[Variant]:
    """Plain transformers, ragkv's full cache and ragkv's SnapKV on one model.

    Args:
        model: prepared by ragkv.backend.prepare.
        base: "sdpa" or "flash_attention_2", used by all of them.
    """

    def snapkv(budget: int) -> SnapKV:
        return SnapKV(max_capacity_prompt=budget, window_size=WINDOW_SIZE, kernel_size=KERNEL_SIZE)

    return [
        Transformers(model, base),
        Ragkv("ragkv FullKV", model, base, lambda budget: FullKV()),
        Ragkv("ragkv SnapKV", model, base, snapkv),
    ]


@dataclass
class Cell:
    """All that is measured of one variant at one length.

    Attributes:
        tokens: the prompt and behind it the tokens to decode.
        budget: entries that a compressing variant keeps per KV head.
    """

    variant: Variant
    tokens: Sequence[int]
    length: int
    budget: int
    reads: list[Read] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    @property
    def prefill_s(self) -> float:
        return median(read.seconds for read in self.reads)

    @property
    def decode_ms_per_token(self) -> float:
        return 1000 * median(self.step_s)

    @property
    def compression_share(self) -> float | None:
        """Time of compression over time of prefill, or None where it was not timed."""
        shares = [read.compression_s / read.seconds for read in self.reads if read.compression_s is not None]
        return median(shares) if shares else None


def measure(
    variants: Sequence[Variant],
    tokens: Sequence[int],
    lengths: Sequence[int],
    budget: int,
    decode_tokens: int,
    repeats: int,
    notify: Notify = lambda text: None,
) -> list[Cell]:
    """Measure every variant at every length.

    Args:
        tokens: at least the longest length and `decode_tokens` more.
        lengths: prompt lengths in tokens.
        budget: entries kept per KV head; half of the prompt where the prompt is not longer than that.
        decode_tokens: tokens decoded after each prompt, the same ones for all variants.
        notify: told what is going on.
    """
    cells = [
        Cell(variant, tokens[: length + decode_tokens], length, budget if length > budget else length // 2)
        for length in lengths
        for variant in variants
    ]
    notify("warming up")
    for variant in variants:
        warm = variant.read(tokens[: 8 * WINDOW_SIZE], 2 * WINDOW_SIZE)
        warm.step(tokens[0])
    for repeat in range(repeats):
        for cell in _in_turn(cells, len(variants), repeat):
            notify(f"repeat {repeat + 1}/{repeats}: reading {cell.length} tokens ({cell.variant.name})")
            cell.reads.append(cell.variant.read(cell.tokens[: cell.length], cell.budget))
        notify(f"repeat {repeat + 1}/{repeats}: decoding {decode_tokens} tokens after every prompt")
        for step in range(decode_tokens):
            for cell in _in_turn(cells, len(variants), step):
                cell.step_s.append(cell.reads[-1].step(cell.tokens[cell.length + step]))
        _forget(cells)
    return cells


def _in_turn(cells: Sequence[Cell], variants: int, shift: int) -> Iterator[Cell]:
    """Length by length; who begins within a length changes with `shift` and from one length to the next."""
    for length, start in enumerate(range(0, len(cells), variants)):
        for turn in range(variants):
            yield cells[start + (turn + shift + length) % variants]


def _forget(cells: Sequence[Cell]) -> None:
    """Let the caches of a repeat go; only the figures stay."""
    for cell in cells:
        read = cell.reads[-1]
        cell.reads[-1] = Read(read.seconds, read.compression_s, read.kv_bytes_full, read.kv_bytes_kept, _finished)


def _finished(token: int) -> float:
    raise RuntimeError("this prompt's cache was let go")
