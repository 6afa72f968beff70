"""A session as one safetensors file: the cache's tensors, and everything else as JSON in the file's metadata.

Nothing in the file is trusted: format, model and hash are checked, what they hold (`session_checks`) before anything is
done with it, and no format can hold code.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ragkv.engine import Engine
from ragkv.errors import DocumentError
from ragkv.kv_store.keys import model_digest
from ragkv.policies import StreamingLLM
from ragkv.storage import replace_file
from ragkv.streaming.cache import StreamingCache
from ragkv.streaming.layout import Layout, layout_for
from ragkv.streaming.long_term import ThreadMemory
from ragkv.streaming.reading import State
from ragkv.streaming.session import Session
from ragkv.streaming.session_checks import check_cache, check_chat, check_turns
from ragkv.streaming.turns import Turn, Turns
from ragkv.streaming.window import Window
from ragkv.tools import ToolSpec

SomeSession = TypeVar("SomeSession", bound=Session)
FORMAT, VERSION = "ragkv-session", 1
CHAT = ("unread", "base", "pending", "recalled", "question")  # fields of a session's state


def write_session(session: Session, state: State, file: Path) -> None:
    """Write a session, replacing a file that is there.

    Raises:
        DocumentError: the file cannot be written.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.window.cache.state().items()}
    written = {
        "format": FORMAT,
        "version": VERSION,
        "model": model_digest(session.engine.model),
        "sha256": _digest(tensors),
        "policy": asdict(session.layout.policy),
        "settings": {
            "system": session.transcript.system,
            "tools": [tool.to_openai() for tool in session.transcript.tools],
            "recall_tokens": session.recall_tokens,
            "max_turn_tokens": session.max_turn_tokens,
            "chunk_size": session.chunk_size,
        },
        "turns": asdict(state.window.turns),
        "tokens_seen": state.window.tokens_seen,
        "chat": {name: getattr(state, name) for name in CHAT},
    }
    data = save(tensors, metadata={FORMAT: json.dumps(written)})
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, data)
    except OSError as error:
        raise DocumentError(f"{file}: cannot write the session ({error.strerror}): choose another place") from error


def read_session(kind: type[SomeSession], engine: Engine, file: Path, memory: ThreadMemory | None) -> SomeSession:
    """Go on with what `write_session` wrote.

    Raises:
        DocumentError: there is none, it is damaged, or another model or version of ragkv wrote it.
    """
    written, tensors = _read(engine, file)
    if written.get("format") != FORMAT or written.get("version") != VERSION:
        raise _unusable(file, f"is none of version {VERSION}")
    if written.get("model") != model_digest(engine.model):
        raise _unusable(file, f"belongs to another model than {engine.loaded.name}")
    if written.get("sha256") != _digest(tensors):
        raise _unusable(file, "differs from its hash")
    try:
        settings = dict(written["settings"])
        settings["tools"] = [ToolSpec.from_openai(tool) for tool in settings["tools"]]
        session = kind(engine, layout_for(engine, StreamingLLM(**written["policy"])), memory=memory, **settings)
        check_cache(tensors, session.layout)
        check_chat(written["chat"], engine.model.config.get_text_config().vocab_size)
        session.restore(_state(written, tensors, session.layout))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise _unusable(file, f"is damaged ({error})") from error
    return session


def _read(engine: Engine, file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(file, framework="pt", device=str(engine.model.device)) as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        written = json.loads(metadata.get(FORMAT, "{}"))
    except FileNotFoundError as error:
        raise DocumentError(f"{file}: no session there: check the path") from error
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise _unusable(file, f"cannot be read ({type(error).__name__})") from error
    return written if isinstance(written, dict) else {}, tensors


def _state(written: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: Layout) -> State:
    cache = StreamingCache.restored(layout, tensors)
    turns = Turns([Turn(**turn) for turn in written["turns"]["live"]], int(written["turns"]["count"]))
    check_turns(turns, max(0, len(cache) - cache.pinned))
    window = Window(cache, turns, int(written["tokens_seen"]))
    chat = {name: written["chat"][name] for name in CHAT}
    return State(window, **{**chat, "recalled": tuple(chat["recalled"])})


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _unusable(file: Path, what: str) -> DocumentError:
    return DocumentError(f"{file}: the session {what}: start a new one")
