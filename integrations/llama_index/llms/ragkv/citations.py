"""Cited answers in a query engine: nodes are numbered once, and the `[n]` of the answer lead back to them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, StreamingResponse
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE

from llama_index.llms.ragkv._messages import plain_text, to_chat_messages
from llama_index.llms.ragkv.base import ChatSnapKV
from ragkv.budget import within_budget
from ragkv.citations import find_markers, split_valid
from ragkv.documents import Document
from ragkv.prompt import CitePrompt

NUMBER, CITED, CITE = "ragkv_number", "ragkv_cited", CitePrompt()
Nodes = list[NodeWithScore]


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
        streaming: answer with a stream.
    """

    def __init__(
        self, llm: LLM | None = None, *, prompt: CitePrompt = CITE, title_key: str = "title", streaming: bool = False
    ) -> None:
        super().__init__(llm=llm, streaming=streaming)
        self._prompt, self._title_key = prompt, title_key

    def synthesize(
        self, query: QueryType, nodes: Nodes, additional_source_nodes: Sequence[NodeWithScore] | None = None, **kw: Any
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes; further arguments go to the LLM."""
        numbered, documents = self._numbered(nodes)
        response = super().synthesize(query, numbered, additional_source_nodes, documents=documents, **kw)
        return _with_dropped(response, nodes[len(numbered) :])

    async def asynthesize(
        self, query: QueryType, nodes: Nodes, additional_source_nodes: Sequence[NodeWithScore] | None = None, **kw: Any
    ) -> RESPONSE_TYPE:
        """`synthesize` without blocking the event loop."""
        numbered, documents = await asyncio.to_thread(self._numbered, nodes)
        response = await super().asynthesize(query, numbered, additional_source_nodes, documents=documents, **kw)
        return _with_dropped(response, nodes[len(numbered) :])

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
        return [_with_number(node, n) for n, node in enumerate(nodes[: len(documents)], 1)], documents

    def _prepare_response_output(self, response_str: RESPONSE_TEXT_TYPE | None, source_nodes: Nodes) -> RESPONSE_TYPE:
        response = super()._prepare_response_output(response_str, source_nodes)
        if isinstance(response, StreamingResponse):
            response.response_gen = _marked_at_end(response.response_gen, response)
        elif isinstance(response, AsyncStreamingResponse):
            response.response_gen = _amarked_at_end(response.response_gen, response)
        else:
            _mark(response, str(response_str))
        return response

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None: ...  # the prompt is no template of LlamaIndex


def _document(scored: NodeWithScore, title_key: str) -> Document:
    """A node as a document; the metadata that the LLM may see stand in its text, except the title."""
    title = str(scored.node.metadata.get(title_key, ""))
    hidden = [*scored.node.excluded_llm_metadata_keys, title_key, NUMBER, CITED]
    shown = scored.node.model_copy(update={"excluded_llm_metadata_keys": hidden})
    return Document(scored.node.node_id, shown.get_content(MetadataMode.LLM), title)


def _with_number(scored: NodeWithScore, number: int) -> NodeWithScore:
    """A copy, for nodes may belong to an index that keeps them."""
    metadata = {**scored.node.metadata, NUMBER: number}
    return NodeWithScore(node=scored.node.model_copy(update={"metadata": metadata}), score=scored.score)


def _mark(response: RESPONSE_TYPE, text: str) -> None:
    numbered = [scored.node for scored in response.source_nodes if NUMBER in scored.node.metadata]
    valid, invalid = split_valid(find_markers(text), len(numbered))
    for node in numbered:
        node.metadata[CITED] = node.metadata[NUMBER] in valid
    response.metadata = {**(response.metadata or {}), "ragkv_citations": valid, "ragkv_invalid_citations": invalid}


def _marked_at_end(stream: Iterator[str], response: StreamingResponse) -> Generator[str, None, None]:
    text = ""
    for piece in stream:
        text += piece
        yield piece
    _mark(response, text)


async def _amarked_at_end(stream: AsyncIterator[str], response: AsyncStreamingResponse) -> AsyncGenerator[str, None]:
    text = ""
    async for piece in stream:
        text += piece
        yield piece
    _mark(response, text)


def _with_dropped(response: RESPONSE_TYPE, dropped: Nodes) -> RESPONSE_TYPE:
    response.metadata = {**(response.metadata or {}), "ragkv_dropped_nodes": [node.node.node_id for node in dropped]}
    return response
