"""ChatSnapKV: ragkv's chat model as a LlamaIndex LLM. Translation only; what happens is in ragkv."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.tools.types import BaseTool
from pydantic import Field

from llama_index.llms.ragkv._messages import from_chat_messages, responses, to_completion
from llama_index.llms.ragkv._structured import StructuredLLMBase
from llama_index.llms.ragkv._tools import REQUEST_NAMES, request_options, selections, tool_choice, tool_spec
from ragkv.aio import in_thread
from ragkv.chat_model import ChatRequest, stream_chat
from ragkv.completion import stream_text
from ragkv.model_info import context_length
from ragkv.options import OPTION_NAMES, ChatOptions, PolicyName, check_names
from ragkv.scoring import Pooling
