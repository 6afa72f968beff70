"""`ragkv chat` with piped lines and at a terminal, on a tiny model that is loaded from a folder."""

import io
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ragkv.cli import chat, main
from ragkv.cli.chat import status
from ragkv.streaming.turns import MemoryReport
from test_streaming_long_term import HashingEmbedder
from tiny import plain_model, tiny_tokenizer

Chat = Callable[..., tuple[object, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    plain_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> Chat:
    """`ragkv chat` with these lines on stdin: exit code, stdout, stderr."""
    monkeypatch.setenv("RAGKV_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(chat, "load_embedder", lambda progress: HashingEmbedder())
    options = ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--max-tokens", "8"]

    def call(*lines: str, more: tuple[str, ...] = ("--window-length", "120")) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        with pytest.raises(SystemExit) as exit_:
            main(["chat", *options, *more])
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return call


def _statuses(err: str) -> list[str]:
    return [line for line in err.splitlines() if "tokens seen" in line]


def test_each_line_gets_a_reply_and_a_status(run: Chat) -> None:
    code, out, err = run("Who wrote it?", "", "  ", "And the answer?", *(f"Question {n}?" for n in range(4)))
    assert code == 0
    assert len(out.split("\n")) >= 6
    statuses = _statuses(err)
    assert len(statuses) == 6
    assert re.fullmatch(r"ragkv: 31 tokens seen · 31 of 124 held \(.* kB\) · all 1 turns remembered", statuses[0])
    assert re.search(r" of 124 held \(.* kB\) · [34] of 6 turns remembered$", statuses[-1])


def test_what_does_not_fit_is_an_error_and_the_chat_goes_on(run: Chat) -> None:
    code, _, err = run("word " * 200, "Who?")
    assert code == 0
    assert "do not fit into the 120 tokens" in err
    assert "(--window-length, --max-tokens)" in err
    assert [line.split(" · ")[-1] for line in _statuses(err)] == ["all 1 turns remembered"]


def test_a_session_goes_on_where_it_was_saved(run: Chat, tmp_path: Path) -> None:
    lines, more = [f"Question {n}?" for n in range(6)], ("--window-length", "120", "--system", "Be brief.")
    _, straight, _ = run(*lines, more=more)
    saved = (*more, "--session", str(tmp_path / "chat.safetensors"))
    _, first, _ = run(*lines[:3], more=saved)
    _, second, err = run(*lines[3:], more=saved)
    assert first + second == straight
    assert "all 3 turns remembered" in _statuses(err)[0]
    code, _, err = run("Who?", more=(*saved[:-4], "--system", "Be long.", *saved[-2:]))
    assert (code, "has another system message" in err) == (2, True)


def test_a_cache_of_another_size_is_refused_for_a_saved_session(run: Chat, tmp_path: Path) -> None:
    saved = ("--session", str(tmp_path / "chat.safetensors"))
    run("Who?", more=("--window-length", "120", *saved))
    code, _, err = run("And?", more=saved)
    assert (code, "all 2 turns remembered" in err, " of 124 held" in err) == (0, True, True)
    for option in (("--window-length", "130"), ("--num-sink-tokens", "8")):
        code, _, err = run("And?", more=(*option, *saved))
        assert (code, f"{'='.join(option)}: the session in" in err) == (2, True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError()])
def test_whatever_ends_a_chat_what_was_said_is_saved(
    run: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    more, said = ("--session", str(tmp_path / "chat.safetensors"), "--thread", "mine"), []

    def write(text: str) -> None:
        said.append(text)
        if len(said) == 4:
            raise error

    with monkeypatch.context() as patched, suppress(BrokenPipeError):
        patched.setattr(chat, "write", write)
        code, _, _ = run("Who?", "And?", more=("--window-length", "120", *more))
        assert code == 130
    _, _, err = run(more=more)
    assert "turns remembered" in _statuses(err)[0]


def test_a_thread_recalls_the_last_turns_too(run: Chat) -> None:
    more = ("--window-length", "220", "--thread", "mine")
    run("My cat is called Tom.", more=more)
    _, _, err = run("Is the cat called Tom?", more=more)
    assert _statuses(err)[0].endswith(" of 2 turns remembered · 1 recalled")


def test_a_thread_recalls_what_has_left_the_cache(run: Chat) -> None:
    others = ("wooden boats", "old maps", "stone walls", "ripe plums", "tall trees")
    more = ("--window-length", "220", "--thread", "mine")
    run("My cat is called Tom.", *others, *others, more=more)
    _, _, err = run("Is the cat called Tom?", more=more)
    assert _statuses(err)[0].endswith(" turns remembered · 1 recalled")
    _, _, err = run("Is the cat called Tom?", more=("--window-length", "220", "--thread", "other"))
    assert "recalled" not in err


def test_ctrl_c_ends_the_reply_and_not_the_session(run: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    before, pressed = signal.getsignal(signal.SIGINT), []
    stream = chat.trimmed

    def press_once(texts):
        for number, text in enumerate(texts):
            if number == 1 and not pressed:
                pressed.append(signal.raise_signal(signal.SIGINT))
            yield text

    monkeypatch.setattr(chat, "trimmed", lambda texts: stream(press_once(texts)))
    code, _, err = run("Who wrote it?", "And the answer?")
    first, second = _statuses(err)
    assert code == 0
    assert int(re.search(r"(\d+) tokens seen", first)[1]) < 31
    assert "all 2 turns remembered" in second
    assert signal.getsignal(signal.SIGINT) == before


def test_the_status_line() -> None:
    report = MemoryReport(12345, 1000, 50, 2048, 34_000_000, 9, (6, 7, 8), (5,), (1, 2))
    expected = "12,345 tokens seen · 1,000 of 2,048 held (34.0 MB) · 3 of 9 turns remembered · 2 recalled"
    assert status(report) == expected


def test_a_terminal_is_asked_and_ctrl_c_there_is_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter([KeyboardInterrupt(), "Who?", " ", "And?", EOFError()])

    def ask(prompt: str) -> str:
        assert prompt == "> "
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert list(chat._lines()) == ["Who?", "And?"]
