"""BioASQ's figures against cases worked out by hand."""

import pytest

from ragkv_evals.bioasq_metrics import (
    candidates,
    factoid,
    items,
    list_items,
    question_figures,
    summary,
    yes_or_no,
    yesno_macro_f1,
)
from ragkv_evals.rouge import rouge_n, rouge_su


def test_a_factoid_is_strict_lenient_and_ranked() -> None:
    assert factoid(["Nova1", "srrm4."], ["Srrm4"]) == {
        "strict_accuracy": 0,
        "lenient_accuracy": 1,
        "mrr": 1 / 2,
        "score": 1 / 2,
    }
    assert factoid(["The SRRM4"], ["Srrm4"])["strict_accuracy"] == 1
    assert factoid(["Srrm4 protein"], ["Srrm4"])["lenient_accuracy"] == 0  # no partial credit


def test_candidates_are_the_first_line_or_a_list() -> None:
    assert candidates("Srrm4 [3]\nbecause it is") == ["Srrm4"]
    assert candidates("1. Srrm4 [3]\n2) Nova1\n- a\n* b\n• c\n- d") == ["Srrm4", "Nova1", "a", "b", "c"]
    assert candidates("") == [""]
    for line in ("\nDocuments:\n- [3]", "\nDocuments: [3] Nova1\n1. [4] Srrm4"):
        assert candidates(f"Losartan{line}") == ["Losartan"]  # the list of its documents is none of candidates
    assert candidates("Documents: [3]") == [""]


def test_items_of_a_list() -> None:
    assert items("Srrm4, Nova1 and PTBP1 [4][9].") == ["Srrm4", "Nova1", "PTBP1"]
    assert items("- Srrm4\n- Nova1; the land") == ["Srrm4", "Nova1", "the land"]  # no cut inside "land"


def test_names_with_commas_are_items() -> None:
    gold = [["glioblastoma, IDH wildtype", "GBM"], ["cats and dogs"], ["Nova1"]]
    names = [name for group in gold for name in group]
    said = "Nova1, Glioblastoma, IDH-wildtype, actin, cats and dogs and mice [4]."
    assert items(said, names) == ["Nova1", "Glioblastoma", "IDH-wildtype", "actin", "cats and dogs", "mice"]
    assert items(said.replace("IDH-", "IDH "), names)[1] == "Glioblastoma, IDH wildtype"
    assert items("- glioblastoma, IDH wildtype\n- Nova1", names) == ["glioblastoma, IDH wildtype", "Nova1"]
    assert question_figures("list", gold[:1], "glioblastoma, IDH wildtype [2]")["list_f1"] == 1
    assert question_figures("list", gold, "mice and men")["list_f1"] == 0


def test_list_items_count_once_under_any_name() -> None:
    gold = [["Srrm4", "nSR100"], ["Nova1"], ["PTBP1"]]
    figures = list_items(["nSR100", "srrm4", "Nova1", "actin"], gold)
    assert figures["list_precision"] == 2 / 4
    assert figures["list_recall"] == 2 / 3
    assert figures["score"] == figures["list_f1"] == pytest.approx(4 / 7)
    assert list_items(["Nova1", "nova1"], gold)["list_precision"] == 1  # said twice is said once
    assert list_items([], gold)["list_f1"] == 0


@pytest.mark.parametrize(
    ("reply", "word"), [("Yes, it can [2].", "yes"), ("no", "no"), ("There is no doubt: yes", "no"), ("Maybe", "")]
)
def test_yes_or_no(reply: str, word: str) -> None:
    assert yes_or_no(reply) == word


def test_macro_f1_is_the_mean_over_both_labels() -> None:
    replies = ["yes", "yes", "yes", "no", "perhaps"]
    truths = ["yes", "yes", "no", "no", "no"]
    # "yes": said 3, right 2, both 2, so F1 4/5; "no": said 1, right 3, both 1, so F1 1/2.
    assert yesno_macro_f1(replies, truths) == pytest.approx((4 / 5 + 1 / 2) / 2)


def test_rouge_2_by_hand() -> None:
    # "the cat sat", bigrams the-cat, cat-sat, against "the cat lay on": the-cat, cat-lay, lay-on.
    overlap = rouge_n("The cat sat.", ["the cat lay on"])
    assert (overlap.precision, overlap.recall) == (1 / 2, 1 / 3)
    assert rouge_n("the cat sat", ["a dog", "The cat sat"]).f1 == 1
    assert rouge_n("cat", ["cat"]).f1 == 0  # one word has no bigram


def test_rouge_su4_by_hand() -> None:
    # "a b c": 3 words and 3 pairs; "a c d": 3 words and the pairs ac, ad, cd; shared: a, c, ac.
    overlap = rouge_su("a b c", ["a c d"])
    assert (overlap.precision, overlap.recall) == (3 / 6, 3 / 6)
    # Of seven words only the pair of the first and the last is too far apart: 7 words and 20 pairs.
    far = rouge_su("a b c d e f g", ["a g"])
    assert (far.precision, far.recall) == (2 / 27, 2 / 3)
    near = rouge_su("a b c d e g", ["a g"])
    assert near.recall == 1


@pytest.mark.parametrize(
    ("kind", "answers", "reply", "names"),
    [
        ("factoid", (("Srrm4",),), "Srrm4 [1]", {"strict_accuracy", "lenient_accuracy", "mrr", "score"}),
        ("list", (("Srrm4",), ("Nova1",)), "Nova1, Srrm4 [1]", {"list_precision", "list_recall", "list_f1", "score"}),
        ("yesno", (("yes",),), "Yes [1]", {"accuracy", "score"}),
        ("summary", (("Losartan did not help.",),), "Losartan did not help [1].", {"rouge_2", "rouge_su4", "score"}),
    ],
)
def test_each_kind_has_its_figures(
    kind: str, answers: tuple[tuple[str, ...], ...], reply: str, names: set[str]
) -> None:
    figures = question_figures(kind, answers, reply)
    assert figures == dict.fromkeys(names, 1.0)


def test_the_line_of_documents_is_no_part_of_an_answer() -> None:
    named = "\nDocuments: [1] No pain and gain [2] Yes, we can"
    assert items("aspirin, codeine" + named) == ["aspirin", "codeine"]
    assert yes_or_no("perhaps" + named) == ""
    assert summary("It helps." + named, ["It helps."])["rouge_2"] == 1
