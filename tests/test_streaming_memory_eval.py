"""The memory benchmark: how conversations become exchanges and questions, what is asked of whom, and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from conftest import EngineOf
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import ConfigError, DocumentError
from ragkv.policies import StreamingLLM
from ragkv.reply import Chunk
from ragkv.streaming import window
from ragkv.streaming.cache import read
from ragkv.streaming.long_term import ThreadMemory
from ragkv.streaming.session import Session
from ragkv_evals import memory_command, memory_report
from ragkv_evals.cli import app
from ragkv_evals.memory import Asked, ask_all, first_line, sample
from ragkv_evals.memory_data import Conversation, Question, read_conversations
from ragkv_evals.memory_lengths import lengths, with_early_questions
from ragkv_evals.memory_sessions import FULL, KINDS, RECALL, STREAMING, WINDOW, Sessions, Setup
from test_streaming_long_term import HashingEmbedder
from tiny import plain_model, tiny_engine, tiny_tokenizer


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
        {"question": "Unknown evidence?", "answer": "y", "evidence": ["D1:1", "D9:1"], "category": 4},
        {"question": "No evidence?", "answer": "y", "evidence": [], "category": 4},
    ],
}


def _call(tool: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


TAU = {
    "task_id": 7,
    "traj": [
        {"role": "system", "content": "Be an agent. Cabins: economy."},
        {"role": "user", "content": "I am mia."},
        _call("find", user="mia_1", flags=["a"], exact=True, why="one two three four five six seven eight nine"),
        {"role": "tool", "content": "found", "tool_call_id": "1", "name": "find"},
        _call("book", flight="HAT1", seats=2, cabin="economy", note='"quiet", please'),
        {"role": "tool", "content": "booked for Mia_1, 22 Euros", "tool_call_id": "1", "name": "book"},
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
    assert (first.name, first.system) == ("task 7", "Be an agent. Cabins: economy.")
    assert [[message["role"] for message in exchange] for exchange in second.exchanges] == [
        ["user", "assistant"],
        ["tool", "assistant"],
        ["tool", "assistant"],
    ]
    # "flight" was given twice, so which one is meant is anybody's guess; the system message names the cabin for good.
    # All exchanges that name a value are evidence: "mia_1" comes again, "2" is no part of "22" or "HAT2".
    assert [(question.answers, question.evidence) for question in first.questions] == [
        (("mia_1",), (0, 2)),
        (("2",), (1,)),
        (('"quiet", please',), (1,)),
    ]


def test_early_evidence() -> None:
    parts = Question("q", ("a",), (0, 2))
    assert [parts.answerable(range(first, 3)) for first in range(4)] == [True, False, False, False]
    each = Question("q", ("a",), (0, 2), one_is_enough=True)
    assert [each.answerable(range(first, 4)) for first in range(4)] == [True, True, True, False]


def test_half_of_the_sample_is_early() -> None:
    early, late = ([Question(f"{kind} {i}", ("a",), (i,)) for i in range(n)] for kind, n in (("early", 6), ("late", 3)))
    late = [Question(question.text, ("a",), (9,)) for question in late]

    def drawn(count: int, seed: int = 0) -> list[str]:
        return [question.text for question in sample([*early, *late], [9], count, seed)]

    assert [sum(text.startswith("early") for text in drawn(count)) for count in (1, 4, 5, 8, 99)] == [0, 2, 2, 5, 6]
    assert [len(set(drawn(count))) for count in (1, 4, 5, 8, 99)] == [1, 4, 5, 8, 9]
    assert drawn(4) == drawn(4) != drawn(4, seed=1)
    assert len(sample(early, [9], 4, 0)) == len(sample(late, [9], 2, 0)) + 2 == 4


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
    return _talk(tmp_path, 16)


def _talk(tmp_path: Path, lines: int) -> Conversation:
    longer = {
        **LOCOMO["conversation"],
        "session_2": [_line(2, n, "Ben", f"bread number {n}") for n in range(1, lines + 1)],
    }
    return read_conversations(_file(tmp_path, {**LOCOMO, "conversation": longer}))[0]


def _setup(window_length: int, **options: int) -> Setup:
    return Setup(**{"recall_tokens": 200, "max_tokens": 4, "questions": 9, **options, "window_length": window_length})


def _sessions(engine: Engine, conversation: Conversation, window_length: int) -> dict[str, Session]:
    found, setup = lengths(engine.tokenizer, conversation), _setup(window_length)
    sessions = Sessions(engine, HashingEmbedder(), conversation, found, setup)
    return {kind: sessions.fork(kind) for kind in KINDS}


def test_each_kind_remembers_in_its_own_way(engine_of: EngineOf, conversation: Conversation) -> None:
    sessions = _sessions(engine_of("llama"), conversation, 280)
    full, window, streaming, recall = (session.report() for session in sessions.values())
    assert full.remembered_turns == (0, 1, 2, 3, 4, 5)
    assert full.tokens_seen == streaming.tokens_seen == recall.tokens_seen > window.tokens_seen
    assert window.remembered_turns == streaming.remembered_turns == recall.remembered_turns
    long_term = sessions[RECALL].memory
    assert long_term is not None
    assert streaming.dropped_turns == long_term.turns > 1
    assert sessions[STREAMING].memory is None


def test_the_full_history_is_whole_beyond_the_usual_window(tmp_path: Path) -> None:
    conversation = _talk(tmp_path, 200)
    full, window, *_ = (
        session.report()
        for session in _sessions(tiny_engine(context_length=8192), conversation, StreamingLLM.window_length).values()
    )
    assert full.tokens_held == full.tokens_seen > StreamingLLM.window_length + 500
    assert len(full.remembered_turns) == len(conversation.exchanges)
    assert full.capacity == 8192
    assert len(window.remembered_turns) < len(conversation.exchanges)


@pytest.mark.parametrize("window_length", [173, 280, 333, 400, 900])
def test_lengths_say_what_will_be_remembered(
    engine_of: EngineOf, conversation: Conversation, window_length: int
) -> None:
    last = [{"role": "user", "content": "bread " * 20}, {"role": "assistant", "content": "Noted."}]
    conversation = replace(conversation, exchanges=[*conversation.exchanges, last])
    engine = engine_of("llama")
    found, capacity = lengths(engine.tokenizer, conversation), _setup(window_length).capacity
    full, window, streaming, _ = (
        session.report() for session in _sessions(engine, conversation, window_length).values()
    )
    assert found.total == full.tokens_seen == full.tokens_held
    assert tuple(found.newest(capacity)) == window.remembered_turns == streaming.remembered_turns
    assert found.held(capacity) == window.tokens_held == streaming.tokens_held


def test_what_cannot_be_compared_is_refused(engine_of: EngineOf, conversation: Conversation) -> None:
    tokenizer = engine_of("llama").tokenizer
    found = lengths(tokenizer, conversation)
    needed = found.total + found.question + 4
    asked_late = replace(conversation, name="late", questions=[Question("q", ("a",), (5,))])
    both = [asked_late, conversation]
    assert with_early_questions(tokenizer, both, 280, needed, 4) == [conversation]
    with pytest.raises(ConfigError, match=f"conv-1: {found.total} tokens, .* into the {needed - 1} tokens of context"):
        with_early_questions(tokenizer, both, 280, needed - 1, 4)
    with pytest.raises(ConfigError, match=f"dropped of 2 conversations .*has {found.total}.*: lower --window-length"):
        with_early_questions(tokenizer, both, found.total, needed, 4)
    with pytest.raises(ConfigError, match="read more conversations"):
        with_early_questions(tokenizer, [replace(conversation, questions=[])], 280, needed, 4)


def _plainly(engine: Engine, conversation: Conversation, setup: Setup) -> dict[tuple[str, str], tuple[str, int]]:
    """Answer and cost by kind and question, each kind read and asked on its own."""
    whole = [message for exchange in conversation.exchanges for message in exchange]
    context = StreamingLLM(window_length=engine.loaded.context_length - 4)
    results = {}
    for kind in KINDS:
        policy = context if kind == FULL else StreamingLLM(window_length=setup.window_length)
        memory = ThreadMemory(HashingEmbedder()) if kind == RECALL else None
        options = {"system": conversation.system, "memory": memory, "recall_tokens": setup.recall_tokens}
        session = engine.session(policy, **options)
        for part in [whole] if kind == WINDOW else conversation.exchanges:
            session.append(part)
            session.read()
        before = session.report().tokens_held if kind in (FULL, WINDOW) else 0
        for question in conversation.questions:
            asked = session.fork(session.memory)
            asked.append({"role": "user", "content": question.text})
            reply = asked.generate(SamplingParams(max_tokens=setup.max_tokens))
            results[kind, question.text] = (reply.text, before + reply.stats.prompt_tokens)
    return results


@pytest.mark.parametrize("window_length", [280, 460, 900])
@pytest.mark.parametrize("recall_tokens", [30, 200])
def test_answers_and_costs_are_those_of_kinds_read_on_their_own(
    engine_of: EngineOf, conversation: Conversation, window_length: int, recall_tokens: int
) -> None:
    engine, setup = engine_of("llama"), _setup(window_length, recall_tokens=recall_tokens, max_tokens=12)
    asked = ask_all(engine, HashingEmbedder(), conversation, setup)
    plain = _plainly(engine, conversation, setup)
    assert len(asked) == len(plain) == 8
    for each in asked:
        text, prefilled_tokens = plain[each.kind, each.question]
        assert text.startswith(each.answer)
        assert each.answer == text or "\n" in each.answer
        assert each.prefilled_tokens == prefilled_tokens


def test_every_question_is_put_to_every_kind(engine_of: EngineOf, conversation: Conversation) -> None:
    asked = ask_all(engine_of("llama"), HashingEmbedder(), conversation, _setup(280))
    assert [each.kind for each in asked] == [kind for kind in KINDS for _ in range(2)]
    assert {each.question for each in asked} == {question.text for question in conversation.questions}
    read = {kind: sum(each.prefilled_tokens for each in asked if each.kind == kind) for kind in KINDS}
    assert read[FULL] > read[WINDOW] > read[RECALL] > read[STREAMING]
    assert all(each.early for each in asked)
    again = ask_all(engine_of("llama"), HashingEmbedder(), conversation, _setup(280))
    assert again == asked


def test_a_question_leaves_nothing_behind_in_the_memory(engine_of: EngineOf, conversation: Conversation) -> None:
    engine = engine_of("llama")
    found = lengths(engine.tokenizer, conversation)
    sessions = Sessions(engine, HashingEmbedder(), conversation, found, _setup(280))
    asked = sessions.fork(RECALL)
    asked.append({"role": "user", "content": "Ada: which lighthouse? " * 4})
    asked.generate(SamplingParams(max_tokens=4))
    assert asked.memory is not None
    assert sessions.streaming.memory is not None
    assert asked.memory.turns > sessions.streaming.memory.turns


def _read_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens of the forward passes from now on."""
    passes: list[int] = []
    monkeypatch.setattr(
        window, "read", lambda model, cache, new: (passes.append(new.shape[1]), read(model, cache, new))[1]
    )
    return passes


def test_what_fits_is_read_and_answered_once(
    engine_of: EngineOf, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = _read_tokens(monkeypatch)
    engine = engine_of("llama")
    asked = ask_all(engine, HashingEmbedder(), conversation, _setup(900, max_tokens=1))
    found = lengths(engine.tokenizer, conversation)
    prompts = sum(each.prefilled_tokens for each in asked if each.kind == STREAMING)
    assert sum(passes) == found.total + 2 * prompts  # whether something is recalled shows as the prompt is read
    assert len({(each.question, each.answer) for each in asked}) == 2


def test_nothing_is_read_twice(
    engine_of: EngineOf, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = _read_tokens(monkeypatch)
    engine = engine_of("llama")
    _sessions(engine, conversation, 280)
    found = lengths(engine.tokenizer, conversation)
    first = found.opening + sum(found.exchanges[i] for i in found.oldest(284))
    assert found.opening < first < found.total
    newest = found.held(284) - found.opening
    assert sum(passes) == first + 2 * (found.total - first) + newest


def test_without_anything_recalled_the_answer_is_that_of_streaming(
    engine_of: EngineOf, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadMemory, "recall", lambda *args, **options: [])
    passes = _read_tokens(monkeypatch)
    steps: list[int] = []

    def once(piece: str, ask: Any) -> list[Asked]:
        before = passes.count(1)
        found: list[Asked] = ask()
        steps.append(passes.count(1) - before)
        return found

    ask_all(engine_of("llama"), HashingEmbedder(), conversation, _setup(280, max_tokens=6), once)
    assert steps[2:4] == [0, 0]
    assert min(steps[:2] + steps[4:]) > 0


def test_the_full_history_is_read_in_long_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {**LOCOMO["conversation"], "session_2": [_line(2, 1, "Ben", "bread " * 300)]}
    (conversation,) = read_conversations(_file(tmp_path, {**LOCOMO, "conversation": said}))
    passes = _read_tokens(monkeypatch)
    _sessions(tiny_engine(context_length=4096), conversation, 400)
    assert max(passes) == lengths(tiny_tokenizer(), conversation).exchanges[-1] > 512


def test_a_reply_ends_with_its_first_line() -> None:
    chunks = iter([Chunk(0, text) for text in ("\n ", "two", " words", "\nmore", " and more")])
    assert first_line(chunks) == "\n two words\nmore"
    assert next(chunks).text == " and more"
    assert first_line([Chunk(0, "one"), Chunk(0, " line")]) == "one line"


def _asked(kind: str, early: bool, f1: float) -> Asked:
    return Asked("c", kind, "q", "a", early, f1, 10)


def test_the_report() -> None:
    early = dict(zip(KINDS, (0.8, 0.0, 0.1, 0.6), strict=True))
    asked = [_asked(kind, True, f1) for kind, f1 in early.items()] + [_asked(kind, False, 1.0) for kind in KINDS]
    found = memory_report.rows(asked)
    assert [(row.f1, row.f1_early, row.f1_late) for row in found] == [((f1 + 1) / 2, f1, 1.0) for f1 in early.values()]
    wide = memory_report.gap(asked)
    assert wide is not None
    assert (wide.questions, wide.lost.value, wide.won.value) == (1, pytest.approx(0.8), pytest.approx(0.6))
    assert wide.closed is not None
    assert wide.closed.value == pytest.approx(0.75)
    assert (
        memory_report.markdown_table(found).splitlines()[2]
        == "| full history | 2 (1 early) | 0.900 | 0.800 | 1.000 | 10 |"
    )
    late_only = memory_report.rows([_asked(kind, False, 1.0) for kind in KINDS])
    assert late_only[0].f1_early is None
    late_asked = [_asked(kind, False, 1.0) for kind in KINDS]
    assert memory_report.gap(late_asked) is None
    assert memory_report.verdict(late_asked) == "No question was about what the window had dropped."


def test_the_gap_has_an_interval_over_paired_questions() -> None:
    figures = [(1.0, 0.0, 1.0), (0.8, 0.2, 0.2), (0.5, 0.5, 0.6), (1.0, 0.1, 0.4), (0.7, 0.0, 0.7)] * 4
    asked = [
        _asked(kind, True, f1)
        for each in figures
        for kind, f1 in zip((FULL, WINDOW, STREAMING, RECALL), (*each[:2], 0.0, each[2]), strict=True)
    ]
    wide = memory_report.gap(asked)
    assert wide is not None
    assert wide.closed is not None
    lost, won = ([each[i] - each[1] for each in figures] for i in (0, 2))
    drawn = np.random.default_rng(1).integers(len(figures), size=(4000, len(figures)))
    ratios = np.asarray(won)[drawn].mean(1) / np.asarray(lost)[drawn].mean(1)
    assert wide.closed.value == pytest.approx(sum(won) / sum(lost))
    assert [wide.closed.low, wide.closed.high] == pytest.approx(np.quantile(ratios, [0.025, 0.975]), abs=0.02)
    assert f"{wide.closed.value:.0%} ({wide.closed.low:.0%} to {wide.closed.high:.0%})" in memory_report.verdict(asked)
    no_better = [replace(each, f1=0.0) if each.kind == FULL else each for each in asked]
    worse = memory_report.gap(no_better)
    assert worse is not None
    assert worse.closed is None


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    plain_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(memory_command, "SentenceTransformerEmbedder", HashingEmbedder)
    options = ["--window-length", "190", "--recall-tokens", "50", "--max-tokens", "4", "--out", str(tmp_path)]
    data = str(_file(tmp_path, LOCOMO, TAU, TAU))
    return ["memory", "--data", data, "--model", str(tmp_path / "model"), *options]


def test_the_command(tmp_path: Path, command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--dtype", "bfloat16"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["kind"] for row in result["rows"]] == list(KINDS)
    assert len(result["answers"]) == 4 * 8  # the third conversation is another one of the second's name
    assert result["dtype"] == "bfloat16"
    assert result["gap"]["questions"] == result["rows"][0]["early_questions"] > 0
    assert json.loads((tmp_path / "memory.json").read_text()) == result
    table = (tmp_path / "memory.md").read_text()
    assert table.startswith("| memory |")
    assert "early questions the window alone loses" in table


def test_the_command_goes_on_at_the_question_where_it_was_stopped(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, forks = Sessions.fork, list[str]()

    def stopping(self: Sessions, kind: str) -> Session:
        forks.append(kind)
        if len(forks) == 8:
            raise KeyboardInterrupt
        return fork(self, kind)

    monkeypatch.setattr(Sessions, "fork", stopping)
    assert CliRunner().invoke(app, command).exit_code != 0
    done = [json.loads(line)["piece"] for line in (Path(command[-1]) / "pieces.jsonl").read_text().splitlines()]
    assert done[:3] == ["0 conv-1, streaming, 0", "0 conv-1, streaming, 1", "0 conv-1, streaming + recall, 0"]
    assert len(done) >= 7
    first = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(first.stdout)["rows"]
    lines = (Path(command[-1]) / "pieces.jsonl").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["piece"] for line in lines}) == 4 * 8
    monkeypatch.setattr(Sessions, "fork", None)  # all questions have been asked
    again = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(again.stdout)["answers"] == json.loads(first.stdout)["answers"]
