"""`ragkv index`: documents embedded once and saved in a folder that `ragkv ask` takes as its path."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from ragkv.cli import options
from ragkv.cli.engines import check_model, load_engine, quieten
from ragkv.cli.output import ProgressBars, say, write
from ragkv.cli.sources import check_paths, open_index
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.index import Index
    from ragkv.options import ChatOptions

_FILE_OVERHEAD = 1.02  # headers, generously


def index(
    paths: options.PathsArgument,
    out: Annotated[Path, typer.Option(help="The folder to write; an index that is there is replaced.")],
    skip_unreadable: options.SkipUnreadableOption = False,
    with_kv: Annotated[
        Path | None,
        typer.Option(
            help="Also read every passage and keep its K/V in this folder, for `ragkv ask --kv-dir … --recompute …`.",
            show_default="none",
        ),
    ] = None,
    kv_disk_bytes: options.KVDiskBytesOption = None,
    model: options.ModelOption = options.DEFAULT_MODEL,
    dtype: options.DTypeOption = None,
    device: options.DeviceOption = None,
) -> None:
    """Index documents and save the index in a folder, to be given to `ragkv ask`."""
    check_paths(paths)
    if with_kv is None:
        _refuse_kv_options(kv_disk_bytes, model, dtype, device)
    folder = None if with_kv is None else str(with_kv)
    chosen = options.chosen(
        "full", model=model, dtype=dtype, device=device, kv_dir=folder, kv_memory_bytes=0, kv_disk_bytes=kv_disk_bytes
    )
    if with_kv is not None:
        check_model(model)
    quieten()
    with ProgressBars() as progress:
        built = open_index(paths, progress, skip_unreadable=skip_unreadable)
    built.save(out)
    say(f"{len(built):,} passages indexed")
    if with_kv is not None:
        _read_passages(built, chosen)
    write(f"{out}\n")


def _refuse_kv_options(kv_disk_bytes: int | None, model: str, dtype: str | None, device: str | None) -> None:
    given = {
        "kv-disk-bytes": kv_disk_bytes is not None,
        "model": model != options.DEFAULT_MODEL,
        "dtype": dtype is not None,
        "device": device is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(f"--{name} means nothing without --with-kv, since no model reads the passages: leave it out")


def _read_passages(index: "Index", chosen: "ChatOptions") -> None:
    """Put the K/V of all passages into the folder, one by one, so that a second call goes on where this one stopped."""
    from ragkv.document_blocks import read_documents

    with ProgressBars() as progress:
        engine = load_engine(chosen, progress)
    _announce(index, engine, chosen)
    with ProgressBars() as progress:
        read_documents(engine, index.passages, progress=progress)


def _announce(index: "Index", engine: "Engine", chosen: "ChatOptions") -> None:
    """Say how many bytes are to be written, or refuse if they do not fit.

    Raises:
        ConfigError: the folder's bound is lower than that, or the disk has less room.
    """
    from ragkv.document_blocks import bytes_to_store
    from ragkv.kv_store.folder_files import contents

    folder = Path(chosen.kv_dir or "")
    held = sum(owner.bytes for owner in contents(folder))
    missing = int(bytes_to_store(engine, index.passages) * _FILE_OVERHEAD)
    say(f"K/V of the passages: about {decimal(missing)} to compute and write to {folder}, which holds {decimal(held)}")
    if missing + held > chosen.kv_disk_bytes:
        raise ConfigError(
            f"--kv-disk-bytes {chosen.kv_disk_bytes} is too small for {missing + held} bytes of K/V: raise it, or "
            "index fewer documents"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if missing > (free := shutil.disk_usage(folder).free):
        raise ConfigError(f"--with-kv {folder}: the disk has {free} bytes left, and {missing} are needed")
