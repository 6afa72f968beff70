"""A conversation or a stream of text that never fills up: it reads and writes on a cache of constant size.

The newest turns and what is pinned are what the model knows; earlier turns are gone, unless a long-term memory recalls
them. `Session.report` and `Session.remembers` tell which is which. A session serves one caller at a time.
"""

import copy
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ragkv.chat import Prompt, encode_untrusted
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import ConfigError, PromptTooLong
from ragkv.messages import Message
from ragkv.reply import Chunk, Completion, Reply
from ragkv.sampling import Constraint
from ragkv.streaming.cache import StreamingCache
from ragkv.streaming.exchanges import exchanges, plain, with_documents, with_recalled
from ragkv.streaming.layout import Layout
from ragkv.streaming.limits import Limits
from ragkv.streaming.reading import Reader, State
from ragkv.streaming.transcript import Transcript
from ragkv.streaming.turns import MemoryReport, Turns
from ragkv.streaming.window import Window
from ragkv.tools import ToolSpec

if TYPE_CHECKING:
    from ragkv.streaming.long_term import ThreadMemory

CHUNK_SIZE = 512


class Session:
    """See the module. Made by `Engine.session`.

    Args:
        engine: model and tokenizer; its own policy is not used.
        layout: see `layout_for`; sessions of one model and policy may share one.
        system: text of the system message; pinned.
        tools: functions that the model may call; pinned.
        memory: gets every exchange that leaves the cache, and recalls those that fit a new question, also those of
            earlier sessions.
        recall_tokens: most tokens of recalled turns in a prompt.
        max_turn_tokens: most tokens of new messages that enter the cache at once; longer ones (a tool result, a
            document) are read whole, and what the question looks at is kept (SnapKV). None refuses what does not fit.
        chunk_size: most tokens read in one forward pass. A chunk's first tokens see as much less of the past as the
            chunk is long, since room is made for all of it at once.

    Raises:
        ConfigError: an option is out of its bounds, or what is pinned leaves no room.
    """

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        *,
        system: str = "",
        tools: Sequence[ToolSpec] = (),
        memory: "ThreadMemory | None" = None,
        recall_tokens: int = 256,
        max_turn_tokens: int | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        if chunk_size < 1:
            raise ConfigError(f"chunk_size={chunk_size}: must be at least 1")
        if recall_tokens < 0:
            raise ConfigError(f"recall_tokens={recall_tokens}: must be at least 0 (0 recalls nothing)")
        if max_turn_tokens is not None and max_turn_tokens < 1:
            raise ConfigError(f"max_turn_tokens={max_turn_tokens}: must be at least 1, or None")
        self.engine, self.recall_tokens, self.chunk_size = engine, recall_tokens, chunk_size
        self.max_turn_tokens = max_turn_tokens
        self.layout, self.transcript = layout, Transcript(engine.tokenizer, system, tuple(tools))
        self._busy = threading.Lock()
        pinned = len(self.transcript.opening)
        if pinned >= layout.capacity:
            raise ConfigError(
                f"the system message and the tools take {pinned} tokens, and the cache holds {layout.capacity}: raise "
                "window_length, or shorten them"
            )
        # Turns are numbered through the life of a thread, so that one which begins anew keeps what it had.
        turns = Turns(count=0 if memory is None else memory.next_turn)
        state = State(Window(StreamingCache(layout), turns))
        state.window.cache.pin(pinned)
        sight = min(engine.loaded.context_length, layout.sight or engine.loaded.context_length)
        self._limits = Limits(engine.loaded.name, sight, layout.capacity, max_turn_tokens)
        self._reader = Reader(engine, self.transcript, memory, self._limits, chunk_size, state)

    @property
    def memory(self) -> "ThreadMemory | None":
        """The long-term memory, if there is one."""
        return self._reader.memory

    def append(self, messages: Message | Sequence[Message]) -> None:
        """Put messages behind the conversation; they are read when the next reply is made."""
        new = [messages] if isinstance(messages, Mapping) else list(messages)
        self._reader.state.unread += [plain(message) for message in new]

    def discard(self) -> None:
        """Forget the messages that wait for a reply."""
        self._reader.state.unread = []

    def feed(self, text: str) -> None:
        """Read a text as it is, without any chat template: one more turn, which is evicted token by token."""
        ids = encode_untrusted(self.engine.tokenizer, text)
        if not ids:
            return
        with self._used():
            turn = self._reader.state.window.turns.begin(whole=False)
            turn.text = text if self.memory is not None else ""
            # The tokenizer's first token is the turn's too: without sinks it is evicted like any other.
            self._reader.open(self.engine.tokenizer("")["input_ids"])
            self._reader.read(ids)

    def read(self) -> None:
        """Read the exchanges that were appended with their replies; if they are more than the window, the newest."""
        *whole, _ = exchanges(self._reader.state.unread)
        with self._used():
            self._reader.open([])
            state = self._reader.state
            self._reader.catch_up(whole, state.window.limit - len(state.pending), threading.Event())

    def generate(self, sampling: SamplingParams = SamplingParams(), **options: Any) -> Completion:
        """The whole reply to what was appended; options are those of `stream`."""
        return next(chunk.completion for chunk in self.stream(sampling, **options) if chunk.completion is not None)

    def stream(
        self,
        sampling: SamplingParams = SamplingParams(),
        *,
        constraint: Constraint | None = None,
        cancel: threading.Event | None = None,
        noted: Callable[[Message], Message | None] = lambda reply: reply,
    ) -> Generator[Chunk]:
        """Reply to what was appended, yielding text as it is made. Closing the iterator keeps the reply so far.

        Args:
            constraint: a grammar that the reply must follow.
            cancel: when set, the reply ends with finish_reason "cancelled" before its next token.
            noted: what the long-term memory notes down as the reply, asked at its end; None keeps the turn out.

        Raises:
            PromptTooLong: the new messages and `max_tokens` do not fit into the cache.
            Cancelled: `cancel` was set while the messages were being read; they still wait for a reply.
        """
        state = self._reader.state
        *earlier, current = exchanges(state.unread)
        if not current:
            raise ConfigError("there is nothing to reply to: append a message first")
        prompt = self.transcript.added(reduce(self.transcript.next_base, earlier, state.base), with_documents(current))
        spare = self._spare(prompt, sampling)
        return self._reply(earlier, current, prompt, spare, sampling, constraint, cancel or threading.Event(), noted)

    def report(self) -> MemoryReport:
        """What is remembered and what was dropped, as of now."""
        return self._reader.state.window.report(self._reader.state.recalled)

    def remembers(self, turn: int) -> bool:
        """Whether every token of turn number `turn` (from 0) is in the cache."""
        count = self._reader.state.window.turns.count
        if not 0 <= turn < count:
            raise ConfigError(f"turn={turn}: there are {count} turns, counted from 0")
        return self._reader.state.window.turns.remembers(turn)

    def flush(self) -> None:
        """Put the turns that are still in the cache into the long-term memory too, when the session is at its end."""
        with self._used():
            self._reader.flush()

    def snapshot(self) -> State:
        """The session as it is now, for `restore`; holds a copy of the cache."""
        with self._used():
            return self._reader.state.copy()

    def restore(self, snapshot: State) -> None:
        """Go back to a snapshot of this session, or of a fork of it. The long-term memory keeps what it has."""
        with self._used():
            self._reader.state = snapshot.copy()

    def save(self, file: str | Path) -> None:
        """Write the session to one safetensors file; one that is there is replaced at once, or not at all.

        Raises:
            DocumentError: the file cannot be written.
        """
        from ragkv.streaming.session_file import write_session

        with self._used():
            write_session(self, self._reader.state, Path(file))

    @classmethod
    def load(cls, engine: Engine, file: str | Path, *, memory: "ThreadMemory | None" = None) -> Self:
        """Go on, bit for bit, with a session that `save` wrote.

        Raises:
            DocumentError: there is none, it is damaged, or another model or version of ragkv wrote it.
        """
        from ragkv.streaming.session_file import read_session

        return read_session(cls, engine, Path(file), memory)

    def fork(self, memory: "ThreadMemory | None" = None) -> Self:
        """A session that goes on from here on its own; it shares no long-term memory unless one is given."""
        other = copy.copy(self)
        other._busy = threading.Lock()
        other._reader = Reader(self.engine, self.transcript, memory, self._limits, self.chunk_size, self.snapshot())
        return other

    def _spare(self, prompt: Prompt, sampling: SamplingParams) -> int:
        """Tokens of the window that prompt and reply leave to earlier exchanges; an error if there are less than 0."""
        state = self._reader.state
        return self._limits.spare(state.window.limit - len(state.pending), len(prompt), sampling.max_tokens)

    def _reply(
        self,
        earlier: Sequence[Sequence[Message]],
        current: Sequence[Message],
        prompt: Prompt,
        spare: int,
        sampling: SamplingParams,
        constraint: Constraint | None,
        cancel: threading.Event,
        noted: Callable[[Message], Message | None],
    ) -> Generator[Chunk]:
        """Read earlier exchanges and the prompt, and write the reply, as one new turn."""
        with self._used():
            started, state = time.perf_counter(), self._reader.state
            self._reader.open([])
            # What is recalled must not push out what is read now, nor keep all of it out.
            room = 0 if self.memory is None else min(self.recall_tokens, spare // 2 if earlier else spare)
            self._reader.catch_up(earlier, spare - room, cancel)
            prompt, recalled = self._reminded(current, prompt, room, sampling)
            logits = self._reader.read_turn(prompt, cancel)
            state.recalled = recalled
            reply, text = Reply(0, self.engine.loaded, prompt, sampling, constraint), ""
            reply.prefilled = self._reader.prefilled(logits)
            try:
                while reply.finish_reason is None:
                    if cancel.is_set():
                        chunk = reply.end("cancelled", started)
                    else:
                        logits = self._reader.read(reply.tokens[-1:]) if reply.tokens else logits
                        chunk = reply.push(reply.sampler(logits[0]), started)
                    text += chunk.text
                    yield chunk
            finally:
                said = {"role": "assistant", "content": text}
                self._reader.close(reply.tokens, said, noted(said))

    def _reminded(
        self, current: Sequence[Message], prompt: Prompt, room: int, sampling: SamplingParams
    ) -> tuple[Prompt, tuple[int, ...]]:
        """The prompt with what is recalled for it, and the numbers of the turns that this is from."""
        if not (recalled := self._reader.recall(current, room)):
            return prompt, ()
        messages = with_recalled(with_documents(current), recalled)
        reminded = self.transcript.added(self._reader.state.base, messages)
        try:
            self._spare(reminded, sampling)
        except PromptTooLong:  # by what recalling costs beyond its budget; the report says that nothing was recalled
            return prompt, ()
        return reminded, tuple(dict.fromkeys(each.turn for each in recalled))

    @contextmanager
    def _used(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ConfigError("the session is in use: finish or close its reply first, or fork it")
        try:
            yield
        finally:
            self._busy.release()
