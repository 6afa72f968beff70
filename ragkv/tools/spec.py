"""Tools and calls in one normal form, to and from the dictionaries that chat templates and OpenAI-like APIs share."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ragkv.errors import ConfigError


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class ToolSpec:
    """A function that the model may call.

    Attributes:
        name: what the model writes to call it.
        description: what it does, for the model to read.
        parameters: JSON schema of an object with the arguments; empty for a function without any.

    Raises:
        ConfigError: the name is empty, or the parameters are no schema of an object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name='': a tool needs a name")
        schema = {"type": "object", "properties": {}, **self.parameters}
        if schema["type"] != "object":
            raise ConfigError(
                f"parameters of tool {self.name!r} have type {schema['type']!r}: "
                'arguments have names, so the schema must have type "object"'
            )
        object.__setattr__(self, "parameters", schema)

    @classmethod
    def from_openai(cls, tool: Mapping[str, Any]) -> Self:
        """From {"type": "function", "function": {...}}, or from the inner dictionary alone."""
        function = tool.get("function", tool)
        if "name" not in function:
            raise ConfigError(f"tool {dict(tool)!r} has no name: give name, description and parameters")
        return cls(function["name"], function.get("description") or "", function.get("parameters") or {})

    def to_openai(self) -> dict[str, Any]:
        """What chat templates take in `tools`."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call that a model made. Whether the arguments fit the tool is for whoever runs it to say."""

    id: str
    name: str
    arguments: dict[str, Any]

    @classmethod
    def from_openai(cls, call: Mapping[str, Any]) -> Self:
        """From {"id": ..., "function": {"name": ..., "arguments": ...}}; arguments may be JSON text."""
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ConfigError(f"arguments of {function['name']!r} are not JSON ({error}): {arguments!r}") from error
        return cls(call.get("id") or new_call_id(), function["name"], dict(arguments))

    def to_openai(self) -> dict[str, Any]:
        """What chat templates take in the `tool_calls` of an assistant message: the arguments stay a dictionary."""
        return {
            "type": "function",
            "id": self.id,
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class InvalidToolCall:
    """Marked as a call, but not readable as one: `arguments` is the text as the model wrote it, `error` says why."""

    id: str
    name: str | None
    arguments: str
    error: str


def allowed_tools(tools: Sequence[ToolSpec], choice: str = "auto") -> tuple[list[ToolSpec], bool]:
    """The tools that a choice lets the model call, and whether it must call one.

    Args:
        choice: "auto", "none", "any" (or "required"), or the name of a tool.

    Raises:
        ConfigError: no tool has this name, or a call is demanded and there is no tool.
    """
    names = [tool.name for tool in tools]
    if choice in names:
        return [tool for tool in tools if tool.name == choice], True
    if choice in ("auto", "none"):
        return list(tools) if choice == "auto" else [], False
    if choice not in ("any", "required"):
        raise ConfigError(f'tool_choice={choice!r}: must be "auto", "none", "any" or one of {names}')
    if not tools:
        raise ConfigError(f"tool_choice={choice!r} demands a call and there are no tools: give tools")
    return list(tools), True
