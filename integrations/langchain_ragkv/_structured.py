"""The way back from a reply to the schema's values. A reply that was cut off is an error, never half a value."""

from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from ragkv.errors import ReplyError
from ragkv.structured import parse_json_reply


def json_parser(schema: Any) -> Runnable[Any, Any]:
    """Reads replies that are JSON: into the schema's class if it is a Pydantic one, else a dictionary."""
    return PydanticReply(pydantic_object=schema) if is_pydantic(schema) else JsonReply()


def tool_parser(schema: Any) -> Runnable[Any, Any]:
    """Reads replies that call the schema as a tool."""
    if is_pydantic(schema):
        return PydanticCall(tools=[schema], first_tool_only=True)
    return JsonCall(key_name=convert_to_openai_tool(schema)["function"]["name"], first_tool_only=True)


def is_pydantic(schema: Any) -> bool:
    """Whether replies become instances of a class (Pydantic's, of version 1 or 2)."""
    return isinstance(schema, type) and is_basemodel_subclass(schema)


class _WholeJson(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """While a stream goes on its beginning is read leniently; an ended reply must be whole."""
        reason = _finish_reason(result)
        if reason is not None or not partial:
            try:
                parse_json_reply(result[0].text, reason or "stop")
            except ReplyError as error:
                raise OutputParserException(str(error), llm_output=result[0].text) from error
        return super().parse_result(result, partial=partial and reason is None)


class JsonReply(_WholeJson):
    """A reply that is a JSON object."""


class PydanticReply(_WholeJson, PydanticOutputParser[Any]):
    """A reply that is a JSON object, read into a class."""


class JsonCall(JsonOutputKeyToolsParser):
    """A reply that calls one tool."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _require_call(result)
        return super().parse_result(result, partial=partial)


class PydanticCall(PydanticToolsParser):
    """A reply that calls one tool, read into a class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        _require_call(result)
        return super().parse_result(result, partial=partial)


def _require_call(result: list[Generation]) -> None:
    reason = _finish_reason(result)
    if reason is not None and not getattr(result[0].message, "tool_calls", None):  # type: ignore[attr-defined]
        fix = "raise max_tokens" if reason == "length" else "ask for the call in the prompt"
        raise OutputParserException(
            f"the reply ended (finish_reason={reason!r}) without a whole tool call: {fix}", llm_output=result[0].text
        )


def _finish_reason(result: list[Generation]) -> str | None:
    """Why the reply ended; None while it has not, or if something else than ragkv made it."""
    if not isinstance(result[0], ChatGeneration):
        return None
    reason: str | None = result[0].message.response_metadata.get("finish_reason")
    return reason
