"""RagkvRetriever: ragkv's index as a LangChain retriever."""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field, model_validator

from langchain_ragkv._documents import to_langchain
from ragkv.index import Index
from ragkv.options import check_names


class RagkvRetriever(BaseRetriever):
    """The passages of a `ragkv.index.Index` that are most like the query, best first.

    Setup:
        `pip install "ragkv[langchain]"`

    Key init args:
        index: where to search.
        k: how many passages; `invoke(query, k=...)` changes it for one call.

    Instantiate:
        ```python
        from ragkv.embedding import SentenceTransformerEmbedder
        from ragkv.index import Index
        from ragkv.readers import read_paths

        index = Index.build(read_paths(["docs/"]), SentenceTransformerEmbedder())
        retriever = RagkvRetriever(index=index, k=20)
        ```

    Usage:
        `retriever.invoke("Who wrote it?")` returns documents with "score" (cosine similarity) and "rank" in their
        metadata, next to "title", "source" and what the passage came with.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    index: Index = Field(exclude=True, repr=False)
    k: int = Field(default=4, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_names(values, cls.model_fields, cls.__name__)
        return values

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return [to_langchain(hit) for hit in self.index.search(query, self.k if k is None else k)]
