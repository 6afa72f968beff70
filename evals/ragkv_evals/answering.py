"""From a task's case to records: the example is built, answered under every policy that it still needs, and scored."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragkv.engine import Engine
from ragkv.errors import PromptTooLong
from ragkv.kv_store import KVStore
from ragkv.models import load
from ragkv_evals.answerers import Answerer, EngineAnswerer
from ragkv_evals.config import RunConfig
from ragkv_evals.metrics import agreement, cited
from ragkv_evals.plan import Job, plan
from ragkv_evals.records import Record
from ragkv_evals.tasks import TASKS
from ragkv_evals.tasks.base import Cases, Example, Layout, Task
from ragkv_evals.variants import FULL

SHARED_BYTES = 4 * 2**30  # of K/V: room for one set of the longest prompts

Work = tuple[Job, tuple[str, ...], str | None]
"""An example, the policies that it still needs, and the reply of the full cache if that is there."""


@dataclass(frozen=True)
class Done:
    """All records of an example have been given; they took so many seconds."""

    job: Job
    seconds: float


@dataclass(frozen=True)
class Answering:
    """A task with its cases, and somebody who answers them."""

    task: Task
    cases: Cases
    answerer: Answerer
    config: RunConfig

    @classmethod
    def load(cls, cases: Cases, config: RunConfig, device: str | None) -> "Answering":
        """With the model that the configuration names.

        Raises:
            PromptTooLong: a length is more than the model can read.
        """
        store = KVStore(SHARED_BYTES) if config.shared_sets else None
        engine = Engine(load(config.model, device=device, dtype=config.dtype), store=store)
        context, longest = engine.loaded.context_length, max(config.context_tokens, default=0)
        if longest + config.max_tokens > context:
            raise PromptTooLong(
                f"--context-tokens {longest} and --max-tokens {config.max_tokens} do not fit into the {context} tokens "
                f"of context of {engine.loaded.name}: lower one of them"
            )
        return cls(TASKS[config.task], cases, EngineAnswerer(engine, config.decode_together, config.must_cite), config)

    def check(self) -> dict[str, int]:
        """Build every example of the plan once, so that one which cannot be built is known now, not after hours.

        Returns:
            A hash of each one's documents, by key.
        """
        return {job.key: hash(self.example(job).documents) for job in plan(self.cases.ids, self.config)}

    def example(self, job: Job) -> Example:
        """The job's case laid out."""
        return self.cases.build(
            job.index,
            Layout(job.context_tokens, job.depth, self.config.seed, self.answerer.counter, self.config.shared_sets),
        )

    def in_turn(self, work: Sequence[Work]) -> Iterator[Record | Done]:
        """One example after the other."""
        for one in work:
            started = time.perf_counter()
            yield from self.records(one)
            yield Done(one[0], time.perf_counter() - started)

    def records(self, work: Work) -> Iterator[Record]:
        """One record for each policy that the example needs, as they are done; the full cache comes first."""
        job, names, full_reply = work
        example = self.example(job)
        in_order = sorted(names, key=lambda name: name != FULL)
        for outcome in self.answerer.answer(example, in_order, self.config.max_tokens):
            if outcome.policy == FULL:
                full_reply = outcome.reply
            yield Record(
                example=job.case,
                context_tokens=job.context_tokens,
                depth=job.depth,
                kind=example.kind,
                question=example.question,
                answers=example.answers,
                gold=example.gold,
                cited=tuple(cited(outcome.reply, example.titles) if example.prompt else ()),
                figures=self.task.score(example, outcome.reply),
                agreement=None if full_reply is None else agreement(outcome.reply, full_reply),
                outcome=outcome,
            )
