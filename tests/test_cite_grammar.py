"""Cited answers by grammar: whatever a model prefers, it answers in a line and names documents that are there."""

import re

import pytest
import torch

from ragkv.answer import ask
from ragkv.cite_grammar import MOST_SOURCES, citation_constraint
from ragkv.config import SamplingParams
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.prompt import CitePrompt
from tiny import tiny_engine

DOCUMENTS = [
    Document("a", "It is in Canberra.", 'The "Toad"\nHall \\ [7]'),
    Document("b", "Foxes jump."),
    Document("c", "Dogs lie.", "Dog"),
    Document("d", "Cats lie.", "Cat"),
    Document("e", "Cats sit.", "Cat"),
]
PROMPT = CitePrompt(system="", rules="Cite.", examples="")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine("llama")


@pytest.mark.parametrize("seed", range(6))
def test_a_random_model_cites_documents_that_are_there(engine: Engine, seed: int) -> None:
    sampling = SamplingParams(max_tokens=400, temperature=1.0, seed=seed)
    answer = ask(engine, "Where?", DOCUMENTS, sampling, prompt=PROMPT, must_cite=True)
    said, _, named = answer.text.rpartition("\nDocuments:")
    if answer.finish_reason == "length":  # a random model may talk on for ever, in its one line
        assert "[" not in answer.text.partition("\nDocuments:")[0]
        return
    assert re.fullmatch(r"[^\n\[\]]+", said)
    assert re.fullmatch(r'( \[1\] The "Toad" Hall \\ \[7\]| \[2\]| \[[1-5]\] Dog| \[4\] Cat| \[5\] Cat){1,8}', named)
    assert (3 in answer.citations) == ("Dog" in named)
    assert set(answer.invalid_citations) <= {7}  # of the title that has brackets


@pytest.mark.parametrize("documents", [DOCUMENTS[:2], DOCUMENTS[1:2], DOCUMENTS[2:3], DOCUMENTS[3:]])
def test_any_documents_make_a_grammar(engine: Engine, documents: list[Document]) -> None:
    constraint = citation_constraint(engine.tokenizer, documents, eos_token_ids=engine.loaded.eos_token_ids)
    title = f" {documents[0].title}" if documents[0].title else ""
    title = title.replace("\n", " ")
    for token in engine.tokenizer.encode(f"yes\nDocuments: [1]{title}", add_special_tokens=False):
        constraint.accept(token)
    allowed = constraint.mask(torch.zeros(len(engine.tokenizer))).isfinite().nonzero().flatten().tolist()
    assert set(engine.loaded.eos_token_ids) <= set(allowed)


def test_a_model_that_would_not_stop_names_eight(engine: Engine) -> None:
    constraint = citation_constraint(engine.tokenizer, DOCUMENTS, eos_token_ids=engine.loaded.eos_token_ids)
    for token in engine.tokenizer.encode("yes\nDocuments:" + " [2]" * MOST_SOURCES, add_special_tokens=False):
        constraint.accept(token)
    allowed = constraint.mask(torch.zeros(len(engine.tokenizer))).isfinite().nonzero().flatten().tolist()
    assert set(allowed) <= set(engine.loaded.eos_token_ids)


def test_there_must_be_something_to_cite(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="must_cite=True without documents: there is nothing to cite"):
        ask(engine, "Where?", [], SamplingParams(max_tokens=2), prompt=PROMPT, must_cite=True)
