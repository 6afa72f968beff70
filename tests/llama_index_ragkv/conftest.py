"""Models for the contract of ChatSnapKV: a tiny random one in a folder, and the smallest that can talk."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_index.llms.ragkv import ChatSnapKV
from ragkv.chat import Prompt
from ragkv.engine import Engine
from ragkv.reply import Chunk, Completion, Stats
from tiny import SPECIAL_TOKENS, plain_model, tiny_tokenizer

QWEN = "qwen2.5-coder-0.5b"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as transformers saves it. It never ends a reply unless a grammar makes it."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    model = plain_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[: len(SPECIAL_TOKENS)] = 0
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> ChatSnapKV:
    """For mechanics: its words mean nothing."""
    return ChatSnapKV(model=str(tiny_folder), dtype="float32", max_tokens=24)


@pytest.fixture(scope="session")
def writer(tiny_folder: Path) -> ChatSnapKV:
    """The tiny model with room for JSON, which it writes byte by byte."""
    return ChatSnapKV(model=str(tiny_folder), dtype="float32", max_tokens=160)


@pytest.fixture(scope="session")
def qwen() -> ChatSnapKV:
    """For tests in which the words count."""
    return ChatSnapKV(model=QWEN, max_tokens=48)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of every prompt that reaches an engine, control tokens included."""
    seen: list[str] = []
    original = Engine.stream

    def stream(self: Engine, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        batch = [prompts] if isinstance(prompts, Prompt) else prompts
        seen.extend(self.tokenizer.decode(prompt.ids) for prompt in batch)
        return original(self, prompts, *args, **kwargs)

    monkeypatch.setattr(Engine, "stream", stream)
    return seen


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Prompt]]:
    """Makes every engine reply with these texts in turn, three characters at a time; returns the prompts it gets."""

    def start(*texts: str) -> list[Prompt]:
        seen: list[Prompt] = []

        def stream(self: Engine, prompts: Any, *args: Any, **kwargs: Any) -> Iterator[Chunk]:
            (prompt,) = [prompts] if isinstance(prompts, Prompt) else prompts
            text = texts[min(len(seen), len(texts) - 1)]
            seen.append(prompt)
            stats = Stats(len(prompt), len(text), 0.1, 10.0, 0, 0, len(prompt), 32, 0)
            yield from (Chunk(0, text[at : at + 3]) for at in range(0, len(text), 3))
            yield Chunk(0, "", Completion(text, (), "stop", stats))

        monkeypatch.setattr(Engine, "stream", stream)
        return seen

    return start
