"""What a stable order of retrieved documents costs and buys: the same questions over them as ranked, and popular first.

Every question retrieves from the paragraphs of all questions. Each order has a store of its own, so that what it need
not read again is counted; the questions come one after the other, as they do in a product.
"""

from collections.abc import Callable, Iterator, Sequence

from ragkv.answer import Answer, ask
from ragkv.config import SamplingParams
from ragkv.documents import Document
from ragkv.embedding import Embedder
from ragkv.engine import Engine
from ragkv.index import Index
from ragkv.kv_store import KVStore
from ragkv.models import LoadedModel
from ragkv.ordering import PopularFirst
from ragkv.policies import SnapKV
from ragkv_evals.paired import Answered
from ragkv_evals.tasks.base import Example
from ragkv_evals.tasks.hotpotqa import HOTPOTQA
from ragkv_evals.tasks.question import Question, identity

AS_RANKED, POPULAR_FIRST = "as ranked", "popular first"


def index_of(questions: Sequence[Question], embedder: Embedder) -> Index:
    """All paragraphs of these questions, one for each title."""
    every = (document for question in questions for document in question.documents)
    return Index.build(list({identity(document): document for document in every}.values()), embedder)


def answers(
    loaded: LoadedModel,
    questions: Sequence[Question],
    index: Index,
    top_k: int,
    budget: int,
    kv_memory_bytes: int,
    notify: Callable[[int], None] = lambda done: None,
) -> Iterator[Answered]:
    """Each question in both orders, with SnapKV.

    Args:
        top_k: passages retrieved for each question.
        budget: entries kept per KV head.
        kv_memory_bytes: of K/V that each order may keep.
        notify: told how many questions are done.
    """
    orders = {AS_RANKED: None, POPULAR_FIRST: PopularFirst()}
    engines = {mode: Engine(loaded, SnapKV(budget), store=KVStore(kv_memory_bytes)) for mode in orders}
    sampling = SamplingParams(max_tokens=HOTPOTQA.max_tokens)
    for done, question in enumerate(questions):
        notify(done)
        retrieved = [hit.document for hit in index.search(question.text, top_k)]
        for mode, order in orders.items():
            yield _answered(question, mode, ask(engines[mode], question.text, retrieved, sampling, order=order))


def _answered(question: Question, mode: str, answer: Answer) -> Answered:
    gold = {identity(question.documents[i]) for i in question.gold}
    example = Example(
        id=question.id,
        question=question.text,
        documents=answer.documents,
        gold=_numbers(answer.documents, gold),
        answers=question.answers,
    )
    return Answered(
        example=question.id,
        mode=mode,
        reply=answer.text,
        figures=HOTPOTQA.score(example, answer.text),
        ttft_s=answer.stats.ttft_s,
        prompt_tokens=answer.stats.prompt_tokens,
        computed_tokens=answer.stats.prompt_tokens - answer.stats.cache_read_tokens,
    )


def _numbers(documents: Sequence[Document], names: set[str]) -> tuple[int, ...]:
    return tuple(number for number, document in enumerate(documents, 1) if identity(document) in names)
