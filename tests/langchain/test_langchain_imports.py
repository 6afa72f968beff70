"""The front door of langchain_ragkv, and what a missing extra looks like."""

import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import langchain_ragkv
import ragkv
from langchain_ragkv import __all__


def test_all() -> None:
    assert sorted(__all__) == ["ChatSnapKV", "Citation", "CitedAnswer", "RagkvRetriever", "create_cited_answer_chain"]
    assert all(hasattr(langchain_ragkv, name) for name in __all__)


def test_without_langchain_core_the_error_names_the_pip_command() -> None:
    script = """
import sys
sys.modules["langchain_core"] = None
from ragkv.errors import MissingExtra
try:
    import langchain_ragkv
except MissingExtra as error:
    assert isinstance(error, ImportError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'langchain_ragkv needs langchain-core: pip install "ragkv[langchain]"'
    assert "langchain" in metadata("ragkv").get_all("Provides-Extra", [])


def test_the_core_does_not_import_langchain() -> None:
    imports = re.compile(r"^\s*(from|import) lang(chain|graph)", re.MULTILINE)
    core = Path(ragkv.__file__).parent
    assert [str(file) for file in core.rglob("*.py") if imports.search(file.read_text())] == []
