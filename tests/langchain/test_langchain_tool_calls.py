"""Tools and structured output: with a grammar even random weights call known tools and write valid values."""

import json
from typing import Any, Literal

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModelV1
from typing_extensions import TypedDict

from langchain_ragkv import ChatSnapKV
from ragkv.chat import Prompt
from ragkv.engine import Engine
from ragkv.errors import ConfigError

ASK = "How is it outside?"


class Weather(BaseModel):
    """Today's weather."""

    city: Literal["Rome", "Oslo"]
    dry: bool


class WeatherV1(BaseModelV1):
    """Today's weather."""

    city: Literal["Rome", "Oslo"]
    dry: bool


class WeatherDict(TypedDict):
    """Today's weather."""

    city: Literal["Rome", "Oslo"]
    dry: bool


@tool
def is_open(day: Literal["Monday", "Sunday"]) -> str:
    """Tells whether the museum is open."""
    return f"closed on {day}"


@pytest.fixture
def caller(llm: ChatSnapKV) -> ChatSnapKV:
    """One with room for whole calls."""
    return ChatSnapKV(model="tiny", max_tokens=120)


class TestTools:
    @pytest.mark.parametrize("choice", ["any", "required", True])
    def test_a_call_is_forced_and_valid(self, caller: ChatSnapKV, choice: Any) -> None:
        bound = caller.bind_tools([Weather, is_open], tool_choice=choice, parallel_tool_calls=False)
        reply = bound.invoke(ASK)
        [call] = reply.tool_calls
        assert _valid(call)
        assert reply.response_metadata["finish_reason"] == "tool_calls"
        assert reply.text == ""

    @pytest.mark.parametrize("choice", ["is_open", {"type": "function", "function": {"name": "is_open"}}])
    def test_a_tool_is_chosen_by_name(self, caller: ChatSnapKV, choice: Any) -> None:
        bound = caller.bind_tools([Weather, is_open], tool_choice=choice, parallel_tool_calls=False)
        assert [call["name"] for call in bound.invoke(ASK).tool_calls] == ["is_open"]

    def test_none(self, caller: ChatSnapKV) -> None:
        assert caller.bind_tools([Weather], tool_choice="none").invoke(ASK).tool_calls == []
        assert caller.bind_tools([Weather], tool_choice=False).invoke(ASK).text == caller.invoke(ASK).text

    def test_every_form_of_a_tool(self, caller: ChatSnapKV) -> None:
        def plain(dry: bool) -> str:
            """Takes a truth value."""
            return str(dry)

        schema = {"type": "object", "properties": {"dry": {"type": "boolean"}}, "required": ["dry"]}
        openai = {"type": "function", "function": {"name": "openai", "description": "d", "parameters": schema}}
        anthropic = {"name": "anthropic", "description": "d", "input_schema": schema}
        json_schema = {"title": "json", "description": "d", **schema}
        for form in (plain, Weather, WeatherDict, is_open, openai, anthropic, json_schema):
            bound = caller.bind_tools([form], tool_choice="any", parallel_tool_calls=False)
            assert len(bound.invoke(ASK).tool_calls) == 1

    def test_the_model_is_told_of_the_tools(self, caller: ChatSnapKV, monkeypatch: pytest.MonkeyPatch) -> None:
        prompts: list[Prompt] = []
        stream = Engine.stream

        def spy(self: Engine, given: list[Prompt], *args: Any, **kwargs: Any) -> Any:
            prompts.extend(given)
            return stream(self, given, *args, **kwargs)

        monkeypatch.setattr(Engine, "stream", spy)
        caller.bind_tools([is_open]).invoke(ASK)
        text = caller.options().engine().tokenizer.decode(prompts[0].ids)
        assert "Tells whether the museum is open." in text
        assert '"Sunday"' in text

    def test_parallel_calls_streamed(self, caller: ChatSnapKV) -> None:
        bound = caller.bind_tools([Weather, is_open], tool_choice="any")
        chunks = list(bound.stream(ASK))
        whole = _sum(chunks)
        said = bound.invoke(ASK)
        assert len(said.tool_calls) > 1
        assert [_without_id(call) for call in whole.tool_calls] == [_without_id(call) for call in said.tool_calls]
        assert len({call["id"] for call in whole.tool_calls}) == len(whole.tool_calls)
        assert [call["index"] for call in whole.tool_call_chunks] == list(range(1, len(whole.tool_call_chunks) + 1))
        assert all(json.loads(call["args"] or "") for call in whole.tool_call_chunks[: len(whole.tool_calls)])

    @pytest.mark.parametrize("version", ["v0", "v1"])
    def test_parallel_calls_in_content_blocks(self, caller: ChatSnapKV, version: str) -> None:
        bound = ChatSnapKV(model="tiny", max_tokens=120, output_version=version).bind_tools(
            [Weather], tool_choice="any"
        )
        blocks = [block for block in _sum(list(bound.stream(ASK))).content_blocks if block["type"] == "tool_call"]
        assert [block["args"] for block in blocks] == [call["args"] for call in bound.invoke(ASK).tool_calls]
        message = bound.stream_events(ASK, version="v3").output
        assert [call["args"] for call in message.tool_calls] == [block["args"] for block in blocks]

    def test_a_call_that_was_cut_off_is_invalid_streamed_or_not(self, caller: ChatSnapKV) -> None:
        bound = caller.bind_tools([Weather], tool_choice="any", max_tokens=12)
        for reply in (bound.invoke(ASK), _sum(list(bound.stream(ASK)))):
            assert reply.tool_calls == []
            [broken] = reply.invalid_tool_calls
            assert str(broken["args"]).startswith('<tool_call>\n{"name"')
            assert reply.response_metadata["finish_reason"] == "length"
        assert caller.invoke([HumanMessage(ASK), bound.invoke(ASK), HumanMessage("Again.")]).text

    def test_what_cannot_be(self, caller: ChatSnapKV) -> None:
        with pytest.raises(ConfigError, match="tool_choice='wether'"):
            caller.bind_tools([Weather], tool_choice="wether").invoke(ASK)
        with pytest.raises(ConfigError, match="tools and a response format"):
            caller.bind_tools([Weather], response_format=Weather).invoke(ASK)
        with pytest.raises(ConfigError, match="tool_choice=3"):
            caller.bind_tools([Weather], tool_choice=3).invoke(ASK)  # type: ignore[arg-type]


class TestStructuredOutput:
    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_values_of_every_kind_of_schema(self, caller: ChatSnapKV, method: Any) -> None:
        for schema in (Weather, WeatherV1):
            value = caller.with_structured_output(schema, method=method).invoke(ASK)
            assert type(value) is schema
        for schema in (WeatherDict, Weather.model_json_schema()):
            value = caller.with_structured_output(schema, method=method).invoke(ASK)
            assert Weather(**value)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_include_raw(self, caller: ChatSnapKV, method: Any) -> None:
        whole = caller.with_structured_output(Weather, method=method, include_raw=True).invoke(ASK)
        assert isinstance(whole["raw"], AIMessage)
        assert isinstance(whole["parsed"], Weather)
        assert whole["parsing_error"] is None
        cut = caller.with_structured_output(Weather, method=method, include_raw=True, max_tokens=9).invoke(ASK)
        assert cut["parsed"] is None
        assert "raise max_tokens" in str(cut["parsing_error"])

    @pytest.mark.parametrize("schema", [Weather, WeatherDict])
    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_half_a_value_is_an_error(self, caller: ChatSnapKV, schema: Any, method: Any) -> None:
        cut = caller.with_structured_output(schema, method=method, max_tokens=9)
        with pytest.raises(OutputParserException, match="raise max_tokens"):
            cut.invoke(ASK)
        with pytest.raises(OutputParserException, match="raise max_tokens"):
            list(cut.stream(ASK))

    def test_streamed_values_grow_to_the_whole(self, caller: ChatSnapKV) -> None:
        structured = caller.with_structured_output(WeatherDict)
        values = list(structured.stream(ASK))
        assert values[-1] == structured.invoke(ASK)
        assert len(values) > 1

    def test_json_mode_without_a_schema_is_any_object(self, caller: ChatSnapKV) -> None:
        raw = caller.with_structured_output(method="json_mode", include_raw=True).invoke(ASK)["raw"]
        assert raw.text.startswith("{")
        with pytest.raises(ConfigError, match="schema=None"):
            caller.with_structured_output()

    def test_strict_refuses_what_the_grammar_cannot_enforce(self, caller: ChatSnapKV) -> None:
        schema = {
            "title": "Days",
            "type": "object",
            "properties": {"days": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}},
            "required": ["days"],
        }
        with pytest.raises(ConfigError, match="uniqueItems"):
            caller.with_structured_output(schema, strict=True).invoke(ASK)

    def test_batch_is_one_generation(self, caller: ChatSnapKV, generations: list[int]) -> None:
        values = caller.with_structured_output(Weather).batch([ASK, "And there?"])
        assert [type(value) for value in values] == [Weather, Weather]
        assert generations == [2]

    def test_an_unknown_method(self, caller: ChatSnapKV) -> None:
        with pytest.raises(ConfigError, match="method='yaml'"):
            caller.with_structured_output(Weather, method="yaml")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="did you mean 'strict'"):
            caller.with_structured_output(Weather, stict=True)


def _valid(call: Any) -> bool:
    if call["name"] == "Weather":
        return bool(Weather(**call["args"]))
    return call["name"] == "is_open" and call["args"]["day"] in ("Monday", "Sunday")


def _sum(chunks: list[Any]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole  # type: ignore[no-any-return]


def _without_id(call: Any) -> Any:
    return {key: value for key, value in call.items() if key != "id"}
