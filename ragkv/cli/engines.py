"""The engine that the options describe, loaded with progress bars and without the libraries' own chatter."""

from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.cli.output import ProgressBars
from ragkv.errors import ModelError
from ragkv.packaged import PACKAGED

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.options import ChatOptions


def check_model(model: str) -> None:
    """Raise a ModelError for a model that is certain not to exist, before anything slow happens."""
    from ragkv.models import resolve

    packaged = PACKAGED.get(model)
    if packaged is None and Path(model).suffix != ".gguf":
        resolve(model)
    if packaged is not None and packaged.kind != "causal-lm":
        raise ModelError(f"{model} is an embedding model: it cannot answer; see `ragkv models list`")


def quieten() -> None:
    """No log lines and loading bars of the libraries; the bars of downloads from the hub stay."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    enable_progress_bars()


def load_engine(options: "ChatOptions", progress: ProgressBars) -> "Engine":
    """Fetch or convert the model if need be, and load it; what that took is no part of an answer's peak memory."""
    from ragkv import peak_memory
    from ragkv.models import resolve

    resolve(options.model, progress)
    with progress.waiting(f"loading {options.model}"):
        engine = options.engine()
    peak_memory.reset(engine.model.device)
    return engine
