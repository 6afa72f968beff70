"""ROUGE-N and ROUGE-SU4 (Lin 2004) of a text against references: lower case, words of letters and digits, no stems."""

import re
from collections import Counter
from collections.abc import Sequence

from ragkv_evals.metrics import NOTHING, Overlap

Unit = tuple[str, ...]


def rouge_n(text: str, references: Sequence[str], n: int = 2) -> Overlap:
    """Shared runs of `n` words with the reference that gives the best F1."""
    return _best(_runs(_words(text), n), [_runs(_words(reference), n) for reference in references])


def rouge_su(text: str, references: Sequence[str], gap: int = 4) -> Overlap:
    """Shared words and pairs of words with at most `gap` words between, with the reference that gives the best F1."""
    return _best(_pairs(_words(text), gap), [_pairs(_words(reference), gap) for reference in references])


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _runs(words: Sequence[str], n: int) -> Counter[Unit]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _pairs(words: Sequence[str], gap: int) -> Counter[Unit]:
    units: Counter[Unit] = Counter((word,) for word in words)
    for i, word in enumerate(words):
        units.update((word, other) for other in words[i + 1 : i + gap + 2])
    return units


def _best(units: Counter[Unit], references: Sequence[Counter[Unit]]) -> Overlap:
    return max(
        (_overlap(units, reference) for reference in references), key=lambda overlap: overlap.f1, default=NOTHING
    )


def _overlap(said: Counter[Unit], right: Counter[Unit]) -> Overlap:
    shared = (said & right).total()
    return Overlap(shared / said.total(), shared / right.total()) if shared else NOTHING
