"""Behaviour on packaged real weights: what SnapKV keeps is what the question needs."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragkv.answer import ask
from ragkv.backend import forward
from ragkv.chat import Prompt, encode_text
from ragkv.compare import prefill_many
from ragkv.config import SamplingParams
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.kv_store import KVStore
from ragkv.models import load
from ragkv.policies import FullKV, Policy, SnapKV, StreamingLLM
from ragkv.prefill import Prefilled, prefill

pytestmark = pytest.mark.usefixtures("cores_to_spare")

ROOT = Path(__file__).parent.parent
SAMPLE = [json.loads(line) for line in (ROOT / "evals/ragkv_evals/data/hotpotqa_sample.jsonl").read_text().splitlines()]
LINES = [json.loads(line) for line in (ROOT / "tests/data/longeval_lines_200.jsonl").read_text().splitlines()]
CITIES = ("Lisbon", "Nairobi", "Quito", "Oslo", "Hanoi", "Tunis", "Riga", "Lima")


@pytest.fixture(scope="module")
def smollm() -> Engine:
    return Engine(load("smollm2-135m"))


@pytest.fixture(scope="module")
def qwen() -> Engine:
    return Engine(load("qwen2.5-coder-1.5b"))  # the 0.5B finds two of the four lines


def needle(engine: Engine, rng: random.Random) -> tuple[Prompt, str]:
    """Six Wikipedia paragraphs with one magic number between them, and the question for it (RULER's single needle)."""
    paragraphs = ["".join(paragraph["sentences"]) for row in SAMPLE for paragraph in row["paragraphs"]]
    text = rng.sample(paragraphs, 6)
    city, number = rng.choice(CITIES), str(rng.randrange(10_000, 100_000))
    text.insert(rng.randrange(len(text) + 1), f"One of the special magic numbers for {city} is: {number}.")
    what = f"special magic number for {city} mentioned in the text above"
    prompt = "\n".join(text) + f"\nWhat is the {what}? The {what} is:"
    return encode_text(engine.tokenizer, prompt), number


def found(engine: Engine, cases: list[tuple[Prompt, str]]) -> Counter[str]:
    """How many answers hold the number, for policies that keep a quarter of each prompt, and for the full cache."""
    counts: Counter[str] = Counter()
    for prompt, number in cases:
        budget = len(prompt) // 4
        policies: dict[str, Policy] = {
            "snapkv": SnapKV(budget, window_size=32),
            "streaming": StreamingLLM(4, budget - 4),
            "full": FullKV(),
        }
        read = prefill_many(engine.model, prompt, list(policies.values()))
        replies = engine.replies([(prompt, each) for each in read], SamplingParams(max_tokens=10))
        for name, reply in zip(policies, replies, strict=True):
            assert name == "full" or reply.stats.kept_tokens == budget
            counts[name] += number in reply.text
    return counts


def test_snapkv_finds_what_streaming_forgets(smollm: Engine) -> None:
    rng = random.Random(1)
    counts = found(smollm, [needle(smollm, rng) for _ in range(6)])
    assert counts["full"] >= 4, f"the model does not find the needle in the full cache: {counts}"
    assert counts["snapkv"] >= counts["streaming"] + 3


def test_a_second_question_finds_what_the_first_one_dropped() -> None:
    """Two numbers in one text, asked about in turn: each question selects from the stored K/V of the whole text.

    The second answer is the full cache's; on the compressed cache that the first question left, the number is gone.
    """
    smollm = Engine(load("smollm2-135m", dtype=torch.float32))  # digits get lost in bfloat16
    rng, answered, lost = random.Random(5), 0, 0
    for _ in range(3):
        text, (first, second), number = two_needles(smollm, rng)
        policy, store = SnapKV(len(text) // 4, window_size=32), KVStore(block_size=32)
        on_first = prefill(smollm.model, Prompt(text.ids + first.ids), policy, store=store)
        asked = Prompt(text.ids + second.ids)
        on_second = prefill(smollm.model, asked, policy, store=store)
        assert on_second.cache_read_tokens >= len(text) - 32
        full = prefill(smollm.model, asked, FullKV())
        plain_reuse = followed_by(smollm, on_first, second)
        read = [(asked, each) for each in (full, on_second, plain_reuse)]
        expected, reply, reused = (each.text for each in smollm.replies(read, SamplingParams(max_tokens=8)))
        if number in expected:
            answered += 1
            assert number in reply
            lost += number not in reused
    assert answered >= 2
    assert lost == answered


def two_needles(engine: Engine, rng: random.Random) -> tuple[Prompt, tuple[Prompt, Prompt], str]:
    """A text with the numbers of two cities, the questions for them, and what is to be answered to the second."""
    paragraphs = ["".join(paragraph["sentences"]) for row in SAMPLE for paragraph in row["paragraphs"]]
    text, cities = rng.sample(paragraphs, 4), rng.sample(CITIES, 2)
    numbers = [str(rng.randrange(10_000, 100_000)) for _ in cities]
    for place, (city, number) in zip((3, 1), zip(cities, numbers, strict=True), strict=True):
        text.insert(place, f"One of the special magic numbers for {city} is: {number}.")
    wanted = [f"special magic number for {city} mentioned in the text above" for city in cities]
    asked = [encode_text(engine.tokenizer, f"\nWhat is the {what}? The {what} is:") for what in wanted]
    return encode_text(engine.tokenizer, "\n".join(text)), (asked[0], asked[1]), numbers[1]


def followed_by(engine: Engine, read: Prefilled, more: Prompt) -> Prefilled:
    """The compressed cache of one prompt with more tokens behind it."""
    positions = torch.arange(read.length, read.length + len(more)).unsqueeze(0)
    logits = forward(engine.model, torch.tensor([more.ids]), read.cache, positions)
    return replace(read, logits=logits, length=read.length + len(more))


def test_a_cited_answer_to_a_real_question(smollm: Engine) -> None:
    """The 135M model cites, if not rightly, when it is held to the form: each citation is a document that is there."""
    row = SAMPLE[1]
    documents = [Document(id="", title=p["title"], text="".join(p["sentences"])) for p in row["paragraphs"][:6]]
    policy = SnapKV(max_capacity_prompt=512)
    first, second = (
        ask(smollm, row["question"], documents, SamplingParams(64), policy=policy, must_cite=True) for _ in range(2)
    )
    assert first.text == second.text != ""
    assert first.citations, f"no citation in {first.text!r}"
    assert not first.invalid_citations
    assert all(document in documents for document in first.cited_documents)
    assert first.stats.kept_tokens == 512 < first.stats.prompt_tokens
    # Exactly budget / length of the full bytes, whatever the rounding of their ratio.
    assert first.stats.kv_bytes_kept * first.stats.prompt_tokens == first.stats.kv_bytes_full * 512


@pytest.mark.qwen
def test_snapkv_retrieves_lines_of_longeval(qwen: Engine) -> None:
    """LongEval line retrieval at 3.3K tokens."""
    cases = [(encode_text(qwen.tokenizer, row["prompt"] + _start(row)), str(row["expected_number"])) for row in LINES]
    counts = found(qwen, cases)
    assert counts["full"] > len(LINES) // 2, f"the model does not find the lines in the full cache: {counts}"
    assert counts["snapkv"] >= counts["streaming"]


def _start(row: dict[str, str]) -> str:
    """The beginning of the answer, which a base model would not find by itself."""
    return f"\nThe <REGISTER_CONTENT> in {row['correct_line'].split(':')[0]} is <"
