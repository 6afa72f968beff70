"""Watch a stream of events that never ends, at constant memory, and say at intervals what is going on.

Usage: python examples/log_watch.py [MODEL] [EVENTS]; without a number of events it goes on for ever.
"""

import random
import sys
from collections.abc import Iterator
from itertools import islice

from ragkv import Engine, SamplingParams, StreamingLLM

EVERY = 25  # events between two summaries
INCIDENTS = ["disk 3 of db-2 failed", "api-1 answers slowly", "login of root from an unknown address"]


def events() -> Iterator[str]:
    """A server's log: mostly routine, with an incident now and then."""
    dice, second = random.Random(0), 0  # noqa: S311 (a log, not a secret)
    while True:
        second += dice.randint(1, 9)
        clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
        routine = f"INFO request {dice.randint(1, 999)} done"
        yield f"{clock} {routine if dice.random() < 0.92 else 'ALERT ' + dice.choice(INCIDENTS)}\n"


def main(model: str = "qwen2.5-coder-0.5b", count: int | None = None) -> None:
    session = Engine.load(model).session(
        StreamingLLM(num_sink_tokens=4, window_length=764), system="You watch the log of a server."
    )
    for number, event in enumerate(islice(events(), count), 1):
        session.feed(event)
        if number % EVERY:
            continue
        # The question is asked on a fork, so that the stream itself stays what the server said.
        analyst = session.fork()
        analyst.append({"role": "user", "content": "Which alerts does the log show? Answer in one sentence."})
        summary = analyst.generate(SamplingParams(max_tokens=40)).text.strip()
        report = session.report()
        print(
            f"{number} events, {report.tokens_seen:,} tokens seen, {report.tokens_held} held, "
            f"{report.cache_bytes / 1e6:.1f} MB: {summary}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
