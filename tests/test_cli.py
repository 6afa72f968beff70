"""The command line: what is on stdout and stderr, exit codes, and one real answer by the smallest packaged model."""

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from ragkv import options as api
from ragkv import registry
from ragkv.answer import Overflow
from ragkv.cli import main, options, sources
from ragkv.cli.ask import ask
from ragkv.cli.output import ProgressBars, printable, trimmed
from ragkv.documents import Document
from ragkv.embedding import Vectors
from ragkv.engine import Engine
from ragkv.errors import RagkvError
from ragkv.prefill import Prefilled, prefill
from ragkv.progress import Progress
from ragkv.reply import Chunk, Completion, Stats
from tiny import tiny_engine

ENGINE = api.ChatOptions.engine
QUESTION = "Who keeps the lighthouse?"
TEXTS = {
    "keeper.txt": "Ada keeps the lighthouse. She lights the lamp at dusk.",
    "baker.md": "# The baker\n\nBen bakes bread before dawn.",
    "page.html": "<title>Cook</title><p>Cyd cooks soup at noon.</p>",
}


class Run:
    """What a call of the command left behind."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Cli = Callable[..., Run]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Calls `ragkv` with arguments in an empty folder, with a cache folder of its own."""
    monkeypatch.setenv("RAGKV_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("ragkv.download.download_wheel", lambda *_: pytest.fail("a test must not download"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def call(*arguments: str) -> Run:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        return Run(exit_.value.code, captured.out, captured.err)

    return call


class WordEmbedder:
    """Bags of hashed words."""

    name = "words"
    max_tokens = 100

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        vectors = np.zeros((len(texts), 64), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                row[zlib.crc32(word.strip(".?").encode()) % 64] += 1
        if progress:
            progress("embedding", len(texts), len(texts))
        return vectors


class ScriptedEngine(Engine):
    """A tiny model that is read in earnest and whose reply is a given text."""

    reply = "Ada [1]"
    error: BaseException | None = None

    def stream(self, prompts: Any, *args: Any, **kwargs: Any) -> Iterator[Chunk]:
        next(super().stream(prompts, *args, **kwargs))
        stats = Stats(len(prompts), 5, 0.25, 8.0, 4_000_000, 1_000_000, 512, 32, 0)
        for character in self.reply:
            yield Chunk(0, character)
            if self.error is not None:
                raise self.error
        yield Chunk(0, "", Completion(self.reply, (5, 6, 7, 8, 9), "stop", stats))


@pytest.fixture(scope="session")
def scripted() -> ScriptedEngine:
    return ScriptedEngine(tiny_engine(context_length=8192).loaded)


@pytest.fixture
def folder(cli: Cli) -> str:
    """A folder of three small documents."""
    Path("docs").mkdir()
    for name, text in TEXTS.items():
        Path("docs", name).write_text(text)
    return "docs"


@pytest.fixture
def fakes(scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    """The scripted engine and the word embedder instead of downloads."""
    monkeypatch.setattr(sources, "load_embedder", lambda progress: WordEmbedder())
    monkeypatch.setattr("ragkv.models.resolve", lambda model, progress=None: str(model))
    monkeypatch.setattr(api.ChatOptions, "engine", lambda self: scripted)
    monkeypatch.setattr(scripted, "reply", ScriptedEngine.reply)
    monkeypatch.setattr(scripted, "error", None)
    return scripted


class TestAsk:
    def test_stdout_is_the_answer_and_stderr_the_rest(self, cli: Cli, folder: str, fakes: ScriptedEngine) -> None:
        fakes.reply = "\n Ada [1], at dusk. \n"
        run = cli("ask", folder, QUESTION)
        assert (run.code, run.out) == (0, "Ada [1], at dusk.\n")
        assert "[1] keeper — docs/keeper.txt" in run.err
        for words in ("prompt tokens", "documents  ", "cited", "0.2 s", "8.0", "4.0 MB → 1.0 MB (4.0× smaller)"):
            assert words in run.err

    def test_json_is_one_object_and_nothing_else(self, cli: Cli, folder: str, fakes: ScriptedEngine) -> None:
        fakes.reply = "Ada [1][9]"
        run = cli("ask", folder, QUESTION, "--json")
        answer = json.loads(run.out)
        assert run.code == 0
        assert run.out.count("\n") == 1
        assert (answer["answer"], answer["citations"], answer["invalid_citations"]) == ("Ada [1][9]", [1], [9])
        assert [document["number"] for document in answer["documents"]] == [1, 2, 3]
        assert [document["cited"] for document in answer["documents"]] == [True, False, False]
        assert answer["documents"][0]["source"] == "docs/keeper.txt"
        stats = answer["stats"]
        assert stats["prompt_tokens"] > 500
        assert (stats["ttft_s"], stats["decode_tokens_per_s"], stats["finish_reason"]) == (0.25, 8.0, "stop")
        assert (stats["kv_bytes_full"], stats["kv_bytes_kept"]) == (4_000_000, 1_000_000)

    def test_warnings(self, cli: Cli, folder: str, fakes: ScriptedEngine) -> None:
        fakes.reply = "Nobody [7]"
        run = cli("ask", folder, QUESTION)
        assert "cites no document" in run.err
        assert "documents that do not exist: 7" in run.err

    def test_titles_with_wrong_numbers(self, cli: Cli, fakes: ScriptedEngine) -> None:
        rows = [{"text": f"{name} keeps it.", "title": name} for name in ("Ada", "Bob")]
        Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fakes.reply = "Nobody\nDocuments: [2] Ada [1] Bob"
        run = cli("ask", "a.jsonl", QUESTION, "--json")
        shown = {document["number"]: document["title"] for document in json.loads(run.out)["documents"]}
        assert [shown[number] for number in json.loads(run.out)["citations"]] == ["Ada", "Bob"]
        fakes.reply = "Nobody\nDocuments: [7] Ada"
        assert "with the numbers of other documents (7)" in " ".join(cli("ask", "a.jsonl", QUESTION).err.split())

    def test_escape_sequences_do_not_reach_a_terminal(
        self, cli: Cli, fakes: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        Path("evil.jsonl").write_text(json.dumps({"text": "Ada keeps it.", "title": "\x1b]0;pwned\x07T\x9b31m"}) + "\n")
        fakes.reply = "\x1b[2JAda [1]\x9b"
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        run = cli("ask", "evil.jsonl", QUESTION)
        assert run.out == "[2JAda [1]\n"
        assert not set(run.err) & {"\x1b", "\x9b", "\x07"}
        assert "]0;pwnedT31m" in run.err

    def test_markup_in_a_title_is_only_text(self, cli: Cli, fakes: ScriptedEngine) -> None:
        Path("a.jsonl").write_text(json.dumps({"text": "Ada keeps it.", "title": "[bold]Ada[/bold] [/oops]"}) + "\n")
        assert "[1] [bold]Ada[/bold] [/oops]" in cli("ask", "a.jsonl", QUESTION).err

    def test_options_reach_the_engine(
        self, cli: Cli, folder: str, fakes: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[api.ChatOptions] = []

        def engine(self: api.ChatOptions) -> Engine:
            seen.append(self)
            return fakes

        monkeypatch.setattr(api.ChatOptions, "engine", engine)
        flags = "--model m/m --max-capacity-prompt 99 --window-size 17 --kernel-size 5 --pooling max --max-tokens 3"
        flags += " --temperature 0.5 --seed 4 --dtype float32 --device cpu --context-tokens 777 --kv-dir kept"
        assert cli("ask", folder, QUESTION, *flags.split()).code == 0
        expected = api.ChatOptions(
            model="m/m",
            max_capacity_prompt=99,
            window_size=17,
            kernel_size=5,
            pooling="max",
            max_tokens=3,
            temperature=0.5,
            seed=4,
            dtype="float32",
            device="cpu",
            context_tokens=777,
            kv_dir="kept",
            kv_memory_bytes=0,
        )
        assert seen == [expected]

    def test_context_tokens_bound_the_documents(self, cli: Cli, folder: str, fakes: ScriptedEngine) -> None:
        answer = json.loads(cli("ask", folder, QUESTION, "--context-tokens", "60", "--json").out)
        assert [document["title"] for document in answer["documents"]] == ["keeper"]

    def test_a_saved_index_is_a_source(self, cli: Cli, folder: str, fakes: ScriptedEngine) -> None:
        saved = cli("index", folder, "--out", "saved")
        assert (saved.code, saved.out) == (0, "saved\n")
        assert "3 passages" in saved.err
        answer = json.loads(cli("ask", "saved", QUESTION, "--json").out)
        assert answer["documents"][0]["source"] == "docs/keeper.txt"

    def test_unreadable_files_can_be_skipped(self, cli: Cli, folder: str, fakes: ScriptedEngine) -> None:
        Path(folder, "bad.txt").write_bytes(b"\0\1")
        run = cli("ask", folder, QUESTION, "--skip-unreadable")
        assert run.code == 0
        assert "warning: docs/bad.txt: binary" in run.err

    def test_ctrl_c_is_one_line_and_130(self, cli: Cli, folder: str, fakes: ScriptedEngine) -> None:
        fakes.error = KeyboardInterrupt()
        run = cli("ask", folder, QUESTION)
        assert run.code == 130
        assert run.err.splitlines()[-1] == "ragkv: interrupted"
        assert "Traceback" not in run.err

    def test_unexpected_errors_are_not_hidden(self, folder: str, fakes: ScriptedEngine) -> None:
        fakes.error = ZeroDivisionError("a bug")
        with pytest.raises(ZeroDivisionError, match="a bug"):
            main(["ask", folder, QUESTION])

    def test_a_prompt_too_long_names_the_ways_out(self, cli: Cli, folder: str, fakes: ScriptedEngine) -> None:
        run = cli("ask", folder, QUESTION, "--max-tokens", "8100")
        assert run.code == 2
        for words in ("8192", "8100", "--context-tokens", "--on-overflow drop_documents"):
            assert words in run.err.splitlines()[-1]


BAD_INPUT = {
    "no such file": (["ask", "missing.txt", QUESTION], "no such file"),
    "empty folder": (["ask", "empty", QUESTION], "no files to read"),
    "binary file": (["ask", "binary.txt", QUESTION], "binary"),
    "unknown suffix": (["ask", "image.png", QUESTION], "convert it"),
    "empty question": (["ask", "a.txt", " "], "question is empty"),
    "no question": (["ask", "a.txt", "b.txt"], "no question"),
    "question that is not text": (["ask", "a.txt", "\udcff?"], "UTF-8"),
    "budget smaller than the window": (["ask", "a.txt", QUESTION, "--max-capacity-prompt", "16"], "observation window"),
    "budget smaller than the sinks": (
        ["ask", "a.txt", QUESTION, "--policy", "streaming", "--max-capacity-prompt", "4"],
        "sink",
    ),
    "unknown model": (["ask", "a.txt", QUESTION, "--model", "qwen-coder"], "did you mean"),
    "embedding model": (["ask", "a.txt", QUESTION, "--model", "all-minilm-l6-v2"], "embedding model"),
    "missing gguf": (["ask", "a.txt", QUESTION, "--model", "m.gguf"], "no file"),
    "unknown policy": (["ask", "a.txt", QUESTION, "--policy", "h2o"], "'full', 'snapkv', 'streaming'"),
    "option of another policy": (["ask", "a.txt", QUESTION, "--policy", "full", "--pooling", "max"], "--policy snapkv"),
    "unknown dtype": (["ask", "a.txt", QUESTION, "--dtype", "int7"], "bfloat16"),
    "unknown device": (["ask", "a.txt", QUESTION, "--device", "gpu"], "'cpu' or 'cuda:0'"),
    "even kernel": (["ask", "a.txt", QUESTION, "--kernel-size", "4"], "odd"),
    "negative window": (["ask", "a.txt", QUESTION, "--window-size", "-1"], "at least 1"),
    "negative max tokens": (["ask", "a.txt", QUESTION, "--max-tokens", "-1"], "at least 1"),
    "negative temperature": (["ask", "a.txt", QUESTION, "--temperature", "-1"], "at least 0"),
    "no context tokens": (["ask", "a.txt", QUESTION, "--context-tokens", "0"], "at least 1"),
    "not a number": (["ask", "a.txt", QUESTION, "--max-tokens", "many"], "--max-tokens"),
    "no paths": (["ask", QUESTION], "PATH"),
    "unknown option": (["ask", "a.txt", QUESTION, "--modle", "m"], "--modle"),
    "unknown command": (["aks"], "aks"),
    "index beside documents": (["ask", "saved", "a.txt", QUESTION], "alone"),
    "damaged index": (["ask", "saved", QUESTION], "manifest"),
    "explain without a question": (["explain", "a.txt"], "no question"),
    "explain an empty question": (["explain", "a.txt", QUESTION, ""], "question is empty"),
    "explain into a folder": (["explain", "a.txt", QUESTION, "--out", "empty"], "is a folder"),
    "explain into no folder": (["explain", "a.txt", QUESTION, "--out", "no/where.html"], "there is no folder"),
    "explain a missing file": (["explain", "a.txt", "gone.md", QUESTION], "gone.md: no such file"),
    "index without a folder": (["index", "a.txt"], "--out"),
    "unknown packaged model": (["models", "fetch", "gpt-7"], "choose one of"),
    "path of a model that is not here": (["models", "path", "smollm2-135m"], "ragkv models fetch smollm2-135m"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "load_embedder", lambda progress: WordEmbedder())
    for name in ("a.txt", "b.txt", "image.png"):
        Path(name).write_text("Ada keeps the lighthouse.")
    Path("binary.txt").write_bytes(b"\0\1\2")
    Path("empty").mkdir()
    Path("saved").mkdir()
    Path("saved", "manifest.json").write_text("{")
    Path("saved", f"passages-{'0' * 64}.jsonl").write_text("")
    run = cli(*arguments)
    assert (run.code, run.out) == (2, "")
    error = run.err.splitlines()[-1]  # stages that were begun before it are lines of their own
    assert error.startswith("ragkv: error: ")
    assert words in error
    assert all(line.endswith("...") for line in run.err.splitlines()[:-1])


def test_without_arguments_there_is_help(cli: Cli) -> None:
    run = cli()
    assert run.code == 0
    assert all(command in run.out for command in ("ask", "index", "explain", "models", "info"))


def test_version(cli: Cli) -> None:
    assert cli("--version").out.startswith("ragkv 0.")


@pytest.mark.parametrize("arguments", [["--help"], ["ask", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from ragkv.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit: pass\n"
        "print(*[m for m in ('torch', 'transformers', 'sentence_transformers', 'faiss', 'numpy') if m in sys.modules],"
        " file=sys.stderr)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stderr == "\n"


def test_defaults_and_choices_are_those_of_the_api() -> None:
    assert api.ChatOptions().model == options.DEFAULT_MODEL
    assert set(get_args(options.PolicyName)) == set(get_args(api.PolicyName))
    assert get_args(get_args(signature(ask).parameters["on_overflow"].annotation)[0]) == get_args(Overflow)
    shown = get_args(options.KVDiskBytesOption)[1].show_default
    assert f"{api.ChatOptions().kv_disk_bytes / 2**30:g} GiB" == shown


def test_models_list(cli: Cli) -> None:
    assert "smollm2-135m" in cli("models", "list").out
    rows = json.loads(cli("models", "list", "--json").out)
    assert {row["name"]: row["path"] for row in rows}["smollm2-135m"] is None


def test_info(cli: Cli) -> None:
    assert "threads" in cli("info").out
    found = json.loads(cli("info", "--json").out)
    assert found["cache_bytes"] == {"models": 0, "gguf": 0, "indexes": 0}


class TestReuse:
    @pytest.fixture
    def real(self, fakes: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """The tiny model, with the store that the options ask for."""
        monkeypatch.setattr(registry, "_stores", {})
        monkeypatch.setattr(api, "shared_model", lambda *_, **__: fakes.loaded)
        monkeypatch.setattr(api.ChatOptions, "engine", ENGINE)

    def test_a_second_call_finds_what_the_first_one_read(self, cli: Cli, folder: str, real: None) -> None:
        call = ("ask", folder, "--kv-dir", "kv", "--max-tokens", "2")
        assert "not read again" not in cli(*call, QUESTION).err
        registry._stores.clear()  # as in another process
        run = cli(*call, "Who lights the lamp?")
        reused = re.search(r"of them not read again +([\d,]+)", run.err)
        assert reused
        found = json.loads(cli("cache", "info", "kv", "--json").out)
        assert found["read_tokens"] == int(reused[1].replace(",", ""))
        assert (found["hits"], found["misses"], found["evictions"]) == (1, 1, 0)
        (row,) = found["contents"]
        assert row["namespace"] == ""
        assert row["blocks"] * 128 == found["created_tokens"]
        assert (row["blocks"], row["bytes"]) == (found["blocks"], found["bytes"])
        assert row["blocks"] == len(list(Path("kv").rglob("*.safetensors")))
        table = cli("cache", "info", "kv").out
        assert row["last_used"] in table
        assert f"read tokens {found['read_tokens']:,}" in table

    def test_questions_of_one_page_share_their_documents(
        self, cli: Cli, folder: str, real: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cli("explain", folder, QUESTION, "Who bakes bread?", "--max-tokens", "2")
        (store,) = registry._stores.values()
        assert (store.info().usage.hits, store.info().usage.misses) == (1, 1)

    def test_without_a_folder_one_question_keeps_nothing(self, cli: Cli, folder: str, real: None) -> None:
        cli("ask", folder, QUESTION, "--max-tokens", "2")
        assert registry._stores == {}

    def test_clear(self, cli: Cli, folder: str, real: None) -> None:
        cli("ask", folder, QUESTION, "--kv-dir", "kv", "--max-tokens", "2")
        Path("kv", "notes.txt").write_text("mine")
        size = json.loads(cli("cache", "info", "kv", "--json").out)["bytes"]
        assert cli("cache", "clear", "kv", "--namespace", "other").out == "0\n"
        assert cli("cache", "clear", "kv").out == f"{size}\n" != "0\n"
        assert json.loads(cli("cache", "info", "kv", "--json").out)["blocks"] == 0
        assert Path("kv", "notes.txt").read_text() == "mine"

    def test_passages_are_read_once_and_joined_later(self, cli: Cli, folder: str, real: None) -> None:
        call = ("index", folder, "--out", "saved", "--with-kv", "kv")
        run = cli(*call)
        assert (run.code, run.out) == (0, "saved\n")
        announced = re.search(r"about ([\d.]+ \w+) to compute", run.err)
        assert announced
        assert not announced[1].startswith("0 ")
        tokens = json.loads(cli("cache", "info", "kv", "--json").out)["created_tokens"]
        assert tokens > 0
        assert "about 0 bytes to compute" in cli(*call).err
        run = cli("ask", "saved", QUESTION, "--kv-dir", "kv", "--recompute", "0", "--max-tokens", "2")
        reused = re.search(r"of them not read again +([\d,]+)", run.err)
        assert run.code == 0
        assert reused
        assert json.loads(cli("cache", "info", "kv", "--json").out)["created_tokens"] == tokens

    def test_reading_passages_goes_on_where_it_was_stopped(
        self, cli: Cli, folder: str, real: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call, reads = ("index", folder, "--out", "saved", "--with-kv", "kv"), list[int]()

        def watched(*arguments: Any, **options: Any) -> Prefilled:
            if len(reads) == 1:
                raise KeyboardInterrupt
            reads.append(1)
            return prefill(*arguments, **options)

        monkeypatch.setattr("ragkv.document_blocks.prefill", watched)
        stopped = cli(*call)
        assert stopped.code == 130
        held = _folder_bytes("kv")
        monkeypatch.setattr("ragkv.document_blocks.prefill", prefill)
        whole, rest = _announced(stopped.err), _announced(cli(*call).err)
        assert 0 < rest < whole
        # What passages share at their beginning counts for each of them.
        assert 0.5 * whole < _folder_bytes("kv") < 1.01 * whole
        assert rest >= 0.99 * (_folder_bytes("kv") - held)

    def test_a_bound_of_no_folder_is_refused(self, cli: Cli, folder: str, real: None) -> None:
        run = cli("ask", folder, QUESTION, "--kv-disk-bytes", "1000")
        assert run.code == 2
        assert "--kv-disk-bytes means nothing without a folder of K/V (--kv-dir): leave it out" in run.err

    def test_the_folder_keeps_the_bound_that_is_given(self, cli: Cli, folder: str, real: None) -> None:
        call = ("ask", folder, QUESTION, "--kv-dir", "kv", "--max-tokens", "2")
        assert cli(*call, "--kv-disk-bytes", "10").code == 0
        assert _folder_bytes("kv") == 0
        assert cli(*call, "--kv-disk-bytes", "1000000000").code == 0
        assert _folder_bytes("kv") > 10

    def test_passages_that_do_not_fit_are_refused_before_they_are_read(self, cli: Cli, folder: str, real: None) -> None:
        run = cli("index", folder, "--out", "saved", "--with-kv", "kv", "--kv-disk-bytes", "1000")
        assert run.code == 2
        assert "--kv-disk-bytes 1000 is too small" in run.err
        assert not Path("kv").exists()
        assert Path("saved").is_dir()

    @pytest.mark.parametrize(
        "given", [("--model", "smollm2-135m"), ("--dtype", "float32"), ("--device", "cpu"), ("--kv-disk-bytes", "9")]
    )
    def test_options_of_reading_are_refused_without_it(self, cli: Cli, folder: str, given: tuple[str, str]) -> None:
        run = cli("index", folder, "--out", "saved", *given)
        assert run.code == 2
        assert f"{given[0]} means nothing without --with-kv" in run.err
        assert not Path("saved").exists()

    def test_joining_needs_a_folder(self, cli: Cli, folder: str) -> None:
        run = cli("ask", folder, QUESTION, "--recompute", "0.2")
        assert run.code == 2
        assert "--kv-dir" in run.err

    def test_half_a_token_is_refused_at_once(self, cli: Cli, folder: str) -> None:
        run = cli("ask", folder, QUESTION, "--kv-dir", "kv", "--recompute", "1.5", "--model", "nowhere")
        assert run.code == 2
        assert "recompute=1.5: must be a share from 0 to 1, or a whole number of tokens" in " ".join(run.err.split())

    @pytest.mark.parametrize("command", ["info", "clear"])
    def test_a_folder_that_is_not_there(self, cli: Cli, command: str) -> None:
        run = cli("cache", command, "nowhere")
        assert run.code == 2
        assert "nowhere: no such folder" in run.err


def _announced(err: str) -> float:
    """Bytes that `ragkv index --with-kv` says it will write."""
    found = re.search(r"about ([\d.,]+) (bytes|kB|MB) to compute", err)
    assert found
    return float(found[1].replace(",", "")) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[found[2]]


def _folder_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


def test_explain_writes_a_page_with_a_column_for_each_question(cli: Cli, folder: str, fakes: ScriptedEngine) -> None:
    run = cli("explain", folder, QUESTION, "Who bakes bread?", "--out", "page.html", "--max-tokens", "2")
    page = Path("page.html").read_text()
    assert (run.code, run.out) == (0, "page.html\n")
    assert page.count('<section class="summary"') == 2
    assert page.count("<article") == 3


def test_retrieval_for_several_questions_takes_the_best_of_each() -> None:
    from ragkv.index import Index

    engine = tiny_engine()
    index = Index.build([Document(name, text, name) for name, text in TEXTS.items()], WordEmbedder())
    found = sources.retrieve(index, ["Ben bakes bread", "Cyd cooks soup"], engine.tokenizer, 2000)
    assert [document.id for document in found] == ["baker.md", "page.html", "keeper.txt"]
    with pytest.raises(RagkvError, match="--context-tokens 8"):
        sources.retrieve(index, ["Ben bakes bread", "Cyd cooks soup"], engine.tokenizer, 8)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [("docs", True), ("new.txt", True), ("what is in a.txt", False), ("Why?", False), ("x" * 5000, False)],
)
def test_what_is_meant_as_a_path(argument: str, expected: bool, folder: str) -> None:
    assert options.is_path(argument) is expected


def test_printable_keeps_text_and_drops_control_characters() -> None:
    assert printable("a\tb\nc\r\x00\x1b[31mé\x7f\x9b👩‍🚀") == "a\tb\nc[31mé👩‍🚀"


@pytest.mark.parametrize("pieces", [["  a", " b ", "", " ", "c\n", "\n"], [" ", " a  b c "], ["a  b c"], [" "], []])
def test_trimmed_strips_only_the_ends(pieces: list[str]) -> None:
    assert "".join(trimmed(pieces)) == "".join(pieces).strip()


def test_stages_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars() as progress:
        for done in (1, 2, 3):
            progress("prefill", done, 3)
        progress("download", 5, 10)
    assert capsys.readouterr().err == "ragkv: prefill ...\nragkv: download ...\n"


def test_stages_are_bars_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with ProgressBars() as progress:
        progress("download", 5_000_000, 10_000_000)
        with progress.waiting("loading it"):
            pass
        progress("prefill", 3, 3)
    drawn = capsys.readouterr().err
    assert "5.0 MB of 10.0 MB" in drawn
    assert "loading it" in drawn
    assert "3 of 3" in drawn


def test_a_real_answer(tmp_path: Path) -> None:
    """The whole way with real weights, as a process of its own."""
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-c", "from ragkv.cli import main; main()", "ask", str(tmp_path), QUESTION, "--json"]
    command += ["--model", "smollm2-135m", "--max-tokens", "6", "--max-capacity-prompt", "128"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(finished.stdout)
    stats = answer["stats"]
    assert len(answer["documents"]) == 3
    assert answer["answer"]
    assert stats["prompt_tokens"] > 128
    assert stats["kv_bytes_kept"] * stats["prompt_tokens"] == stats["kv_bytes_full"] * 128
    assert "Traceback" not in finished.stderr
