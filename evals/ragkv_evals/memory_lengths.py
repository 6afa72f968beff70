"""How many tokens a conversation has, and so what a cache will still hold of it: known before anything is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from ragkv.errors import ConfigError
from ragkv.messages import Message
from ragkv.policies import StreamingLLM
from ragkv.streaming.transcript import Transcript
from ragkv_evals.memory_data import Conversation


@dataclass(frozen=True)
class Lengths:
    """Tokens of a conversation.

    Attributes:
        opening: of the system message, which stays for good.
        exchanges: of each exchange.
        question: of the longest question, with the beginning of the reply.
    """

    opening: int
    exchanges: tuple[int, ...]
    question: int

    @property
    def total(self) -> int:
        """All that is said before a question."""
        return self.opening + sum(self.exchanges)

    def newest(self, capacity: int) -> range:
        """Numbers of the exchanges that a cache of this many tokens holds in the end."""
        fitting = sum(total <= capacity - self.opening for total in accumulate(reversed(self.exchanges)))
        return range(len(self.exchanges) - fitting, len(self.exchanges))

    def oldest(self, capacity: int) -> range:
        """Numbers of the exchanges that are read before one has to go."""
        return range(sum(total <= capacity - self.opening for total in accumulate(self.exchanges)))

    def held(self, capacity: int) -> int:
        """Tokens that a cache of this many holds in the end."""
        return self.opening + sum(self.exchanges[number] for number in self.newest(capacity))


def lengths(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> Lengths:
    """As a session counts them."""
    transcript = Transcript(tokenizer, conversation.system)
    start: list[Message] = []
    *bases, last = accumulate(conversation.exchanges, transcript.next_base, initial=start)
    pairs = zip(bases, conversation.exchanges, strict=True)
    asked = ([{"role": "user", "content": question.text}] for question in conversation.questions)
    return Lengths(
        max(StreamingLLM.num_sink_tokens, len(transcript.opening)),
        tuple(len(transcript.added(base, exchange, reply=False)) for base, exchange in pairs),
        max((len(transcript.added(last, question)) for question in asked), default=0),
    )


def with_early_questions(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    capacity: int,
    context: int,
    max_tokens: int,
) -> list[Conversation]:
    """The conversations that tell kinds of memory apart: with a question about what the streaming cache has dropped.

    Args:
        capacity: tokens that the streaming cache holds.
        context: tokens that the model sees.

    Raises:
        ConfigError: there are none, or there is no full history of one; with the numbers.
    """
    found = [(conversation, lengths(tokenizer, conversation)) for conversation in conversations]
    telling = [(each, length) for each, length in found if each.early(length.newest(capacity))]
    if not telling:
        longest = max(length.total for _, length in found)
        raise ConfigError(
            f"no question is about what a cache of {capacity} tokens has dropped of {len(found)} conversations "
            f"(the longest has {longest}): lower --window-length, or read more conversations"
        )
    for conversation, length in telling:
        if length.total + length.question + max_tokens > context:
            raise ConfigError(
                f"{conversation.name}: {length.total} tokens, {length.question} of a question and "
                f"--max-tokens={max_tokens} do not fit into the {context} tokens of context of the model, so there is "
                "no full history to compare with: use a model with a longer context"
            )
    return [conversation for conversation, _ in telling]
