"""From a task's case to records: the example is built, answered under every policy that it still needs, and scored."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.errors import PromptTooLong
from ragkv.kv_store import KVStore
from ragkv.models import load
from ragkv_evals.answerers import Answerer, EngineAnswerer
from ragkv_evals.config import RunConfig
from ragkv_evals.metrics import agreement, cited
from ragkv_evals.plan import Job, plan
from ragkv_evals.probe import Probe
from ragkv_evals.records import Record
from ragkv_evals.tasks import TASKS
from ragkv_evals.tasks.base import Cases, Example, Layout, Task
from ragkv_evals.variants import FULL

SHARED_BYTES = 4 * 2**30  # of K/V: room for one set of the longest prompts
WHOLE_PROMPTS = "whole prompts"  # the namespace of `ragkv-eval blocks`, too, whose folder may be given here

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
    def load(cls, cases: Cases, config: RunConfig, device: str | None, kv_dir: Path | None = None) -> "Answering":
        """With the model that the configuration names.

        Args:
            kv_dir: where K/V of prompts are kept, for examples and runs whose prompts begin alike; no reply changes.

        Raises:
            PromptTooLong: a length is more than the model can read.
        """
        store = KVStore(SHARED_BYTES, kv_dir, namespace=WHOLE_PROMPTS) if config.shared_sets or kv_dir else None
        engine = Engine(load(config.model, device=device, dtype=config.dtype), store=store)
        context, longest = engine.loaded.context_length, max(config.context_tokens, default=0)
        if longest + config.max_tokens > context:
            raise PromptTooLong(
                f"--context-tokens {longest} and --max-tokens {config.max_tokens} do not fit into the {context} tokens "
                f"of context of {engine.loaded.name}: lower one of them"
            )
        return cls(TASKS[config.task], cases, EngineAnswerer(engine, config.decode_together, config.must_cite), config)

    def check(self) -> dict[str, str]:
        """Build every example of the plan once, so that one which cannot be built is known now, not after hours.

        Returns:
            A name for each one's documents, by key: the same for the same documents.
        """
        return {job.key: set_name(self.example(job).documents) for job in plan(self.cases.ids, self.config)}

    def example(self, job: Job) -> Example:
        """The job's case laid out."""
        return self.cases.build(
            job.index,
            Layout(job.context_tokens, job.depth, self.config.seed, self.answerer.counter, self.config.shared_sets),
        )

    def spread(self, work: Sequence[Work]) -> Iterator[Record | Done | Probe]:
        """A probe of the first example, and then one after the other."""
        if work:
            yield self.answerer.probe(self.example(work[0][0]))
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
                document_set=set_name(example.documents) if self.config.shared_sets else None,
            )


def set_name(documents: Sequence[Document]) -> str:
    """Names a document set; the same in every process, as a run may be continued."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(repr((document.title, document.text)).encode())
    return digest.hexdigest()[:16]
