"""From messages to token ids, with the spans that matter marked; text that people wrote never becomes a control token.

The model's own chat template is rendered around placeholders. Template text is encoded as it is, and what stands for a
placeholder (message texts, tool results, retrieved documents) is encoded apart, so that a `<|im_end|>` in a document is
six harmless tokens and every span is known exactly.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ragkv.errors import ConfigError
from ragkv.messages import Message, Segment, SpanKind, fold_system, in_segments, merge_neighbours, take_reply

_CALL_SHAPE = '"name": <function-name>, "arguments": <args-json-object>'


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) of a prompt that came from one segment."""

    start: int
    end: int
    kind: SpanKind
    document: int | None = None


@dataclass(frozen=True)
class Prompt:
    """Token ids of a whole prompt and its marked spans, in order; `begun` if it ends with first words of the reply."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...] = field(default=(), repr=False)
    begun: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def question_tokens(self) -> int | None:
        """Tokens from the start of the last question to the end of the prompt; None if no question is marked."""
        starts = [span.start for span in self.spans if span.kind == "question"]
        return len(self.ids) - starts[-1] if starts else None

    @property
    def protected(self) -> list[tuple[int, int]]:
        """Spans to keep in spite of their votes, the most important first: instructions, then document headers."""
        return [(s.start, s.end) for kind in ("instruction", "header") for s in self.spans if s.kind == kind]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Prompt:
    """A raw prompt as the caller wrote it, control tokens included; the tokenizer adds its usual first token."""
    return Prompt(tuple(tokenizer(text)["input_ids"]))


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> Prompt:
    """Render messages through the tokenizer's chat template, ready for the assistant's reply.

    Neighbours of one role are merged, and system messages that the template refuses are folded into the first user
    message. A tokenizer without a template gets the texts one after the other, separated by blank lines.

    Args:
        messages: see `ragkv.messages`.
        tools: JSON schemas of functions, for templates that describe tools.
        add_generation_prompt: whether to end with the beginning of the assistant's reply, "reply" segments included.

    Raises:
        ConfigError: there is no message, or the template refuses the conversation.
    """
    if not messages:
        raise ConfigError("messages=[]: a chat needs at least one message")
    whole = merge_neighbours(in_segments(messages))
    normal, reply = take_reply(whole) if add_generation_prompt else (whole, "")
    control = _control_tokens(tokenizer)
    try:
        holes: dict[str, Segment] = {}
        contents = [{**message, "content": message["content"] or ""} for message in normal]
        with_holes = _with_holes(contents, holes, control), _with_holes(tools, holes, control)
        rendered = _render(tokenizer, *with_holes, add_generation_prompt)
    except TemplateError as refused:
        if not any(message["role"] == "system" for message in normal):
            raise ConfigError(f"the model's chat template refuses the conversation: {refused}") from refused
        return encode_chat(tokenizer, fold_system(whole), tools, add_generation_prompt=add_generation_prompt)
    prompt = _fill(tokenizer, rendered, holes, control)
    return replace(prompt, ids=(*prompt.ids, *_encode_plain(tokenizer, reply, control)), begun=bool(reply))


def encode_untrusted(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text of which no part becomes an added token (`<|im_end|>`, `<tool_call>`), whatever it says."""
    return _encode_plain(tokenizer, text, _control_tokens(tokenizer))


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool
) -> str:
    if tokenizer.chat_template is None:
        first = tokenizer.bos_token or ""
        return first + "\n\n".join(message["content"] for message in messages) + "\n\n"
    rendered = str(
        tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )
    # Qwen2.5-Coder's template shows models a call in doubled braces, and they copy it.
    return rendered.replace("{{" + _CALL_SHAPE + "}}", "{" + _CALL_SHAPE + "}")


def _with_holes(value: Any, holes: dict[str, Segment], control: re.Pattern[str]) -> Any:
    """A copy of a nested value in which segments, and control tokens in other strings, have become placeholders."""
    if isinstance(value, str):
        return control.sub(lambda match: _placeholder(Segment(match.group()), holes), value)
    if isinstance(value, Mapping):
        return {_with_holes(key, holes, control): _with_holes(item, holes, control) for key, item in value.items()}
    if isinstance(value, Sequence):
        if value and all(isinstance(item, Segment) for item in value):
            return "".join(_placeholder(segment, holes) for segment in value)
        return [_with_holes(item, holes, control) for item in value]
    return value


def _placeholder(segment: Segment, holes: dict[str, Segment]) -> str:
    """A name that no text holds by accident and every template passes through."""
    name = f"ragkv{secrets.token_hex(8)}"
    holes[name] = segment
    return name


def _fill(
    tokenizer: PreTrainedTokenizerBase, rendered: str, holes: Mapping[str, Segment], control: re.Pattern[str]
) -> Prompt:
    """Encode the rendered template piece by piece, with the segments in the place of their placeholders."""
    ids: list[int] = []
    spans: list[Span] = []
    pieces = re.split(f"({'|'.join(holes)})", rendered) if holes else [rendered]
    for piece in pieces:
        segment = holes.get(piece)
        if segment is None:
            ids += _encode(tokenizer, piece)
            continue
        start = len(ids)
        ids += _encode_plain(tokenizer, segment.text, control)
        if segment.kind is not None:
            spans.append(Span(start, len(ids), segment.kind, segment.document))
    return Prompt(tuple(ids), tuple(spans))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False) if text else []


def _encode_plain(tokenizer: PreTrainedTokenizerBase, text: str, control: re.Pattern[str]) -> list[int]:
    """Encode with a cut after the first character of every control token, so that none can form."""
    ids: list[int] = []
    start = 0
    while (match := control.search(text, start)) is not None:
        cut = match.start() + 1
        ids += _encode(tokenizer, text[start:cut])
        start = cut
    return ids + _encode(tokenizer, text[start:])


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches every added token of the vocabulary; single characters and white space are ordinary text."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values())
    names = sorted((name for name in added if len(name) > 1 and not name.isspace()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")
