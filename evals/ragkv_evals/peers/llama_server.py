"""A llama.cpp server as an answering peer: started on a free port of this machine, and ended with the run."""

import json
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from ragkv_evals.peers.environment import PeerError
from ragkv_evals.peers.generators import Generated

PROGRAM = "llama-server"
_START_S, _REPLY_S = 300.0, 3600.0


class LlamaServer:
    """Continues token ids over HTTP; close it in the end.

    Args:
        program: the server to start.
        model: a `.gguf` file.
        context: most tokens of a prompt and its reply.
    """

    def __init__(self, program: str, model: Path, context: int, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                *(program, "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
                *("--ctx-size", str(context), "--threads", str(threads), "--parallel", "1"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait()
        except PeerError:
            self.close()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + _START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with urlopen(f"{self._address}/health", timeout=5):  # noqa: S310 (an address of this machine)
                    return
            except (URLError, OSError):
                time.sleep(0.2)
        raise PeerError(f"{PROGRAM} did not start (exit code {self._process.poll()}): try it by hand")

    def generate(self, ids: Sequence[int], max_tokens: int) -> Generated:
        done = self._post(prompt=list(ids), n_predict=max_tokens, temperature=0, cache_prompt=False, return_tokens=True)
        try:
            timings = done["timings"]
            return Generated(done["tokens"], timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000)
        except KeyError as error:
            raise PeerError(f"the reply of {PROGRAM} has no {error}: install a newer llama.cpp") from error

    def _post(self, **request: object) -> dict[str, Any]:
        body = json.dumps(request).encode()
        asked = Request(  # noqa: S310 (an address of this machine)
            f"{self._address}/completion", body, {"Content-Type": "application/json"}
        )
        try:
            with urlopen(asked, timeout=_REPLY_S) as reply:  # noqa: S310
                return dict(json.load(reply))
        except (URLError, OSError, ValueError) as error:
            raise PeerError(f"{PROGRAM} did not answer: {error}") from error

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()
