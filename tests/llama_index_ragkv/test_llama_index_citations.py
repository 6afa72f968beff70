"""Cited answers: numbers given once, and every `[n]` of an answer led back to its node, or reported."""

from collections.abc import Callable

import pytest
from llama_index.core import SummaryIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index.llms.ragkv import ChatSnapKV, CitedAnswerSynthesizer
from llama_index.llms.ragkv._messages import to_chat_messages
from ragkv.budget import document_tokens
from ragkv.chat import Prompt, encode_chat
from ragkv.documents import Document
from ragkv.errors import PromptTooLong
from ragkv.ordering import PopularFirst
from ragkv.prompt import CitePrompt

Say = Callable[..., list[Prompt]]
SHORT = CitePrompt(system="", rules="Answer and cite.", examples="")
NODES = [
    NodeWithScore(node=TextNode(id_=f"node-{n}", text=f"Fact {n} is here.", metadata=metadata), score=1 / n)
    for n, metadata in enumerate([{"title": "First"}, {"title": "Second", "year": 1999}, {}], 1)
]


def marks(response: object) -> list[tuple[int, bool]]:
    nodes = [scored.node for scored in response.source_nodes]  # type: ignore[attr-defined]
    return [(node.metadata["ragkv_number"], node.metadata["ragkv_cited"]) for node in nodes]


def test_cited_answer(tiny: ChatSnapKV, say: Say) -> None:
    say(" It is so [3][1], and [7]. ")
    response = CitedAnswerSynthesizer(tiny).synthesize("What is so?", NODES)
    assert isinstance(response, Response)
    assert response.response == "It is so [3][1], and [7]."
    assert [scored.node.node_id for scored in response.source_nodes] == ["node-1", "node-2", "node-3"]
    assert [scored.score for scored in response.source_nodes] == [1, 1 / 2, 1 / 3]
    assert marks(response) == [(1, True), (2, False), (3, True)]
    assert response.metadata is not None
    assert response.metadata["ragkv_citations"] == [3, 1]
    assert response.metadata["ragkv_invalid_citations"] == [7]
    assert response.metadata["ragkv_dropped_nodes"] == []
    assert response.metadata["node-1"]["title"] == "First"
    assert "ragkv_number" not in NODES[0].node.metadata  # the index's own nodes stay as they are


@pytest.mark.parametrize("streaming", [False, True])
def test_titles_decide_where_documents_are_named(tiny: ChatSnapKV, say: Say, streaming: bool) -> None:
    say("So.\nDocuments: Second [1], [3]")
    response = CitedAnswerSynthesizer(tiny, streaming=streaming).synthesize("What is so?", NODES)
    if isinstance(response, StreamingResponse):
        assert len(list(response.response_gen)) > 3
    assert marks(response) == [(1, False), (2, True), (3, True)]
    assert response.metadata is not None
    assert response.metadata["ragkv_citations"] == [2, 3]


def test_an_order_of_its_own(tiny: ChatSnapKV, say: Say) -> None:
    """Popular nodes come first, and numbers follow the prompt."""
    seen = say("[1]", "[1][3]")
    synthesizer = CitedAnswerSynthesizer(tiny, prompt=SHORT, order=PopularFirst())
    synthesizer.synthesize("What is so?", NODES[:2])
    response = synthesizer.synthesize("What else?", [NODES[2], NODES[1], NODES[0]])
    assert [scored.node.node_id for scored in response.source_nodes] == ["node-1", "node-2", "node-3"]
    assert marks(response) == [(1, True), (2, False), (3, True)]
    text = tiny.options().engine().tokenizer.decode(seen[1].ids)
    assert text.index("[1] First") < text.index("[2] Second") < text.index("[3]\n")


def test_prompt_keeps_its_marks(tiny: ChatSnapKV, say: Say) -> None:
    """Headers are protected, and the observation window begins at the question."""
    seen = say("[1]")
    CitedAnswerSynthesizer(tiny).synthesize("What is so?", NODES)
    tokenizer = tiny.options().engine().tokenizer
    texts: dict[str, list[str]] = {}
    for span in seen[0].spans:
        texts.setdefault(span.kind, []).append(tokenizer.decode(seen[0].ids[span.start : span.end]))
    assert texts["header"] == ["[1] First\n", "[2] Second\n", "[3]\n"]
    assert texts["document"][1] == "year: 1999\n\nFact 2 is here.\n\n"  # the title stands in the header alone
    assert texts["question"] == ["Question: What is so?"]
    assert [span.document for span in seen[0].spans if span.kind == "document"] == [1, 2, 3]


def test_prompt_is_that_of_ragkv_ask(tiny: ChatSnapKV, say: Say) -> None:
    seen = say("[1]")
    plain = [Document("", text, title) for title, text in (("First", "Fact 1."), ("Second", "Fact 2."))]
    nodes = [NodeWithScore(node=TextNode(text=d.text, metadata={"title": d.title})) for d in plain]
    CitedAnswerSynthesizer(tiny).synthesize("What is so?", nodes)
    expected = encode_chat(tiny.options().engine().tokenizer, CitePrompt().messages("What is so?", plain))
    assert seen == [expected]


def test_system_prompt_comes_first(tiny: ChatSnapKV, prompts: list[str]) -> None:
    llm = ChatSnapKV(**{**tiny.to_dict(), "system_prompt": "Be polite."})
    CitedAnswerSynthesizer(llm).synthesize("What is so?", NODES, max_tokens=2)
    assert prompts[0].startswith("<|im_start|>system\nBe polite.\n\nYou answer questions from numbered documents.")


async def test_cited_answer_async(tiny: ChatSnapKV, say: Say) -> None:
    say("So [2].")
    response = await CitedAnswerSynthesizer(tiny).asynthesize("What is so?", NODES)
    assert str(response) == "So [2]."
    assert marks(response) == [(1, False), (2, True), (3, False)]


def test_cited_answer_streamed(tiny: ChatSnapKV, say: Say) -> None:
    say("So [2] and [9].")
    response = CitedAnswerSynthesizer(tiny, streaming=True).synthesize("What is so?", NODES)
    assert isinstance(response, StreamingResponse)
    assert [scored.node.metadata["ragkv_number"] for scored in response.source_nodes] == [1, 2, 3]
    pieces = list(response.response_gen)
    assert len(pieces) > 3
    assert "".join(pieces) == "So [2] and [9]."
    assert marks(response) == [(1, False), (2, True), (3, False)]
    assert response.metadata is not None
    assert response.metadata["ragkv_invalid_citations"] == [9]


async def test_cited_answer_streamed_async(tiny: ChatSnapKV, say: Say) -> None:
    say("So [2].")
    response = await CitedAnswerSynthesizer(tiny, streaming=True).asynthesize("What is so?", NODES)
    assert isinstance(response, AsyncStreamingResponse)
    assert "".join([piece async for piece in response.response_gen]) == "So [2]."
    assert marks(response) == [(1, False), (2, True), (3, False)]


def test_context_tokens(tiny: ChatSnapKV, say: Say) -> None:
    seen = say("So [1].")
    tokenizer = tiny.options().engine().tokenizer
    shown = [Document("", "Fact 1 is here.", "First"), Document("", "year: 1999\n\nFact 2 is here.", "Second")]
    budget = sum(document_tokens(tokenizer, document) for document in shown)
    llm = ChatSnapKV(**{**tiny.to_dict(), "context_tokens": budget})
    response = CitedAnswerSynthesizer(llm).synthesize("What is so?", NODES)
    assert [scored.node.node_id for scored in response.source_nodes] == ["node-1", "node-2"]
    assert response.metadata is not None
    assert response.metadata["ragkv_dropped_nodes"] == ["node-3"]
    assert "Fact 3" not in tokenizer.decode(seen[0].ids)


def test_context_tokens_without_room(tiny: ChatSnapKV) -> None:
    llm = ChatSnapKV(**{**tiny.to_dict(), "context_tokens": 5})
    with pytest.raises(PromptTooLong, match="context_tokens=5 is less than the"):
        CitedAnswerSynthesizer(llm).synthesize("What is so?", NODES)


def test_nothing_is_dropped_silently(tiny: ChatSnapKV) -> None:
    many = [NodeWithScore(node=TextNode(text="Many words stand in this text. " * 20)) for _ in range(10)]
    with pytest.raises(PromptTooLong, match="1024 tokens of context"):
        CitedAnswerSynthesizer(tiny).synthesize("What is so?", many)


def test_no_nodes(tiny: ChatSnapKV) -> None:
    response = CitedAnswerSynthesizer(tiny).synthesize("What is so?", [])
    assert str(response) == "Empty Response"
    assert response.metadata == {"ragkv_dropped_nodes": []}


def test_additional_source_nodes_have_no_number(tiny: ChatSnapKV, say: Say) -> None:
    say("So [3].")
    extra = NodeWithScore(node=TextNode(text="seen elsewhere"))
    response = CitedAnswerSynthesizer(tiny).synthesize("What is so?", NODES[:2], [extra])
    assert response.metadata is not None
    assert response.metadata["ragkv_invalid_citations"] == [3]
    assert "ragkv_number" not in response.source_nodes[2].node.metadata


def test_other_llms_get_plain_text() -> None:
    """The mock says its prompt, which cites all three."""
    response = CitedAnswerSynthesizer(MockLLM(), prompt=SHORT).synthesize("What is so?", NODES)
    assert "Documents:\n\n[1] First\nFact 1 is here.\n\n[2] Second\n" in str(response)
    assert marks(response) == [(1, True), (2, True), (3, True)]


class Fixed(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return NODES


def test_in_a_query_engine(tiny: ChatSnapKV, say: Say) -> None:
    say("So [2].")
    index = SummaryIndex([scored.node for scored in NODES])
    engine = index.as_query_engine(llm=tiny, response_synthesizer=CitedAnswerSynthesizer(tiny))
    response = engine.query("What is so?")
    assert marks(response) == [(1, False), (2, True), (3, False)]


def test_citation_query_engine(tiny: ChatSnapKV, say: Say) -> None:
    """LlamaIndex's own: it numbers by itself and leaves the reading of numbers to the caller."""
    seen = say("So [1].")
    index = SummaryIndex([scored.node for scored in NODES])
    engine = CitationQueryEngine.from_args(index, llm=tiny, retriever=Fixed(), citation_chunk_size=64)
    response = engine.query("What is so?")
    assert str(response) == "So [1]."
    assert [scored.node.get_content().split("\n")[0] for scored in response.source_nodes] == [
        "Source 1:",
        "Source 2:",
        "Source 3:",
    ]
    assert len(seen) == 1
    assert "Source 3:" in tiny.options().engine().tokenizer.decode(seen[0].ids)


def test_nodes_are_joined_in_any_order(tiny: ChatSnapKV) -> None:
    """All computed anew is the usual answer; with nothing, nodes that were read before are not read again."""
    for nodes in (NODES, NODES[::-1]):
        usual, joined = (
            CitedAnswerSynthesizer(tiny, prompt=SHORT).synthesize("What is so?", nodes, max_tokens=8, **options)
            for options in ({}, {"recompute": 1})
        )
        assert str(joined) == str(usual)
    _, documents = CitedAnswerSynthesizer(tiny)._numbered(NODES[1:])
    messages = to_chat_messages(SHORT.messages("What is so?", documents))
    counts = tiny.chat(messages, max_tokens=2, recompute=0).additional_kwargs
    assert counts["cache_creation"] == 0
    assert counts["cache_read"] > counts["prompt_tokens"] // 4
