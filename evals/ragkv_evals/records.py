"""What a run leaves behind: one JSON line for each example and policy, written as it is done."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Self

from ragkv.errors import DocumentError
from ragkv_evals.results_folder import open_behind, whole_lines


@dataclass(frozen=True)
class Outcome:
    """A reply under one policy and what it cost.

    Attributes:
        budget: entries the policy allows per KV head, averaged over layers; the prompt's length where it keeps all.
        kept_tokens: entries it did keep, averaged in the same way; checked to equal the budget. None of a peer that
            does not tell.
        gold_survival, answer_survival: share of KV heads in which the tokens of the gold documents, and of the answer
            in them, were kept; None where there are none.
        documents_kept: the same share for every document of the prompt, in order.
        gold_kept: the texts of the first gold documents in pieces, (shade, text): 0 was kept by no head, 9 by all.
        unprotected_tokens: of instructions and headers, those that the budget had no room to protect.
        ttft_s: seconds to the first token, of the prefill that all policies of an example share, compression included;
            None where an earlier example had read a part of the prompt, which this one has no claim to.
        decode_tokens_per_s: after the first token; None where policies were decoded together.
        kv_bytes_full, kv_bytes_kept: of the prompt's K/V; None where a peer does not tell.
        peak_memory_bytes: most memory while the example was read and answered; None where the system does not tell.
    """

    policy: str
    reply: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    budget: float | None
    kept_tokens: float | None
    gold_survival: float | None
    answer_survival: float | None
    documents_kept: tuple[float, ...]
    gold_kept: tuple[tuple[tuple[int, str], ...], ...]
    unprotected_tokens: int
    ttft_s: float | None
    decode_tokens_per_s: float | None
    kv_bytes_full: int | None
    kv_bytes_kept: int | None
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Record:
    """An outcome with the example that it belongs to, and its figures.

    Attributes:
        example: id of the case; with `context_tokens` and `depth` it names the example.
        gold: numbers of the gold documents.
        cited: numbers of the documents that the reply cites.
        figures: what the task makes of the reply, each between 0 and 1.
        agreement: words shared with the reply of the full cache; None where that was not asked for.
        document_set: names the documents, where several questions are asked over the same ones; None where each has
            its own.
    """

    example: str
    context_tokens: int | None
    depth: float | None
    kind: str
    question: str
    answers: tuple[tuple[str, ...], ...]
    gold: tuple[int, ...]
    cited: tuple[int, ...]
    figures: Mapping[str, float]
    agreement: float | None
    outcome: Outcome
    document_set: str | None = None

    @property
    def key(self) -> str:
        """Names the example: the same for all policies."""
        return key(self.example, self.context_tokens, self.depth)

    @property
    def cluster(self) -> str:
        """Names what depends on each other: the questions about a document set, or a case at its lengths and depths."""
        return self.example if self.document_set is None else self.document_set

    @classmethod
    def parse(cls, line: str) -> Self:
        """The record of a line; raises ValueError, TypeError or KeyError if it is none."""
        row = json.loads(line)
        outcome = row.pop("outcome")
        outcome["documents_kept"] = tuple(outcome["documents_kept"])
        outcome["gold_kept"] = tuple(tuple((shade, text) for shade, text in text) for text in outcome["gold_kept"])
        answers = tuple(tuple(names) for names in row.pop("answers"))
        numbers = {name: tuple(row[name]) for name in ("gold", "cited")}
        return cls(**row | numbers, answers=answers, outcome=Outcome(**outcome))


def key(example: str, context_tokens: int | None, depth: float | None) -> str:
    """One string for an example at a length and depth."""
    return f"{example}|{context_tokens or ''}|{'' if depth is None else depth}"


class RecordFile:
    """The predictions of a run: what is there already, and a place for more.

    A line that a killed run left incomplete is dropped; a file that is broken anywhere else is refused.
    """

    def __init__(self, path: Path, shared_sets: bool = False) -> None:
        self.records = read(path, shared_sets)
        self._path = path
        self._file: IO[str] | None = None

    def append(self, record: Record) -> None:
        """Write a record so that a kill right after this keeps it."""
        if self._file is None:
            self._file = open_behind(self._path)
        self._file.write(json.dumps(asdict(record)) + "\n")
        self._file.flush()
        self.records.append(record)

    def close(self) -> None:
        """Close the file; records can still be read."""
        if self._file is not None:
            self._file.close()


def read(path: Path, shared_sets: bool = False) -> list[Record]:
    """All complete records of a file.

    Args:
        shared_sets: whether the run's questions share document sets. Records from before these were noted then belong
            to one unknown set, and whether their documents had been read before is not known either.
    """
    records = list(_complete(path))
    return [_of_unknown_set(r) if shared_sets and r.document_set is None else r for r in records]


def _of_unknown_set(record: Record) -> Record:
    return replace(record, document_set="unknown", outcome=replace(record.outcome, ttft_s=None))


def _complete(path: Path) -> Iterator[Record]:
    for number, line in enumerate(whole_lines(path), 1):
        try:
            yield Record.parse(line)
        except (ValueError, TypeError, KeyError) as error:
            raise DocumentError(
                f"{path}, line {number}: not a prediction of this version ({error}); use another --out folder"
            ) from error
