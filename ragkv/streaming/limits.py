"""What fits: a turn and its reply into the window, and a turn that is to be compressed into what the model sees."""

from dataclasses import dataclass

from ragkv.errors import PromptTooLong

LONGEST_QUESTION = 64  # tokens of it that vote on a tool's result


@dataclass(frozen=True)
class Limits:
    """The bounds of a session; all in tokens.

    Attributes:
        model: its name.
        sight: most that the model sees at once.
        capacity: most that the cache holds.
        max_turn_tokens: most of a turn's messages that enter the cache; longer ones are compressed. None for no bound.
    """

    model: str
    sight: int
    capacity: int
    max_turn_tokens: int | None

    def kept(self, length: int) -> int:
        """Of so many new tokens, those that enter the cache."""
        return length if self.max_turn_tokens is None else min(length, self.max_turn_tokens)

    def readable(self, length: int) -> bool:
        """Whether the model sees so many new tokens and all that is remembered, where it must: to choose among them."""
        kept = self.kept(length)
        return kept == length or self.capacity - kept + length + LONGEST_QUESTION <= self.sight

    def spare(self, window: int, length: int, max_tokens: int) -> int:
        """What a prompt and its reply leave of the window to earlier exchanges.

        Args:
            window: its tokens that are neither pinned nor spoken for.
            length: of the prompt.

        Raises:
            PromptTooLong: they do not fit, or the model cannot see the prompt whole.
        """
        kept = self.kept(length)
        if kept + max_tokens > window:
            raise PromptTooLong(
                f"{kept} new tokens and max_tokens={max_tokens} do not fit into the {window} tokens of the window that "
                "are not pinned: raise window_length, shorten the messages or lower max_tokens"
            )
        if not self.readable(length):
            raise PromptTooLong(
                f"{length} new tokens are read behind up to {self.capacity - kept} remembered ones, with up to "
                f"{LONGEST_QUESTION} of the question, and {self.model} sees at most {self.sight} tokens at once: "
                "shorten the messages or window_length"
            )
        return window - kept - max_tokens
