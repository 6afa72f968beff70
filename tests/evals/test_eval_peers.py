"""Peers on the same prompts: scripted processes and servers, and transformers' own `generate` on a tiny model."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import EngineOf
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv_evals.cli import app
from ragkv_evals.peers import command
from ragkv_evals.peers.answerer import PeerAnswerer
from ragkv_evals.peers.command import KVPRESS, OPENVINO
from ragkv_evals.peers.environment import PEERS, Peer, PeerError, PeerProcess
from ragkv_evals.peers.generators import Generated, Piped, Transformers
from ragkv_evals.peers.llama_server import LlamaServer
from ragkv_evals.prompts import encode
from ragkv_evals.records import read
from ragkv_evals.tasks.base import Example
from tiny import random_prompt

ECHO = """
import json, sys
options = json.loads(sys.argv[2])
print(json.dumps({"echo": "1.0"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    kept = min(asked.get("budget", len(asked["ids"])), len(asked["ids"])) - options.get("short", 0)
    reply = {"tokens": asked["ids"][-2:], "prefill_s": 0.5, "decode_s": 0.1, "kept_tokens": kept}
    print(json.dumps({**reply, "kv_bytes_full": 10, "kv_bytes_kept": 5}), flush=True)
"""

SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--model" in sys.argv and sys.argv[sys.argv.index("--model") + 1] == "bad.gguf":
    sys.exit(7)

class Handler(BaseHTTPRequestHandler):
    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        self.reply({{"status": "ok"}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = asked["prompt"][-1:] * asked["n_predict"]
        self.reply({{"tokens": tokens, "timings": {{"prompt_ms": 1500, "predicted_ms": 250}}}})

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def engine(engine_of: EngineOf) -> Engine:
    return engine_of("llama")


@pytest.fixture
def echo(tmp_path: Path) -> Peer:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    return Peer("echo", (), script)


@pytest.fixture
def llama_server(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    return program


def test_transformers_says_what_the_full_cache_says(engine: Engine) -> None:
    """And ragkv's attention is back in place behind it, whose observer SnapKV needs."""
    example = Example(
        "e", "What?", (Document("1", "It is so, and the answer is here. " * 8),), (1,), (("so",),), prompt=None
    )
    peer = Transformers(engine.model, "sdpa", engine.loaded.eos_token_ids)
    outcomes = PeerAnswerer(engine, {"transformers": peer}).answer(
        example, ["full", "transformers", "snapkv:96,window_size=16"], 12
    )
    full, snapkv, peers = outcomes
    assert (full.policy, snapkv.policy, peers.policy) == ("full", "snapkv:96,window_size=16", "transformers")
    assert peers.reply == full.reply
    assert (peers.finish_reason, peers.completion_tokens) == (full.finish_reason, full.completion_tokens)
    assert peers.kept_tokens == peers.prompt_tokens == full.prompt_tokens
    assert peers.ttft_s > 0
    assert peers.kv_bytes_kept is None
    again = next(PeerAnswerer(engine, {}).answer(example, ["snapkv:96,window_size=16"], 12))
    assert again.reply == snapkv.reply


def test_transformers_stops_at_the_end_of_sequence(engine: Engine) -> None:
    ids = random_prompt(40).ids
    long = Transformers(engine.model, "sdpa", (2,)).generate(ids, 8).tokens
    stopped = Transformers(engine.model, "sdpa", (long[2],)).generate(ids, 8).tokens
    assert len(long) == 8
    assert list(stopped) == list(long[: list(long).index(long[2]) + 1])


def test_a_piped_peer_answers_the_same_tokens(engine: Engine, echo: Peer) -> None:
    process = PeerProcess(echo, Path(sys.executable), "model", {})
    example = Example("e", "What now?", (), (), (("x",),), prompt=None)
    ids = encode(engine.tokenizer, example).ids
    (outcome,) = PeerAnswerer(engine, {"echo:8": Piped(process, budget=8)}).answer(example, ["echo:8"], 4)
    process.close()
    assert outcome.reply == engine.tokenizer.decode(ids[-2:], skip_special_tokens=True).strip()
    assert (outcome.kept_tokens, outcome.prompt_tokens, outcome.kv_bytes_kept) == (8, len(ids), 5)
    assert (outcome.ttft_s, outcome.decode_tokens_per_s) == (0.5, 10)


def test_a_peer_that_misses_its_budget_is_named(echo: Peer) -> None:
    process = PeerProcess(echo, Path(sys.executable), "model", {"short": 1})
    with pytest.raises(PeerError, match="kept 7 of 20 tokens, but its budget is 8"):
        Piped(process, budget=8).generate(range(20), 4)
    process.close()


def test_a_llama_server_is_asked_over_http(llama_server: Path) -> None:
    server = LlamaServer(str(llama_server), Path("model.gguf"), 1000, 2)
    assert server.generate([5, 6, 7], 3) == Generated([7, 7, 7], 1.5, 0.25)
    server.close()
    with pytest.raises(PeerError, match="llama-server did not answer"):
        server.generate([5], 1)


@pytest.mark.parametrize("missing", ["tokens", "timings", "prompt_ms"])
def test_a_llama_server_of_another_version_is_named(llama_server: Path, missing: str) -> None:
    llama_server.write_text(llama_server.read_text().replace(f'"{missing}"', '"other"'))
    server = LlamaServer(str(llama_server), Path("model.gguf"), 1000, 2)
    with pytest.raises(PeerError, match=f"the reply of llama-server has no '{missing}': install a newer llama.cpp"):
        server.generate([5], 1)
    server.close()


def test_a_llama_server_that_does_not_start_is_named(llama_server: Path) -> None:
    with pytest.raises(PeerError, match=r"llama-server did not start \(exit code 7\)"):
        LlamaServer(str(llama_server), Path("bad.gguf"), 1000, 2)


def test_scripts_of_peers_stand_alone() -> None:
    for peer in (KVPRESS, OPENVINO):
        lines = peer.script.read_text().splitlines()
        assert not [line for line in lines if line.startswith(("import ragkv", "from ragkv"))]
    assert KVPRESS.requirements == PEERS["kvpress"].requirements  # one environment for both of its scripts


@pytest.fixture
def no_installation(echo: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "KVPRESS", echo)
    monkeypatch.setattr(command, "install", lambda peer: Path(sys.executable))


@pytest.mark.usefixtures("no_installation")
def test_a_comparison_is_a_run_like_any_other(tmp_path: Path, model: str) -> None:
    arguments = ["compare-peers", "--model", model, "--context-tokens", "3500", "--limit", "2", "--budget", "256"]
    arguments += ["--dtype", "float32"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run")], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    cells: list[dict[str, Any]] = json.loads(done.stdout)["cells"]
    assert [(cell["policy"], cell["examples"]) for cell in cells] == [
        ("full", 2),
        ("snapkv:256", 2),
        ("transformers", 2),
        ("kvpress:256", 2),
    ]
    assert cells[2]["agreement"] == 1
    assert [cell["kept_tokens"] for cell in cells[1::2]] == [256, 256]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["peers"] == {"kvpress:256": {"echo": "1.0"}}
    assert len(read(tmp_path / "run" / "predictions.jsonl")) == 8
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(tmp_path)], catch_exceptions=False)
    assert shown.exit_code == 0, shown.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "kvpres"], "no peer is named 'kvpres': choose one of transformers, kvpress"),
        (["--task", "hotpot"], "--task 'hotpot': choose one of hotpotqa"),
        (["--peers", "openvino", "--model", "org/model"], r"openvino reads \.gguf files"),
        (["--peers", "llama.cpp"], "no llama-server is on the PATH"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["compare-peers", *arguments, "--out", str(tmp_path)], catch_exceptions=False)
