"""Runs that can be shown together: the same in all that decides documents and replies, but not which of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ragkv.errors import DocumentError
from ragkv_evals.config import RunConfig
from ragkv_evals.records import Record, read
from ragkv_evals.tasks import TASKS
from ragkv_evals.tasks.base import Task
from ragkv_evals.variants import FULL

_MAY_DIFFER = ("context_tokens", "depths", "limit", "policies", "shard")
_SAME = [field.name for field in fields(RunConfig) if field.name not in _MAY_DIFFER]
_DEFAULTS = {field.name: field.default for field in fields(RunConfig) if field.default is not MISSING}


@dataclass(frozen=True)
class Study:
    """All records of runs over the same cases.

    Attributes:
        config: what the runs have in common.
        machines: what each run noted about where it took place, without repeats.
    """

    task: Task
    config: dict[str, Any]
    machines: Sequence[dict[str, Any]]
    records: Sequence[Record]

    @property
    def lengths(self) -> list[int | None]:
        """Lengths of the prompts that were asked for, ascending."""
        return sorted({record.context_tokens for record in self.records}, key=lambda length: length or 0)

    @property
    def policies(self) -> list[str]:
        """Names, the full cache first, in order of first mention."""
        names = dict.fromkeys(record.outcome.policy for record in self.records)
        return sorted(names, key=lambda name: name != FULL)

    def where(self, policy: str, length: int | None) -> list[Record]:
        """The records of a policy at a length."""
        return [r for r in self.records if r.outcome.policy == policy and r.context_tokens == length]


def studies(folders: Iterable[Path]) -> list[Study]:
    """The runs in these folders, those that belong together joined; of an example answered twice, the first counts.

    Raises:
        DocumentError: a folder holds no run, or one without any prediction.
    """
    groups: dict[str, list[tuple[dict[str, Any], dict[str, Any], list[Record]]]] = {}
    for folder in folders:
        config, machine, records = _run(folder)
        groups.setdefault(json.dumps([config[name] for name in _SAME]), []).append((config, machine, records))
    return [_joined(group) for group in groups.values()]


def _run(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[Record]]:
    try:
        config, machine = (json.loads((folder / name).read_text()) for name in ("config.json", "environment.json"))
    except (OSError, json.JSONDecodeError) as error:
        raise DocumentError(f"{folder} holds no run ({error}): give the --out folder of one") from error
    config = _DEFAULTS | config  # runs of earlier versions lack what these could not do
    records = read(folder / "predictions.jsonl", config["shared_sets"])
    if not records:
        raise DocumentError(f"{folder} holds a run without any prediction: let it go on first")
    return config, machine, records


def _joined(runs: Sequence[tuple[dict[str, Any], dict[str, Any], list[Record]]]) -> Study:
    config = {name: runs[0][0][name] for name in _SAME}
    machines = {json.dumps(machine): machine for _, machine, _ in runs}
    records: dict[tuple[str, str], Record] = {}
    for _, _, found in runs:
        for record in found:
            records.setdefault((record.key, record.outcome.policy), record)
    return Study(TASKS[config["task"]], config, list(machines.values()), list(records.values()))
