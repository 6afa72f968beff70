"""A reply as it comes in, parted into text and tool calls: text at once, each call when it is whole, never its markup.

Calls are read in the format of `HERMES`, and as bare JSON (alone, in a list, in a code fence) when that is the whole
reply and names known tools: so write Llama and Mistral models, whose markers are no text, and Qwen2.5-Coder at times.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ragkv.tools.formats import HERMES, MISTRAL
from ragkv.tools.spec import InvalidToolCall, ToolCall, ToolSpec, new_call_id

# transformers' own parse_response needs a `response_template`, which these tokenizers (and any from GGUF) lack.
ReplyPart = str | ToolCall | InvalidToolCall

_BARE_STARTS = ("", "```", "```json", MISTRAL.begin, "<|python_tag|>")
_AROUND_BARE = re.compile(r"^\s*(?:```(?:json)?|\[TOOL_CALLS\]|<\|python_tag\|>)?\s*|\s*(?:```)?\s*$")
_BETWEEN_BARE = re.compile(r"[\s,;]*")


@dataclass(frozen=True)
class ToolReply:
    """A whole reply: its text without markup, and its calls in order."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()


def parse_tool_calls(text: str, tools: Sequence[ToolSpec]) -> ToolReply:
    """Part a finished reply; the result is that of `ToolCallStream` on any pieces of it."""
    stream = ToolCallStream(tools)
    return collect([*stream.push(text), *stream.finish()])


def collect(parts: Iterable[ReplyPart]) -> ToolReply:
    """The parts of a stream as one reply."""
    parts = list(parts)
    return ToolReply(
        "".join(part for part in parts if isinstance(part, str)),
        tuple(part for part in parts if isinstance(part, ToolCall)),
        tuple(part for part in parts if isinstance(part, InvalidToolCall)),
    )


class ToolCallStream:
    """Parts the text of one reply while it is made.

    White space next to a call is markup. A call gets its id once, here, so that chunks and final message agree.
    """

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._names = frozenset(tool.name for tool in tools)
        self._starts = [
            f'{start}{bracket}{{"name":{json.dumps(name)}'.replace(" ", "")
            for start in _BARE_STARTS
            for bracket in ("", "[")
            for name in self._names
        ]
        self._pending = ""
        self._at_start = True
        self._in_call = False
        self._after_call = False

    def push(self, text: str) -> list[ReplyPart]:
        """Take new text; return what is certain: pieces of text and whole calls, in order."""
        self._pending += text
        if self._at_start and self._may_be_bare():
            return []
        self._at_start = False
        return list(self._parts(last=False))

    def finish(self) -> list[ReplyPart]:
        """No more text will come. A call that was not closed is read as far as it goes."""
        bare = _bare_calls(self._pending, self._names) if self._at_start else []
        if bare:
            self._pending = ""
            return list(bare)
        return list(self._parts(last=True))

    def _may_be_bare(self) -> bool:
        compact = "".join(self._pending.split())
        return any(start.startswith(compact) or compact.startswith(start) for start in self._starts)

    def _parts(self, last: bool) -> Iterator[ReplyPart]:
        while True:
            end = _end_of_call(self._pending, last) if self._in_call else self._pending.find(HERMES.begin)
            if end < 0:
                break
            piece, marker = self._pending[:end], HERMES.end if self._in_call else HERMES.begin
            self._pending = self._pending[end + len(marker) :]
            if self._in_call:
                yield _read_call(piece)
            elif piece := self._trimmed(piece, before_call=True):
                yield piece
            self._after_call, self._in_call = self._in_call, not self._in_call
        if not self._in_call:
            yield from self._text(last)

    def _text(self, last: bool) -> Iterator[str]:
        """Pending text that no marker can change any more."""
        held = 0 if last else _held_back(self._pending)
        piece = self._trimmed(self._pending[: len(self._pending) - held], before_call=False)
        self._pending = self._pending[len(self._pending) - held :]
        if piece:
            self._after_call = False
            yield piece

    def _trimmed(self, piece: str, before_call: bool) -> str:
        piece = piece.lstrip() if self._after_call else piece
        return piece.rstrip() if before_call else piece


def _held_back(text: str) -> int:
    """Length of the tail that may turn out to be markup: white space, then the beginning of a marker."""
    marker = _tail(text, HERMES.begin)
    before = text[: len(text) - marker]
    return marker + len(before) - len(before.rstrip())


def _end_of_call(text: str, last: bool) -> int:
    """Where the end marker of an open call stands, -1 if not yet; a marker inside a JSON string is none."""
    end = text.find(HERMES.end)
    while end >= 0 and re.sub(r"\\.", "", text[:end], flags=re.DOTALL).count('"') % 2:
        end = text.find(HERMES.end, end + 1)
    return len(text) - _tail(text, HERMES.end) if end < 0 and last else end


def _tail(text: str, marker: str) -> int:
    """Length of the longest end of a text that begins a marker."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _read_call(text: str) -> ToolCall | InvalidToolCall:
    """The call that stands between two markers."""
    text = text.strip()
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        return InvalidToolCall(new_call_id(), None, text, f"not JSON: {error}")
    call = _as_call(body)
    if call is None:
        name = body.get("name") if isinstance(body, dict) else None
        return InvalidToolCall(
            new_call_id(),
            name if isinstance(name, str) else None,
            text,
            'not a call: it must be an object with "name" and an object of "arguments"',
        )
    return call


def _as_call(body: Any) -> ToolCall | None:
    """A decoded call; arguments may be called "parameters", be JSON in a string (models quote them) or be absent."""
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        return None
    arguments = body.get("arguments", body.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return ToolCall(new_call_id(), body["name"], arguments) if isinstance(arguments, dict) else None


def _bare_calls(text: str, names: frozenset[str]) -> list[ToolCall]:
    """The calls of a reply that is nothing but JSON objects with the names of known tools, else none."""
    text = _AROUND_BARE.sub("", text)
    decoder, bodies, position = json.JSONDecoder(), [], 0
    while position < len(text):
        try:
            body, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        bodies += body if isinstance(body, list) else [body]
        position = _BETWEEN_BARE.match(text, position).end()  # type: ignore[union-attr]
    calls = [_as_call(body) for body in bodies]
    if any(call is None or call.name not in names for call in calls):
        return []
    return [call for call in calls if call is not None]
