"""A run spread over a Ray cluster: every worker loads the model once and answers whole examples; this process writes.

RAY_ADDRESS names the cluster; without it Ray starts one on this machine. Workers need ragkv[evals,ray] and the model.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from ragkv.errors import ConfigError
from ragkv_evals.answering import Answering, Done, Work
from ragkv_evals.records import Record


class RayWorker:
    """Answers examples in a process of its own; an actor."""

    def __init__(self, load: Callable[[], Answering]) -> None:
        self._load = cache(load)  # called by the first example, where an error can be told from a broken worker

    def answer(self, work: Work) -> tuple[list[Record], float]:
        """The example's records, and the seconds they took."""
        started = time.perf_counter()
        return list(self._load().records(work)), time.perf_counter() - started


def over_ray(load: Callable[[], Answering], workers: int | None, work: Sequence[Work]) -> Iterator[Record | Done]:
    """Do the work on a cluster.

    Args:
        load: called once in every worker; it travels there, with the cases that it holds.
        workers: how many; None takes one for each GPU, or else one for each machine.

    Raises:
        ConfigError: the cluster has too few CPUs for so many workers.
    """
    import ray
    from ray.exceptions import RayTaskError
    from ray.util import ActorPool

    if not work:
        return
    if started := not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    try:
        count, options = _shares(ray, workers)
        made = ray.put(load)
        actors = [ray.remote(RayWorker).options(**options).remote(made) for _ in range(min(count, len(work)))]
        jobs = {one[0].key: one[0] for one in work}
        pool: Any = ActorPool(actors)
        for records, seconds in pool.map_unordered(lambda actor, one: actor.answer.remote(one), work):
            yield from records
            yield Done(jobs[records[0].key], seconds / len(actors))
    except RayTaskError as error:
        raise error.cause from None
    finally:
        if started:
            ray.shutdown()


def _shares(ray: Any, workers: int | None) -> tuple[int, dict[str, float]]:
    """How many workers there are, and what each gets of the cluster: a GPU, or its share of the CPUs."""
    found = ray.cluster_resources()
    cpus, gpus = int(found.get("CPU", 1)), int(found.get("GPU", 0))
    count = workers or gpus or sum(node["Alive"] for node in ray.nodes())
    if count > cpus:
        raise ConfigError(f"--ray-workers {count}: the cluster has {cpus} CPUs; give at most as many workers")
    # Ray gives a worker as many threads as it has CPUs.
    return count, {"num_cpus": cpus // count, "num_gpus": gpus // count or gpus / count}
