"""The memory benchmark: how conversations become exchanges and questions, what is asked of whom, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import EngineOf
from ragkv.errors import ConfigError, DocumentError
from ragkv_evals import memory_command, memory_report
from ragkv_evals.cli import app
from ragkv_evals.memory import KINDS, Asked, Setup, ask_all, remember
from ragkv_evals.memory_data import Conversation, read_conversations
from test_streaming_long_term import HashingEmbedder
from tiny import plain_model, tiny_tokenizer


def _line(session: int, number: int, speaker: str, text: str) -> dict[str, str]:
    return {"dia_id": f"D{session}:{number}", "speaker": speaker, "text": text}


LOCOMO = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ada",
        "speaker_b": "Ben",
        "session_1_date_time": "8 May",
        "session_1": [_line(1, n, "Ada" if n % 2 else "Ben", f"lighthouse {n}") for n in range(1, 7)],
        "session_2_date_time": "9 May",
        "session_2": [_line(2, 1, "Ben", "bread")],
        "session_3": [],
    },
    "qa": [
        {"question": "Ada: which lighthouse?", "answer": "lighthouse", "evidence": ["D1:6", "D2:1"], "category": 1},
        {"question": "When?", "answer": 2022, "evidence": ["D1:1"], "category": 2},
        {"question": "Adversarial?", "adversarial_answer": "x", "evidence": ["D1:1"], "category": 5},
        {"question": "No evidence?", "answer": "y", "evidence": ["D9:1"], "category": 4},
    ],
}


def _call(tool: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


TAU = {
    "task_id": 7,
    "traj": [
        {"role": "system", "content": "Be an agent."},
        {"role": "user", "content": "I am mia."},
        _call("find", user="mia_1", flags=["a"], exact=True),
        {"role": "tool", "content": "found", "tool_call_id": "1", "name": "find"},
        _call("book", flight="HAT1", seats=2),
        {"role": "tool", "content": "booked", "tool_call_id": "1", "name": "book"},
        _call("book", flight="HAT2"),
        {"role": "user", "content": "Bye."},
    ],
}


def _file(tmp_path: Path, *rows: Any) -> Path:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data.jsonl"


def test_locomo(tmp_path: Path) -> None:
    (read,) = read_conversations(_file(tmp_path, LOCOMO))
    texts = [exchange[0]["content"] for exchange in read.exchanges]
    assert texts == [
        "(8 May)\nAda: lighthouse 1\nBen: lighthouse 2\nAda: lighthouse 3\nBen: lighthouse 4",
        "(8 May)\nAda: lighthouse 5\nBen: lighthouse 6",
        "(9 May)\nBen: bread",
    ]
    assert [(question.answers, question.evidence) for question in read.questions] == [
        (("lighthouse",), (1, 2)),
        (("2022",), (0,)),
    ]
    assert read.questions[1].text == "When?"
    assert read.system.startswith("You are told what Ada and Ben said to each other.")


def test_tau_bench(tmp_path: Path) -> None:
    first, second = read_conversations(_file(tmp_path, TAU, TAU))
    assert (first.name, first.system) == ("task 7", "Be an agent.")
    assert [[message["role"] for message in exchange] for exchange in second.exchanges] == [
        ["user", "assistant"],
        ["tool", "assistant"],
        ["tool", "assistant"],
    ]
    # "flight" was given twice, so which one is meant is anybody's guess.
    assert [(question.answers, question.evidence) for question in first.questions] == [
        (("mia_1",), (0,)),
        (("2",), (1,)),
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty"),
        ([{"other": 1}], "neither LoCoMo's nor tau-bench's"),
        ([{"conversation": 1}], "neither LoCoMo's"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        read_conversations(_file(tmp_path, *rows))
    with pytest.raises(DocumentError, match="cannot read"):
        read_conversations(tmp_path / "none.jsonl")


@pytest.fixture
def conversation(tmp_path: Path) -> Conversation:
    longer = {
        **LOCOMO["conversation"],
        "session_2": [_line(2, n, "Ben", f"bread number {n}") for n in range(1, 17)],
    }
    return read_conversations(_file(tmp_path, {**LOCOMO, "conversation": longer}))[0]


def test_each_kind_remembers_in_its_own_way(engine_of: EngineOf, conversation: Conversation) -> None:
    setup = Setup(window_length=280, recall_tokens=200, max_tokens=4, questions=9)
    sessions = remember(engine_of("llama"), HashingEmbedder(), conversation, setup)
    assert tuple(sessions) == KINDS
    full, window, streaming, recall = (session.report() for session in sessions.values())
    assert full.remembered_turns == (0, 1, 2, 3, 4, 5)
    assert full.tokens_seen == streaming.tokens_seen == recall.tokens_seen > window.tokens_seen
    assert window.remembered_turns == streaming.remembered_turns == recall.remembered_turns
    long_term = sessions["streaming + recall"].memory
    assert long_term is not None
    assert streaming.dropped_turns == long_term.turns > 1
    assert sessions["streaming"].memory is None


def test_every_question_is_put_to_every_kind(engine_of: EngineOf, conversation: Conversation) -> None:
    setup = Setup(window_length=280, recall_tokens=200, max_tokens=4, questions=9)
    asked = ask_all(engine_of("llama"), HashingEmbedder(), conversation, setup)
    assert [each.kind for each in asked] == [*KINDS, *KINDS]
    assert {each.question for each in asked} == {question.text for question in conversation.questions}
    read = {kind: sum(each.prefilled_tokens for each in asked if each.kind == kind) for kind in KINDS}
    assert read["full history"] > read["window only"] > read["streaming + recall"] > read["streaming"]
    assert all(each.early for each in asked)
    again = ask_all(engine_of("llama"), HashingEmbedder(), conversation, setup)
    assert again == asked  # a question leaves nothing behind
    with pytest.raises(ConfigError, match="must be less than the 1024 tokens of context"):
        ask_all(engine_of("llama"), HashingEmbedder(), conversation, Setup(1020, 1, 1, 1))


def _asked(kind: str, early: bool, f1: float) -> Asked:
    return Asked("c", kind, "q", "a", early, f1, 10)


def test_the_report() -> None:
    early = dict(zip(KINDS, (0.8, 0.0, 0.1, 0.6), strict=True))
    asked = [_asked(kind, True, f1) for kind, f1 in early.items()] + [_asked(kind, False, 1.0) for kind in KINDS]
    found = memory_report.rows(asked)
    assert [(row.f1, row.f1_early, row.f1_late) for row in found] == [((f1 + 1) / 2, f1, 1.0) for f1 in early.values()]
    assert memory_report.gap_closed(found) == pytest.approx(0.75)
    assert (
        memory_report.markdown_table(found).splitlines()[2]
        == "| full history | 2 (1 early) | 0.900 | 0.800 | 1.000 | 10 |"
    )
    late_only = memory_report.rows([_asked(kind, False, 1.0) for kind in KINDS])
    assert memory_report.gap_closed(late_only) is None
    assert late_only[0].f1_early is None


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(memory_command, "SentenceTransformerEmbedder", HashingEmbedder)
    command = ["memory", "--data", str(_file(tmp_path, LOCOMO, TAU, TAU)), "--model", str(tmp_path / "model")]
    command += ["--window-length", "300", "--max-tokens", "4", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["kind"] for row in result["rows"]] == list(KINDS)
    assert len(result["answers"]) == 4 * 6  # the third conversation is another one of the second's name
    assert json.loads((tmp_path / "memory.json").read_text()) == result
    assert (tmp_path / "memory.md").read_text().startswith("| memory |")
    monkeypatch.setattr(memory_command, "ask_all", None)  # all conversations have been asked
    again = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(again.stdout)["answers"] == result["answers"]
