"""The kinds of memory: sessions that have read a conversation, each in its own way, and nothing twice.

A kind that is not asked for is not read.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from ragkv.embedding import Embedder
from ragkv.engine import Engine
from ragkv.messages import Message
from ragkv.policies import StreamingLLM
from ragkv.streaming.cache import StreamingCache
from ragkv.streaming.long_term import ThreadMemory
from ragkv.streaming.session import Session
from ragkv_evals.memory_data import Conversation
from ragkv_evals.memory_lengths import Lengths

FULL, WINDOW, STREAMING, RECALL = KINDS = ("full history", "window only", "streaming", "streaming + recall")
_FULL_CHUNK = 2048  # nothing is evicted for it, so a chunk may be long


@dataclass(frozen=True)
class Setup:
    """How conversations are remembered, see `ragkv.streaming.session.Session`, and how many questions are asked."""

    window_length: int
    recall_tokens: int
    max_tokens: int
    questions: int
    seed: int = 0

    @property
    def policy(self) -> StreamingLLM:
        """What all kinds but the full history keep."""
        return StreamingLLM(window_length=self.window_length)

    @property
    def capacity(self) -> int:
        """Tokens that their caches hold."""
        return StreamingLLM.num_sink_tokens + self.window_length


class Sessions:
    """One conversation, remembered in all kinds. Questions are for forks, so that none changes the next.

    Attributes:
        conversation, lengths, setup: what is read, how long it is, and how it is remembered.
    """

    def __init__(
        self,
        engine: Engine,
        embedder: Embedder,
        conversation: Conversation,
        lengths: Lengths,
        setup: Setup,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.conversation, self.lengths, self.setup = conversation, lengths, setup
        self._engine, self._embedder, self._progress = engine, embedder, progress
        self._beginning = len(lengths.oldest(setup.capacity))

    def fork(self, kind: str) -> Session:
        """A session of this kind, to ask one question; what is recalled enters with it, so both that stream are one."""
        if kind == FULL:
            return self.full.fork()
        if kind == WINDOW:
            return self.window.fork()
        # What the question pushes out goes to a copy of the memory: the next question is none the wiser.
        return self.streaming.fork(copy.copy(self.streaming.memory) if kind == RECALL else None)

    @cached_property
    def full(self) -> Session:
        """Remembers everything."""
        context = self._engine.loaded.context_length
        whole = StreamingLLM(window_length=context - StreamingLLM.num_sink_tokens)
        session = self._engine.session(whole, system=self.conversation.system, chunk_size=_FULL_CHUNK)
        begun = self._begun.snapshot()
        # Nothing has been evicted yet, so the entries stand in a larger cache as they do in the small one.
        begun.window.cache = StreamingCache.restored(session.layout, begun.window.cache.state())
        session.restore(begun)
        return self._read(FULL, session, self.conversation.exchanges[self._beginning :])

    @cached_property
    def window(self) -> Session:
        """Has read the newest exchanges only, those that fit."""
        session = self._opened.fork()
        return self._read(WINDOW, session, [list(chain.from_iterable(self.conversation.exchanges))])

    @cached_property
    def streaming(self) -> Session:
        """Has read everything, and remembers the newest; what it dropped is in its long-term memory."""
        session = self._begun.fork(self._begun.memory)
        return self._read(STREAMING, session, self.conversation.exchanges[self._beginning :])

    @cached_property
    def _begun(self) -> Session:
        """All that is read before something is dropped, which is the same for full history and streaming."""
        session = self._opened.fork(ThreadMemory(self._embedder))
        return self._read("first exchanges", session, self.conversation.exchanges[: self._beginning])

    @cached_property
    def _opened(self) -> Session:
        session = self._engine.session(
            self.setup.policy, system=self.conversation.system, recall_tokens=self.setup.recall_tokens
        )
        session.read()
        return session

    def _read(self, what: str, session: Session, exchanges: Sequence[Sequence[Message]]) -> Session:
        for number, exchange in enumerate(exchanges, 1):
            self._progress(f"{self.conversation.name}: reading {what}, {number} of {len(exchanges)}")
            session.append(list[Message](exchange))
            session.read()
        return session
