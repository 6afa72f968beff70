"""Citation markers: every form that models write, and numbers that no document has."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.citations import Marker, find_markers, split_valid, strip_markers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Canberra [1]", [(1,)]),
        ("Canberra [1][2].", [(1,), (2,)]),
        ("Canberra [1, 4]", [(1, 4)]),
        ("Canberra [1,4; 9]", [(1, 4, 9)]),
        ("Canberra [2-5]", [(2, 3, 4, 5)]),
        ("Canberra [2–4]", [(2, 3, 4)]),
        ("Canberra [ 3 ]", [(3,)]),
        ("Canberra [1, 3-5, 9]", [(1, 3, 4, 5, 9)]),
        ("Canberra [2, 2, 1-3]", [(2, 1, 3)]),
        ("[5-5]", [(5,)]),
        ("[5-2]", [(5, 2)]),  # no range
        ("[1-999999]", [(1, 999999)]),  # absurd: its ends, not a million numbers
        ("[1-20]", [tuple(range(1, 21))]),
        ("[1-21]", [(1, 21)]),
        ("[0]", [(0,)]),
        ("no citation", []),
        ("", []),
        ("[a] [] [1 [2", []),
        ("[1.5] [-1] [12345678]", []),
        ("array[i]", []),
    ],
)
def test_markers_are_found(text: str, numbers: list[tuple[int, ...]]) -> None:
    assert [marker.numbers for marker in find_markers(text)] == numbers


def test_markers_know_where_they_stand() -> None:
    text = "Canberra [4], they say [1, 2]."
    markers = find_markers(text)
    assert [text[marker.start : marker.end] for marker in markers] == ["[4]", "[1, 2]"]


def test_numbers_without_a_document_are_told_apart() -> None:
    markers = [Marker((3, 9), 0, 1), Marker((1, 3, 0), 2, 3), Marker((9, 4), 4, 5)]
    assert split_valid(markers, 4) == ([3, 1, 4], [9, 0])
    assert split_valid(markers, 0) == ([], [3, 9, 1, 0, 4])
    assert split_valid([], 4) == ([], [])


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("Canberra [1][2].", "Canberra."),
        ("[1] Canberra", "Canberra"),
        ("Canberra [2-5], says [3, 4] he.", "Canberra, says he."),
        ("array[i] [x]", "array[i] [x]"),
    ],
)
def test_markers_are_stripped_with_the_space_before_them(text: str, stripped: str) -> None:
    assert strip_markers(text) == stripped


@given(st.lists(st.integers(0, 999999), min_size=1, max_size=8), st.sampled_from([",", ", ", " ; ", ";"]))
def test_lists_of_any_numbers_are_read_back(numbers: list[int], separator: str) -> None:
    marker = f"[{separator.join(map(str, numbers))}]"
    assert find_markers(f"x {marker} y")[0].numbers == tuple(dict.fromkeys(numbers))


@given(st.text("[]0123456789,;- –a", max_size=30))
def test_any_text_can_be_read(text: str) -> None:
    markers = find_markers(text)
    assert all(text[m.start] == "[" and text[m.end - 1] == "]" and m.numbers for m in markers)
    outside = "".join(
        text[a.end : b.start] for a, b in itertools.pairwise([Marker((), 0, 0), *markers, Marker((), len(text), 0)])
    )
    assert strip_markers(text).replace(" ", "") == outside.replace(" ", "")
