"""Runs with a scripted answerer: what is written when, what a second start still does, and what it refuses."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest

from ragkv.documents import Document
from ragkv.errors import ConfigError, DocumentError
from ragkv.prompt import CitePrompt
from ragkv_evals.answering import Answering
from ragkv_evals.config import RunConfig
from ragkv_evals.plan import Job, Pace, kinds, plan
from ragkv_evals.probe import Probe
from ragkv_evals.records import Outcome, Record, RecordFile, read
from ragkv_evals.run import RunFolder, missing, run
from ragkv_evals.summary import summarize
from ragkv_evals.tasks.base import Example, Layout, Task
from ragkv_evals.tasks.hotpotqa import score

CONFIG = RunConfig(
    task="toy",
    data="toy.jsonl",
    data_hash="1234",
    model="scripted",
    dtype="float32",
    context_tokens=(100, 200),
    depths=(),
    limit=None,
    seed=0,
    policies=("snapkv:16,window_size=8", "full"),
    max_tokens=8,
    shard=(1, 1),
    prompt_hash="5678",
)


class NoCounter:
    """Nothing is counted here."""

    def document(self, document: Document) -> int:
        raise NotImplementedError

    def text(self, text: str) -> int:
        raise NotImplementedError

    def frame(self, question: str, prompt: CitePrompt | None) -> int:
        raise NotImplementedError


@dataclass
class ToyCases:
    """Case n asks for n, which stands in the first of two documents."""

    count: int
    ids: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = [f"case {n}" for n in range(self.count)]

    def build(self, index: int, layout: Layout) -> Example:
        documents = (Document(id="a", text=f"It is {index}."), Document(id="b", text="Or not."))
        return Example(self.ids[index], f"Which {index}?", documents, (1,), ((f"number {index}",),), "toy")


class Killed(Exception):
    """Stands for whatever ends a run."""


@dataclass
class Scripted:
    """The full cache is always right; SnapKV never cites, and is wrong about even numbers. Notes what it is asked."""

    kill_after: int | None = None
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    counter = NoCounter()

    def answer(self, example: Example, names: Sequence[str], max_tokens: int) -> Iterator[Outcome]:
        self.asked.append((example.id, tuple(names)))
        for name in names:
            if self.kill_after is not None:
                self.kill_after -= 1
                if self.kill_after < 0:
                    raise Killed
            number = int(example.id.split()[1])
            wrong = name != "full" and number % 2 == 0
            reply = ("other" if wrong else f"number {number}") + (" [1]" if name == "full" else "")
            yield outcome(name, reply)

    def probe(self, example: Example) -> Probe:
        return Probe(prompt_tokens=50, read_tokens=10, seconds=2.0)


def outcome(policy: str, reply: str) -> Outcome:
    kept = 100.0 if policy == "full" else 16.0
    return Outcome(
        policy=policy,
        reply=reply,
        finish_reason="stop",
        prompt_tokens=100,
        completion_tokens=3,
        budget=kept,
        kept_tokens=kept,
        gold_survival=kept / 100,
        answer_survival=None,
        documents_kept=(kept / 100, 0.5),
        gold_kept=(((9, "It is "), (2, "0.")),),
        unprotected_tokens=0 if policy == "full" else 7,
        ttft_s=1.0,
        decode_tokens_per_s=10.0,
        kv_bytes_full=800,
        kv_bytes_kept=int(8 * kept),
        peak_memory_bytes=None,
    )


TOY = Task(
    name="toy",
    help="For tests.",
    open=lambda data: ToyCases(3),
    score=score,
    headline=("f1", "citation_f1"),
    max_tokens=8,
)


def start(folder: Path, answerer: Scripted, config: RunConfig = CONFIG, count: int = 3) -> list[Record]:
    cases = ToyCases(count)
    answering = Answering(TOY, cases, answerer, config)
    return run(cases.ids, RunFolder(folder, config, {"python": "3"}), answering.spread)


def without_times(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines())


def test_a_run_answers_every_case_at_every_length_under_every_policy(tmp_path: Path) -> None:
    answerer = Scripted()
    records = start(tmp_path, answerer)
    assert len(records) == 3 * 2 * 2
    assert len({(record.key, record.outcome.policy) for record in records}) == 12
    assert {names for _, names in answerer.asked} == {("full", "snapkv:16,window_size=8")}  # full first, for agreement
    assert read(tmp_path / "predictions.jsonl") == records
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG.to_json()
    assert json.loads((tmp_path / "environment.json").read_text()) == {"python": "3"}


def test_records_carry_figures_and_agreement(tmp_path: Path) -> None:
    found = {(r.example, r.outcome.policy): r for r in start(tmp_path, Scripted())}
    full, right, wrong = (
        found[key]
        for key in (("case 1", "full"), ("case 1", "snapkv:16,window_size=8"), ("case 2", "snapkv:16,window_size=8"))
    )
    assert (full.figures["f1"], full.figures["citation_f1"], full.agreement) == (1, 1, 1)
    assert (right.figures["f1"], right.figures["citation_f1"]) == (1, 0)
    assert right.agreement == pytest.approx(4 / 5)  # two of its two words, two of three
    assert (wrong.figures["f1"], wrong.agreement) == (0, 0)


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    start(tmp_path / "whole", Scripted())
    with pytest.raises(Killed):
        start(tmp_path / "cut", Scripted(kill_after=5))
    assert len(read(tmp_path / "cut" / "predictions.jsonl")) == 5  # each is on the disk as it is done
    second = Scripted()
    start(tmp_path / "cut", second)
    # The third example lacks only SnapKV; the three after it lack everything.
    assert [names for _, names in second.asked] == [
        ("snapkv:16,window_size=8",),
        *[("full", "snapkv:16,window_size=8")] * 3,
    ]
    assert without_times(tmp_path / "cut" / "predictions.jsonl") == without_times(
        tmp_path / "whole" / "predictions.jsonl"
    )
    third = Scripted()
    start(tmp_path / "cut", third)
    assert third.asked == []


def test_a_line_cut_in_the_middle_is_done_again(tmp_path: Path) -> None:
    start(tmp_path, Scripted())
    file = tmp_path / "predictions.jsonl"
    whole = without_times(file)
    file.write_bytes(file.read_bytes()[:-20])
    again = Scripted()
    start(tmp_path, again)
    assert [names for _, names in again.asked] == [("snapkv:16,window_size=8",)]
    assert without_times(file) == whole


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x0b"])
def test_line_separators_in_a_text_do_not_end_a_record(tmp_path: Path, separator: str) -> None:
    (record, *_) = start(tmp_path / "run", Scripted())
    odd = replace(record, question=f"one{separator}two")
    file = RecordFile(tmp_path / "odd.jsonl")
    file.append(odd)
    file.close()
    assert RecordFile(tmp_path / "odd.jsonl").records == [odd]
    raw = json.dumps(asdict(odd), ensure_ascii=False) + "\n"  # as earlier versions wrote it
    (tmp_path / "raw.jsonl").write_text(raw, encoding="utf-8")
    assert RecordFile(tmp_path / "raw.jsonl").records == [odd]


def test_a_broken_line_elsewhere_is_refused(tmp_path: Path) -> None:
    start(tmp_path, Scripted())
    file = tmp_path / "predictions.jsonl"
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(DocumentError, match="line 1: not a prediction of this version"):
        start(tmp_path, Scripted())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "holds a run with seed=0, and this one has 1"),
        ({"context_tokens": (100,)}, r"context_tokens=\[100, 200\], and this one has \[100\]"),
        ({"prompt_hash": "new"}, "prompt_hash='5678', and this one has 'new'"),
    ],
)
def test_a_folder_with_another_run_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    start(tmp_path, Scripted())
    before = (tmp_path / "predictions.jsonl").read_text()
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, Scripted(), replace(CONFIG, **change))  # type: ignore[arg-type]
    assert (tmp_path / "predictions.jsonl").read_text() == before


def test_shards_share_out_the_cases() -> None:
    ids = [str(n) for n in range(10)]
    whole = plan(ids, CONFIG)
    shards = [plan(ids, replace(CONFIG, shard=(n, 3))) for n in (1, 2, 3)]
    assert sorted(job.key for shard in shards for job in shard) == sorted(job.key for job in whole)
    assert all({job.context_tokens for job in shard} == {100, 200} for shard in shards)
    assert [len(shard) for shard in shards] == [8, 6, 6]


def test_a_limit_draws_the_first_of_what_a_larger_one_draws() -> None:
    ids = [str(n) for n in range(50)]
    five, ten = (plan(ids, replace(CONFIG, limit=limit, context_tokens=())) for limit in (5, 10))
    assert ten[:5] == five
    assert [job.index for job in ten] != sorted(job.index for job in ten)
    assert [job.index for job in plan(ids, replace(CONFIG, seed=1))] != [job.index for job in plan(ids, CONFIG)]


def test_depths_multiply_the_plan() -> None:
    jobs = plan(["a"], replace(CONFIG, depths=(0.0, 50.0)))
    assert [(job.context_tokens, job.depth) for job in jobs] == [(100, 0.0), (100, 50.0), (200, 0.0), (200, 50.0)]
    assert len({job.key for job in jobs}) == 4


def test_examples_of_one_kind() -> None:
    """What begins another document set takes longer than what goes on with it."""
    jobs = [Job(n, f"case {n}", length, None) for n in range(4) for length in (100, 200)]
    documents = {job.key: (job.context_tokens, job.index // 2) for job in jobs}
    begins = [True, True, False, False] * 2
    assert list(kinds(jobs, documents).items()) == [
        (job.key, (job.context_tokens, each)) for job, each in zip(jobs, begins, strict=True)
    ]
    assert set(kinds(jobs, {}).values()) == {(100, True), (200, True)}


def test_estimates_wait_for_every_kind() -> None:
    short, long = (100, True), (200, False)
    pace = Pace()
    pace.add(short, 2.0)
    assert pace.estimate([short, long]) is None
    pace.add(long, 10.0)
    pace.add(long, 20.0)
    assert pace.estimate([short, short, long]) == 2 + 2 + 15
    assert pace.estimate([]) == 0


def test_watchers_hear_of_the_progress(tmp_path: Path) -> None:
    heard: list[tuple[int, int, bool]] = []
    cases, answering = ToyCases(2), Answering(TOY, ToyCases(2), Scripted(), CONFIG)
    folder = RunFolder(tmp_path, CONFIG, {})
    run(cases.ids, folder, answering.spread, lambda done, total, left: heard.append((done, total, left is not None)))
    assert heard == [(0, 4, False), (1, 4, False), (2, 4, True), (3, 4, True), (4, 4, True)]


def test_a_first_guess_comes_before_the_first_example(tmp_path: Path) -> None:
    """From a probe; prompts whose documents were read before cost next to nothing."""
    heard: list[object] = []
    cases, answering = ToyCases(2), Answering(TOY, ToyCases(2), Scripted(), CONFIG)
    documents = {job.key: job.context_tokens for job in plan(cases.ids, CONFIG)}
    run(
        *(cases.ids, RunFolder(tmp_path, CONFIG, {}), answering.spread),
        lambda done, total, left: heard.append(done),
        documents,
        lambda probe, seconds: heard.append(seconds),
    )
    assert heard == [0, 0.2 * (100 + 200), 1, 2, 3, 4]
    probe = Scripted().probe(cases.build(0, Layout(None, None, 0, NoCounter())))
    assert probe.estimate([(None, True), (100, True), (100, False)]) == 0.2 * (50 + 100)
    assert list(answering.spread([])) == []


def test_estimates_of_shared_sets_wait_for_what_goes_on_with_one(tmp_path: Path) -> None:
    heard: list[tuple[int, bool]] = []
    cases, answering = ToyCases(2), Answering(TOY, ToyCases(2), Scripted(), CONFIG)
    documents = {job.key: job.context_tokens for job in plan(cases.ids, CONFIG)}
    watch = lambda done, total, left: heard.append((done, left is not None))  # noqa: E731
    run(cases.ids, RunFolder(tmp_path, CONFIG, {}), answering.spread, watch, documents)
    assert heard == [(0, False), (1, False), (2, False), (3, False), (4, True)]


def test_missing_gives_the_full_reply_where_it_is_known(tmp_path: Path) -> None:
    records = [record for record in start(tmp_path, Scripted()) if record.outcome.policy == "full"]
    work = missing(plan(ToyCases(3).ids, CONFIG), CONFIG.policies, records)
    assert {(names, reply) for _, names, reply in work} == {
        (("snapkv:16,window_size=8",), f"number {n} [1]") for n in range(3)
    }


def test_the_summary_pairs_policies_with_full(tmp_path: Path) -> None:
    cells = summarize(start(tmp_path, Scripted(), count=6), TOY)
    assert [(cell["context_tokens"], cell["policy"]) for cell in cells[:2]] == [
        (100, "full"),
        (100, "snapkv:16,window_size=8"),
    ]
    full, snapkv = cells[:2]
    assert full["figures"]["f1"] == {"value": 1, "low": 1, "high": 1, "clusters": 6}
    assert full["versus_full"] == {}
    assert snapkv["examples"] == 6
    assert snapkv["figures"]["f1"]["value"] == 0.5
    versus = snapkv["versus_full"]["f1"]
    assert (versus["examples"], versus["difference"]["value"], versus["relative"]["value"]) == (6, -0.5, -0.5)
    assert -1 <= versus["difference"]["low"] < -0.5 < versus["difference"]["high"] <= 0
    assert snapkv["gold_survival"] == 0.16
    assert snapkv["answer_survival"] is None
    assert snapkv["finish_reasons"] == {"stop": 6}
    assert snapkv["unprotected_tokens"] == 7


def test_what_depends_on_each_other_is_one_cluster(tmp_path: Path) -> None:
    """A case at several depths, and the questions about one document set."""
    records = start(tmp_path, Scripted(), count=6)
    depths = [replace(r, depth=float(depth)) for r in records for depth in range(3)]
    assert [cell["figures"]["f1"]["clusters"] for cell in summarize(depths, TOY)] == [6] * 4
    sharing = [replace(r, document_set=f"set {int(r.example[-1]) // 2}") for r in records]
    for cell in summarize(sharing, TOY):
        f1 = cell["figures"]["f1"]
        assert (f1["clusters"], f1["low"], f1["high"]) == (3, None, None)  # too few for bounds
        assert cell["policy"] == "full" or cell["versus_full"]["f1"]["difference"]["clusters"] == 3


def test_times_of_prompts_that_were_partly_read_before_do_not_count(tmp_path: Path) -> None:
    records = start(tmp_path, Scripted(), count=3)
    again = [r if r.example == "case 1" else replace(r, outcome=replace(r.outcome, ttft_s=None)) for r in records]
    assert [cell["ttft_s"] for cell in summarize(again, TOY)] == [1.0] * 4
    none = [replace(r, outcome=replace(r.outcome, ttft_s=None)) for r in records]
    assert [cell["ttft_s"] for cell in summarize(none, TOY)] == [None] * 4


def test_records_name_the_document_set_that_questions_share(tmp_path: Path) -> None:
    config = replace(CONFIG, shared_sets=True, context_tokens=(100,))
    sets = {record.example: record.document_set for record in start(tmp_path / "shared", Scripted(), config)}
    assert len({*sets.values(), None}) == 4  # these cases have three, and every process names them alike
    answering = Answering(TOY, ToyCases(3), Scripted(), config)
    assert list(answering.check().values()) == [sets[job.case] for job in plan(ToyCases(3).ids, config)]
    assert sets["case 1"] == "10d54eac43419045"
    assert {record.document_set for record in start(tmp_path / "own", Scripted())} == {None}


def test_earlier_runs_over_shared_sets_can_be_read(tmp_path: Path) -> None:
    """Which of their questions shared a set was not noted, nor whether a prompt's beginning had been read before."""
    config = replace(CONFIG, shared_sets=True)
    start(tmp_path, Scripted(), config, count=6)
    file = tmp_path / "predictions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "document_set"}) + "\n" for row in rows))
    again = Scripted()
    records = start(tmp_path, again, config, count=6)
    assert again.asked == []
    assert {(record.cluster, record.outcome.ttft_s) for record in records} == {("unknown", None)}
    assert {record.cluster for record in read(file)} == {f"case {n}" for n in range(6)}


def test_a_run_grows_with_its_limit(tmp_path: Path) -> None:
    """What a larger limit draws begins with what the smaller one drew."""
    first, second = Scripted(), Scripted()
    start(tmp_path, first, replace(CONFIG, limit=2), count=5)
    records = start(tmp_path, second, replace(CONFIG, limit=4), count=5)
    assert not {case for case, _ in first.asked} & {case for case, _ in second.asked}
    assert len(records) == 4 * 2 * 2
    assert json.loads((tmp_path / "config.json").read_text())["limit"] == 4
    for smaller in (3, 2):
        with pytest.raises(ConfigError, match=f"limit=4, and this one has {smaller}"):
            start(tmp_path, Scripted(), replace(CONFIG, limit=smaller), count=5)
    assert len(start(tmp_path, Scripted(), replace(CONFIG, limit=None), count=5)) == 5 * 2 * 2
    with pytest.raises(ConfigError, match="limit=None, and this one has 4"):
        start(tmp_path, Scripted(), replace(CONFIG, limit=4), count=5)
