"""Raw text in, the same events as a chat turn out."""

import threading

from ragkv.completion import stream_text
from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.policies import FullKV
from tiny import tiny_engine

SAMPLING = SamplingParams(max_tokens=8)


def engine() -> Engine:
    return tiny_engine(eos=())


def test_text_is_continued_as_it_is() -> None:
    *pieces, last = stream_text(engine(), "<|im_start|>user\n", SAMPLING)
    assert last.reply is not None
    assert last.reply.stats.prompt_tokens == len(engine().tokenizer("<|im_start|>user\n")["input_ids"])
    assert last.reply.finish_reason == "length"
    assert "".join(str(part) for event in [*pieces, last] for part in event.parts) == last.reply.text


def test_policy_and_cancel() -> None:
    stopped = threading.Event()
    long = SamplingParams(max_tokens=200)
    stream = stream_text(engine(), "word " * 60, long, policy=FullKV(), cancel=stopped)
    next(stream)
    stopped.set()
    *_, last = stream
    assert last.reply is not None
    assert last.reply.finish_reason == "cancelled"
    assert last.reply.stats.completion_tokens < 200
    assert last.reply.stats.kept_tokens == last.reply.stats.prompt_tokens
