"""Greedy decoding from a cache that was read and compressed before."""

import time
from dataclasses import dataclass

from ragkv.decode import Decoder
from ragkv.detokenize import TextStream
from ragkv.engine import Engine
from ragkv.prefill import Prefilled


@dataclass(frozen=True)
class Decoded:
    """A reply; its speed is that of the tokens after the first, 0 if there are none."""

    text: str
    tokens: int
    finish_reason: str
    tokens_per_s: float


def decode(engine: Engine, prefilled: Prefilled, max_tokens: int) -> Decoded:
    """The likeliest token again and again; the prompt's cache is used up."""
    decoder, text = Decoder(engine.model, [prefilled]), TextStream(engine.tokenizer)
    tokens, reason = 0, "length"
    started = time.perf_counter()
    while True:
        token = int(decoder.logits[0].argmax())
        tokens += 1
        if token in engine.loaded.eos_token_ids:
            reason = "stop"
            break
        text.push(token)
        if tokens == max_tokens:
            break
        decoder.step([token])
    seconds = time.perf_counter() - started
    text.finish()
    return Decoded(text.text, tokens, reason, (tokens - 1) / seconds if tokens > 1 else 0.0)
