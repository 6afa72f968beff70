"""A run spread over a Ray cluster: every worker loads the model once and answers whole examples; this process writes.

RAY_ADDRESS names the cluster; without it Ray starts one on this machine. Workers need ragkv[evals,ray] and the model.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

from ragkv_evals.answering import Answering, Done, Work
from ragkv_evals.ray_placement import placements
from ragkv_evals.records import Record


class RayWorker:
    """Answers examples in a process of its own; an actor."""

    def __init__(self, load: Callable[[], Answering]) -> None:
        self._load = cache(load)  # called by the first request, where an error can be told from a broken worker

    def check(self) -> dict[str, str]:
        """As `Answering.check`."""
        return self._load().check()

    def answer(self, work: Work) -> tuple[list[Record], float]:
        """The example's records, and the seconds they took."""
        started = time.perf_counter()
        return list(self._load().records(work)), time.perf_counter() - started


class RayWorkers:
    """The workers of a run on a cluster; a context, at whose end a cluster that it started is ended.

    Args:
        load: called once in every worker; it travels there, with the cases that it holds.
        workers: how many; None takes one for each GPU, or else one for each machine.

    Raises:
        ConfigError: the cluster has too few CPUs for so many workers.
    """

    def __init__(self, load: Callable[[], Answering], workers: int | None) -> None:
        self._load, self._workers = load, workers
        self._started = False
        self._actors: list[Any] = []

    def __enter__(self) -> Self:
        import ray

        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
            self._started = True
        return self

    def __exit__(self, *error: object) -> None:
        import ray

        self._actors.clear()
        if self._started:
            ray.shutdown()

    def check(self) -> dict[str, str]:
        """As `Answering.check`, by the first worker."""
        import ray

        with _own_errors():
            return dict(ray.get(self._first(1)[0].check.remote()))

    def spread(self, work: Sequence[Work]) -> Iterator[Record | Done]:
        """Do the work, in any order."""
        if not work:
            return
        from ray.util import ActorPool

        actors, jobs = self._first(len(work)), {one[0].key: one[0] for one in work}
        pool: Any = ActorPool(actors)
        with _own_errors():
            for records, seconds in pool.map_unordered(lambda actor, one: actor.answer.remote(one), work):
                yield from records
                yield Done(jobs[records[0].key], seconds / len(actors))

    def _first(self, most: int) -> list[Any]:
        """The first of the workers, at most so many; those that are not there yet are made."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        found: Any = ray.nodes()  # type: ignore[no-untyped-call]
        for place in placements(found, self._workers)[len(self._actors) : most]:
            # Ray gives a worker as many threads as it has CPUs.
            options = ray.remote(RayWorker).options(
                num_cpus=place.cpus,
                num_gpus=place.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False),
            )
            self._actors.append(options.remote(self._load))
        return self._actors[:most]


@contextmanager
def _own_errors() -> Iterator[None]:
    """An error that a worker raised is raised as if there were no Ray between."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as error:
        raise error.cause from None
