"""Numbers and citations on LlamaIndex's nodes and responses."""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator

from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, StreamingResponse
from llama_index.core.schema import BaseNode, NodeWithScore

from ragkv.citations import cited_numbers

NUMBER, CITED = "ragkv_number", "ragkv_cited"
Nodes = list[NodeWithScore]


def with_number(scored: NodeWithScore, number: int) -> NodeWithScore:
    """A copy, for nodes may belong to an index that keeps them."""
    metadata = {**scored.node.metadata, NUMBER: number}
    return NodeWithScore(node=scored.node.model_copy(update={"metadata": metadata}), score=scored.score)


def title(node: BaseNode, title_key: str) -> str:
    return str(node.metadata.get(title_key, ""))


def mark(response: RESPONSE_TYPE, text: str, title_key: str) -> None:
    numbered = [scored.node for scored in response.source_nodes if NUMBER in scored.node.metadata]
    valid, invalid = cited_numbers(text, [title(node, title_key) for node in numbered])
    for node in numbered:
        node.metadata[CITED] = node.metadata[NUMBER] in valid
    response.metadata = {**(response.metadata or {}), "ragkv_citations": valid, "ragkv_invalid_citations": invalid}


def marked_at_end(stream: Iterator[str], response: StreamingResponse, title_key: str) -> Generator[str, None, None]:
    text = ""
    for piece in stream:
        text += piece
        yield piece
    mark(response, text, title_key)


async def amarked_at_end(
    stream: AsyncIterator[str], response: AsyncStreamingResponse, title_key: str
) -> AsyncGenerator[str, None]:
    text = ""
    async for piece in stream:
        text += piece
        yield piece
    mark(response, text, title_key)


def with_dropped(response: RESPONSE_TYPE, dropped: Nodes) -> RESPONSE_TYPE:
    response.metadata = {**(response.metadata or {}), "ragkv_dropped_nodes": [node.node.node_id for node in dropped]}
    return response
