"""Where the gold documents and the answers in them stand in a prompt, and what of them was kept."""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ragkv.chat import Prompt
from ragkv.explain import text_pieces
from ragkv.explain_page import runs
from ragkv_evals.tasks.base import Example

Range = tuple[int, int]
_SAY_NOTHING = {"yes", "no"}  # stand everywhere


def document_ranges(prompt: Prompt) -> dict[int, Range]:
    """The tokens of each document's text, by its number."""
    return {s.document: (s.start, s.end) for s in prompt.spans if s.kind == "document" and s.document is not None}


def gold_ranges(prompt: Prompt, example: Example) -> list[Range]:
    """The tokens of the gold documents' texts."""
    ranges = document_ranges(prompt)
    return [ranges[number] for number in example.gold if number in ranges]


def answer_ranges(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, example: Example) -> list[Range]:
    """The tokens of every answer wherever it stands, letter for letter, in a gold document."""
    names = [name for names in example.answers for name in names if name and name.lower() not in _SAY_NOTHING]
    if not names:
        return []
    wanted = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", re.IGNORECASE)
    found: list[Range] = []
    for start, end in gold_ranges(prompt, example):
        text, offsets = _characters(tokenizer, list(prompt.ids[start:end]))
        for match in wanted.finditer(text):
            inside = [i for i, (a, b) in enumerate(offsets) if a < match.end() and b > match.start()]
            found.append((start + inside[0], start + inside[-1] + 1))
    return found


def _characters(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[str, list[Range]]:
    """The text of these tokens, and the characters that each of them reaches into."""
    ends = [len(tokenizer.decode(ids[: n + 1])) for n in range(len(ids))]
    return str(tokenizer.decode(ids)), list(zip([0, *ends[:-1]], ends, strict=True))


def shares(masks: Sequence[Tensor], ranges: Iterable[Range]) -> tuple[float, ...]:
    """The share of all KV heads in which the tokens of each range were kept, to four digits.

    Args:
        masks: those of `ragkv.survival.kept_masks`.
    """
    counts, heads = _counts(masks)
    return tuple(round(float(counts[a:b].sum()) / (heads * (b - a)), 4) for a, b in ranges)


def shaded(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, masks: Sequence[Tensor], ranges: Iterable[Range]
) -> tuple[tuple[tuple[int, str], ...], ...]:
    """The text of each range in pieces, (shade, text): 0 was kept by no head, 9 by all."""
    counts, heads = _counts(masks)
    return tuple(
        tuple(runs(text_pieces(tokenizer, prompt.ids[start:end], counts[start:end].tolist()), heads))
        for start, end in ranges
    )


def _counts(masks: Sequence[Tensor]) -> tuple[Tensor, int]:
    """In how many heads each token is kept, and how many heads there are."""
    return torch.cat(list(masks)).sum(dim=0), sum(mask.shape[0] for mask in masks)
