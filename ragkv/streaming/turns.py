"""Which turns a session still remembers: tokens per turn, the oldest evicted first, whole exchanges at once."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Turn:
    """An exchange of a chat, or a text that was fed.

    Attributes:
        number: counts from 0.
        whole: whether it is evicted at once (an exchange) or token by token (a text).
        text: what a long-term memory gets to keep; empty where there is none.
        tokens: read so far.
        evictable: of these, in the cache and not pinned.
        dropped: of these, not in the cache any more, or never: evicted, or left out by SnapKV.
    """

    number: int
    whole: bool
    text: str = ""
    tokens: int = 0
    evictable: int = 0
    dropped: int = 0


@dataclass
class Turns:
    """The turns of which something is in the cache, oldest first, and how many there have been."""

    live: list[Turn] = field(default_factory=list)
    count: int = 0

    def begin(self, *, whole: bool) -> Turn:
        """A new turn; tokens that are read from now on are its own."""
        self.live.append(Turn(self.count, whole))
        self.count += 1
        return self.live[-1]

    def skip(self, text: str) -> Turn:
        """Count a turn of which nothing is read."""
        self.count += 1
        return Turn(self.count - 1, whole=True, text=text)

    def cancel(self) -> None:
        """Take the last turn back."""
        self.live.pop()
        self.count -= 1

    def evict(self, needed: int) -> Iterator[Turn]:
        """Choose what to evict to gain at least `needed` tokens, and yield the turns that lose something, oldest first.

        The current turn and texts lose what is needed and no more, an exchange that is over all that it has.
        """
        for turn in list(self.live):
            if needed <= 0:
                return
            current = self.live[-1]
            dropped = turn.evictable if turn.whole and turn is not current else min(turn.evictable, needed)
            turn.evictable -= dropped
            turn.dropped += dropped
            needed -= dropped
            if not turn.evictable and turn is not current:
                self.live.pop(0)
            yield turn

    def remembers(self, number: int) -> bool:
        """Whether all tokens of a turn are still there."""
        return any(turn.number == number and not turn.dropped for turn in self.live)


@dataclass(frozen=True)
class MemoryReport:
    """What a session remembers.

    Attributes:
        tokens_seen: tokens read and written since the session began.
        tokens_held: of these, in the cache now.
        pinned_tokens: of these, there for good (sinks, system message, tools).
        capacity: most tokens that the cache holds.
        cache_bytes: memory that the cache takes.
        turns: turns so far, those of earlier sessions with the same long-term memory included.
        remembered_turns: numbers of those that are whole in the cache.
        partial_turns: numbers of those of which only a part is.
        recalled_turns: numbers of earlier turns that the last prompt was reminded of.
    """

    tokens_seen: int
    tokens_held: int
    pinned_tokens: int
    capacity: int
    cache_bytes: int
    turns: int
    remembered_turns: tuple[int, ...]
    partial_turns: tuple[int, ...]
    recalled_turns: tuple[int, ...]

    @property
    def dropped_turns(self) -> int:
        """Turns of which nothing is left in the cache."""
        return self.turns - len(self.remembered_turns) - len(self.partial_turns)
