"""What the wheel holds, which extras it declares, and that every error which names an extra names a real one."""

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("ragkv", "integrations", "evals")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built without network by the backend that is installed."""
    out = tmp_path_factory.mktemp("wheel")
    build = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(out)], cwd=ROOT, capture_output=True, text=True, check=True)
    return zipfile.ZipFile(out / done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    """Header fields of the wheel's METADATA."""
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    message = Parser().parsestr(wheel.read(name).decode())
    return {key: message.get_all(key, []) for key in ("Provides-Extra", "Requires-Dist", "Requires-Python")}


def test_top_level_names(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {
        "ragkv",
        "langchain_ragkv",
        "llama_index",
        "ragkv_evals",
    }


def test_llama_index_stays_a_namespace(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert "llama_index/llms/ragkv/__init__.py" in names
    assert not names & {"llama_index/__init__.py", "llama_index/llms/__init__.py"}


@pytest.mark.parametrize("package", ["ragkv", "langchain_ragkv", "llama_index/llms/ragkv", "ragkv_evals"])
def test_packages_are_typed(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_data_travels_with_its_attribution(wheel: zipfile.ZipFile) -> None:
    data = {Path(name).name for name in wheel.namelist() if name.startswith("ragkv_evals/data/")}
    assert {"hotpotqa_sample.jsonl", "ATTRIBUTION.md"} <= data
    assert any(name.startswith("ragkv/templates/") for name in wheel.namelist())


def test_core_needs_no_framework(metadata: dict[str, list[str]]) -> None:
    core = [line for line in metadata["Requires-Dist"] if "extra ==" not in line]
    assert not [line for line in core if re.match(r"(langchain|llama|flash|kvpress|ray)", line)]


def test_errors_name_real_extras(metadata: dict[str, list[str]]) -> None:
    named = {
        extra.strip()
        for folder in SOURCES
        for file in (ROOT / folder).rglob("*.py")
        for match in re.finditer(r"ragkv\[([\w, -]+)\]", file.read_text())
        for extra in match[1].split(",")
    }
    assert named, "no error names an extra: this test looks for the wrong thing"
    assert named <= set(metadata["Provides-Extra"])


@pytest.mark.parametrize("module", ["ragkv", "ragkv.cli"])
def test_light_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
