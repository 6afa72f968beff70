"""LangChain's documents and ragkv's, to and from each other."""

from langchain_core.documents import Document as LangChainDocument

from ragkv.documents import Document
from ragkv.index import Hit


def from_langchain(document: LangChainDocument) -> Document:
    """Text, and the title for its header in the prompt; where it came from stays with LangChain's document."""
    title = document.metadata.get("title")
    return Document(document.id or "", document.page_content, title if isinstance(title, str) else "")


def to_langchain(hit: Hit) -> LangChainDocument:
    """A passage with its title and source, cosine similarity and rank among the metadata."""
    found = hit.document
    named = {name: value for name, value in (("title", found.title), ("source", found.source)) if value}
    metadata = {**found.metadata, **named, "score": hit.score, "rank": hit.rank}
    return LangChainDocument(id=found.id, page_content=found.text, metadata=metadata)
