"""ragkv in LlamaIndex: a chat model on a compressed KV cache, cited answers, embeddings and a long-term memory."""

from ragkv.errors import MissingExtra

try:
    import llama_index.core  # noqa: F401
except ImportError as missing:
    raise MissingExtra('llama_index.llms.ragkv needs llama-index-core: pip install "ragkv[llama-index]"') from missing

from llama_index.llms.ragkv.base import ChatSnapKV
from llama_index.llms.ragkv.citations import CitedAnswerSynthesizer
from llama_index.llms.ragkv.embeddings import RagkvEmbedding
from llama_index.llms.ragkv.memory import RecallMemoryBlock

__all__ = ["ChatSnapKV", "CitedAnswerSynthesizer", "RagkvEmbedding", "RecallMemoryBlock"]
