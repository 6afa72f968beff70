"""Paths and files of the hub, without a network."""

from pathlib import Path

import huggingface_hub
import pytest

from ragkv.errors import ConfigError, DocumentError
from ragkv_evals.data_source import locate


def test_paths_stay_what_they_are() -> None:
    assert locate(None) is None
    assert locate("folder/dev.jsonl") == Path("folder/dev.jsonl")


def test_a_file_of_the_hub_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repo: str, file: str, *, repo_type: str) -> str:
        return f"/{repo_type}/{repo}/{file}"

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert locate("hub:org/name/data/dev.jsonl") == Path("/dataset/org/name/data/dev.jsonl")


@pytest.mark.parametrize("name", ["hub:org/name", "hub:dev.jsonl", "hub:org/name/dev.parquet"])
def test_incomplete_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"give hub:ORG/NAME/FILE with a \.jsonl or \.json file"):
        locate(name)


def test_what_cannot_be_fetched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: str, **__: str) -> str:
        raise OSError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    with pytest.raises(DocumentError, match=r"cannot be fetched \(no network\); download it and give its path"):
        locate("hub:org/name/dev.jsonl")
