"""Cited answers in a query engine: nodes are numbered once, and the `[n]` of the answer lead back to them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, StreamingResponse
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE

from llama_index.llms.ragkv._marks import (
    CITED,
    NUMBER,
    Nodes,
    amarked_at_end,
    mark,
    marked_at_end,
    title,
    with_dropped,
    with_number,
)
from llama_index.llms.ragkv._messages import plain_text, to_chat_messages
from llama_index.llms.ragkv.base import ChatSnapKV
from ragkv.budget import within_budget
from ragkv.documents import Document
from ragkv.ordering import PopularFirst
from ragkv.prompt import CitePrompt

CITE = CitePrompt()


class CitedAnswerSynthesizer(BaseSynthesizer):
    """Answers in one call from numbered nodes, best first.

    `source_nodes` of the response are copies of the nodes in the order of the prompt, with `ragkv_number` and
    `ragkv_cited` in their metadata (a stream: once it has ended). `metadata` of the response has "ragkv_citations" (the
    numbers, in order of first mention), "ragkv_invalid_citations" (cited, but no node has them) and
    "ragkv_dropped_nodes" (ids of the lowest-ranked nodes that `context_tokens` of a ChatSnapKV had no room for).

    Args:
        llm: any LLM; with ChatSnapKV the prompt keeps its marked spans, so document headers survive compression.
        prompt: the texts around documents and question.
        title_key: the metadata that is shown beside a node's number.
        order: puts the nodes used most often first, so that prompts begin alike; None keeps the retriever's order.
        streaming: answer with a stream.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        prompt: CitePrompt = CITE,
        title_key: str = "title",
        order: PopularFirst | None = None,
        streaming: bool = False,
    ) -> None:
        super().__init__(llm=llm, streaming=streaming)
        self._prompt, self._title_key, self._order = prompt, title_key, order

    def synthesize(
        self, query: QueryType, nodes: Nodes, additional_source_nodes: Sequence[NodeWithScore] | None = None, **kw: Any
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes; further arguments go to the LLM."""
        numbered, documents = self._numbered(nodes)
        response = super().synthesize(query, numbered, additional_source_nodes, documents=documents, **kw)
        return with_dropped(response, nodes[len(numbered) :])

    async def asynthesize(
        self, query: QueryType, nodes: Nodes, additional_source_nodes: Sequence[NodeWithScore] | None = None, **kw: Any
    ) -> RESPONSE_TYPE:
        """`synthesize` without blocking the event loop."""
        numbered, documents = await asyncio.to_thread(self._numbered, nodes)
        response = await super().asynthesize(query, numbered, additional_source_nodes, documents=documents, **kw)
        return with_dropped(response, nodes[len(numbered) :])

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], documents: Sequence[Document] = (), **kw: Any
    ) -> RESPONSE_TEXT_TYPE:
        """The text of the answer; texts alone, as other callers give, are documents without titles."""
        messages = self._messages(query_str, documents or [Document("", text) for text in text_chunks])
        if self._streaming:
            return (response.delta or "" for response in self._llm.stream_chat(messages, **kw))
        return (self._llm.chat(messages, **kw).message.content or "").strip()

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], documents: Sequence[Document] = (), **kw: Any
    ) -> RESPONSE_TEXT_TYPE:
        """`get_response` without blocking the event loop."""
        messages = self._messages(query_str, documents or [Document("", text) for text in text_chunks])
        if self._streaming:
            stream = await self._llm.astream_chat(messages, **kw)
            return (response.delta or "" async for response in stream)
        return ((await self._llm.achat(messages, **kw)).message.content or "").strip()

    def _messages(self, question: str, documents: Sequence[Document]) -> list[ChatMessage]:
        messages = to_chat_messages(self._prompt.messages(question, documents))
        kept = messages if isinstance(self._llm, ChatSnapKV) else [plain_text(message) for message in messages]
        return self._llm._extend_messages(kept)

    def _numbered(self, nodes: Nodes) -> tuple[Nodes, list[Document]]:
        """Copies of the nodes that have room, with their numbers, and the documents that the prompt shows."""
        documents = [_document(node, self._title_key) for node in nodes]
        if isinstance(self._llm, ChatSnapKV) and self._llm.context_tokens is not None:
            documents = within_budget(self._llm.options().engine().tokenizer, documents, self._llm.context_tokens)
        shown = nodes[: len(documents)]
        if self._order is not None:
            positions = self._order.positions([document.id for document in documents])
            shown, documents = [shown[n] for n in positions], [documents[n] for n in positions]
            self._order.count([document.id for document in documents])
        return [with_number(node, n) for n, node in enumerate(shown, 1)], documents

    def _prepare_response_output(self, response_str: RESPONSE_TEXT_TYPE | None, source_nodes: Nodes) -> RESPONSE_TYPE:
        response = super()._prepare_response_output(response_str, source_nodes)
        if isinstance(response, StreamingResponse):
            response.response_gen = marked_at_end(response.response_gen, response, self._title_key)
        elif isinstance(response, AsyncStreamingResponse):
            response.response_gen = amarked_at_end(response.response_gen, response, self._title_key)
        else:
            mark(response, str(response_str), self._title_key)
        return response

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None: ...  # the prompt is no template of LlamaIndex


def _document(scored: NodeWithScore, title_key: str) -> Document:
    """A node as a document; the metadata that the LLM may see stand in its text, except the title."""
    hidden = [*scored.node.excluded_llm_metadata_keys, title_key, NUMBER, CITED]
    shown = scored.node.model_copy(update={"excluded_llm_metadata_keys": hidden})
    return Document(scored.node.node_id, shown.get_content(MetadataMode.LLM), title(scored.node, title_key))
