"""A peer lives in its own virtual environment below ragkv's cache folder and answers JSON lines over a pipe.

Requests and replies are one JSON object a line, so that a peer can be measured in turn with ragkv, not after it.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ragkv import paths
from ragkv.errors import ConfigError, RagkvError


class PeerError(RagkvError):
    """A peer cannot be installed or has stopped."""


@dataclass(frozen=True)
class Peer:
    """A system to compare with.

    Attributes:
        name: what `--peers` takes.
        requirements: pip requirements besides torch.
        script: a stand-alone file that imports nothing of ragkv; called with a model and options.
        needs_torch: whether it gets torch too, the very build that runs here.
    """

    name: str
    requirements: tuple[str, ...]
    script: Path
    needs_torch: bool = True


PEERS = {
    "kvpress": Peer("kvpress", ("kvpress==0.5.5", "transformers<5.3"), Path(__file__).with_name("kvpress_speed.py")),
}


def find(name: str) -> Peer:
    """The peer of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PEERS:
        raise ConfigError(f"no peer is named {name!r}: choose one of {', '.join(PEERS)}")
    return PEERS[name]


def install(peer: Peer) -> Path:
    """Make the peer's environment unless it is there.

    Returns:
        Its Python.

    Raises:
        PeerError: pip failed.
    """
    folder = paths.home() / "peers" / peer.name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    requirements = [*peer.requirements, *([f"torch=={version('torch')}"] if peer.needs_torch else [])]
    note = folder / "requirements.txt"  # written last: it says that the installation was completed
    if note.is_file() and note.read_text().split("\n") == requirements:
        return python
    venv.create(folder, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    pip = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if pip.returncode:
        reason = (pip.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerError(f"cannot install {peer.name} into {folder}: {reason}")
    note.write_text("\n".join(requirements))
    return python


class PeerProcess:
    """A running peer with a model loaded; close it in the end.

    Attributes:
        versions: of the packages that matter, as the peer reports them.
    """

    def __init__(self, peer: Peer, python: Path, model: str, options: Mapping[str, object]) -> None:
        self._name = peer.name
        self._process = subprocess.Popen(
            [str(python), "-I", str(peer.script), model, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        self.versions: dict[str, str] = self._reply()

    def ask(self, **request: object) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Raises:
            PeerError: the peer has stopped.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing reply says so
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self._name} stopped with exit code {self._process.wait()}; its message stands above")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the peer."""
        self._process.communicate()  # closes its input, which ends it
