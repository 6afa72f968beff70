"""What a benchmark has measured, a line for each piece of its work: one that was stopped goes on where it was."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

from ragkv.errors import DocumentError
from ragkv_evals.results_folder import claim, open_behind, whole_lines

Row = TypeVar("Row")


class Pieces:
    """Rows by piece of work; a context, at whose end others may have the folder.

    Args:
        folder: made when needed; None keeps the rows in memory only.
        settings: all that decides them.

    Raises:
        ConfigError: the folder holds a benchmark with other settings, or another process has it.
        DocumentError: it holds something else.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, object]) -> None:
        self._file = None if folder is None else folder / "pieces.jsonl"
        self._lock = None if folder is None else claim(folder, settings)
        self._rows = {} if self._file is None else _read(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def once(self, piece: str, kind: Callable[..., Row], make: Callable[[], Sequence[Row]]) -> list[Row]:
        """The rows of a piece, which are dataclasses of this kind; made, and written, if they are not there.

        Raises:
            DocumentError: those there are of another kind.
        """
        if piece not in self._rows:
            self._rows[piece] = [asdict(row) for row in make()]  # type: ignore[call-overload]
            if self._file is not None:
                with open_behind(self._file) as file:
                    file.write(json.dumps({"piece": piece, "rows": self._rows[piece]}) + "\n")
        try:
            return [kind(**row) for row in self._rows[piece]]
        except TypeError as error:
            raise _foreign(self._file, error) from error


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        return {line["piece"]: line["rows"] for line in map(json.loads, whole_lines(path))}
    except (ValueError, TypeError, KeyError) as error:
        raise _foreign(path, error) from error


def _foreign(path: Path | None, error: Exception) -> DocumentError:
    return DocumentError(f"{path}: no results of this version ({error!r}); use another --out folder")
