"""Bootstrap intervals: where they must lie, and that pairs stay together."""

import pytest

from ragkv_evals.statistics import (
    Estimate,
    Interval,
    clustered_difference,
    clustered_mean,
    clustered_relative_difference,
    difference,
    mean,
    relative_difference,
)

NOISE = [0.1, 0.9, 0.4, 0.6, 0.2, 0.8, 0.3, 0.7, 0.0, 1.0]


def test_the_interval_of_a_mean() -> None:
    interval = mean(NOISE)
    assert interval.value == pytest.approx(0.5)
    # The standard error is 0.101, hence about two of them on either side.
    assert interval.low == pytest.approx(0.5 - 0.19, abs=0.04)
    assert interval.high == pytest.approx(0.5 + 0.19, abs=0.04)
    assert mean(NOISE) == interval  # seeded


def test_what_does_not_vary_is_certain() -> None:
    assert mean([0.3, 0.3, 0.3]) == Interval(pytest.approx(0.3), pytest.approx(0.3), pytest.approx(0.3))
    assert mean([0.7]) == Interval(0.7, 0.7, 0.7)


def test_a_difference_is_paired() -> None:
    shifted = [value - 0.05 for value in NOISE]
    interval = difference(shifted, NOISE)
    # Unpaired, the bounds would be about 0.28 away from the difference.
    assert (interval.value, interval.low, interval.high) == pytest.approx((-0.05, -0.05, -0.05))


def test_a_relative_difference_is_that_of_the_means() -> None:
    halved = [value / 2 for value in NOISE]
    interval = relative_difference(halved, NOISE)
    assert interval is not None
    # Every resample of pairs is halved, so that nothing is uncertain about the relative difference.
    assert (interval.value, interval.low, interval.high) == pytest.approx((-0.5, -0.5, -0.5))
    assert relative_difference([0.1, 0.2], [0.0, 0.0]) is None


def test_a_relative_difference_survives_resamples_without_a_baseline() -> None:
    interval = relative_difference([1.0, 0.0, 0.5], [0.0, 0.0, 1.0])
    assert interval is not None
    assert interval.value == pytest.approx(0.5)
    assert interval.low <= interval.value <= interval.high


def test_clusters_are_drawn_whole() -> None:
    """Four values that are the same in each of ten clusters say no more than ten values."""
    values, clusters = [value for value in NOISE for _ in range(4)], [n for n in range(10) for _ in range(4)]
    single = mean(NOISE)
    found = clustered_mean(values, clusters)
    assert (found.value, found.low, found.high) == pytest.approx((single.value, single.low, single.high))
    assert found.clusters == 10
    alone = clustered_mean(NOISE, range(10))
    assert (alone.value, alone.low, alone.high) == pytest.approx((single.value, single.low, single.high))
    independent = mean(values)
    assert independent.high - independent.low < 0.6 * (single.high - single.low)
    shifted = [value / 2 for value in values]
    relative, difference_ = (
        clustered_relative_difference(shifted, values, clusters),
        clustered_difference(shifted, values, clusters),
    )
    assert relative is not None
    assert (relative.value, relative.low, relative.high) == pytest.approx((-0.5, -0.5, -0.5))
    halves = difference([value / 2 for value in NOISE], NOISE)
    assert (difference_.value, difference_.low, difference_.high) == pytest.approx(
        (halves.value, halves.low, halves.high)
    )
    assert clustered_relative_difference([0.1], [0.0], ["a"]) is None


def test_larger_clusters_weigh_more() -> None:
    found = clustered_mean([1.0] * 6 + [0.0] * 4, ["a"] * 6 + ["b", "c", "d", "e"])
    assert (found.value, found.clusters) == (0.6, 5)
    assert found.low == 0  # nothing of "a" drawn


def test_few_clusters_have_no_interval() -> None:
    assert clustered_mean(NOISE, [n // 3 for n in range(10)]) == Estimate(pytest.approx(0.5), None, None, 4)
    assert clustered_mean([0.7], ["a"]) == Estimate(0.7, None, None, 1)
    assert clustered_mean(NOISE, [n // 2 for n in range(10)]).low is not None


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="longer"):
        difference([0.1], [0.1, 0.2])
