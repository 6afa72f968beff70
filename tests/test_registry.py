"""One copy of the same weights per process, loaded once however many ask at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import EngineOf
from ragkv import registry
from ragkv.policies import SnapKV
from ragkv.prefill import prefill
from tiny import random_prompt, tiny_engine


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were loaded; every load takes a moment and gives a new object."""
    names: list[str] = []

    def load(model: str, **options: object) -> object:
        names.append(model)
        time.sleep(0.05)
        if model == "broken":
            raise RuntimeError("no weights")
        return threading.Lock()

    monkeypatch.setattr(registry, "load", load)
    monkeypatch.setattr(registry, "_entries", {})
    monkeypatch.setattr(registry, "_stores", {})
    return names


def test_threads_share_one_load(loads: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(lambda _: registry.shared_model("a"), range(8)))
    assert len(set(map(id, copies))) == 1
    assert loads == ["a"]


def test_other_weights_are_another_copy(loads: list[str]) -> None:
    assert registry.shared_model("a") is not registry.shared_model("b")
    assert registry.shared_model("a") is not registry.shared_model("a", device="cpu")
    assert loads == ["a", "b", "a"]


def test_unload_forgets(loads: list[str]) -> None:
    first = registry.shared_model("a")
    registry.shared_model("b")
    assert registry.unload("a") == 1
    assert registry.unload("a") == 0
    assert registry.shared_model("a") is not first
    assert registry.unload() == 2


def test_a_failed_load_is_tried_again(loads: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no weights"):
            registry.shared_model("broken")
    assert loads == ["broken", "broken"]


def test_settings_share_a_store_whatever_the_namespace() -> None:
    model, prompt, policy = tiny_engine().model, random_prompt(300), SnapKV(40, 8)
    prefill(model, prompt, policy, store=registry.shared_store(10**8, None, 0, "model", "a"))
    again = registry.shared_store(10**8, None, 0, "model", "a")
    assert prefill(model, prompt, policy, store=again).cache_read_tokens == 256
    other = registry.shared_store(10**8, None, 0, "model", "b")
    assert prefill(model, prompt, policy, store=other).cache_read_tokens == 0
    assert again.info() == other.info()
    assert registry.shared_store(10**7, None, 0, "model", "a").info().blocks == 0


def test_a_folder_has_one_store_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("kv", "./kv", "~/kv", str(tmp_path / "kv")):
        registry.shared_store(10**8, name, 10**8, "model", "")
    assert len(registry._stores) == 1


def test_unload_frees_what_the_stores_have_of_the_model(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"a": engine_of("llama").loaded, "b": engine_of("qwen2").loaded}
    monkeypatch.setattr(registry, "load", lambda name, **_: models[name])
    store = registry.shared_store(10**8, None, 0, "model", "")
    for name in models:
        prefill(registry.shared_model(name).model, random_prompt(300), SnapKV(40, 8), store=store)
    both = store.info()
    assert registry.unload("a") == 1
    assert (store.info().blocks, store.info().nbytes) == (both.blocks // 2, both.nbytes // 2)
    assert prefill(models["b"].model, random_prompt(300), SnapKV(40, 8), store=store).cache_read_tokens == 256
    registry.unload()
    assert (store.info().blocks, store.info().nbytes) == (0, 0)
