"""Token ids to text, piece by piece: never half a character, never a part of a stop string."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class TextStream:
    """Turns one reply's tokens into text that may be shown at once.

    Args:
        stop: strings that end the reply.
        strip_start: leave out white space before the first word, as behind a reply that the prompt has begun.

    Attributes:
        text: all text shown so far; after `finish`, the whole reply.
        stopped: whether a stop string has been reached. It and everything behind it are not part of the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), *, strip_start: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop, self._strip_start = stop, strip_start
        self._ids: list[int] = []
        self._decoded = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take the next token; return the new text that is safe to show (often empty)."""
        self._ids.append(token)
        self._decoded = self._begin(self._decoded + (self._stream.step(self._tokenizer.backend_tokenizer, token) or ""))
        return self._show(len(self._decoded) - self._held_back())

    def finish(self) -> str:
        """No more tokens will come: return what was held back, incomplete characters replaced as the tokenizer does."""
        if not self.stopped:
            whole = self._begin(str(self._tokenizer.decode(self._ids, skip_special_tokens=True)))
            if whole.startswith(self._decoded):
                self._decoded = whole
        return self._show(len(self._decoded))

    def _begin(self, text: str) -> str:
        return text.lstrip() if self._strip_start else text

    def _show(self, end: int) -> str:
        """Show decoded text up to `end`, or up to the first stop string."""
        searched_from = max(0, len(self.text) - max(map(len, self._stop), default=0))
        found = [self._decoded.find(stop, searched_from) for stop in self._stop]
        found = [position for position in found if position >= 0]
        if found and not self.stopped:
            self.stopped = True
            end = min(found)
            self._decoded = self._decoded[:end]
        new = self._decoded[len(self.text) : end]
        self.text += new
        return new

    def _held_back(self) -> int:
        """Length of the longest tail that could still become a stop string."""
        tails = range(min(max(map(len, self._stop), default=1) - 1, len(self._decoded)), 0, -1)
        return next((n for n in tails if any(stop.startswith(self._decoded[-n:]) for stop in self._stop)), 0)
