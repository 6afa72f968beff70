"""The baseline without any compression: fewer documents."""

from dataclasses import replace

import torch
from torch import Tensor

from ragkv.chat import Prompt
from ragkv.errors import PromptTooLong
from ragkv_evals.tasks.base import Counter, Example


def truncated(example: Example, max_prompt: int, counter: Counter) -> Example:
    """The example with its first documents only, as many as fit into a prompt of `max_prompt` tokens.

    The gold numbers stay those of all documents, so that a document which was left out counts as not cited.

    Raises:
        PromptTooLong: not even the question fits.
    """
    room = max_prompt - counter.frame(example.question, example.prompt)
    if room < 0:
        raise PromptTooLong(f"truncate:{max_prompt}: the prompt needs {-room} tokens more without any document")
    for count, document in enumerate(example.documents):
        room -= counter.document(document)
        if room < 0:
            return replace(example, documents=example.documents[:count])
    return example


def kept_mask(prompt: Prompt, documents: int) -> Tensor:
    """(1, length) bool over the whole prompt: what is left of it with its first `documents` documents."""
    mask = torch.ones(1, len(prompt), dtype=torch.bool)
    for span in prompt.spans:
        if span.document is not None and span.document > documents:
            mask[:, span.start : span.end] = False
    return mask
