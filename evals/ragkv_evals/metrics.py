"""How good a cited answer is: words against accepted answers, citations against gold documents, and both jointly.

Pure functions of strings and document numbers; all figures are between 0 and 1. Answers are normalised and compared as
HotpotQA's evaluation does (arXiv 1809.09600, section 4). Joint figures multiply as theirs do, but over cited documents,
where theirs take supporting sentences: the two cannot be compared.
"""

import re
import string
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ragkv.citations import cited_numbers, strip_markers

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = {"yes", "no", "noanswer"}


@dataclass(frozen=True)
class Overlap:
    """Precision and recall of what was said against what is right."""

    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """Their harmonic mean, 0 if both are 0."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


NOTHING = Overlap(0.0, 0.0)


def answer_text(reply: str) -> str:
    """The answer in a reply: its first line, without citation markers."""
    lines = reply.strip().splitlines()
    return strip_markers(lines[0]) if lines else ""


def cited(reply: str, titles: Sequence[str]) -> list[int]:
    """All numbers that a reply cites, as the product reads it; those that no document has come last."""
    valid, invalid = cited_numbers(reply, titles)
    return valid + invalid


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Sequence[str]) -> float:
    """1 if the normalised answer is one of the accepted ones."""
    return float(normalize(answer) in {normalize(text) for text in accepted})


def word_overlap(answer: str, accepted: Sequence[str]) -> Overlap:
    """Shared words with the accepted answer that gives the best F1; yes and no match only themselves."""
    return max((_word_overlap(answer, text) for text in accepted), key=lambda overlap: overlap.f1, default=NOTHING)


def _word_overlap(answer: str, accepted: str) -> Overlap:
    said, right = normalize(answer), normalize(accepted)
    if said != right and {said, right} & _CLOSED_ANSWERS:
        return NOTHING
    shared = sum((Counter(said.split()) & Counter(right.split())).values())
    return Overlap(shared / len(said.split()), shared / len(right.split())) if shared else NOTHING


def citation_overlap(cited: Collection[int], gold: Collection[int]) -> Overlap:
    """Cited document numbers against the gold ones; a number that no document has is a wrong citation."""
    right = len(set(cited) & set(gold))
    return Overlap(right / len(set(cited)), right / len(set(gold))) if right else NOTHING


def joint(answer: Overlap, citations: Overlap) -> Overlap:
    """Both at once: the products of their precisions and of their recalls."""
    return Overlap(answer.precision * citations.precision, answer.recall * citations.recall)


def cited_answer(reply: str, accepted: Sequence[str], gold: Collection[int], titles: Sequence[str]) -> dict[str, float]:
    """Every figure of a cited answer, by name.

    Args:
        titles: of all documents of the prompt.
    """
    text = answer_text(reply)
    answer, citations = word_overlap(text, accepted), citation_overlap(cited(reply, titles), gold)
    return {
        "em": exact_match(text, accepted),
        "f1": answer.f1,
        **citation_figures(citations),
        "joint_f1": joint(answer, citations).f1,
    }


def citation_figures(citations: Overlap) -> dict[str, float]:
    """Precision, recall and F1 by name."""
    return {
        "citation_precision": citations.precision,
        "citation_recall": citations.recall,
        "citation_f1": citations.f1,
    }


def agreement(reply: str, reference: str) -> float:
    """F1 of the words (markers included) that a reply shares with another; 1 for equal ones."""
    said, right = reply.split(), reference.split()
    if said == right:
        return 1.0
    shared = sum((Counter(said) & Counter(right)).values())
    return Overlap(shared / len(said), shared / len(right)).f1 if shared else 0.0
