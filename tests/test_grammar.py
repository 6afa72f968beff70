"""Constraints: whatever a model prefers, the text is whole JSON of the schema and then ends."""

import json
import sys
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
import torch
from pydantic import BaseModel, Field
from transformers import PreTrainedTokenizerFast

from ragkv.chat import encode_text
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import ConfigError, MissingExtra, ModelError
from ragkv.grammar import GrammarConstraint, json_object_constraint, json_schema_constraint
from ragkv.models import load
from ragkv.sampling import Sampler
from tiny import VOCABULARY

EOS = 2
Name = Annotated[str, Field(max_length=6)]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Name | None = None


class Home(BaseModel):
    """Definitions, a discriminated union, enums, defaults, nested lists and null."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    colours: list[Colour] = Field(default=[], max_length=3)
    grid: list[Annotated[list[bool], Field(max_length=2)]] = Field(max_length=2)
    note: Name | None


class Tree(BaseModel):
    """A schema that refers to itself."""

    value: int = Field(ge=-9, le=99)
    children: list["Tree"] = Field(default=[], max_length=1)


class Formats(BaseModel):
    day: date
    key: UUID
    ratio: float = Field(ge=0, le=1)
    pair: tuple[bool, Literal["a", 2, None]]


def write_at_random(constraint: GrammarConstraint, tokenizer: PreTrainedTokenizerFast, seed: int) -> str:
    """What a model without any idea writes."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [0], constraint)
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while EOS not in tokens and len(tokens) < 1500:
        tokens.append(sampler(torch.randn(VOCABULARY, generator=generator)))
    assert tokens[-1] == EOS
    return tokenizer.decode(tokens[:-1])


def follows(constraint: GrammarConstraint, tokenizer: PreTrainedTokenizerFast, text: str) -> bool:
    """Whether the grammar lets exactly this reply be written."""
    for token in [*tokenizer.encode(text, add_special_tokens=False), EOS]:
        if constraint.mask(torch.zeros(VOCABULARY))[token] < 0:
            return False
        constraint.accept(token)
    return True


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("model", [Home, Tree, Formats])
def test_random_choices_are_valid_json_of_a_pydantic_schema(
    tokenizer: PreTrainedTokenizerFast, model: type[BaseModel], seed: int
) -> None:
    constraint = json_schema_constraint(tokenizer, model.model_json_schema(), strict=True)
    text = write_at_random(constraint, tokenizer, seed)
    model.model_validate_json(text)
    assert json.dumps(json.loads(text), ensure_ascii=False) == text or model is Formats  # floats have many spellings


def test_random_model_through_the_engine(engine_of: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = encode_text(tokenizer, "Describe the home.")
    sampling = SamplingParams(max_tokens=600, temperature=1.0, seed=3)
    constraints = [json_schema_constraint(tokenizer, Home.model_json_schema()), None]
    chunks = list(engine_of("qwen2").stream([prompt, prompt], sampling, constraints=constraints))
    done = {chunk.row: chunk.completion for chunk in chunks if chunk.completion is not None}
    assert done[0].finish_reason == "stop"
    Home.model_validate_json(done[0].text)
    assert "".join(chunk.text for chunk in chunks if chunk.row == 0) == done[0].text
    with pytest.raises(ValueError, match="Invalid JSON"):
        Home.model_validate_json(done[1].text)


def test_max_tokens_within_json_is_reported_as_length(engine_of: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    chunks = engine_of("qwen2").stream(
        encode_text(tokenizer, "Go."),
        SamplingParams(max_tokens=3),
        constraints=[json_schema_constraint(tokenizer, Home.model_json_schema())],
    )
    completion = [chunk.completion for chunk in chunks][-1]
    assert completion is not None
    assert (completion.finish_reason, completion.text[0]) == ("length", "{")


def test_after_the_json_only_the_end_is_allowed(tokenizer: PreTrainedTokenizerFast) -> None:
    constraint = json_schema_constraint(tokenizer, {"const": {"a": 1}}, eos_token_ids=(2, 0))
    for token in tokenizer.encode('{"a": 1}'):
        assert constraint.mask(torch.zeros(VOCABULARY))[EOS] == -torch.inf
        constraint.accept(token)
    assert constraint.mask(torch.zeros(VOCABULARY)).isfinite().nonzero().flatten().tolist() == [0, 2]


def test_mask_keeps_the_other_logits_and_covers_padding(tokenizer: PreTrainedTokenizerFast) -> None:
    logits = torch.randn(VOCABULARY + 50)
    before = logits.clone()
    masked = json_object_constraint(tokenizer).mask(logits)
    allowed = masked.isfinite()
    assert allowed.nonzero().flatten().tolist() == [
        i for i in range(VOCABULARY) if tokenizer.decode([i]).startswith("{")
    ]
    assert torch.equal(masked[allowed], before[allowed])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": [1, {"b": null}], "é": "日本"}', True),
        ("{}", True),
        ("[]", False),
        ('{"a":  1}', False),
        ('{\n"a": 1}', False),
        ('{"a": "\\ud800"}', False),
        ('{"a": 1', False),
        ('{"a": 1} and more', False),
    ],
)
def test_json_mode(tokenizer: PreTrainedTokenizerFast, text: str, valid: bool) -> None:
    assert follows(json_object_constraint(tokenizer), tokenizer, text) == valid


def test_listed_properties_close_an_object(tokenizer: PreTrainedTokenizerFast) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not follows(json_schema_constraint(tokenizer, schema), tokenizer, '{"b": 1}')
    opened = {**schema, "additionalProperties": True}
    assert follows(json_schema_constraint(tokenizer, opened), tokenizer, '{"b": 1}')


UNENFORCEABLE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def test_strict_refuses_what_cannot_be_enforced(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="uniqueItems"):
        json_schema_constraint(tokenizer, UNENFORCEABLE, strict=True)
    with pytest.warns(UserWarning, match="uniqueItems"):
        constraint = json_schema_constraint(tokenizer, UNENFORCEABLE)
    assert follows(constraint, tokenizer, "[1, 1]")


def test_look_around_is_left_out_unless_strict(tokenizer: PreTrainedTokenizerFast) -> None:
    schema = {"type": "string", "pattern": "^(?!x)[a-z]+$"}
    with pytest.raises(ConfigError, match="look-ahead"):
        json_schema_constraint(tokenizer, schema, strict=True)
    with pytest.warns(UserWarning, match="look"):
        assert follows(json_schema_constraint(tokenizer, schema), tokenizer, '"xyz"')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/Gone"}, "Gone"),
        ({"type": "rainbow"}, "rainbow"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    ],
)
def test_impossible_schemas_are_errors(tokenizer: PreTrainedTokenizerFast, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        json_schema_constraint(tokenizer, schema)


def test_a_token_outside_the_grammar_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ModelError, match="does not follow"):
        json_object_constraint(tokenizer).accept(tokenizer.encode("x")[0])


def test_a_vocabulary_without_the_needed_token_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ModelError, match="allows no token"):
        json_object_constraint(tokenizer).mask(torch.zeros(5))


def test_tokenizer_is_compiled_once(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    json_object_constraint(tokenizer)

    def compiled_again(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("llguidance.hf.from_tokenizer", compiled_again)
    json_object_constraint(tokenizer)
    with pytest.raises(AssertionError, match="compiled again"):
        json_object_constraint(tokenizer, eos_token_ids=(1,))


def test_missing_llguidance_names_the_extra(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(MissingExtra, match=r'pip install "ragkv\[langchain\]"'):
        json_object_constraint(tokenizer)


def test_a_packaged_model_fills_a_schema() -> None:
    loaded = load("smollm2-135m", device="cpu")
    prompt = encode_text(loaded.tokenizer, "A home with a red cat as JSON:\n")
    constraint = json_schema_constraint(
        loaded.tokenizer, Home.model_json_schema(), strict=True, eos_token_ids=loaded.eos_token_ids
    )
    chunks = Engine(loaded).stream(prompt, SamplingParams(max_tokens=200), constraints=[constraint])
    completion = [chunk.completion for chunk in chunks][-1]
    assert completion is not None
    assert completion.finish_reason == "stop"
    Home.model_validate_json(completion.text)
