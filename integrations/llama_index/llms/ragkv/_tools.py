"""LlamaIndex's tools, tool choices and output classes into ragkv's, and calls back into selections."""

from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.tools.types import BaseTool
from pydantic import BaseModel

from ragkv.errors import ConfigError, ReplyError
from ragkv.tools import ToolCall, ToolSpec

REQUEST_NAMES = ("tools", "tool_choice", "allow_parallel_tool_calls", "response_format", "strict")


def request_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call says about tools and the form of its reply, as fields of `ragkv.chat_model.ChatRequest`."""
    given = {name: kwargs[name] for name in REQUEST_NAMES if kwargs.get(name) is not None}
    request: dict[str, Any] = {"strict": bool(given.get("strict", False))}
    if "tools" in given:
        request["tools"] = [tool_spec(tool) for tool in given["tools"]]
        request["tool_choice"] = tool_choice(given.get("tool_choice"))
        request["parallel_tool_calls"] = bool(given.get("allow_parallel_tool_calls", True))
    if "response_format" in given:
        request["response_format"] = response_format(given["response_format"])
    return request


def tool_spec(tool: BaseTool | ToolSpec | Mapping[str, Any]) -> ToolSpec:
    """A tool, or its description in OpenAI's form."""
    if isinstance(tool, ToolSpec):
        return tool
    if isinstance(tool, Mapping):
        return ToolSpec.from_openai(tool)
    about = tool.metadata
    return ToolSpec(about.get_name(), about.description, about.get_parameters_dict())


def tool_choice(choice: str | Mapping[str, Any] | None, required: bool = False) -> str:
    """ "auto", "none", "any", or a tool's name; also from OpenAI's {"type": "function", "function": {"name": ...}}."""
    if choice is None:
        return "any" if required else "auto"
    name = choice if isinstance(choice, str) else choice.get("function", choice).get("name")
    if not name:
        raise ConfigError(f'tool_choice={choice!r}: give "auto", "none", "any", or the name of a tool')
    return "any" if name == "required" else name


def response_format(form: Any) -> Mapping[str, Any] | str:
    """A JSON schema from a pydantic class or OpenAI's {"type": "json_schema", ...}; "json_object" stays."""
    if isinstance(form, type) and issubclass(form, BaseModel):
        return form.model_json_schema()
    if isinstance(form, Mapping) and form.get("type") == "json_schema" and "json_schema" in form:
        return dict(form["json_schema"].get("schema", form["json_schema"]))
    if form == "json_object" or (isinstance(form, Mapping) and form.get("type") == "json_object"):
        return "json_object"
    if not isinstance(form, Mapping):
        raise ConfigError(f'response_format={form!r}: give a pydantic class, a JSON schema or "json_object"')
    return form


def selections(response: ChatResponse, error_on_no_tool_call: bool) -> list[ToolSelection]:
    """The calls of a reply, in order.

    Raises:
        ReplyError: there is none and there must be one.
    """
    blocks: Sequence[Any] = response.message.blocks
    calls = [_selection(block) for block in blocks if isinstance(block, ToolCallBlock)]
    if not calls and error_on_no_tool_call:
        raw = response.raw if isinstance(response.raw, Mapping) else {}
        broken = [call["error"] for call in raw.get("invalid_tool_calls", ())]
        raise ReplyError(
            f"expected a tool call, and the reply has none (finish_reason={raw.get('finish_reason')!r}"
            f"{', ' + broken[0] if broken else ''}): ask for one with tool_required=True, or raise max_tokens"
        )
    return calls


def _selection(block: ToolCallBlock) -> ToolSelection:
    function = {"name": block.tool_name, "arguments": block.tool_kwargs}
    call = ToolCall.from_openai({"id": block.tool_call_id, "function": function})
    return ToolSelection(tool_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
