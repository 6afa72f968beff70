"""Perplexity and time per token over a long text: window attention, StreamingLLM, and recomputing a window each time.

Every variant predicts each next token of the same streams. What it costs to recompute the window for every token is
measured at some positions only, on one stream, taking turns with the streaming cache; how steady that cache is, on the
beginning of one stream, one token at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ragkv.backend import forward
from ragkv.cache import new_cache
from ragkv.errors import ConfigError
from ragkv.policies import StreamingLLM
from ragkv.streaming.cache import StreamingCache, read
from ragkv.streaming.layout import Layout
from ragkv_evals.speed import now
from ragkv_evals.streaming_pass import StreamingPass

Floats = npt.NDArray[np.float64]
Progress = Callable[[str], None]

PASS_TOKENS = 2048  # of all streams together
_LOSS_ROWS = 256  # logits in float32 at a time: vocabularies are large


@dataclass(frozen=True)
class Reading:
    """What one variant made of the text.

    Attributes:
        window: tokens that it sees, sinks included.
        sinks: 0 is window attention.
        nll: (streams, tokens - 1) negative log-likelihood of every token but the first.
    """

    window: int
    sinks: int
    nll: Floats

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"StreamingLLM, {self.sinks} sinks" if self.sinks else "window attention"


@dataclass(frozen=True)
class Steps:
    """One stream on the streaming cache, token by token.

    Attributes:
        nll: (tokens - 1,).
        step_s: (tokens - 1,) seconds of each step.
        cache_bytes: bytes of the cache when it was full for the first time, and at the end.
    """

    window: int
    sinks: int
    nll: Floats
    step_s: Floats
    cache_bytes: tuple[int, int]


@dataclass(frozen=True)
class Recomputed:
    """A fresh pass over the window for each of some positions.

    Attributes:
        positions: which tokens were predicted, in every stream.
        nll: by stream and position.
        seconds, streaming_seconds: of each pass, and of each step of the streaming cache in turn with it; one stream.
    """

    window: int
    positions: list[int]
    nll: list[list[float]]
    seconds: list[float]
    streaming_seconds: list[float]


def cut_streams(ids: Sequence[int], streams: int, start: Sequence[int]) -> Tensor:
    """Consecutive parts of a text as rows, (streams, tokens), each behind `start`."""
    length = len(ids) // streams
    rows = [[*start, *ids[i * length : (i + 1) * length]] for i in range(streams)]
    return torch.tensor(rows)


def check(model: PreTrainedModel, ids: Tensor, windows: Sequence[int], sinks: Sequence[int], steps: int) -> None:
    """See that all of it can be measured, before hours are spent on a part.

    Raises:
        ConfigError: sinks leave no room for recent tokens, the model cannot be read in passes or sees less than a
            window, or there are too few tokens to fill one.
    """
    for window in windows:
        for number in sinks:
            StreamingPass(model, _policy(window, number))
        Layout.of(model, _policy(window, usual_sinks(window)))
        for name, length in (("streams", ids.shape[1]), ("--steps", min(steps, ids.shape[1]))):
            if length <= window + 1:
                raise ConfigError(
                    f"{name} of {length} tokens: must be at least {window + 2} to fill the window of {window} tokens "
                    "and go on; read more"
                )


def read_streaming(
    model: PreTrainedModel, ids: Tensor, window: int, sinks: int, progress: Progress = lambda text: None
) -> Reading:
    """Read (streams, tokens), every token seeing what a streaming cache would show it.

    Raises:
        ConfigError: as `check`.
    """
    passes, nll = StreamingPass(model, _policy(window, sinks)), []
    chunk_size = max(sinks, PASS_TOKENS // len(ids), 1)
    for start in range(0, ids.shape[1] - 1, chunk_size):
        chunk = ids[:, start : start + chunk_size + 1]
        logits = passes.read(chunk[:, :-1])
        nll.append(_nll(logits.flatten(0, 1), chunk[:, 1:].flatten()).reshape(len(ids), -1))
        progress(f"window {window}, {sinks} sinks: token {start:,} of {ids.shape[1]:,}")
    return Reading(window, sinks, np.concatenate(nll, axis=1))


def read_steps(
    model: PreTrainedModel, ids: Tensor, window: int, sinks: int, progress: Progress = lambda text: None
) -> Steps:
    """Read (1, tokens) one token at a time on a streaming cache, as in use."""
    cache = StreamingCache(Layout.of(model, _policy(window, sinks)))
    nll, step_s, full_bytes = [], [], 0
    for t in range(ids.shape[1] - 1):
        began = now(model.device)
        cache.evict(max(0, 1 - cache.room))
        logits = read(model, cache, ids[:, t : t + 1])
        step_s.append(now(model.device) - began)
        nll.append(_nll(logits, ids[:, t + 1]))
        full_bytes = full_bytes or cache.nbytes * (t >= 2 * window)
        if t % 100 == 0:
            progress(f"window {window}, token by token: {t:,} of {ids.shape[1]:,}")
    return Steps(window, sinks, np.concatenate(nll), np.array(step_s), (full_bytes or cache.nbytes, cache.nbytes))


def recompute(
    model: PreTrainedModel, ids: Tensor, window: int, count: int, progress: Progress = lambda text: None
) -> Recomputed:
    """Predict `count` tokens, spread over the text from where the window is full: each by a pass over its window."""
    length = ids.shape[1]
    positions = sorted({int(p) for p in np.linspace(window + 1, length - 1, count)})
    cache = StreamingCache(Layout.of(model, _policy(window, usual_sinks(window))))
    read(model, cache, ids[:1, :window])
    nll, seconds, streaming_seconds = [], [], []
    for done, position in enumerate(positions):
        rows = [_fresh_pass(model, ids[row : row + 1, position - window : position]) for row in range(len(ids))]
        nll.append(_nll(torch.cat([logits for logits, _ in rows]), ids[:, position]))
        seconds.append(rows[0][1])
        began = now(model.device)
        cache.evict(1)
        read(model, cache, ids[:1, position : position + 1])
        streaming_seconds.append(now(model.device) - began)
        progress(f"window {window}, recomputed: {done:,} of {len(positions):,}")
    return Recomputed(window, positions, np.stack(nll, axis=1).tolist(), seconds, streaming_seconds)


def usual_sinks(window: int) -> int:
    """As many as the paper recommends, where they fit."""
    return min(4, window - 1)


def _policy(window: int, sinks: int) -> StreamingLLM:
    """All variants see the same number of tokens."""
    if not 0 <= sinks < window:
        raise ConfigError(f"sinks={sinks}: must be at least 0 and less than the window of {window} tokens")
    return StreamingLLM(sinks, window - sinks)


def _fresh_pass(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, float]:
    began = now(model.device)
    positions = torch.arange(ids.shape[1], device=model.device).unsqueeze(0)
    logits = forward(model, ids.to(model.device), new_cache(model.config), positions)
    return logits, now(model.device) - began


def _nll(logits: Tensor, target: Tensor) -> Floats:
    parts = zip(*(torch.split(each, _LOSS_ROWS) for each in (logits, target.to(logits.device))), strict=True)
    losses = [F.cross_entropy(some.float(), these, reduction="none") for some, these in parts]
    return torch.cat(losses).double().cpu().numpy()
