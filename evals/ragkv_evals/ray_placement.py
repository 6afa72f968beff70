"""Which machine of a cluster each worker of a run gets, and how much of it: a worker has to fit into one machine."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ragkv.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """A worker's machine and its share of that."""

    node: str
    cpus: int
    gpus: float


def placements(nodes: Sequence[Mapping[str, Any]], workers: int | None) -> list[Placement]:
    """One for each worker, the largest shares first.

    Args:
        nodes: as from `ray.nodes()`.
        workers: how many; None takes one for each GPU, or else one for each machine.

    Raises:
        ConfigError: there are too few CPUs for so many workers.
    """
    alive = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    cpus = {node: int(found["CPU"]) for node, found in alive.items() if found.get("CPU", 0) >= 1}
    gpus = {node: int(alive[node].get("GPU", 0)) for node in cpus}
    count = workers or sum(gpus.values())
    on = _shared_out(count, cpus, gpus) if count else Counter(list(cpus))
    found = [
        Placement(node, cpus[node] // many, _gpus_each(gpus[node], many))
        for node, many in on.items()
        for _ in range(many)
    ]
    return sorted(found, key=lambda place: (place.gpus, place.cpus), reverse=True)


def _shared_out(count: int, cpus: Mapping[str, int], gpus: Mapping[str, int]) -> Counter[str]:
    """How many workers each machine gets: one after the other goes where its share is largest."""
    on: Counter[str] = Counter()
    for _ in range(count):
        free = [node for node in cpus if on[node] < cpus[node]]
        if not free:
            raise ConfigError(
                f"--ray-workers {count}: the cluster has {sum(cpus.values())} CPUs; give at most as many workers"
            )
        best = max(free, key=lambda node: (gpus[node] / (on[node] + 1), cpus[node] / (on[node] + 1)))
        on[best] += 1
    return on


def _gpus_each(gpus: int, workers: int) -> float:
    """Whole GPUs, or a part of one that as many workers as have to can share."""
    if gpus >= workers:
        return gpus // workers
    return 1 / ceil(workers / gpus) if gpus else 0
