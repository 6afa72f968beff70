"""How many documents a budget of tokens holds, counted as they stand in the prompt of a cited answer."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ragkv.chat import encode_untrusted
from ragkv.documents import Document
from ragkv.errors import PromptTooLong
from ragkv.prompt import CitePrompt


def document_tokens(tokenizer: PreTrainedTokenizerBase, document: Document) -> int:
    """Tokens of a document in the prompt, header included."""
    segments = CitePrompt().messages("?", [document])[-1]["content"]
    return sum(len(encode_untrusted(tokenizer, part.text)) for part in segments if part.document is not None)


def within_budget(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], context_tokens: int | None
) -> list[Document]:
    """The longest head of the documents (best first) that fits into `context_tokens` tokens; None is no limit.

    Raises:
        PromptTooLong: not even the best document fits.
    """
    if context_tokens is None:
        return list(documents)
    used = 0
    for count, document in enumerate(documents):
        used += document_tokens(tokenizer, document)
        if used > context_tokens:
            if count == 0:
                raise PromptTooLong(
                    f"context_tokens={context_tokens} is less than the {used} tokens of the best document: raise it, "
                    "or split the documents"
                )
            return list(documents[:count])
    return list(documents)
