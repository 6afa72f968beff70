"""LangChain's own suite for retrievers on ragkv's index, and what a document carries."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import ValidationError

from langchain_ragkv import RagkvRetriever
from ragkv.documents import Document
from ragkv.embedding import Vectors
from ragkv.index import Index
from ragkv.progress import Progress


class WordEmbedder:
    """Bags of hashed words: texts with the same words are alike."""

    name, max_tokens = "words", 64

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> Vectors:
        vectors = np.zeros((len(texts), 64), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                row[zlib.crc32(word.strip(".?").encode()) % 64] += 1
        return vectors


def colours() -> Index:
    texts = ["red rose", "blue sky", "red sky", "green sea", "grey cloud"]
    documents = [
        Document(f"d{n}", text, title=text.title(), source="colours.txt", metadata={"page": n})
        for n, text in enumerate(texts)
    ]
    return Index.build(documents, WordEmbedder())


class TestRagkvRetrieverIntegration(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[RagkvRetriever]:
        return RagkvRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"index": colours(), "k": 2}

    @property
    def retriever_query_example(self) -> str:
        return "What is red in the sky?"


def test_documents_carry_title_source_metadata_score_and_rank() -> None:
    first, second = RagkvRetriever(index=colours(), k=2).invoke("red sky")
    assert (first.id, first.page_content) == ("d2", "red sky")
    assert first.metadata == {
        "page": 2,
        "title": "Red Sky",
        "source": "colours.txt",
        "score": pytest.approx(1.0),
        "rank": 1,
    }
    assert second.metadata["rank"] == 2
    assert second.metadata["score"] < 1


def test_more_than_there_are() -> None:
    assert len(RagkvRetriever(index=colours(), k=99).invoke("red")) == 5


def test_unknown_names_and_values() -> None:
    with pytest.raises(ValidationError, match="RagkvRetriever has no option 'indx': did you mean 'index'"):
        RagkvRetriever(indx=colours())
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        RagkvRetriever(index=colours(), k=0)
