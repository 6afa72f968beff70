"""A folder of blocks: what is read is what was written, whatever happened to the disk, the files or the writer."""

import errno
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ragkv.chat import Prompt
from ragkv.errors import ConfigError
from ragkv.kv_store import KVStore
from ragkv.kv_store.block_file import UnusableBlock, encode_block, read_block
from ragkv.kv_store.blocks import Block
from ragkv.kv_store.folder import BlockFolder
from ragkv.kv_store.folder_files import block_path, list_owners, scan
from ragkv.kv_store.int8 import from_int8, to_int8
from ragkv.kv_store.keys import Owner
from ragkv.kv_store.usage import Usage, read_usage
from ragkv.policies import FullKV, SnapKV
from ragkv.prefill import Prefilled, prefill
from test_kv_store_reuse import BLOCK, SNAPKV, WINDOW, assert_equal, sharing, small_store
from tiny import random_prompt, tiny_model

OWNER = Owner("model", "tenant", 2, name="shown")
NOTHING = Usage()
fork = multiprocessing.get_context("fork")


def blocks_of(ids: list[int], floats: int = 8) -> list[Block]:
    """K/V that say which tokens they are of."""

    def states(end: int) -> torch.Tensor:
        return torch.full((1, 2, floats), float(sum(ids[:end])))

    return [Block(((states(n), states(n)), (states(n), states(n)))) for n in range(2, len(ids) + 1, 2)]


def put(folder: BlockFolder, ids: list[int], owner: Owner = OWNER, floats: int = 8) -> set[str]:
    return folder.put(owner, owner.chain(ids), ids, blocks_of(ids, floats), NOTHING)


def found(folder: BlockFolder, ids: list[int], owner: Owner = OWNER) -> list[bool]:
    """Which blocks of a prompt are there; those that are must be right."""
    chain = owner.chain(ids)
    read = [
        folder.get(owner, parent, ids[2 * n : 2 * n + 2], key)
        for n, (parent, key) in enumerate(zip([owner.root, *chain], chain, strict=False))
    ]
    for n, block in enumerate(read):
        assert block is None or bool((block.layers[1][0] == sum(ids[: 2 * n + 2])).all())
    return [block is not None for block in read]


@pytest.fixture
def folder(tmp_path: Path) -> BlockFolder:
    return BlockFolder(tmp_path / "kv", 10**9)


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """A store warns when something is wrong, and of nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def _assert_found_again(model: Any, store: KVStore, read: int = 64) -> Prefilled:
    prompt = sharing(random_prompt(100), 70, 110)
    reused = prefill(model, prompt, SNAPKV, store=store)
    assert reused.cache_read_tokens == read
    assert_equal(reused, prefill(model, prompt, SNAPKV))
    return reused


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-sliding", "gpt-neox"])
@pytest.mark.parametrize("memory_bytes", [0, 20_000, 10**9])
def test_a_restart_changes_nothing(tmp_path: Path, name: str, memory_bytes: int) -> None:
    """A new store, and a model loaded anew, as in another process; with memory for all, for some, and for no blocks."""
    prefill(tiny_model(name), random_prompt(100), SNAPKV, store=small_store(memory_bytes, tmp_path))
    _assert_found_again(tiny_model(name), small_store(memory_bytes, tmp_path))


def test_what_left_the_memory_is_read_from_the_folder(tmp_path: Path, model: Any) -> None:
    store = small_store(20_000, tmp_path)
    prefill(model, random_prompt(100), SNAPKV, store=store)
    for seed in range(1, 4):
        prefill(model, random_prompt(100, seed), SNAPKV, store=store)
    assert store.info().usage.evictions > 0
    _assert_found_again(model, store)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_hold_every_dtype_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    block = Block(tuple((torch.randn(2, 3, 4).to(dtype), torch.randn(2, 3, 5).to(dtype)) for _ in range(3)))
    (tmp_path / "file").write_bytes(encode_block(block, "ab", [1, 2, 3]))
    read = read_block(tmp_path / "file", "ab", [1, 2, 3])
    assert read.mapped
    for mine, other in zip(read.layers, block.layers, strict=True):
        for states, expected in zip(mine, other, strict=True):
            assert states.dtype == dtype
            assert torch.equal(states, expected)
    for parent, tokens in (("ac", [1, 2, 3]), ("ab", [1, 2, 4]), ("ab", [1, 2])):
        with pytest.raises(UnusableBlock, match="not the one expected"):
            read_block(tmp_path / "file", parent, tokens)


@given(st.integers(1, 6), st.floats(1e-6, 1e6), st.integers(0, 100))
def test_eight_bits_are_off_by_half_a_step_at_most(head_dim: int, size: float, seed: int) -> None:
    """A step is the largest number of a head's vector over 127; zeros stay zeros."""
    states = size * torch.randn(2, 5, head_dim, generator=torch.Generator().manual_seed(seed))
    states[0, 0] = 0
    restored = from_int8(*to_int8(states), torch.float32)
    step = states.abs().amax(dim=-1, keepdim=True) / 127
    assert ((restored - states).abs() <= 0.5001 * step).all()
    assert not restored[0, 0].any()


def test_eight_bits_halve_the_files_at_a_small_error(tmp_path: Path) -> None:
    """Measured on bfloat16: the logits of a model whose whole prefix went through int8 and back."""
    model, first = tiny_model("qwen3", torch.bfloat16), random_prompt(100)
    second = sharing(first, 96, 110)
    sizes, logits = [], []
    for disk_dtype in ("model", "int8"):
        folder = tmp_path / disk_dtype
        prefill(model, first, FullKV(), store=KVStore(0, folder, disk_dtype=disk_dtype, block_size=BLOCK))
        read = prefill(model, second, FullKV(), store=KVStore(0, folder, disk_dtype=disk_dtype, block_size=BLOCK))
        assert read.cache_read_tokens == 96
        assert read.logits.dtype == torch.bfloat16
        logits.append(read.logits.float())
        sizes.append(sum(layer.nbytes for layer in _tensors(folder)))
    assert sizes[1] / sizes[0] == (32 + 4) / 64  # head_dim of 32, and a scale of four bytes
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.05


def _tensors(folder: Path) -> Iterator[torch.Tensor]:
    for file in scan(folder):
        yield from load_file(file.path).values()


def test_exact_stores_read_nothing_that_was_rounded(tmp_path: Path, model: Any) -> None:
    rounded = KVStore(10**9, tmp_path, disk_dtype="int8", block_size=BLOCK)
    prefill(model, random_prompt(100), SNAPKV, store=rounded)
    assert prefill(model, random_prompt(100), SNAPKV, store=small_store(10**9, tmp_path)).cache_read_tokens == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_no_damaged_byte_goes_unnoticed(tmp_path: Path, position: int, change: int, cut: bool) -> None:
    """Any byte changed, or the file cut anywhere: it is refused."""
    block = blocks_of([1, 2])[0]
    data = bytearray(encode_block(block, OWNER.root, [1, 2]))
    position %= len(data)
    if cut:
        del data[position:]
    else:
        data[position] ^= change
    path = tmp_path / "block"
    path.write_bytes(data)
    try:
        read = read_block(path, OWNER.root, [1, 2])
    except UnusableBlock:
        return
    # A byte of white space or of a header that nobody reads.
    assert all(
        torch.equal(a, b) for x, y in zip(read.layers, block.layers, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "foreign", "another block", "a folder"])
def test_a_bad_file_is_skipped_with_a_warning_and_replaced(tmp_path: Path, model: Any, damage: str) -> None:
    prefill(model, random_prompt(100), SNAPKV, store=small_store(0, tmp_path))
    chain = _owner(model).chain(random_prompt(100).ids)
    path, other = (block_path(tmp_path, _owner(model), key) for key in chain[2:4])
    data = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "cut":
        path.write_bytes(data[:-4])
    elif damage == "emptied":
        path.write_bytes(b"")
    elif damage == "foreign":
        path.write_text("a letter to somebody else")
    elif damage == "another block":
        shutil.copy(other, path)
    else:
        path.unlink()
        path.mkdir()
    store = small_store(0, tmp_path)
    with warnings.catch_warnings(record=True, action="always") as caught:
        _assert_found_again(model, store, read=32)
    messages = [str(warning.message) for warning in caught]
    assert f"{path} is not used: " in messages[0]
    if damage == "a folder":  # which nothing can replace
        assert len(messages) == 2
        assert "what was there stays" in messages[1]
        return
    assert len(messages) == 1
    _check(path)
    _assert_found_again(model, small_store(0, tmp_path), read=96)


def _owner(model: Any) -> Owner:
    from ragkv.kv_store.keys import owner_of

    return owner_of(model, "", BLOCK)


def test_namespaces_and_models_never_mix(tmp_path: Path, model: Any) -> None:
    """Not even if the files of one are put in the place of another's."""
    store, prompt = small_store(0, tmp_path), random_prompt(100)
    prefill(model, prompt, SNAPKV, store=store.within("a"))
    assert prefill(model, prompt, SNAPKV, store=store.within("b")).cache_read_tokens == 0
    assert prefill(model, prompt, SNAPKV, store=store).cache_read_tokens == 0
    mine, theirs = (list_owners(tmp_path)[n].folder for n in (0, 1))
    assert not {path.name for path in mine.glob("*.safetensors")} & {path.name for path in theirs.glob("*.safetensors")}
    names = {owner.namespace for owner in list_owners(tmp_path)}
    assert names == {"", "a", "b"}


def test_a_block_under_a_name_of_another_namespace_is_refused(folder: BlockFolder) -> None:
    other = Owner("model", "other", 2)
    put(folder, [1, 2])
    target = block_path(folder.path, other, other.chain([1, 2])[0])
    target.parent.mkdir()
    shutil.copy(block_path(folder.path, OWNER, OWNER.chain([1, 2])[0]), target)
    with pytest.warns(UserWarning, match="its key is not the one expected"):
        assert found(folder, [1, 2], other) == [False]


def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings(folder: BlockFolder) -> None:
    first, second = [11, 12, 13, 14, 15, 16], [17, 18, 19, 20]
    put(folder, first)
    put(folder, second)
    size = max(file.size for file in scan(folder.path))
    small = BlockFolder(folder.path, 5 * size)
    assert len(put(small, [21, 22])) == 1
    assert found(small, first) == [True, True, False]
    put(small, first[:2])  # used again
    put(small, [23, 24, 25, 26])
    assert found(small, first) == [True, False, False]
    assert found(small, second) == [True, False]
    assert sum(file.size for file in scan(folder.path)) <= 5 * size
    assert read_usage(folder.path).evictions == 3


def test_a_lower_bound_costs_nothing_that_a_higher_one_has_kept(folder: BlockFolder) -> None:
    """New blocks take the place of old ones, and no more goes than that; a warning says so, once."""
    kept = list(range(40))
    put(folder, kept)
    size = max(file.size for file in scan(folder.path))
    small = BlockFolder(folder.path, 5 * size)
    with pytest.warns(UserWarning, match=rf"holds \d+ bytes, more than kv_disk_bytes={5 * size}: it grows no more"):
        assert len(put(small, [51, 52])) == 1
    put(small, [53, 54])
    assert found(small, kept) == [True] * 18 + [False] * 2
    assert found(small, [51, 52]) == found(small, [53, 54]) == [True]


def test_of_a_prompt_that_is_too_long_the_beginning_stays(folder: BlockFolder) -> None:
    put(folder, [1, 2])
    size = scan(folder.path)[0].size
    small = BlockFolder(folder.path, 2 * size + 20)
    ids = [7, 8, 9, 10, 11, 12]
    assert put(small, ids) == {*OWNER.chain(ids)[:2]}
    assert found(small, ids) == [True, True, False]
    assert found(small, [1, 2]) == [False]


class FullDisk:
    """`Path.write_bytes` on a disk that has room for some files and half of another."""

    def __init__(self, files: int, code: int = errno.ENOSPC) -> None:
        self.files, self.code = files, code
        self.write = Path.write_bytes

    def __call__(self, path: Path, data: bytes) -> int:
        if self.files == 0:
            self.write(path, data[: len(data) // 2])
            raise OSError(self.code, os.strerror(self.code), str(path))
        self.files -= 1
        return self.write(path, data)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("files", range(5))
def test_a_full_disk_is_a_warning_and_loses_nothing(
    folder: BlockFolder, monkeypatch: pytest.MonkeyPatch, files: int, code: int
) -> None:
    """Files, in order: three blocks, then the counts."""
    put(folder, [1, 2, 3, 4])
    disk = FullDisk(files, code)
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: disk(path, data))
    if files == 4:
        assert len(put(folder, [7, 8, 9, 10, 11, 12])) == 3
    else:
        with pytest.warns(UserWarning, match=f"cannot be written .{os.strerror(code)}.: what was there stays"):
            assert len(put(folder, [7, 8, 9, 10, 11, 12])) == min(files, 3)
    monkeypatch.undo()
    assert found(folder, [1, 2, 3, 4]) == [True, True]
    assert found(folder, [7, 8, 9, 10, 11, 12]) == [n < files for n in range(3)]
    assert list(folder.path.rglob("*.partial")) == []
    assert len(put(folder, [7, 8, 9, 10, 11, 12])) == 3 - min(files, 3)


def test_a_full_disk_costs_nothing_where_others_would_have_made_room(
    folder: BlockFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, [1, 2, 3, 4])
    full = BlockFolder(folder.path, sum(file.size for file in scan(folder.path)))
    disk = FullDisk(0)
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: disk(path, data))
    with pytest.warns(UserWarning, match="what was there stays"):
        put(full, [7, 8])
    monkeypatch.undo()
    assert found(full, [1, 2, 3, 4]) == [True, True]
    assert len(put(full, [7, 8])) == 1
    assert found(full, [1, 2, 3, 4]) == [True, False]


def test_a_full_disk_does_not_touch_the_answer(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(3)
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: disk(path, data))
    store, prompt = small_store(10**9, tmp_path), random_prompt(100)
    with pytest.warns(UserWarning, match="No space left on device"):
        read = prefill(model, prompt, SNAPKV, store=store)
    assert read.cache_creation_tokens == 96  # in memory
    assert_equal(read, prefill(model, prompt, SNAPKV))
    monkeypatch.undo()  # the manifest and two blocks had room
    assert prefill(model, prompt, SNAPKV, store=small_store(0, tmp_path)).cache_read_tokens == 32


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path, model: Any) -> None:
    (tmp_path / "file").write_text("")
    store = small_store(10**9, tmp_path / "file" / "kv")
    with pytest.warns(UserWarning, match="cannot be written"):
        prefill(model, random_prompt(100), SNAPKV, store=store)
    with pytest.warns(UserWarning, match="cannot be written"):
        _assert_found_again(model, store)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file: name a folder"):
        KVStore(folder=tmp_path / "file")


STEPS = ("write", "before the rename", "after the rename")


def _write_and_die(path: Path, ids: list[int], owner: Owner, step: str, file: int) -> None:
    """Put a prompt, and be killed in the midst of the given file's write, or right before or after its rename."""
    written, write, move = itertools.count(), Path.write_bytes, os.replace

    def die_at(here: str, number: int) -> None:
        if (here, number) == (step, file):
            os.kill(os.getpid(), signal.SIGKILL)

    def write_bytes(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        die_at("write", number := next(written))
        numbers[str(path)] = number
        return write(path, data)

    def rename(source: Path, target: Path) -> None:
        die_at("before the rename", numbers[str(source)])
        move(source, target)
        die_at("after the rename", numbers[str(source)])

    numbers: dict[str, int] = {}
    Path.write_bytes, os.replace = write_bytes, rename  # type: ignore[method-assign, assignment]
    put(BlockFolder(path, 10**9), ids, owner)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("file", range(5))
def test_killing_a_writer_loses_nothing_that_was_there(folder: BlockFolder, step: str, file: int) -> None:
    """Files, in order: the manifest, three blocks, the counts. The next writer is not kept waiting by the lock."""
    kept, ids, other = list(range(20)), [51, 52, 53, 54, 55, 56], replace(OWNER, namespace="other")
    put(folder, kept)
    writer = fork.Process(target=_write_and_die, args=(folder.path, ids, other, step, file))
    writer.start()
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    assert found(folder, kept) == [True] * 10
    whole = min(3, max(0, file - 1 + (step == "after the rename")))
    assert found(folder, ids, other) == [n < whole for n in range(3)]
    assert len(put(folder, ids, other)) == 3 - whole
    assert found(folder, ids, other) == [True] * 3
    assert list(folder.path.rglob("*.partial")) == []


def _check(path: Path) -> None:
    """The block says who it is, and is that."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    assert path.stem == header["key"]
    read_block(path, header["parent"], json.loads(header["tokens"]))


def _write_some(path: Path, seed: int, results: Any) -> None:
    warnings.simplefilter("error")
    folder, hits, chosen = BlockFolder(path, 60_000), 0, random.Random(seed)
    for _ in range(60):
        first = 100 * chosen.randrange(20)
        ids = list(range(first, first + 12))
        hits += sum(found(folder, ids))
        put(folder, ids)
    results.put(hits)


def test_processes_at_once_share_a_folder(tmp_path: Path) -> None:
    """They write, evict and read the same blocks; nothing breaks, the bound holds, and each finds the other's."""
    results = fork.Queue()
    writers = [fork.Process(target=_write_some, args=(tmp_path, seed, results)) for seed in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(300)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert all(results.get(timeout=5) for _ in writers)
    files = scan(tmp_path)
    assert 0 < sum(file.size for file in files) <= 60_000
    for file in files:
        _check(file.path)
    usage = read_usage(tmp_path)
    assert usage.evictions > 0
    assert usage.created_tokens == 2 * (len(files) + usage.evictions)


def test_counts_are_those_of_all_processes(tmp_path: Path, model: Any) -> None:
    for _ in range(2):
        prefill(model, random_prompt(100), SNAPKV, store=small_store(10**9, tmp_path))
    read = (100 - WINDOW) // BLOCK * BLOCK
    assert read_usage(tmp_path) == Usage(hits=1, misses=1, read_tokens=read, created_tokens=96)
    (tmp_path / "usage.json").write_text("{")
    assert read_usage(tmp_path) == NOTHING


def test_clear_removes_what_is_ours_and_nothing_else(tmp_path: Path, model: Any) -> None:
    store, policy = small_store(10**9, tmp_path), SnapKV(40, WINDOW)
    for namespace in ("a", "b"):
        prefill(model, random_prompt(100), policy, store=store.within(namespace))
    theirs = [tmp_path / "notes.txt", list_owners(tmp_path)[0].folder / "notes.txt"]
    for path in theirs:
        path.write_text("mine")
    store.clear("a")
    assert prefill(model, random_prompt(100), policy, store=store.within("b")).cache_read_tokens == 80
    assert prefill(model, random_prompt(100), policy, store=store.within("a")).cache_read_tokens == 0
    store.clear()
    assert scan(tmp_path) == []
    assert all(path.read_text() == "mine" for path in theirs)
    assert prefill(model, random_prompt(100), policy, store=store.within("b")).cache_read_tokens == 0


def test_a_subfolder_that_does_not_say_whose_it_is(folder: BlockFolder) -> None:
    """It stays where one namespace is cleared, with a warning; its next prompt says it again."""
    put(folder, [1, 2])
    manifest = list_owners(folder.path)[0].folder / "manifest.json"
    manifest.write_text("")
    with pytest.warns(UserWarning, match="does not say whose it is, and stays"):
        folder.clear(OWNER.namespace)
    assert found(folder, [1, 2]) == [True]
    put(folder, [1, 2, 3, 4])
    folder.clear(OWNER.namespace)
    assert found(folder, [1, 2]) == [False]
    put(folder, [1, 2])
    manifest.write_text("")
    folder.clear()
    assert scan(folder.path) == []


def test_nobody_else_may_read_the_folder(folder: BlockFolder) -> None:
    put(folder, [1, 2])
    assert folder.path.stat().st_mode & 0o077 == 0
    assert list_owners(folder.path)[0].folder.stat().st_mode & 0o077 == 0


def test_prompts_of_other_processes_are_found_while_this_one_runs(tmp_path: Path, model: Any) -> None:
    mine, theirs = small_store(10**9, tmp_path), small_store(10**9, tmp_path)
    prompt = Prompt(random_prompt(100).ids)
    assert prefill(model, prompt, SNAPKV, store=mine).cache_read_tokens == 0
    assert prefill(model, prompt, SNAPKV, store=theirs).cache_read_tokens == 80
