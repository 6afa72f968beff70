"""Going on from raw text: no chat template, no tools; the same events as a chat turn."""

import threading
from collections.abc import Iterator

from ragkv.chat import encode_text
from ragkv.chat_model import ChatEvent, ChatReply
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.policies import Policy


def stream_text(
    engine: Engine,
    text: str,
    sampling: SamplingParams = SamplingParams(),
    *,
    policy: Policy | None = None,
    cancel: threading.Event | None = None,
) -> Iterator[ChatEvent]:
    """Continue a text as the caller wrote it, control tokens included; see `Engine.stream` for `cancel` and errors."""
    prompt = encode_text(engine.tokenizer, text)
    for chunk in engine.stream(prompt, sampling, policy=policy, cancel=cancel):
        done = chunk.completion
        reply = None if done is None else ChatReply(done.text, done.finish_reason, done.stats)
        if chunk.text or reply:
            yield ChatEvent(chunk.row, (chunk.text,) if chunk.text else (), reply)
