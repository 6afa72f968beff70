"""Citation markers: every form that models write, and numbers that no document has."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.citations import Marker, cited_numbers, find_markers, named_alone, settled, split_valid, strip_markers


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


TITLES = ("Toad Hall", "Canberra", "Young, New South Wales", "Mercury (planet)", "Passage", "Passage", "", "¡Hola!")


@pytest.mark.parametrize(
    ("text", "cited"),
    [
        ("x\nDocuments: [3] Toad Hall [9] Canberra", [1, 2]),
        ("x\nDocuments: Toad Hall [3], Canberra [9]", [1, 2]),
        ("x\nDocuments: Young, New South Wales [1], TOAD  hall [2]", [3, 1]),
        ("x\nDocuments:\n- Toad Hall [3]\n- Canberra [9]", [1, 2]),
        ("x\nDocuments:\n[3] Toad Hall\n[9] *Canberra*.\n", [1, 2]),
        ("Documents: [1] Canberra", [2]),
        ("x\nDocuments: [4] Toad Hall [4] Canberra", [1, 2]),  # one number for two titles
        ("x\nDocuments: [3] Toad Hall [1] Toad Hall", [1]),
        ("x\nDocuments: [1] Mercury [2] ¡hola!", [4, 8]),  # as people call it
        ("x\nDocuments: [1] Mercury (planet)", [4]),
        # The number decides:
        ("x\nDocuments: [6] Passage [2] Passage", [6, 2]),  # two have that title
        ("x\nDocuments: [3] Toad [1] Mercury (god)", [3, 1]),  # none has
        ("x\nDocuments: [7] [1]", [7, 1]),
        ("x\nDocuments: [3, 4] Toad Hall", [3, 4]),  # one title is not for both
        ("x\nDocuments: [3] they say Toad Hall", [3]),
        ("It is in [3] Toad Hall\nCanberra [1]", [3, 1]),  # prose: what stands there is no title
        ("Canberra [1]\nDocuments: [3] Toad Hall", [1]),
        ("Canberra [7]\nDocuments: Toad Hall [3]", [7, 1]),
        ("no Documents: [3] Toad Hall", [3]),
        ("", []),
    ],
)
def test_titles_decide_where_documents_are_named(text: str, cited: list[int]) -> None:
    assert cited_numbers(text, TITLES) == (cited, [])


@given(st.text("[]12, \n-Docums:abAB().*", max_size=60), st.lists(st.text("abAB() .", max_size=4), max_size=4))
def test_any_reply_can_be_read(text: str, titles: list[str]) -> None:
    """Every marker still stands for something, and what is settled is the beginning of it."""
    text = f"x\nDocuments:{text}"
    valid, invalid = cited_numbers(text, titles)
    assert bool(valid or invalid) == bool(find_markers(text))
    assert all(1 <= number <= len(titles) for number in valid)
    assert text.startswith(settled(text))


def test_titles_that_tell_their_document() -> None:
    assert named_alone(TITLES) == [1, 2, 3, 4, 8]
    assert named_alone(["Song [1]", "song", "SONG.", "", "-"]) == []


def test_numbers_that_no_document_has_are_told_apart_unless_their_title_is_one() -> None:
    assert cited_numbers("x [9]\nDocuments: [99] Toad Hall [98] Nobody", TITLES) == ([1], [9, 98])
    assert cited_numbers("Documents: [1] Toad Hall", ()) == ([], [1])


@pytest.mark.parametrize(
    "text",
    [
        "Canberra [1], they say [2].\nDocuments: [3] Toad Hall [9] Canberra\nAnd [4] more.",
        "Canberra [1]\nDocuments: Toad Hall [3], Canberra [9], Young, New South Wales [8]",
        "x\nDocuments:\n[3] Toad Hall\n[9] Canberra",
    ],
)
def test_what_is_settled_stays(text: str) -> None:
    """However a stream is cut, no citation is taken back, and the whole text's are given at its end."""
    given: list[int] = []
    for end in range(len(text) + 1):
        valid, _ = cited_numbers(settled(text[:end]), TITLES)
        assert valid[: len(given)] == given, text[:end]
        given = valid
    whole, _ = cited_numbers(text, TITLES)
    assert whole[: len(given)] == given
    assert len(whole) - len(given) <= 1  # a last title might have gone on
