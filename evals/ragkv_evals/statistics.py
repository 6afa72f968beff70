"""How sure a mean or a difference is: bootstrap intervals over examples, paired where both policies saw the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
RESAMPLES = 9999


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


def mean(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean; of a single example the interval is that value."""
    return _interval(np.asarray([values], dtype=float), _mean, seed)


def difference(values: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Interval:
    """The mean of values minus baseline, example by example."""
    return mean([value - base for value, base in zip(values, baseline, strict=True)], seed)


def relative_difference(values: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Interval | None:
    """The difference of the means over the baseline's mean, as papers give it; None for a baseline of 0."""
    pairs = np.asarray([values, baseline], dtype=float)
    return _interval(pairs, _relative, seed) if pairs[1].any() else None


def _mean(values: Floats, axis: int = -1) -> Floats:
    return np.asarray(np.mean(values, axis=axis))


def _relative(values: Floats, baseline: Floats, axis: int = -1) -> Floats:
    base = np.mean(baseline, axis=axis)
    # A resample whose baseline is all 0 has no relative difference: it counts as none.
    return np.asarray(np.divide(np.mean(values, axis=axis) - base, base, out=np.zeros_like(base), where=base != 0))


def _interval(samples: Floats, statistic: Callable[..., Floats], seed: int) -> Interval:
    from scipy.stats import bootstrap

    value = float(statistic(*samples))
    if samples.shape[1] < 2 or (samples == samples[:, :1]).all():
        return Interval(value, value, value)  # nothing varies
    drawn = bootstrap(
        tuple(samples),
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=RESAMPLES // 9,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value, float(drawn.low), float(drawn.high))
