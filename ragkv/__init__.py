"""ragkv: cited answers over long retrieved contexts on a compressed KV cache."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragkv.answer import Answer, ask, stream_answer
    from ragkv.config import SamplingParams
    from ragkv.documents import Document
    from ragkv.engine import Engine
    from ragkv.index import Index
    from ragkv.policies import FullKV, SnapKV, StreamingLLM

__all__ = ["Answer", "Document", "Engine", "FullKV", "Index", "SamplingParams", "SnapKV", "StreamingLLM"]
__all__ += ["ask", "stream_answer"]

_HOME = {"ask": "answer", "stream_answer": "answer", "SamplingParams": "config", "Document": "documents"}
_HOME |= dict.fromkeys(("FullKV", "SnapKV", "StreamingLLM"), "policies")


def __getattr__(name: str) -> object:
    """Import on first use: torch takes seconds that `ragkv --help` should not wait for."""
    if name == "__version__":
        return version("ragkv")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, name.lower())}"), name)
