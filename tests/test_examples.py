"""The examples run as a reader would run them, on the smallest packaged model that answers in sentences."""

import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from filelock import FileLock

from ragkv.registry import unload

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = "qwen2.5-coder-0.5b"

# What each must print, as patterns in the order of the output.
PRINTS = {
    "langchain_rag.py": ["board game Medici", r"\[1\] Medici: .*Knizia", r"4 sources, cited in vain: \[", r"\S\n\S"],
    "langchain_agent.py": [r"17 \+ 25", r"ai: add\(", "tool: 42", r"ai: multiply\(", "My name is", "4 messages in the"],
    "llama_index_rag.py": [r"Which government positions", r"Ghana.* \[1\]", r"\* \[1\] Shirley Temple", r"  \[4\] "],
    "log_watch.py": ["25 events, ", " held, .* MB: ", r"50 events, \d+ tokens seen, 7\d\d held"],
    "agent_memory.py": [r"turn 0: \d+ tokens", "turn 8: .*recalled", "What is my name"],
    "llama_index_agent.py": ["FunctionAgent", r"opening_hours\(", "answer: .*10 to 17", "ReActAgent", "answer: .*42"],
}
# Too much for the smallest: ReAct's format, and naming the documents behind an answer.
STRONGER = dict.fromkeys(("llama_index_agent.py", "llama_index_rag.py", "langchain_rag.py"), "qwen2.5-coder-1.5b")
# What goes on for long or for ever goes on for a while, on the smallest: its words do not count.
BOUNDED = {"log_watch.py": ["smollm2-135m", "50"], "agent_memory.py": ["smollm2-135m", "8"]}


def test_every_example_is_run() -> None:
    assert sorted(PRINTS) == sorted(file.name for file in EXAMPLES.glob("*.py"))


@pytest.fixture
def one_large_model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The 1.5B takes 6 GB in float32: one worker of the run has it at a time, and none keeps it."""
    lock = FileLock(tmp_path_factory.getbasetemp().parent / "one_large_model.lock")
    with lock if name in STRONGER else nullcontext():
        yield
        unload()


@pytest.mark.usefixtures("cores_to_spare", "one_large_model")
@pytest.mark.parametrize("name", sorted(PRINTS))
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, *BOUNDED.get(name, [STRONGER.get(name, MODEL)])])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(".*".join(PRINTS[name]), printed, re.DOTALL), printed


@pytest.mark.parametrize("name", sorted(PRINTS))
def test_an_example_is_short(name: str) -> None:
    assert 30 <= len((EXAMPLES / name).read_text().splitlines()) <= 60
