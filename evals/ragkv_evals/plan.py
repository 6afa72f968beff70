"""Which examples a run answers, in which order, and how long the rest will take."""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ragkv_evals.config import RunConfig
from ragkv_evals.records import key
from ragkv_evals.tasks.question import drawn


@dataclass(frozen=True)
class Job:
    """One example to be built and answered: case number `index` at a length and depth."""

    index: int
    case: str
    context_tokens: int | None
    depth: float | None

    @property
    def key(self) -> str:
        """Names the example, as in the records."""
        return key(self.case, self.context_tokens, self.depth)


def plan(ids: Sequence[str], config: RunConfig) -> list[Job]:
    """All examples of a run: cases in a seeded order, each at every length and depth; a shard takes every n-th case.

    A smaller limit draws the first of the cases that a larger one draws.
    """
    first, shards = config.shard
    return [
        Job(index, ids[index], context_tokens, depth)
        for index in drawn(len(ids), config.seed)[: config.limit][first - 1 :: shards]
        for context_tokens in config.context_tokens or (None,)
        for depth in config.depths or (None,)
    ]


Kind = tuple[int | None, bool]
"""Of examples that take alike: their length, and whether their documents are other ones than those before."""


def kinds(jobs: Iterable[Job], documents: Mapping[str, Hashable]) -> dict[str, Kind]:
    """The kind of each of these examples, which are answered in this order, by key.

    Args:
        documents: by key, something that is the same for examples with the same documents; others have their own.
    """
    found: dict[str, Kind] = {}
    before: dict[int | None, Hashable] = {}
    for job in jobs:
        these = documents.get(job.key, job.key)
        found[job.key] = job.context_tokens, before.get(job.context_tokens) != these
        before[job.context_tokens] = these
    return found


@dataclass
class Pace:
    """Estimates from what was measured: seconds per example, for each kind by itself."""

    seconds: dict[Kind, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: Kind, seconds: float) -> None:
        """An example is done."""
        self.seconds[kind].append(seconds)

    def estimate(self, left: Collection[Kind]) -> float | None:
        """Seconds for these examples; None while a kind among them has not been measured."""
        if not set(left) <= set(self.seconds):
            return None
        return sum(fmean(self.seconds[kind]) for kind in left)
