"""The order of documents: stable, popular first, and citations that lead to the right ones."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.answer import ask
from ragkv.config import SamplingParams
from ragkv.documents import Document
from ragkv.engine import Engine
from ragkv.kv_store import KVStore
from ragkv.ordering import PopularFirst, popular_first
from ragkv.policies import SnapKV
from ragkv.prompt import CitePrompt
from test_answer import Saying
from tiny import tiny_engine


@pytest.mark.parametrize(
    ("ids", "uses", "expected"),
    [
        ("abc", {}, "abc"),
        ("cab", {"a": 1, "b": 1, "c": 1}, "abc"),
        ("cab", {"a": 1, "b": 3, "c": 2}, "bca"),
        ("xcya", {"a": 1, "b": 9, "c": 2}, "caxy"),
        ("", {"a": 1}, ""),
    ],
)
def test_popular_first(ids: str, uses: dict[str, int], expected: str) -> None:
    assert "".join(ids[n] for n in popular_first(ids, uses)) == expected


@given(
    st.permutations("abcdef"),
    st.permutations("abcdef"),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9)),
)
def test_the_order_of_known_documents_does_not_depend_on_their_rank(
    one: list[str], other: list[str], uses: dict[str, int]
) -> None:
    known = [[name for name in ids if name in uses] for ids in (one, other)]
    first, second = ([ids[n] for n in popular_first(ids, uses)] for ids in known)
    assert first == second
    assert sorted(popular_first(one, uses)) == list(range(6))


def test_sets_that_overlap_share_their_beginning() -> None:
    order = PopularFirst()

    def ordered(ids: str) -> str:
        result = "".join(ids[n] for n in order.positions(ids))
        order.count(result)
        return result

    assert ordered("abcd") == "abcd"
    assert ordered("xbyac") == "abcxy"
    assert ordered("cbda") == "abcd"


def test_looking_counts_nothing() -> None:
    order = PopularFirst()
    for ids in ("ab", "ba"):
        assert order.positions(ids) == [0, 1]


def test_threads_lose_no_count() -> None:
    order = PopularFirst()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(order.count, ["ab"] * 500 + ["b"]))
    assert order.positions("ab") == [1, 0]


DOCUMENTS = {name: Document(name, f"Text of {name}. " * 4, f"Title {name}") for name in "abcdx"}
PROMPT = CitePrompt(system="", rules="Cite.", examples="")


def _of(ids: str) -> list[Document]:
    return [DOCUMENTS[name] for name in ids]


def test_numbers_of_an_answer_are_those_of_the_prompt() -> None:
    order = PopularFirst()
    ask(Saying("[1]"), "Who?", _of("abc"), prompt=PROMPT, order=order)
    answer = ask(Saying("[3] and [1]"), "When?", _of("xcb"), prompt=PROMPT, order=order)
    assert "".join(document.id for document in answer.documents) == "bcx"
    assert "".join(document.id for document in answer.cited_documents) == "xb"
    unordered = ask(Saying("[3] and [1]"), "When?", _of("xcb"), prompt=PROMPT)
    assert "".join(document.id for document in unordered.cited_documents) == "bx"


def test_what_is_dropped_are_the_lowest_ranked_whatever_the_order() -> None:
    order = PopularFirst()
    order.count("dcba")
    loaded = tiny_engine(context_length=160).loaded
    answer = ask(
        Engine(loaded, SnapKV(100, 8)),
        "Who?",
        _of("abcd"),
        SamplingParams(max_tokens=2),
        prompt=PROMPT,
        order=order,
        on_overflow="drop_documents",
    )
    kept = len(answer.documents)
    assert 0 < kept < 4
    assert [document.id for document in answer.documents] == sorted("abcd"[:kept], reverse=True)
    assert "".join(document.id for document in answer.dropped_documents) == "abcd"[kept:]


def test_an_engine_with_a_store_reads_less() -> None:
    loaded, read = tiny_engine(context_length=4096).loaded, []
    for order in (None, PopularFirst()):
        engine = Engine(loaded, SnapKV(100, 16), store=KVStore(10**8, block_size=16))
        sampling = SamplingParams(max_tokens=1)
        ask(engine, "Who?", _of("abcd"), sampling, prompt=PROMPT, order=order)
        stats = ask(engine, "When?", _of("xdcba"), sampling, prompt=PROMPT, order=order).stats
        read.append(stats.cache_read_tokens / stats.prompt_tokens)
    assert read[0] < 0.2
    assert read[1] > 0.6
