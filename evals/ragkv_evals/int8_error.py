"""How far K/V kept in eight bits move the next token: the same prompts read from memory, exact, and from a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from tempfile import TemporaryDirectory

from torch import Tensor

from ragkv.chat import Prompt
from ragkv.kv_store import KVStore
from ragkv.models import LoadedModel
from ragkv.policies import FullKV
from ragkv.prefill import prefill
from ragkv_evals.reuse import QUESTION_TOKENS

QUESTIONS = 16


@dataclass(frozen=True)
class Int8Error:
    """Over questions behind one text, whose K/V came from files in eight bits.

    Attributes:
        length: tokens of a prompt, of which `cache_read_tokens` were read from the folder.
        divergence, largest_divergence: Kullback-Leibler divergence from the exact distribution of the next token, in
            nats: its mean and its largest.
        same_token: share of questions whose most likely next token stays the same.
    """

    length: int
    cache_read_tokens: int
    divergence: float
    largest_divergence: float
    same_token: float

    def __str__(self) -> str:
        return (
            f"{self.length} tokens, K/V of {self.cache_read_tokens} from the disk in eight bits: {self.divergence:.2g} "
            f"nats from the exact ones, {self.largest_divergence:.2g} at most; same next token {self.same_token:.0%}"
        )


def int8_error(loaded: LoadedModel, tokens: Sequence[int], length: int) -> Int8Error:
    """Read a text once and ask `QUESTIONS` questions about it, each of them twice.

    Args:
        tokens: `length`, and `QUESTIONS * QUESTION_TOKENS` more, which stand for questions.
        length: of a prompt, its question included.
    """
    documents = length - QUESTION_TOKENS
    starts = range(documents, documents + QUESTIONS * QUESTION_TOKENS, QUESTION_TOKENS)
    prompts = [Prompt((*tokens[:documents], *tokens[start : start + QUESTION_TOKENS])) for start in starts]
    with TemporaryDirectory() as folder:
        exact, rounded = (KVStore(size, folder, 2**40, disk_dtype="int8") for size in (2**40, 0))
        prefill(loaded.model, Prompt(tuple(tokens[:documents])), FullKV(), store=exact)
        # The exact one comes first: what the other reads behind rounded K/V must not be found by it.
        pairs = [(_read(loaded, prompt, exact), _read(loaded, prompt, rounded)) for prompt in prompts]
    reused = min(count for _, (_, count) in pairs)
    logits = [(wanted, got) for (wanted, _), (got, _) in pairs]
    found = [divergence(wanted, got) for wanted, got in logits]
    same = [wanted.argmax() == got.argmax() for wanted, got in logits]
    return Int8Error(length, reused, fmean(found), max(found), fmean(map(float, same)))


def _read(loaded: LoadedModel, prompt: Prompt, store: KVStore) -> tuple[Tensor, int]:
    """Logits of the next token, and how many tokens came from the store; the full cache is let go of."""
    read = prefill(loaded.model, prompt, FullKV(), store=store)
    return read.logits, read.cache_read_tokens


def divergence(exact: Tensor, other: Tensor) -> float:
    """Kullback-Leibler divergence of the distributions that logits (1, vocabulary) stand for, in nats."""
    wanted, got = (logits.double().log_softmax(dim=-1) for logits in (exact, other))
    return float((wanted.exp() * (wanted - got)).sum())
