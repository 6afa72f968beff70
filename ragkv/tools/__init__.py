"""Tools without framework vocabulary: what a tool is, how models are told of it, and how their calls are read."""

from ragkv.tools.formats import HERMES, LLAMA, MISTRAL, ToolFormat, tool_format
from ragkv.tools.grammar import MAX_PARALLEL_CALLS, tool_call_constraint
from ragkv.tools.parsing import ToolCallStream, ToolReply, parse_tool_calls
from ragkv.tools.prompt import prepare_tool_messages
from ragkv.tools.spec import InvalidToolCall, ToolCall, ToolSpec, allowed_tools

__all__ = [
    "HERMES",
    "LLAMA",
    "MAX_PARALLEL_CALLS",
    "MISTRAL",
    "InvalidToolCall",
    "ToolCall",
    "ToolCallStream",
    "ToolFormat",
    "ToolReply",
    "ToolSpec",
    "allowed_tools",
    "parse_tool_calls",
    "prepare_tool_messages",
    "tool_call_constraint",
    "tool_format",
]
