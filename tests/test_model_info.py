"""Context lengths without weights: the same number that a loaded model has."""

from pathlib import Path

import pytest

from ragkv import models
from ragkv.errors import ModelError
from ragkv.model_info import context_length
from ragkv.packaged import PACKAGED
from tiny import plain_model, tiny_tokenizer


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_model("qwen2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = models.load(tmp_path, dtype="float32").context_length
    (tmp_path / "model.safetensors").unlink()
    assert context_length(str(tmp_path)) == loaded == 1024


def test_packaged_models_are_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAGKV_HOME", str(tmp_path))
    assert context_length("smollm2-135m") == PACKAGED["smollm2-135m"].context_length == 8192
    assert not list(tmp_path.iterdir())


def test_no_such_model() -> None:
    with pytest.raises(ModelError, match="no model 'nothing'"):
        context_length("nothing")


def test_configs_that_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    with pytest.raises(ModelError, match="states no context length"):
        context_length(str(tmp_path))


def test_configs_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read the config"):
        context_length(str(tmp_path))
