"""The contract of structured output: objects of a pydantic class, whole, async and streamed, by grammar."""

from typing import Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel, Field, ValidationError

from llama_index.llms.ragkv import ChatSnapKV
from ragkv.errors import ConfigError, ReplyError


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(description="question to set up the joke")
    punchline: str = Field(description="answer to resolve the joke")


class Light(BaseModel):
    """What the tiny model can fill in a few tokens."""

    state: Literal["on", "off"]
    dimmed: bool


class Person(BaseModel):
    """A person."""

    name: str
    age: int | None = Field(None, description="only if it is given")


PROMPT = PromptTemplate("Set the light for {occasion}.")


def test_structured_output(qwen: ChatSnapKV) -> None:
    joke = qwen.structured_predict(Joke, PromptTemplate("Tell me a short joke about {x}."), x="cats")
    assert joke.setup
    assert joke.punchline


def test_structured_output_optional_param(qwen: ChatSnapKV) -> None:
    prompt = PromptTemplate("Extract the person from this text. {text}")
    assert qwen.structured_predict(Person, prompt, text="Erick is 27 years old.") == Person(name="Erick", age=27)


def test_structured_predict(writer: ChatSnapKV, prompts: list[str]) -> None:
    assert isinstance(writer.structured_predict(Light, PROMPT, occasion="a film"), Light)
    assert "Set the light for a film." in prompts[0]
    assert '"enum": ["on", "off"]' in prompts[0]  # the model is shown the schema


async def test_astructured_predict(writer: ChatSnapKV) -> None:
    assert await writer.astructured_predict(Light, PROMPT, occasion="a film") == writer.structured_predict(
        Light, PROMPT, occasion="a film"
    )


def test_stream_structured_predict(writer: ChatSnapKV) -> None:
    objects = list(writer.stream_structured_predict(Light, PROMPT, occasion="a film"))
    assert objects[-1] == writer.structured_predict(Light, PROMPT, occasion="a film")
    assert any(getattr(partial, "state", None) and getattr(partial, "dimmed", None) is None for partial in objects)


async def test_astream_structured_predict(writer: ChatSnapKV) -> None:
    stream = await writer.astream_structured_predict(Light, PROMPT, occasion="a film")
    objects = [partial async for partial in stream]
    assert objects[-1] == writer.structured_predict(Light, PROMPT, occasion="a film")


def test_options_of_a_structured_call(writer: ChatSnapKV) -> None:
    with pytest.raises(ReplyError, match="incomplete: max_tokens ended it"):
        writer.structured_predict(Light, PROMPT, {"max_tokens": 5}, occasion="a film")
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        writer.structured_predict(Light, PROMPT, {"temprature": 5}, occasion="a film")


def test_a_stream_that_is_cut_off_is_an_error(writer: ChatSnapKV) -> None:
    stream = writer.stream_structured_predict(Light, PROMPT, {"max_tokens": 5}, occasion="a film")
    with pytest.raises(ReplyError, match="incomplete: max_tokens ended it"):
        list(stream)


def test_what_the_schema_does_not_say_is_validated(writer: ChatSnapKV) -> None:
    class Never(Light):
        def __init__(self, **data: object) -> None:
            super().__init__(**{**data, "dimmed": "perhaps"})

    with pytest.raises(ValidationError, match="dimmed"):
        writer.structured_predict(Never, PROMPT, occasion="a film")


def test_system_prompt_is_used(writer: ChatSnapKV, prompts: list[str]) -> None:
    ChatSnapKV(**{**writer.to_dict(), "system_prompt": "Be dim."}).structured_predict(Light, PROMPT, occasion="a film")
    assert "<|im_start|>system\nBe dim." in prompts[0]


def test_as_structured_llm(writer: ChatSnapKV) -> None:
    structured = writer.as_structured_llm(Light)
    response = structured.chat([ChatMessage(content="A film!")])
    assert isinstance(response.raw, Light)
    assert Light.model_validate_json(response.message.content or "") == response.raw
    assert isinstance(structured.complete("A film!").raw, Light)


async def test_as_structured_llm_async_and_streamed(writer: ChatSnapKV) -> None:
    structured = writer.as_structured_llm(Light)
    messages = [ChatMessage(content="A film!")]
    whole = structured.chat(messages).raw
    assert (await structured.achat(messages)).raw == whole
    assert list(structured.stream_chat(messages))[-1].raw == whole
    assert [chunk async for chunk in await structured.astream_chat(messages)][-1].raw == whole


@pytest.mark.parametrize("mode", [PydanticProgramMode.FUNCTION, PydanticProgramMode.DEFAULT])
def test_program_modes(writer: ChatSnapKV, mode: PydanticProgramMode) -> None:
    llm = ChatSnapKV(**{**writer.to_dict(), "pydantic_program_mode": mode, "max_tokens": 60})
    assert isinstance(llm.structured_predict(Light, PROMPT, occasion="a film"), Light)


def test_function_calling_program(writer: ChatSnapKV) -> None:
    prompt = ChatPromptTemplate(message_templates=[ChatMessage(content="Set the light for {occasion}.")])
    program = FunctionCallingProgram.from_defaults(Light, prompt=prompt, llm=writer)
    assert isinstance(program(occasion="a film", llm_kwargs={"max_tokens": 60}), Light)


@pytest.mark.parametrize(
    "form",
    [
        Light,
        Light.model_json_schema(),
        {"type": "json_schema", "json_schema": {"name": "light", "schema": Light.model_json_schema()}},
    ],
    ids=["class", "schema", "openai"],
)
def test_response_format(writer: ChatSnapKV, form: object) -> None:
    reply = writer.chat([ChatMessage(content="A film!")], response_format=form)
    assert Light.model_validate_json(reply.message.content or "")


@pytest.mark.parametrize("form", ["json_object", {"type": "json_object"}])
def test_json_mode(qwen: ChatSnapKV, form: object) -> None:
    reply = qwen.complete('Give me JSON with the key "a" and the value 1.', response_format=form)
    assert reply.text.startswith("{")


def test_unknown_response_formats_are_errors(writer: ChatSnapKV) -> None:
    with pytest.raises(ConfigError, match="response_format='xml'"):
        writer.chat([ChatMessage(content="A film!")], response_format="xml")


def test_strict_refuses_what_the_grammar_cannot_hold(writer: ChatSnapKV) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(ConfigError):
        writer.chat([ChatMessage(content="A film!")], response_format=schema, strict=True)
