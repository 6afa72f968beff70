"""Which examples a run answers, in which order, and how long the rest will take."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
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


@dataclass
class Pace:
    """Estimates from what was measured: seconds per example, for each length by itself."""

    seconds: dict[int | None, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, job: Job, seconds: float) -> None:
        """An example is done."""
        self.seconds[job.context_tokens].append(seconds)

    def estimate(self, left: Iterable[Job]) -> float | None:
        """Seconds for these examples; None while a length among them has not been measured."""
        lengths = [job.context_tokens for job in left]
        if not set(lengths) <= set(self.seconds):
            return None
        return sum(fmean(self.seconds[length]) for length in lengths)
