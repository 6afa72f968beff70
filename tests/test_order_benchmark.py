"""The benchmark of a stable order: both orders see the same documents, and what they need not read again is counted."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv.documents import Document
from ragkv.embedding import SentenceTransformerEmbedder
from ragkv.models import LoadedModel
from ragkv_evals import order as benchmark
from ragkv_evals.cli import app
from ragkv_evals.order import AS_RANKED, POPULAR_FIRST, answers, index_of
from ragkv_evals.tasks.question import Question
from tiny import tiny_model, tiny_tokenizer

TEXTS = {
    "Otters": "The otter swims in the river and eats fish. " * 8,
    "Rivers": "The river flows past the old mill to the sea. " * 8,
    "Bread": "Bread is baked from flour, water and salt. " * 8,
}
DOCUMENTS = tuple(Document("", text, title=title) for title, text in TEXTS.items())


@pytest.fixture
def loaded() -> LoadedModel:
    return LoadedModel(tiny_model("llama"), tiny_tokenizer(), "tiny", 8192, (2,), "sdpa")


def _question(text: str, gold: int) -> Question:
    return Question(text, text, (("fish",),), DOCUMENTS, frozenset({gold}))


def test_popular_documents_are_read_once(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [_question("What does the otter eat in the river?", 0), _question("Where does the river flow?", 1)]
    index = index_of(questions, SentenceTransformerEmbedder())
    assert len(index) == 3
    scored: dict[str, list[tuple[str, ...]]] = {AS_RANKED: [], POPULAR_FIRST: []}
    make = benchmark._answered

    def seen(question: Question, mode: str, answer: benchmark.Answer) -> benchmark.Answered:
        scored[mode].append(tuple(document.title for document in answer.documents))
        return make(question, mode, answer)

    monkeypatch.setattr(benchmark, "_answered", seen)
    found = list(answers(loaded, questions, index, 2, 256, 2**30))
    assert [each.mode for each in found] == [AS_RANKED, POPULAR_FIRST] * 2
    assert scored == {
        AS_RANKED: [("Otters", "Rivers"), ("Rivers", "Otters")],
        POPULAR_FIRST: [("Otters", "Rivers"), ("Otters", "Rivers")],
    }
    ranked, popular = found[2:]
    assert ranked.prompt_tokens == popular.prompt_tokens
    assert popular.computed_tokens < ranked.computed_tokens / 2


def test_gold_documents_are_found_in_the_order_of_the_prompt() -> None:
    assert benchmark._numbers([DOCUMENTS[2], DOCUMENTS[0]], {"Otters", "Rivers"}) == (2,)


def test_the_command(loaded: LoadedModel, tmp_path: Path, two_questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv_evals.order_command.load", lambda model, device=None: loaded)
    command = ["order", "--data", str(two_questions), "--top-k", "2", "--budget", "128", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(row["mode"], row["examples"]) for row in result["rows"]] == [(AS_RANKED, 2), (POPULAR_FIRST, 2)]
    assert {"f1", "citation_f1"} <= set(result["rows"][0]["figures"])
    assert result["rows"][0]["differences"]["f1"]["value"] == 0
    assert json.loads((tmp_path / "order.json").read_text()) == result
    assert (tmp_path / "order.md").read_text().startswith("| mode |")


@pytest.mark.parametrize(("options", "passages"), [((), 6), (("--own-passages",), 3)])
def test_passages_are_those_of_all_questions_or_of_the_drawn_ones(
    loaded: LoadedModel, two_questions: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], passages: int
) -> None:
    monkeypatch.setattr("ragkv_evals.order_command.load", lambda model, device=None: loaded)
    monkeypatch.setattr(
        "ragkv_evals.order_command.answers", lambda *_: iter([_scored(AS_RANKED), _scored(POPULAR_FIRST)])
    )
    command = ["order", "--data", str(two_questions), "--limit", "1", *options]
    result = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert (result["passages"], result["own_passages"]) == (passages, bool(options))


def _scored(mode: str) -> benchmark.Answered:
    return benchmark.Answered("a", mode, "", {"f1": 1.0}, 1.0, 100, 100)
