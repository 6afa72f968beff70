"""What a benchmark has measured, a line for each piece of its work: one that was stopped goes on where it was."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ragkv.errors import DocumentError
from ragkv_evals.config import check_same

Row = TypeVar("Row")


class Pieces:
    """Rows by piece of work.

    Args:
        folder: made when needed; None keeps the rows in memory only.
        settings: all that decides them.

    Raises:
        ConfigError: the folder holds a benchmark with other settings.
        DocumentError: it holds something else.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, object]) -> None:
        self._file = None if folder is None else folder / "pieces.jsonl"
        self._rows: dict[str, list[dict[str, Any]]] = {}
        if folder is None or self._file is None:
            return
        config = folder / "config.json"
        if config.exists():
            check_same(settings, json.loads(config.read_text()), folder)
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(json.dumps(settings, indent=1) + "\n")
        if self._file.exists():
            self._rows = _read(self._file)

    def once(self, piece: str, kind: Callable[..., Row], make: Callable[[], Sequence[Row]]) -> list[Row]:
        """The rows of a piece, which are dataclasses of this kind; made, and written, if they are not there.

        Raises:
            DocumentError: those there are of another kind.
        """
        if piece not in self._rows:
            self._rows[piece] = [asdict(row) for row in make()]  # type: ignore[call-overload]
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"piece": piece, "rows": self._rows[piece]}) + "\n")
        try:
            return [kind(**row) for row in self._rows[piece]]
        except TypeError as error:
            raise _foreign(self._file, error) from error


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    cut = lines.pop()  # what a killed run has left of a line, or nothing
    try:
        rows = {line["piece"]: line["rows"] for line in map(json.loads, lines)}
    except (ValueError, TypeError, KeyError) as error:
        raise _foreign(path, error) from error
    if cut:
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return rows


def _foreign(path: Path | None, error: Exception) -> DocumentError:
    return DocumentError(f"{path}: no results of this version ({error!r}); use another --out folder")
