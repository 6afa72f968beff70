"""One call of the model: what was said to `invoke` and `bind`, in ragkv's terms and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from langchain_ragkv._messages import to_ragkv
from ragkv.chat_model import ChatRequest
from ragkv.errors import ConfigError
from ragkv.options import OPTION_NAMES, ChatOptions, check_names
from ragkv.tools import ToolSpec

REQUEST_NAMES = ("tools", "tool_choice", "parallel_tool_calls", "strict", "response_format")
# LangChain passes `stream` on when it was said to `invoke`; `BaseChatModel` has acted on it by then.
CALL_NAMES = (*OPTION_NAMES, *REQUEST_NAMES, "timeout", "thread_id", "stream")


@dataclass(frozen=True)
class Call:
    """What to answer, with which options, in how many seconds, and in which thread."""

    request: ChatRequest
    options: ChatOptions
    timeout: float | None
    thread_id: str | None = None


def read_call(
    options: ChatOptions, timeout: float | None, messages: Sequence[BaseMessage], kwargs: Mapping[str, Any]
) -> Call:
    """A call with the model's own options, changed by what the call says.

    Raises:
        ConfigError: there is no such option, a value is out of its bounds, or a message is not text.
    """
    check_call_names(kwargs)
    given = {name: value for name, value in kwargs.items() if value is not None}
    chosen = options.override(**{name: given[name] for name in OPTION_NAMES if name in given})
    request = ChatRequest(
        messages=to_ragkv(messages),
        sampling=chosen.sampling(),
        tools=[tool_spec(tool) for tool in given.get("tools", ())],
        tool_choice=tool_choice(given.get("tool_choice", "auto")),
        parallel_tool_calls=given.get("parallel_tool_calls", True),
        response_format=response_format(given.get("response_format")),
        strict=given.get("strict", False),
        blocks=chosen.blocks(),
    )
    return Call(request, chosen, given.get("timeout", timeout), given.get("thread_id"))


def check_call_names(kwargs: Mapping[str, Any]) -> None:
    """Raise a ConfigError that suggests the nearest name for an option that no call has."""
    check_names(kwargs, CALL_NAMES, "a call of ChatSnapKV")


def tool_spec(tool: Any) -> ToolSpec:
    """A tool in any form that LangChain knows: its own, functions, classes, OpenAI's and Anthropic's schemas."""
    return ToolSpec.from_openai(convert_to_openai_tool(tool))


def tool_choice(choice: Any) -> str:
    """LangChain's and OpenAI's ways to choose; True is "any", False is "none"."""
    if isinstance(choice, bool):
        return "any" if choice else "none"
    if isinstance(choice, Mapping):
        choice = choice.get("function", choice).get("name")
    if not isinstance(choice, str) or not choice:
        raise ConfigError(f'tool_choice={choice!r}: must be "auto", "none", "any" or the name of a tool')
    return choice


def response_format(form: Any) -> Any:
    """OpenAI's response formats, a schema or a class as what `ragkv.chat_model.ChatRequest` takes."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return "json_object"
    if kind == "json_schema":
        return form["json_schema"]["schema"]
    return convert_to_json_schema(form)
