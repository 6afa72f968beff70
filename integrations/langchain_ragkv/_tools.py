"""`bind_tools` and `with_structured_output`: what is said once is bound and comes back with every call."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from langchain_ragkv._calls import check_call_names
from langchain_ragkv._fields import ChatSnapKVFields
from langchain_ragkv._structured import json_parser, tool_parser
from ragkv.errors import ConfigError

Method = Literal["json_schema", "function_calling", "json_mode"]
_TRACING = "ls_structured_output_format"  # LangChain takes it out of a call before the model sees it


class ToolBindingChatModel(ChatSnapKVFields):
    """A chat model with tools and schemas."""

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """A model that may call these tools. Names and arguments are valid: decoding is constrained.

        Args:
            tools: LangChain tools, functions, Pydantic or TypedDict classes, JSON, OpenAI or Anthropic schemas.
            tool_choice: "auto" (the default), "any" or True (must call), "none", or the name of the tool to call.
            strict: refuse schemas that the grammar cannot enforce in full.
            parallel_tool_calls: whether one reply may hold several calls; yes if not given.
            kwargs: options of the calls, such as `max_tokens`.
        """
        check_call_names({name: value for name, value in kwargs.items() if name != _TRACING})
        said = {"tool_choice": tool_choice, "strict": strict, "parallel_tool_calls": parallel_tool_calls}
        said = {name: value for name, value in said.items() if value is not None}
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **said, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A model whose replies are values of a schema: instances of a Pydantic class, else dictionaries.

        Args:
            schema: a Pydantic or TypedDict class, a JSON schema, or a tool in OpenAI's or Anthropic's form. "json_mode"
                can do without one: then a reply is any JSON object, and the prompt must say which.
            method: whether the model replies with JSON ("json_schema" and "json_mode", which are the same here) or
                calls the schema as a tool ("function_calling"). The reply cannot but fit the schema.
            include_raw: return {"raw": message, "parsed": value or None, "parsing_error": error or None}.
            strict: refuse schemas that the grammar cannot enforce in full.
            kwargs: options of the calls, such as `max_tokens`.
        """
        if method not in get_args(Method):
            raise ConfigError(f"method={method!r}: must be one of {', '.join(get_args(Method))}")
        if schema is None and method != "json_mode":
            raise ConfigError(
                f'schema=None: give one, or choose method="json_mode" for any JSON object, not {method!r}'
            )
        check_call_names(kwargs)
        if schema is None:
            return _parsed(self.bind(response_format={"type": "json_object"}, **kwargs), json_parser(None), include_raw)
        kwargs[_TRACING] = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
        if method == "function_calling":
            name = convert_to_openai_tool(schema)["function"]["name"]
            llm = self.bind_tools([schema], tool_choice=name, strict=strict, parallel_tool_calls=False, **kwargs)
            return _parsed(llm, tool_parser(schema), include_raw)
        form = {"type": "json_schema", "json_schema": {"schema": convert_to_json_schema(schema)}}
        return _parsed(self.bind(response_format=form, strict=strict, **kwargs), json_parser(schema), include_raw)


def _parsed(
    llm: Runnable[LanguageModelInput, AIMessage], parser: Runnable[Any, Any], include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
