"""What a chat template makes of a conversation that goes on: the tokens that each new message adds to those before.

Only the last exchange is rendered again to find them, so a turn costs the same after ten thousand others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from ragkv.chat import Prompt, encode_chat
from ragkv.errors import ConfigError
from ragkv.messages import Message, Segment
from ragkv.tools import ToolSpec, prepare_tool_messages

_LONGEST_BASE = 4  # messages after the user's: calls and results, of which a template looks back at the last ones


@dataclass(frozen=True)
class Transcript:
    """A conversation's fixed beginning, and how messages are put behind it.

    Args:
        tokenizer: with the chat template.
        system: text of the system message; empty for none.
        tools: functions that the model may call.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str = ""
    tools: tuple[ToolSpec, ...] = ()

    @cached_property
    def opening(self) -> list[int]:
        """Tokens of the system message and the tools, before any other message; empty if there are neither."""
        if not (self.system or self.tools):
            return []
        shared = _common_prefix(*(self._ids([_user(text)]).ids for text in "ab"))
        exchange = [_user("x"), _assistant("x")]
        closed = len(self._ids(exchange, reply=False))
        header = _common_prefix(*(self._ids([*exchange, _user(text)]).ids for text in "ab"))[closed:]
        # The beginning of a user's message is no part of what comes before it.
        return shared[: len(shared) - len(header)] if header and shared[-len(header) :] == header else shared

    @cached_property
    def closing(self) -> list[int]:
        """Tokens that the template puts behind a whole reply."""
        reply = {"role": "assistant", "content": [Segment("x", "document")]}
        prompt = self._ids([_user("x"), reply], reply=False)
        end = max(span.end for span in prompt.spans if span.kind == "document")
        return list(prompt.ids[end:])

    def added(self, base: Sequence[Message], new: Sequence[Message], *, reply: bool = True) -> Prompt:
        """Tokens of `new`, and of the beginning of a reply to it, behind those of `base` (see `next_base`).

        Raises:
            ConfigError: the template writes earlier messages in another way once there are new ones.
        """
        known = self._ids(base, reply=False).ids if base else tuple(self.opening)
        whole = self._ids([*base, *new], reply=reply)
        if whole.ids[: len(known)] != known:
            raise ConfigError(
                f"the chat template of {self.tokenizer.name_or_path or 'this model'} writes earlier messages anew when "
                "a conversation goes on, so it cannot be streamed: use a template that only appends"
            )
        start = len(known)
        spans = (replace(span, start=span.start - start, end=span.end - start) for span in whole.spans)
        return Prompt(whole.ids[start:], tuple(span for span in spans if span.start >= 0))

    def next_base(self, base: Sequence[Message], new: Sequence[Message]) -> list[Message]:
        """The messages since the last user's, behind which what comes next is rendered; their texts do not matter."""
        messages = [_short(message) for message in (*base, *new)]
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=0)
        question, since = messages[last : last + 1], messages[last + 1 :]
        recent = since[-_LONGEST_BASE:]
        while len(since) > _LONGEST_BASE and recent[0]["role"] != "assistant":
            recent = recent[1:]
        return [*question, *recent]

    def _ids(self, messages: Sequence[Message], *, reply: bool = True) -> Prompt:
        system = [{"role": "system", "content": self.system}] if self.system else []
        prepared, tools = prepare_tool_messages(self.tokenizer, [*system, *messages], self.tools)
        return encode_chat(self.tokenizer, prepared, tools, add_generation_prompt=reply)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _short(message: Message) -> dict[str, Any]:
    return {**message, "content": "" if message.get("tool_calls") else "x"}


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> list[int]:
    length = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    return list(first[:length])
