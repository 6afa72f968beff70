"""One copy of the same weights per process, loaded once however many ask at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ragkv import registry


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
