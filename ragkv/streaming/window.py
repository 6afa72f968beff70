"""A streaming cache that knows its turns: reads tokens in chunks, and evicts old turns to make room for them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ragkv.errors import Cancelled
from ragkv.streaming.cache import StreamingCache, read
from ragkv.streaming.turns import MemoryReport, Turn, Turns


@dataclass
class Window:
    """What a session has in its cache.

    Attributes:
        cache: the tokens.
        turns: whose tokens they are.
        tokens_seen: tokens read since the beginning.
    """

    cache: StreamingCache
    turns: Turns = field(default_factory=Turns)
    tokens_seen: int = 0

    @property
    def limit(self) -> int:
        """Tokens that one turn can have: all that is not pinned."""
        return self.cache.capacity - self.cache.pinned

    def report(self, recalled: tuple[int, ...]) -> MemoryReport:
        """What is remembered and what was dropped; `recalled` are the turns that the last prompt was reminded of."""
        live = self.turns.live
        return MemoryReport(
            tokens_seen=self.tokens_seen,
            tokens_held=len(self.cache),
            pinned_tokens=min(self.cache.pinned, len(self.cache)),
            capacity=self.cache.capacity,
            cache_bytes=self.cache.nbytes,
            turns=self.turns.count,
            remembered_turns=tuple(turn.number for turn in live if not turn.dropped),
            partial_turns=tuple(turn.number for turn in live if turn.dropped),
            recalled_turns=recalled,
        )

    def read(
        self,
        model: PreTrainedModel,
        ids: Sequence[int],
        chunk_size: int,
        on_dropped: Callable[[Turn], None],
        cancel: threading.Event | None = None,
    ) -> Tensor:
        """Append tokens to the current turn (to none, before the first), evicting what has to go.

        Args:
            ids: at least one token.
            chunk_size: tokens per forward pass.
            on_dropped: told of each turn that has left the cache for good.
            cancel: when set, reading ends before the next chunk with `Cancelled`.

        Returns:
            Logits behind the last token, (1, vocabulary).
        """
        size = min(chunk_size, self.limit)
        for start in range(0, len(ids), size):
            if cancel is not None and cancel.is_set():
                raise Cancelled("the generation was cancelled while its prompt was being read")
            chunk = ids[start : start + size]
            self.make_room(len(chunk), on_dropped)
            logits = read(model, self.cache, torch.tensor([chunk]))
            self.count(len(chunk))
        return logits

    def make_room(self, count: int, on_dropped: Callable[[Turn], None]) -> None:
        """Evict until `count` tokens fit."""
        turns = self.turns.evict(count - self.cache.room)
        gone = [turn for turn in turns if turn.evictable == 0 and turn is not self.turns.live[-1]]
        self.cache.evict(max(0, len(self.cache) - self.cache.pinned - self._evictable))
        for turn in gone:  # last: a memory that cannot be written leaves the cache in order
            on_dropped(turn)

    def take_back(self, tokens: int) -> None:
        """Forget the last tokens of the current turn, as if they had not been read."""
        self.cache.crop(-tokens)
        self.count(-tokens)

    def count(self, tokens: int) -> None:
        """The current turn has become this much longer, of which what the cache says is held."""
        self.tokens_seen += tokens
        if self.turns.live:
            turn = self.turns.live[-1]
            turn.tokens += tokens
            turn.evictable += max(0, len(self.cache) - self.cache.pinned) - self._evictable

    @property
    def _evictable(self) -> int:
        return sum(turn.evictable for turn in self.turns.live)
