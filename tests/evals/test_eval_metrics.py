"""Answers and citations against figures worked out by hand, by the rules of HotpotQA's evaluation."""

import pytest

from ragkv_evals.metrics import (
    NOTHING,
    Overlap,
    agreement,
    answer_text,
    citation_overlap,
    cited,
    cited_answer,
    exact_match,
    joint,
    normalize,
    word_overlap,
)

TITLES = ("", "", "", "Toad Hall", "", "", "", "", "ANU", "")


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Beatles", "beatles"),
        ("  An  apple, a pear & the plum. ", "apple pear plum"),
        ("U.S.A.", "usa"),
        ("theatre and Anna", "theatre and anna"),  # articles are whole words only
        ("well-known", "wellknown"),
        ("“quoted”", "“quoted”"),  # only ASCII punctuation goes, as in the official script
    ],
)
def test_normalization(text: str, normal: str) -> None:
    assert normalize(text) == normal


@pytest.mark.parametrize(
    ("said", "accepted", "precision", "recall"),
    [
        ("Canberra", ["Canberra"], 1, 1),
        ("the city of Canberra", ["Canberra"], 1 / 3, 1),  # "city of canberra"
        ("Canberra", ["the city of Canberra"], 1, 1 / 3),
        ("Canberra Canberra", ["Canberra"], 1 / 2, 1),  # words are counted, not only seen
        ("Sydney", ["Canberra"], 0, 0),
        ("Stanley Hall", ["G. Stanley Hall", "Stanley Hall"], 1, 1),  # the best of several
        ("yes it is", ["yes"], 0, 0),  # yes and no match only themselves
        ("yes", ["yes it is"], 0, 0),
        ("Yes.", ["yes"], 1, 1),
        ("no", ["yes"], 0, 0),
        ("", ["Canberra"], 0, 0),
        ("the", ["a"], 0, 0),  # nothing is left of both
    ],
)
def test_word_overlap(said: str, accepted: list[str], precision: float, recall: float) -> None:
    overlap = word_overlap(said, accepted)
    assert (overlap.precision, overlap.recall) == pytest.approx((precision, recall))


def test_f1_is_the_harmonic_mean() -> None:
    assert Overlap(1 / 3, 1).f1 == pytest.approx(1 / 2)
    assert NOTHING.f1 == 0


@pytest.mark.parametrize(
    ("said", "accepted", "match"),
    [
        ("The Beatles!", ["beatles"], 1),
        ("Beatles band", ["beatles"], 0),
        ("Stanley Hall", ["G. Stanley Hall", "stanley hall"], 1),
    ],
)
def test_exact_match(said: str, accepted: list[str], match: float) -> None:
    assert exact_match(said, accepted) == match


@pytest.mark.parametrize(
    ("numbers", "gold", "precision", "recall"),
    [
        ([4, 9], [9, 4], 1, 1),
        ([4], [4, 9], 1, 1 / 2),
        ([4, 5, 6], [4, 9], 1 / 3, 1 / 2),
        ([99], [4, 9], 0, 0),
        ([4, 99], [4, 9], 1 / 2, 1 / 2),  # a number that no document has counts against precision
        ([], [4, 9], 0, 0),
    ],
)
def test_citation_overlap(numbers: list[int], gold: list[int], precision: float, recall: float) -> None:
    overlap = citation_overlap(numbers, gold)
    assert (overlap.precision, overlap.recall) == pytest.approx((precision, recall))


def test_joint_figures_are_products() -> None:
    both = joint(Overlap(1 / 2, 1), Overlap(1, 1 / 2))
    assert (both.precision, both.recall, both.f1) == (1 / 2, 1 / 2, 1 / 2)


@pytest.mark.parametrize(
    ("reply", "answer", "numbers"),
    [
        ("Canberra [4][9]", "Canberra", [4, 9]),
        ("\n Canberra [4, 9].\nBecause [7] says so", "Canberra.", [4, 9, 7]),  # citations count wherever they stand
        ("Canberra [99, 4]", "Canberra", [4, 99]),
        ("Canberra\nDocuments: Toad Hall [2], ANU [9]", "Canberra", [4, 9]),
        ("[3]", "", [3]),
        ("", "", []),
    ],
)
def test_a_reply_has_an_answer_and_citations(reply: str, answer: str, numbers: list[int]) -> None:
    assert answer_text(reply) == answer
    assert cited(reply, TITLES) == numbers


def test_a_cited_answer_by_hand() -> None:
    figures = cited_answer("the city of Canberra [4][7]", ["Canberra"], [4, 9], TITLES)
    expected = {
        "em": 0,
        "f1": 1 / 2,  # precision 1/3, recall 1
        "citation_precision": 1 / 2,
        "citation_recall": 1 / 2,
        "citation_f1": 1 / 2,
        "joint_f1": 2 * (1 / 6) * (1 / 2) / (1 / 6 + 1 / 2),
    }
    assert figures == pytest.approx(expected)


def test_agreement_is_about_words_as_they_stand() -> None:
    assert agreement("Canberra [4]", " Canberra  [4]\n") == 1
    assert agreement("Canberra [5]", "Canberra [4]") == 1 / 2
    assert agreement("canberra", "Canberra") == 0
    assert agreement("", "") == 1
