"""Constraints by grammar, so that JSON and tool calls are valid whatever the model would have preferred.

llguidance turns a JSON schema or a grammar into the set of tokens that may come next. A constraint serves one reply.
When the text is whole, only the end of the reply is allowed; a reply that `max_tokens` ends first is incomplete.
"""

import json
import threading
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ragkv.errors import ConfigError, MissingExtra, ModelError
from ragkv.json_schema import closed, without_look_around

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Written as json.dumps does, which models have read most: given free white space, small ones write nothing else.
_JSON_STYLE = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": True,
}

_compiled: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, ...], "LLTokenizer"]] = WeakKeyDictionary()
_compiling = threading.Lock()


class GrammarConstraint:
    """A grammar at its place in one reply; see `ragkv.sampling.Constraint`.

    Args:
        tokenizer: whose tokens the model writes.
        grammar: in llguidance's dialect of Lark.
        eos_token_ids: tokens that end a reply; the tokenizer's own if not given.

    Raises:
        ConfigError: the grammar is wrong, or cannot be followed.
        MissingExtra: llguidance is not installed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, grammar: str, eos_token_ids: Iterable[int] | None = None
    ) -> None:
        compiled = _compile(tokenizer, eos_token_ids)
        from llguidance import LLMatcher

        self._matcher = LLMatcher(compiled, grammar, log_level=0)
        if self._matcher.is_error():
            raise ConfigError(f"no grammar can be made of this schema: {self._matcher.get_error()}")
        if left_out := self._matcher.get_grammar_warnings():
            warnings.warn(f"the grammar does not enforce all of the schema: {'; '.join(left_out)}", stacklevel=3)

    def mask(self, logits: Tensor) -> Tensor:
        """Logits (vocabulary,) with -inf on tokens that may not come next; padding of the vocabulary never may."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: len(logits)]).bool()
        if self._matcher.is_error() or not allowed.any():
            raise ModelError(f"the grammar allows no token of this model here: {self._matcher.get_error()}")
        forbidden = torch.ones(len(logits), dtype=torch.bool)
        forbidden[: len(allowed)] = ~allowed
        return logits.masked_fill(forbidden.to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Move on by the token that was chosen."""
        if not self._matcher.consume_token(token):
            raise ModelError(f"token {token} does not follow the grammar: {self._matcher.get_error()}")


def json_schema_constraint(
    tokenizer: PreTrainedTokenizerBase,
    schema: Mapping[str, Any],
    *,
    strict: bool = False,
    eos_token_ids: Iterable[int] | None = None,
) -> GrammarConstraint:
    """The reply is JSON that fits a schema, and nothing else. Properties come in the order of the schema.

    Args:
        strict: refuse keywords that the grammar cannot enforce (such as `uniqueItems` or an unknown `format`), which
            are otherwise left out with a warning.

    Raises:
        ConfigError: the schema is wrong or contradicts itself; if strict, also that it has such keywords.
    """
    return GrammarConstraint(tokenizer, f"start: {json_rule(schema, strict)}\n", eos_token_ids)


def json_object_constraint(
    tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: Iterable[int] | None = None
) -> GrammarConstraint:
    """The reply is any JSON object, and nothing else."""
    return json_schema_constraint(tokenizer, {"type": "object"}, eos_token_ids=eos_token_ids)


def json_rule(schema: Mapping[str, Any], strict: bool) -> str:
    """The part of a grammar that stands for JSON of this schema."""
    kept = closed(schema)
    if not strict and (loose := without_look_around(kept)) != kept:
        warnings.warn("the grammar does not enforce all of the schema: patterns that look around", stacklevel=3)
        kept = loose
    return "%json " + json.dumps({**kept, "x-guidance": {**_JSON_STYLE, "lenient": not strict}})


def _compile(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Iterable[int] | None) -> "LLTokenizer":
    """The tokenizer in llguidance's form, made once (it takes seconds) and kept as long as the tokenizer lives."""
    try:
        from llguidance.hf import from_tokenizer
    except ImportError as missing:
        raise MissingExtra(
            'constrained output needs llguidance: pip install "ragkv[langchain]" or "ragkv[llama-index]"'
        ) from missing
    eos = tuple(sorted({tokenizer.eos_token_id} if eos_token_ids is None else set(eos_token_ids)))
    if not eos or None in eos:
        raise ConfigError("the tokenizer has no end-of-sequence token: give eos_token_ids")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"constrained output needs a fast tokenizer; this one is {type(tokenizer).__name__}")
    with _compiling:
        forms = _compiled.setdefault(tokenizer, {})
        if eos not in forms:
            forms[eos] = from_tokenizer(tokenizer, eos_token=list(eos))
        return forms[eos]
