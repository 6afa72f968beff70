"""The form of a cited answer as a grammar: one line with the answer, one that names documents which are there.

A model too small to keep to the form of the citing prompt does so under it: no citation is missing, and none invalid.
That a document is named says that the model chose it, not that it is right.
"""

import json
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from ragkv.citations import SOURCES_LABEL, named_alone
from ragkv.documents import Document
from ragkv.errors import ConfigError
from ragkv.grammar import GrammarConstraint
from ragkv.prompt import heading

MOST_SOURCES = 8


def citation_constraint(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], *, eos_token_ids: Iterable[int] | None = None
) -> GrammarConstraint:
    """The reply is an answer without brackets, a line end, and 1 to 8 documents by number and title.

    The number of a title that only one document has is free; `ragkv.citations.cited_numbers` goes by the title.

    Args:
        documents: those of the prompt, in its order.

    Raises:
        ConfigError: there are no documents.
        MissingExtra: llguidance is not installed.
    """
    if not documents:
        raise ConfigError("must_cite=True without documents: there is nothing to cite")
    alone, label = set(named_alone([document.title for document in documents])), json.dumps(f"\n{SOURCES_LABEL}")
    titles = [json.dumps(heading(n, documents[n - 1]).partition(" ")[2]) for n in sorted(alone)]
    pairs = [json.dumps(f" {heading(n, each)}") for n, each in enumerate(documents, 1) if n not in alone]
    # A title tells its document by itself: held to the number that it wrote first, a small model cites the wrong one.
    sources = [*pairs, *(['" [" NUMBER "] " TITLE'] if titles else [])]
    grammar = f"""\
start: ANSWER {label} source{{1,{MOST_SOURCES}}}
ANSWER: /[^\\n\\[\\]]+/
NUMBER: {" | ".join(json.dumps(str(n)) for n in range(1, len(documents) + 1))}
TITLE: {" | ".join(titles) or '"-"'}
source: {" | ".join(sources)}
"""
    return GrammarConstraint(tokenizer, grammar, eos_token_ids)
