"""An index on disk: passages (JSON lines), vectors (safetensors), and a manifest that vouches for both.

Nothing in the folder is trusted: versions, names, hashes and counts are checked, and no format can hold code.
The manifest is replaced last, in one step, so a reader finds the old index or the new one.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ragkv.documents import JSON, Document, parse_row
from ragkv.embedding import Vectors
from ragkv.errors import DocumentError
from ragkv.storage import replace_file

MANIFEST = "manifest.json"
FORMAT = "ragkv-index"
VERSION = 1

DATA_FILE = re.compile(r"(passages|vectors)-[0-9a-f]{64}\.(jsonl|safetensors)")


def write_index(folder: Path, passages: Sequence[Document], vectors: Vectors, embedder: str) -> None:
    """Writes passages and their vectors (count, dimension), replacing an index that is there.

    Raises:
        DocumentError: the folder cannot be written, or holds files that are not an index.
    """
    rows = "".join(json.dumps(passage.to_row()) + "\n" for passage in passages)
    files = {"passages": rows.encode("ascii"), "vectors": save({"vectors": vectors})}
    hashes: dict[str, str] = {kind: hashlib.sha256(data).hexdigest() for kind, data in files.items()}
    manifest: dict[str, JSON] = {
        "format": FORMAT,
        "version": VERSION,
        "embedder": embedder,
        "dimension": int(vectors.shape[1]),
        "count": len(passages),
        "sha256": dict(hashes),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(folder)
        for kind, data in files.items():
            replace_file(_data_file(folder, kind, hashes[kind]), data)
        replace_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        kept = {_data_file(folder, kind, sha256) for kind, sha256 in hashes.items()}
        for path in folder.iterdir():
            if DATA_FILE.fullmatch(path.name) and path not in kept:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise DocumentError(f"{folder}: cannot write the index ({error.strerror}): choose another folder") from error


def read_index(folder: Path, embedder: str) -> tuple[list[Document], Vectors]:
    """Reads what `write_index` wrote: passages, and vectors of shape (count, dimension).

    Raises:
        DocumentError: anything is missing, damaged, foreign, or of another embedder or version.
    """
    manifest = _read_manifest(folder)
    if manifest.get("embedder") != embedder:
        raise _unusable(folder, f"was built with {manifest.get('embedder')}, not {embedder}")
    try:
        passages = _parse_passages(_read_data(folder, manifest, "passages"))
        vectors = load(_read_data(folder, manifest, "vectors"))["vectors"]
    except (ValueError, RecursionError, KeyError, DocumentError, SafetensorError) as error:
        raise _unusable(folder, f"is damaged ({error})") from error
    shape = (manifest.get("count"), manifest.get("dimension"))
    if not passages or vectors.shape != shape or len(passages) != shape[0] or vectors.dtype != np.float32:
        raise _unusable(folder, f"is damaged ({len(passages)} passages, vectors {vectors.shape}, not {shape})")
    if not np.isfinite(vectors).all():
        raise _unusable(folder, "is damaged (vectors that are not finite)")
    return passages, vectors


def _unusable(folder: Path, what: str) -> DocumentError:
    return DocumentError(f"{folder}: the index {what}: rebuild it from the documents")


def _read_manifest(folder: Path) -> dict[str, JSON]:
    path = folder / MANIFEST
    if not path.is_file():
        raise DocumentError(f"{folder}: no index there: build one from the documents")
    try:
        manifest: JSON = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(folder, f"has no readable manifest ({type(error).__name__})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DocumentError(f"{folder}: not an index of ragkv: build one from the documents in another folder")
    if manifest.get("version") != VERSION:
        raise _unusable(folder, f"has version {manifest.get('version')}, this ragkv reads {VERSION}")
    return manifest


def _data_file(folder: Path, kind: str, sha256: str) -> Path:
    return folder / f"{kind}-{sha256}.{'jsonl' if kind == 'passages' else 'safetensors'}"


def _read_data(folder: Path, manifest: dict[str, JSON], kind: str) -> bytes:
    """The bytes of a data file, as hashed in the manifest; its name cannot lead out of the folder."""
    hashes = manifest.get("sha256")
    sha256 = hashes.get(kind) if isinstance(hashes, dict) else None
    path = _data_file(folder, kind, str(sha256))
    if not DATA_FILE.fullmatch(path.name):
        raise ValueError(f"no hash of its {kind}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{kind}: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{kind} differ from their hash")
    return data


def _parse_passages(data: bytes) -> list[Document]:
    passages: list[Document] = []
    for number, line in enumerate(data.splitlines(), 1):
        row: JSON = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"passage {number} is not an object")
        passages.append(parse_row(row, f"passage {number}"))
    return passages


def _refuse_foreign(folder: Path) -> None:
    foreign = [path.name for path in folder.iterdir() if not DATA_FILE.fullmatch(path.name)]
    if MANIFEST in foreign:
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
        except ValueError:
            return  # a damaged manifest: rebuilding is the cure
        if isinstance(manifest, dict) and manifest.get("format") == FORMAT:
            return
    if any(not name.startswith(".") for name in foreign):
        raise DocumentError(f"{folder}: holds other files ({sorted(foreign)[0]}): choose an empty folder")
