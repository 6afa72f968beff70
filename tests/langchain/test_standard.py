"""LangChain's own suites for chat models, on a packaged model: no test is overridden, none is expected to fail."""

from importlib import import_module
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_ragkv import ChatSnapKV

MODEL = "qwen2.5-coder-0.5b"


class TestChatSnapKVUnit(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def _as_a_class_known_to_langchain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`allowed_objects="all"` in `test_serdes` is a list in langchain-core; others name the class to `load`."""
        langchain_load = import_module("langchain_core.load.load")
        path = ("langchain_ragkv", "chat_models", "ChatSnapKV")
        monkeypatch.setitem(langchain_load.ALL_SERIALIZABLE_MAPPINGS, path, path)
        monkeypatch.setattr(langchain_load, "_default_class_paths_cache", {})

    @property
    def chat_model_class(self) -> type[ChatSnapKV]:
        return ChatSnapKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"RAGKV_MODEL": MODEL}, {}, {"model": MODEL}


@pytest.mark.usefixtures("cores_to_spare")
class TestChatSnapKVIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatSnapKV]:
        return ChatSnapKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "max_tokens": 100}

    @property
    def model_override_value(self) -> str:
        return "smollm2-135m"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True
