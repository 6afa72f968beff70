"""Documents within a budget: a head of the list, whole documents, headers counted."""

import pytest
from transformers import PreTrainedTokenizerFast

from ragkv.budget import document_tokens, within_budget
from ragkv.chat import encode_chat
from ragkv.documents import Document
from ragkv.errors import PromptTooLong
from ragkv.prompt import CitePrompt

DOCUMENTS = [Document(str(n), f"Document number {n} names the answer.", f"Title {n}") for n in range(1, 5)]


def test_counts_are_those_of_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = encode_chat(tokenizer, CitePrompt().messages("Who?", DOCUMENTS[:1]))
    in_prompt = sum(span.end - span.start for span in prompt.spans if span.document is not None)
    assert document_tokens(tokenizer, DOCUMENTS[0]) == in_prompt


def test_longest_head(tokenizer: PreTrainedTokenizerFast) -> None:
    sizes = [document_tokens(tokenizer, document) for document in DOCUMENTS]
    assert within_budget(tokenizer, DOCUMENTS, sum(sizes[:2])) == DOCUMENTS[:2]
    assert within_budget(tokenizer, DOCUMENTS, sum(sizes[:3]) - 1) == DOCUMENTS[:2]
    assert within_budget(tokenizer, DOCUMENTS, sum(sizes)) == DOCUMENTS
    assert within_budget(tokenizer, DOCUMENTS, None) == DOCUMENTS


def test_no_room(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(PromptTooLong, match=r"context_tokens=3 is less than the \d+ tokens of the best document"):
        within_budget(tokenizer, DOCUMENTS, 3)
