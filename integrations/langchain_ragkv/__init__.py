"""ragkv in LangChain: a chat model on a compressed KV cache, a retriever, and answers that cite their sources."""

from ragkv.errors import MissingExtra

try:
    import langchain_core  # noqa: F401
except ImportError as missing:
    raise MissingExtra('langchain_ragkv needs langchain-core: pip install "ragkv[langchain]"') from missing

from langchain_ragkv.chat_models import ChatSnapKV
from langchain_ragkv.citations import Citation, CitedAnswer, create_cited_answer_chain
from langchain_ragkv.retrievers import RagkvRetriever

__all__ = ["ChatSnapKV", "Citation", "CitedAnswer", "RagkvRetriever", "create_cited_answer_chain"]
