"""Bootstrap intervals: where they must lie, and that pairs stay together."""

import pytest

from ragkv_evals.statistics import Interval, difference, mean, relative_difference

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


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="longer"):
        difference([0.1], [0.1, 0.2])
