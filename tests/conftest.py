"""Fixtures that the whole suite shares: tiny models are built once, and one thread each is fastest for them."""

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ragkv.engine import Engine
from tiny import plain_model, tiny_engine, tiny_model, tiny_tokenizer

torch.set_num_threads(1)
settings.register_profile("ragkv", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("ragkv")

ModelOf = Callable[[str], PreTrainedModel]
EngineOf = Callable[[str], Engine]


@pytest.fixture(scope="session")
def model_of() -> ModelOf:
    """Tiny models with ragkv's attention, by architecture."""
    return cache(tiny_model)


@pytest.fixture(scope="session")
def plain_of() -> ModelOf:
    """The same models untouched, for reference routes."""
    return cache(plain_model)


@pytest.fixture(scope="session")
def engine_of() -> EngineOf:
    """Engines on tiny models, by architecture, with the default policy and no limit but the model's."""
    return cache(tiny_engine)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture
def cores_to_spare() -> Iterator[None]:
    """Tiny models want one thread; a packaged one wants all cores that no other worker of the run needs."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    yield
    torch.set_num_threads(1)


@pytest.fixture
def two_questions(tmp_path: Path) -> Path:
    """A file in the form of HotpotQA: two questions of three short paragraphs each, the first of which is gold."""
    rows = [
        {
            "id": f"q{q}",
            "question": f"What is {q}?",
            "answer": str(q),
            "type": "bridge",
            "supporting": [[f"Title {q}-0", 0]],
            "paragraphs": [{"title": f"Title {q}-{p}", "sentences": [f"Number {q} {p}."]} for p in range(3)],
        }
        for q in range(2)
    ]
    path = tmp_path / "two_questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
