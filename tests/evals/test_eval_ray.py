"""Runs spread over a local Ray cluster of two workers give what a run in one process gives."""

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from ragkv.documents import Document
from ragkv.errors import ConfigError, DocumentError
from ragkv.prompt import CitePrompt
from ragkv_evals.answering import Answering, Done
from ragkv_evals.cli import app
from ragkv_evals.config import RunConfig
from ragkv_evals.plan import plan
from ragkv_evals.probe import Probe
from ragkv_evals.ray_placement import Placement, placements
from ragkv_evals.ray_run import RayWorkers
from ragkv_evals.records import Outcome, Record, read
from ragkv_evals.run import missing
from ragkv_evals.tasks import TASKS
from ragkv_evals.tasks.base import Example, Layout

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster of two CPUs on this machine."""
    ray.init(num_cpus=2, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    yield
    ray.shutdown()


CONFIG = RunConfig(
    *("hotpotqa", "toy", "1", "scripted", "float32"),
    context_tokens=(),
    depths=(),
    limit=None,
    seed=0,
    policies=("full", "snapkv:512"),
    max_tokens=4,
    shard=(1, 1),
    prompt_hash="2",
)


class Cases:
    """Questions without documents."""

    ids: Sequence[str] = ("a", "b", "c", "d", "e")

    def build(self, index: int, layout: Layout) -> Example:
        if index == 99:
            raise DocumentError("case 99 cannot be built")
        return Example(self.ids[index], "?", (), (), (("x",),))


class Counter:
    """Counts nothing."""

    def document(self, document: Document) -> int:
        return 0

    def text(self, text: str) -> int:
        return 0

    def frame(self, question: str, prompt: CitePrompt | None) -> int:
        return 0


class Pid:
    """Answers with the number of its process, slowly enough that two share the work."""

    counter = Counter()

    def answer(self, example: Example, names: Sequence[str], max_tokens: int) -> Iterator[Outcome]:
        time.sleep(0.3)
        for name in names:
            yield Outcome(name, str(os.getpid()), "stop", 1, 1, 1, 1, None, None, (), (), 0, 1.0, 1.0, 1, 1, None)

    def probe(self, example: Example) -> Probe:
        raise NotImplementedError


def load(config: RunConfig = CONFIG) -> Answering:
    return Answering(TASKS["hotpotqa"], Cases(), Pid(), config)


def test_two_workers_share_the_work() -> None:
    work = missing(plan(Cases.ids, CONFIG), CONFIG.policies, [])
    with RayWorkers(load, 2) as workers:
        events = list(workers.spread(work))
    records = [event for event in events if isinstance(event, Record)]
    done = [event for event in events if isinstance(event, Done)]
    assert sorted((r.example, r.outcome.policy) for r in records) == [
        (case, policy) for case in Cases.ids for policy in ("full", "snapkv:512")
    ]
    assert sorted(event.job.case for event in done) == list(Cases.ids)
    workers = {record.outcome.reply for record in records}
    assert len(workers) == 2
    assert str(os.getpid()) not in workers
    assert all(0.1 < event.seconds < 1 for event in done)  # an example takes 0.3 s, and two run at once


def test_an_error_on_purpose_comes_back_as_it_is() -> None:
    work = [(replace(job, index=99), names, None) for job, names, _ in missing(plan(["a"], CONFIG), ("full",), [])]
    with RayWorkers(load, 1) as workers, pytest.raises(DocumentError, match=r"^case 99 cannot be built$"):
        list(workers.spread(work))


def test_examples_are_built_before_the_first_is_answered() -> None:
    with RayWorkers(load, 1) as workers:
        assert workers.check() == load().check()
        assert list(workers.check()) == [job.key for job in plan(Cases.ids, CONFIG)]


def test_nothing_to_do_starts_nothing() -> None:
    def fail() -> Answering:
        raise AssertionError("a worker was started")

    with RayWorkers(fail, 2) as workers:
        assert list(workers.spread([])) == []


def test_a_cluster_of_its_own_is_started_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: calls.append("init"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    work = missing(plan(Cases.ids, CONFIG), CONFIG.policies, [])
    with pytest.raises(ConfigError, match="--ray-workers 1000: the cluster has 2 CPUs"), RayWorkers(load, 1000) as few:
        list(few.spread(work))
    assert calls == ["init", "shutdown"]


def nodes(*found: tuple[int, int]) -> list[dict[str, Any]]:
    resources = [{"CPU": float(cpus), "GPU": float(gpus)} if gpus else {"CPU": float(cpus)} for cpus, gpus in found]
    return [{"NodeID": str(n), "Alive": True, "Resources": each} for n, each in enumerate(resources)]


@pytest.mark.parametrize(
    ("machines", "workers", "shares"),
    [
        (((4, 0), (16, 0)), None, [("1", 16, 0), ("0", 4, 0)]),
        (((4, 0), (16, 0)), 2, [("1", 8, 0)] * 2),  # each more than the four of the other machine
        (((4, 0), (16, 0)), 5, [("1", 4, 0)] * 4 + [("0", 4, 0)]),
        (((8, 2),), 3, [("0", 2, 0.5)] * 3),  # 2/3 of a GPU each would leave one worker without
        (((8, 1), (8, 2)), None, [("0", 8, 1), ("1", 4, 1), ("1", 4, 1)]),
        (((8, 4),), 2, [("0", 4, 2)] * 2),
        (((0, 0), (2, 0)), None, [("1", 2, 0)]),  # the head of a cluster may have no CPUs
    ],
)
def test_every_worker_fits_into_its_machine(
    machines: Sequence[tuple[int, int]], workers: int | None, shares: list[tuple[str, int, float]]
) -> None:
    found = placements(nodes(*machines), workers)
    assert found == [Placement(*share) for share in shares]


def test_machines_that_are_gone_get_no_worker() -> None:
    lost, left = nodes((8, 0), (2, 0))
    assert placements([{**lost, "Alive": False}, left], None) == [Placement("1", 2, 0)]


def test_the_command_gives_what_it_gives_without_ray(tmp_path: Path, model: str) -> None:
    command = ["hotpotqa", "--model", model, "--limit", "3", "--max-tokens", "4", "--context-tokens", "4000"]
    command += ["--dtype", "float32"]
    for folder, options in (("alone", []), ("spread", ["--ray", "--ray-workers", "2"])):
        done = CliRunner().invoke(app, [*command, *options, "--out", str(tmp_path / folder)], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
    alone, spread = (sorted(map(_untimed, read(tmp_path / name / "predictions.jsonl"))) for name in ("alone", "spread"))
    assert len(alone) == 6
    assert alone == spread


def _untimed(record: Record) -> str:
    outcome = replace(record.outcome, ttft_s=0.0, decode_tokens_per_s=0.0, peak_memory_bytes=None)
    return str(replace(record, outcome=outcome))
