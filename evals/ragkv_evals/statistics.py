"""How sure a mean or a difference is: bootstrap intervals over examples, paired where both policies saw the same.

Examples that depend on each other, as questions about one document set do, are drawn together, as a cluster: only
clusters tell how much another draw would differ.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
RESAMPLES = 9999
FEWEST_CLUSTERS = 5  # resamples of fewer are too few different ones to bound anything


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """An estimate over examples in clusters; there are no bounds where there are too few of these."""

    value: float
    low: float | None
    high: float | None
    clusters: int


def clustered_mean(values: Sequence[float], clusters: Sequence[Hashable], seed: int = 0) -> Estimate:
    """The mean over examples; `clusters` names that of each."""
    sums = _sums(clusters, values, [1.0] * len(values))
    return _estimate(_interval(sums, _ratio, seed), sums)


def clustered_difference(
    values: Sequence[float], baseline: Sequence[float], clusters: Sequence[Hashable], seed: int = 0
) -> Estimate:
    """The mean of values minus baseline, example by example."""
    return clustered_mean([value - base for value, base in zip(values, baseline, strict=True)], clusters, seed)


def clustered_relative_difference(
    values: Sequence[float], baseline: Sequence[float], clusters: Sequence[Hashable], seed: int = 0
) -> Estimate | None:
    """The difference of the means over the baseline's mean, as papers give it; None for a baseline of 0."""
    sums = _sums(clusters, values, baseline)
    return _estimate(_interval(sums, _relative, seed), sums) if sums[1].any() else None


def _sums(clusters: Sequence[Hashable], *columns: Sequence[float]) -> Floats:
    """(columns, clusters): the sums over each cluster, in order of first mention."""
    places = {cluster: place for place, cluster in enumerate(dict.fromkeys(clusters))}
    where = np.asarray([places[cluster] for cluster in clusters])
    return np.stack([np.bincount(where, weights=column, minlength=len(places)) for column in columns])


def _ratio(sums: Floats, counts: Floats, axis: int = -1) -> Floats:
    return np.asarray(np.sum(sums, axis=axis) / np.sum(counts, axis=axis))


def _estimate(found: Interval, sums: Floats) -> Estimate:
    clusters = sums.shape[1]
    if clusters < FEWEST_CLUSTERS:
        return Estimate(found.value, None, None, clusters)
    return Estimate(found.value, found.low, found.high, clusters)


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
