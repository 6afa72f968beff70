"""ChatSnapKV on a tiny random model: what the weights would say does not matter, only what becomes of it."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from langchain_ragkv import ChatSnapKV
from ragkv.engine import Engine
from ragkv.models import LoadedModel
from ragkv.reply import Chunk
from ragkv.sampling import Sampler

EngineOf = Callable[[str], Engine]


@pytest.fixture
def loads(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that were asked for, in order; each is the tiny one."""
    asked: list[str] = []
    loaded = engine_of("llama").loaded  # made here: threads that make it together draw from one random generator

    def shared_model(model: str, **_: Any) -> LoadedModel:
        asked.append(model)
        return loaded

    monkeypatch.setattr("ragkv.options.shared_model", shared_model)
    return asked


@pytest.fixture
def llm(loads: list[str]) -> ChatSnapKV:
    return ChatSnapKV(model="tiny", max_tokens=24)


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts went into each generation, in order."""
    sizes: list[int] = []
    run = Engine._run

    def counted(self: Engine, replies: list[Any], *args: Any) -> Iterator[Chunk]:
        sizes.append(len(replies))
        yield from run(self, replies, *args)

    monkeypatch.setattr(Engine, "_run", counted)
    return sizes


class Tokens:
    """Counts sampled tokens, each of which takes a while."""

    seconds = 0.01

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def slow_tokens(monkeypatch: pytest.MonkeyPatch) -> Tokens:
    tokens = Tokens()
    sample = Sampler.__call__

    def slow(self: Sampler, logits: Any) -> int:
        tokens.count += 1
        time.sleep(tokens.seconds)
        return sample(self, logits)

    monkeypatch.setattr(Sampler, "__call__", slow)
    return tokens
