"""Fixtures that the whole suite shares: tiny models are built once, and one thread each is fastest for them."""

from collections.abc import Callable
from functools import cache

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
