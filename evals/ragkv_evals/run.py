"""A run: every example of the plan answered under every policy, written as it is done, and continued where it stopped.

A run folder holds config.json, environment.json, predictions.jsonl and, once all is done, metrics.json.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ragkv_evals.answering import Done, Work
from ragkv_evals.config import RunConfig
from ragkv_evals.plan import Job, Pace, kinds, plan
from ragkv_evals.probe import Probe
from ragkv_evals.records import Record, RecordFile
from ragkv_evals.results_folder import claim
from ragkv_evals.variants import FULL

Spread = Callable[[Sequence[Work]], Iterator[Record | Done | Probe]]
"""Does the work, in any order; `Done` follows the records of an example. A `Probe` may come before all of them."""

Watch = Callable[[int, int, float | None], None]
"""Told how many examples are done, of how many, and the seconds that the others will take, once that is known."""

Guess = Callable[[Probe, float], None]
"""Told the probe before the first example, and the seconds that reading the prompts takes by it."""


class RunFolder:
    """Where a run is written.

    Args:
        path: made if it is not there; a run that is there is gone on with.
        config: of this run.
        environment: noted about this machine; that of the last start is kept.

    Raises:
        ConfigError: the folder holds another run, or another process has it.
        DocumentError: its predictions cannot be read.
    """

    def __init__(self, path: Path, config: RunConfig, environment: Mapping[str, object]) -> None:
        self.config, self._lock = config, claim(path, config.to_json())
        self.predictions = RecordFile(path / "predictions.jsonl", config.shared_sets)
        (path / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")

    def close(self) -> None:
        """Let others have the folder."""
        self.predictions.close()
        self._lock.release()


def run(
    ids: Sequence[str],
    folder: RunFolder,
    spread: Spread,
    watch: Watch = lambda done, total, seconds: None,
    documents: Mapping[str, Hashable] = MappingProxyType({}),
    guess: Guess = lambda probe, seconds: None,
) -> list[Record]:
    """Answer what is missing in the folder, and close it.

    Args:
        ids: of the task's cases.
        spread: does the work.
        documents: what examples with the same ones share, by key: reading them once makes the first of these slow.

    Returns:
        All records of the run, those from before included.
    """
    file, jobs, pace = folder.predictions, plan(ids, folder.config), Pace()
    work = missing(jobs, folder.config.policies, file.records)
    left = kinds((job for job, _, _ in work), documents)
    watch(len(jobs) - len(left), len(jobs), None)
    try:
        for event in spread(work):
            if isinstance(event, Record):
                file.append(event)
                continue
            if isinstance(event, Probe):
                guess(event, event.estimate(left.values()))
                continue
            pace.add(left.pop(event.job.key), event.seconds)
            watch(len(jobs) - len(left), len(jobs), pace.estimate(left.values()))
    finally:
        folder.close()
    return file.records


def missing(jobs: Sequence[Job], policies: Sequence[str], records: Iterable[Record]) -> list[Work]:
    """The examples that are not answered under all policies yet."""
    replies: dict[str, dict[str, str]] = {}
    for record in records:
        replies.setdefault(record.key, {})[record.outcome.policy] = record.outcome.reply
    work = []
    for job in jobs:
        there = replies.get(job.key, {})
        if names := tuple(name for name in policies if name not in there):
            work.append((job, names, there.get(FULL)))
    return work
