"""ragkv's embedding model as a LlamaIndex embedding."""

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import PrivateAttr

from ragkv.embedding import PACKAGED_MODEL, SentenceTransformerEmbedder


class RagkvEmbedding(BaseEmbedding):
    """Unit vectors from sentence-transformers, by default the packaged all-MiniLM-L6-v2. Loaded at first use.

    Args:
        model_name: the packaged model, a folder, or a model of the Hugging Face hub.
        device: a torch device; chosen by sentence-transformers when left out.
    """

    device: str | None = None
    _embedder: SentenceTransformerEmbedder = PrivateAttr()

    def __init__(self, model_name: str = PACKAGED_MODEL, **kwargs: Any) -> None:
        super().__init__(model_name=model_name, **kwargs)
        self._embedder = SentenceTransformerEmbedder(model_name, device=self.device)

    @classmethod
    def class_name(cls) -> str:
        """The name that serialisation knows."""
        return "RagkvEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._embedder.encode(texts).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)
