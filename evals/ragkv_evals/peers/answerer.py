"""ragkv and its peers on the same prompts: an answerer whose names are policies of ragkv or systems beside it."""

from collections.abc import Iterator, Mapping, Sequence

from ragkv.engine import Engine
from ragkv_evals.answerers import EngineAnswerer
from ragkv_evals.peers.generators import Generated, Generator
from ragkv_evals.probe import Probe
from ragkv_evals.prompts import encode
from ragkv_evals.records import Outcome
from ragkv_evals.tasks.base import Counter, Example


class PeerAnswerer:
    """Answers under ragkv's policies, and has peers answer the very same token ids.

    Args:
        peers: by the name that stands for them among the policies.
    """

    def __init__(self, engine: Engine, peers: Mapping[str, Generator]) -> None:
        self._engine, self._peers = engine, peers
        self._own = EngineAnswerer(engine)
        self.counter: Counter = self._own.counter

    def answer(self, example: Example, names: Sequence[str], max_tokens: int) -> Iterator[Outcome]:
        """First ragkv, then the peers."""
        yield from self._own.answer(example, [name for name in names if name not in self._peers], max_tokens)
        ids = encode(self._engine.tokenizer, example).ids
        for name in names:
            if name in self._peers:
                yield self._outcome(name, self._peers[name].generate(ids, max_tokens), len(ids))

    def probe(self, example: Example) -> Probe:
        return self._own.probe(example)

    def _outcome(self, name: str, done: Generated, length: int) -> Outcome:
        tokens = list(done.tokens)
        ended = bool(tokens) and tokens[-1] in self._engine.loaded.eos_token_ids
        return Outcome(
            policy=name,
            reply=str(self._engine.tokenizer.decode(tokens, skip_special_tokens=True)).strip(),
            finish_reason="stop" if ended else "length",
            prompt_tokens=length,
            completion_tokens=len(tokens),
            budget=done.kept_tokens,
            kept_tokens=done.kept_tokens,
            gold_survival=None,
            answer_survival=None,
            documents_kept=(),
            gold_kept=(),
            unprotected_tokens=0,
            ttft_s=done.prefill_s,
            decode_tokens_per_s=(len(tokens) - 1) / done.decode_s if len(tokens) > 1 and done.decode_s else 0.0,
            kv_bytes_full=done.kv_bytes_full,
            kv_bytes_kept=done.kv_bytes_kept,
            peak_memory_bytes=None,
        )
