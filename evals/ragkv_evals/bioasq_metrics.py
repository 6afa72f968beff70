"""How BioASQ scores answers (task B, phase B): by the kind of question.

factoid: strict and lenient accuracy and reciprocal rank over up to five candidates; list: precision, recall, F1 of the
items; yesno: accuracy, and macro F1 over all questions; summary: ROUGE-2 and ROUGE-SU4 F1 of the ideal answer.
`score` is the leading figure of each kind, so that questions of all kinds can be averaged: reciprocal rank, F1,
accuracy, ROUGE-SU4 F1.
"""

import re
from collections.abc import Collection, Sequence

from ragkv.prompt import answer_alone
from ragkv_evals.metrics import Overlap, answer_text, normalize
from ragkv_evals.rouge import rouge_n, rouge_su

MOST_CANDIDATES = 5
Answers = Sequence[Sequence[str]]


def question_figures(kind: str, answers: Answers, reply: str) -> dict[str, float]:
    """The figures of one reply; `answers` are groups of synonyms."""
    if kind == "factoid":
        return factoid(candidates(reply), answers[0])
    if kind == "list":
        return list_items(items(reply, [name for names in answers for name in names]), answers)
    if kind == "yesno":
        right = float(yes_or_no(reply) == normalize(answers[0][0]))
        return {"accuracy": right, "score": right}
    return summary(reply, answers[0])


def candidates(reply: str) -> list[str]:
    """Candidates for a factoid, the best first: the first line, or the lines of a numbered or bulleted list."""
    said = answer_alone(reply)
    lines = [_unbulleted(line) for line in said.splitlines() if _BULLET.match(line)]
    return (lines or [answer_text(said)])[:MOST_CANDIDATES]


def items(reply: str, names: Collection[str] = ()) -> list[str]:
    """Items of a list: separated by commas, semicolons, line ends or "and".

    Args:
        names: what is not cut where the reply says it, such as "glioblastoma, IDH wildtype".
    """
    text, whole = answer_alone(reply), {normalize(name) for name in names}
    cuts = [match.span() for match in _SEPARATOR.finditer(text)]
    starts, ends = [0, *(end for _, end in cuts)], [*(start for start, _ in cuts), len(text)]
    found: list[str] = []
    while starts:
        longest = next((n for n in range(len(ends), 1, -1) if normalize(text[starts[0] : ends[n - 1]]) in whole), 1)
        found.append(_unbulleted(text[starts[0] : ends[longest - 1]]).rstrip("."))
        starts, ends = starts[longest:], ends[longest:]
    return [item for item in found if item]


_SEPARATOR = re.compile(r"[,;\n]|\band\b")
_BULLET = re.compile(r"\s*(?:[-*•]|\d{1,2}[.)])\s+")


def _unbulleted(text: str) -> str:
    return _BULLET.sub("", text, count=1).strip()


def yes_or_no(reply: str) -> str:
    """The first "yes" or "no" among the words, or nothing."""
    return next((word for word in normalize(answer_alone(reply)).split() if word in ("yes", "no")), "")


def factoid(said: Sequence[str], synonyms: Sequence[str]) -> dict[str, float]:
    """Whether the first candidate is right, whether any is, and one over the rank of the first right one."""
    accepted = {normalize(name) for name in synonyms}
    ranks = [rank for rank, name in enumerate(said, 1) if normalize(name) in accepted]
    reciprocal = 1 / ranks[0] if ranks else 0.0
    return {
        "strict_accuracy": float(reciprocal == 1),
        "lenient_accuracy": float(bool(ranks)),
        "mrr": reciprocal,
        "score": reciprocal,
    }


def list_items(said: Sequence[str], answers: Answers) -> dict[str, float]:
    """Items said against items wanted; each wanted item counts once, under any of its names."""
    left = [{normalize(name) for name in names} for names in answers]
    distinct = list(dict.fromkeys(filter(None, map(normalize, said))))
    hits = 0
    for item in distinct:
        match = next((names for names in left if item in names), None)
        if match is not None:
            left.remove(match)
            hits += 1
    overlap = Overlap(hits / len(distinct), hits / len(answers)) if hits else Overlap(0.0, 0.0)
    return {
        "list_precision": overlap.precision,
        "list_recall": overlap.recall,
        "list_f1": overlap.f1,
        "score": overlap.f1,
    }


def summary(reply: str, references: Sequence[str]) -> dict[str, float]:
    """ROUGE of the whole answer, markers left out."""
    text = answer_alone(reply)
    su4 = rouge_su(text, references).f1
    return {"rouge_2": rouge_n(text, references).f1, "rouge_su4": su4, "score": su4}


def yesno_macro_f1(replies: Sequence[str], truths: Sequence[str]) -> float:
    """The mean of the F1 of "yes" and of "no" over all questions."""
    pairs = [(yes_or_no(reply), normalize(truth)) for reply, truth in zip(replies, truths, strict=True)]
    return (_f1(pairs, "yes") + _f1(pairs, "no")) / 2


def _f1(pairs: Sequence[tuple[str, str]], label: str) -> float:
    said = sum(answer == label for answer, _ in pairs)
    right = sum(truth == label for _, truth in pairs)
    both = sum(answer == truth == label for answer, truth in pairs)
    return Overlap(both / said, both / right).f1 if both else 0.0
