"""Long documents cut into passages of at most max_tokens tokens, at the best border there is.

Passages joined give back the text, character for character. Knows no tokenizer: a callable counts the tokens.
"""

import re
from collections.abc import Callable, Iterator

from ragkv.documents import JSON, Document
from ragkv.errors import ConfigError

CountTokens = Callable[[str], int]

BORDERS = [  # each matches up to a place where a text may be cut, the best kind of place first
    re.compile(r"\n[^\S\n]*\n\s*"),  # paragraph
    re.compile(r"""[.!?…]["'”’»)\]]*\s+|[。！？]|\n\s*"""),  # sentence or line
    re.compile(r"\s+"),  # word
]
MAX_CHARACTERS_PER_TOKEN = 8
"""Longer texts are cut without counting them first; a piece that came out small for it is joined again."""


def split_text(text: str, count_tokens: CountTokens, max_tokens: int) -> list[str]:
    """Cuts a text into passages of at most `max_tokens` tokens each.

    Halves what is too long at its middlemost paragraph border, or sentence or word border if it has no better
    one, or between two characters, then joins neighbours as long as they fit.

    Raises:
        ConfigError: `max_tokens` is below one or below the tokens of a single character.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens} must be at least 1")
    passages: list[str] = []
    for piece in _pieces(text, count_tokens, max_tokens):
        if passages and count_tokens(passages[-1] + piece) <= max_tokens:
            passages[-1] += piece
        else:
            passages.append(piece)
    return passages


def _pieces(text: str, count_tokens: CountTokens, max_tokens: int) -> Iterator[str]:
    if len(text) <= max_tokens * MAX_CHARACTERS_PER_TOKEN and (count := count_tokens(text)) <= max_tokens:
        yield text
        return
    if len(text) == 1:
        raise ConfigError(f"max_tokens={max_tokens} is less than the {count} tokens of {text!r}: raise it")
    cut = _middlemost_border(text)
    yield from _pieces(text[:cut], count_tokens, max_tokens)
    yield from _pieces(text[cut:], count_tokens, max_tokens)


def _middlemost_border(text: str) -> int:
    for border in BORDERS:
        cuts = [match.end() for match in border.finditer(text) if match.end() < len(text)]
        if cuts:
            return min(cuts, key=lambda cut: abs(2 * cut - len(text)))
    return len(text) // 2


def split_document(document: Document, count_tokens: CountTokens, max_tokens: int) -> list[Document]:
    """Passages of a document, or the document itself when it fits.

    A passage is called "<document id>#<number from 1>" and keeps title, source and metadata; metadata gains
    "document_id" and the character offsets "passage_start" and "passage_end" into the document's text.
    """
    texts = split_text(document.text, count_tokens, max_tokens)
    if len(texts) == 1:
        return [document]
    passages: list[Document] = []
    start = 0
    for number, text in enumerate(texts, 1):
        end = start + len(text)
        place: dict[str, JSON] = {"document_id": document.id, "passage_start": start, "passage_end": end}
        metadata = {**document.metadata, **place}
        passages.append(Document(f"{document.id}#{number}", text, document.title, document.source, metadata))
        start = end
    return passages
