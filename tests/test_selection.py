"""Selection against sorting, and what always holds of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from ragkv.selection import fit_protected, protect, select


@pytest.mark.parametrize("protected", [(), [(0, 3)], [(10, 13), (2, 4), (28, 40)]])
@pytest.mark.parametrize("window_size", [1, 6])
@pytest.mark.parametrize("count", [8, 17, 30])
def test_selection_equals_sorting(count: int, window_size: int, protected: list[tuple[int, int]]) -> None:
    scores = torch.rand(2, 3, 30, generator=torch.Generator().manual_seed(count))
    positions = select(scores, count, window_size, protected)
    assert torch.equal(positions, reference.select(scores, count, window_size, protected))


@given(st.data(), st.integers(1, 60), st.integers(1, 8))
def test_positions_ascend_and_hold_the_window_and_what_is_protected(
    data: st.DataObject, prefix: int, window: int
) -> None:
    # Few distinct scores, so that there are ties; a zero is the score of most tokens under max pooling.
    scores = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2 * prefix, max_size=2 * prefix))
    )
    count = data.draw(st.integers(0, prefix))
    start = data.draw(st.integers(0, prefix))
    protected = (start, min(prefix, start + count))
    positions = select(scores.view(1, 2, prefix), count, window, [protected])
    assert positions.shape == (1, 2, count + window)
    assert (positions.diff(dim=-1) > 0).all()
    assert positions.min() >= 0
    for row in positions[0].tolist():
        assert row[count:] == list(range(prefix, prefix + window))
        assert set(range(*protected)) <= set(row)


def test_scores_are_left_as_they_were() -> None:
    scores = torch.rand(1, 1, 10)
    before = scores.clone()
    select(scores, 4, 2, [(0, 2)])
    assert torch.equal(scores, before)


def test_protected_scores_are_infinite_within_the_spans_and_nowhere_else() -> None:
    scores = protect(torch.rand(1, 2, 10), [(0, 2), (8, 14)])
    assert scores.isinf().nonzero()[:, 2].tolist() == [0, 1, 8, 9] * 2


def test_protection_goes_in_the_order_given_and_counts_what_it_leaves_out() -> None:
    spans = [(0, 4), (10, 20), (30, 33), (95, 105), (120, 130)]
    # 4 fit, 10 do not, 3 fit; of the fourth 5 are in the prefix and do not fit into 3; the last is in the window.
    assert fit_protected(spans, prefix=100, room=10) == ([(0, 4), (30, 33), (120, 130)], 15)
    assert fit_protected(spans, prefix=100, room=22) == (spans, 0)
    assert fit_protected([], prefix=100, room=0) == ([], 0)
