"""What a session does to its cache: exchanges are read as turns, room is made for them, and what leaves is remembered.

The order of steps in a reply is `ragkv.streaming.session`'s; each step leaves a state that can be gone on from.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from ragkv.cache import kv_bytes
from ragkv.chat import Prompt, encode_untrusted
from ragkv.engine import Engine
from ragkv.errors import PromptTooLong
from ragkv.messages import Message
from ragkv.prefill import Prefilled
from ragkv.streaming.compress_turn import read_compressed
from ragkv.streaming.exchanges import (
    END_OF_RECALLED,
    RECALLED,
    Recalled,
    as_text,
    key_of,
    last_question,
    with_documents,
)
from ragkv.streaming.limits import LONGEST_QUESTION, Limits
from ragkv.streaming.transcript import Transcript
from ragkv.streaming.turns import Turn
from ragkv.streaming.window import Window

if TYPE_CHECKING:
    from ragkv.streaming.long_term import ThreadMemory


@dataclass
class State:
    """What changes as a session goes on. To callers it is a snapshot, for `Session.restore` alone.

    Attributes:
        window: the cache and whose tokens are in it.
        unread: messages that wait for the next reply.
        base: the last exchange, behind which the chat template goes on (see `Transcript.next_base`).
        pending: tokens at the end of the last reply that the model has not read yet.
        recalled: numbers of the turns that the last prompt was reminded of.
        question: what the user said last.
    """

    window: Window
    unread: list[Message] = field(default_factory=list)
    base: list[Message] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    recalled: tuple[int, ...] = ()
    question: str = ""

    def copy(self) -> "State":
        """One that shares nothing with this."""
        window = Window(self.window.cache.copy(), copy.deepcopy(self.window.turns), self.window.tokens_seen)
        return replace(self, window=window, unread=list(self.unread), base=list(self.base), pending=list(self.pending))


class Reader:
    """Reads into the cache of one session.

    Args:
        memory: gets every exchange that leaves the cache, if there is one.
        limits: of the session.
        chunk_size: most tokens read in one forward pass.
        state: of the session; may be replaced between two replies.
    """

    def __init__(
        self,
        engine: Engine,
        transcript: Transcript,
        memory: "ThreadMemory | None",
        limits: Limits,
        chunk_size: int,
        state: State,
    ) -> None:
        self.memory, self.state = memory, state
        self._engine, self._transcript, self._limits, self._chunk_size = engine, transcript, limits, chunk_size

    def open(self, start: Sequence[int]) -> None:
        """Read what comes before everything else, unless that has been done."""
        ids = self._transcript.opening or list(start)
        if self.state.window.tokens_seen == 0 and ids:
            self.read(ids)

    def read(self, ids: Sequence[int], cancel: threading.Event | None = None) -> Tensor:
        """Read what is pending and these; (1, vocabulary)."""
        ids = [*self.state.pending, *ids]
        logits = self.state.window.read(self._engine.model, ids, self._chunk_size, self._dropped, cancel)
        self.state.pending = []
        return logits

    def catch_up(self, earlier: Sequence[Sequence[Message]], spare: int, cancel: threading.Event) -> None:
        """Take in exchanges that were held elsewhere: the newest that fit into `spare` tokens are read."""
        state, bases = self.state, list(accumulate(earlier, self._transcript.next_base, initial=self.state.base))
        added = [
            self._transcript.added(base, with_documents(exchange), reply=False)
            for base, exchange in zip(bases, earlier, strict=False)
        ]
        skipped = len(added) - self._fitting(added, spare)
        if skipped:
            state.window.make_room(state.window.limit, self._dropped)
        for number, (exchange, prompt, base) in enumerate(zip(earlier, added, bases[1:], strict=True)):
            state.question = last_question(exchange) or state.question
            text = as_text(exchange) if self.memory is not None else ""
            if number < skipped or not self._could_read(prompt, text, cancel):
                self._dropped(state.window.turns.skip(text))
            state.unread, state.base = state.unread[len(exchange) :], base

    def _fitting(self, prompts: Sequence[Prompt], spare: int) -> int:
        """How many of the last ones fit together, as far as the model can read them."""
        sizes = [
            self._limits.kept(len(prompt)) if self._limits.readable(len(prompt)) else spare + 1 for prompt in prompts
        ]
        return sum(total <= spare for total in accumulate(reversed(sizes)))

    def _could_read(self, prompt: Prompt, text: str, cancel: threading.Event) -> bool:
        """Read an earlier exchange, unless too little of it is a tool's result that could be compressed."""
        try:
            self.read_turn(prompt, cancel)
        except PromptTooLong:
            return False
        self.state.window.turns.live[-1].text = text
        return True

    def read_turn(self, prompt: Prompt, cancel: threading.Event) -> Tensor:
        """Read a prompt as a new turn, or, if that fails, leave no trace of it; what was evicted for it stays so."""
        window = self.state.window
        before, pending = window.tokens_seen, list(self.state.pending)
        window.turns.begin(whole=True)
        try:
            if self._limits.kept(len(prompt)) == len(prompt):
                return self.read(prompt.ids, cancel)
            return self._read_compressed(prompt, self._limits.kept(len(prompt)), cancel)
        except BaseException:
            window.take_back(window.tokens_seen - before)
            window.turns.cancel()
            self.state.pending = pending
            raise

    def close(self, tokens: Sequence[int], reply: Message, noted: Message | None) -> None:
        """End the turn: its last token and the template's closing tokens are read with what comes next.

        Args:
            noted: the reply as the long-term memory gets to keep it; None keeps the turn out of there.
        """
        state = self.state
        exchange, ended = [*state.unread, reply], not tokens or tokens[-1] in self._engine.loaded.eos_token_ids
        state.pending = [*([] if ended else tokens[-1:]), *self._transcript.closing]
        state.base = self._transcript.next_base(state.base, exchange)
        kept = [] if self.memory is None or noted is None else [*state.unread, noted]
        state.window.turns.live[-1].text = as_text(kept)
        state.question = last_question(exchange) or state.question
        state.unread = []

    def recall(self, messages: Sequence[Message], budget: int) -> list[Recalled]:
        """What the long-term memory has to say to the last question, of turns that are not whole in the cache."""
        question, budget = last_question(messages), budget - self._count_tokens(RECALLED + END_OF_RECALLED)
        if self.memory is None or budget < 1 or not question.strip():
            return []
        live = self.state.window.turns.live
        for turn in live:
            if turn.dropped:  # its beginning is gone, so it cannot wait for its end
                self._dropped(turn)
        held = {key_of(turn.text) for turn in live if not turn.dropped}
        return self.memory.recall(question, budget, self._count_tokens, held=held)

    def flush(self) -> None:
        """Put what is still in the cache into the long-term memory too."""
        for turn in self.state.window.turns.live:
            self._dropped(turn)

    def prefilled(self, logits: Tensor) -> Prefilled:
        """What statistics say of the cache as the reply begins."""
        window = self.state.window
        held = kv_bytes(window.cache)
        return Prefilled(
            cache=window.cache,
            logits=logits,
            length=window.tokens_seen,
            window_size=0,
            kept_tokens=len(window.cache),
            unprotected_tokens=0,
            kv_bytes_full=held // len(window.cache) * window.tokens_seen,
            kv_bytes_kept=held,
            kv_bytes_allocated=window.cache.nbytes,
        )

    def _read_compressed(self, prompt: Prompt, kept: int, cancel: threading.Event) -> Tensor:
        """Read a prompt whole, and keep what the question looks at: its own, or, behind a tool's result, the last."""
        window, question = self.state.window, self.state.question if prompt.question_tokens is None else ""
        if self.state.pending:
            self.read([])
        ids = encode_untrusted(self._engine.tokenizer, question)[-LONGEST_QUESTION:]
        window.make_room(kept, self._dropped)
        logits = read_compressed(self._engine.model, window.cache, prompt, ids, kept, self._chunk_size, cancel)
        window.count(len(prompt))
        window.turns.live[-1].dropped += len(prompt) - kept
        return logits

    def _dropped(self, turn: Turn) -> None:
        if self.memory is not None and turn.text:
            self.memory.add(turn.number, turn.text)

    def _count_tokens(self, text: str) -> int:
        return len(encode_untrusted(self._engine.tokenizer, text))
