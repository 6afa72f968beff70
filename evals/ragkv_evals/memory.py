"""What an agent still knows at the end of a long conversation, and what each question costs, by kind of memory.

Each kind reads the conversation in its own way; questions are then asked on forks, so that none changes the next.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ragkv.config import SamplingParams
from ragkv.embedding import Embedder
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.messages import Message
from ragkv.policies import StreamingLLM
from ragkv.streaming.long_term import ThreadMemory
from ragkv.streaming.session import Session
from ragkv_evals.memory_data import Conversation, Question
from ragkv_evals.metrics import answer_text, word_overlap

KINDS = ("full history", "window only", "streaming", "streaming + recall")


@dataclass(frozen=True)
class Asked:
    """One question put to one kind of memory.

    Attributes:
        early: whether some of its evidence had left the streaming window.
        f1: of the words of the answer.
        prefilled_tokens: read for this question. What keeps nothing between calls reads its whole context again.
    """

    conversation: str
    kind: str
    question: str
    answer: str
    early: bool
    f1: float
    prefilled_tokens: int


@dataclass(frozen=True)
class Setup:
    """How conversations are remembered; see `ragkv.streaming.session.Session`."""

    window_length: int
    recall_tokens: int
    max_tokens: int
    questions: int
    seed: int = 0


def ask_all(
    engine: Engine,
    embedder: Embedder,
    conversation: Conversation,
    setup: Setup,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Asked]:
    """Ask a seeded sample of a conversation's questions, to all kinds of memory."""
    order = random.Random(setup.seed)  # noqa: S311 (a sample, not a secret)
    questions = list(conversation.questions)
    chosen = order.sample(questions, min(setup.questions, len(questions)))
    progress(f"{conversation.name}: reading {len(conversation.exchanges)} exchanges")
    sessions = remember(engine, embedder, conversation, setup)
    results: list[Asked] = []
    for number, question in enumerate(chosen, 1):
        progress(f"{conversation.name}: question {number} of {len(chosen)}")
        early = not all(sessions["streaming"].remembers(turn) for turn in question.evidence)
        results += [_ask(conversation, kind, session, question, early, setup) for kind, session in sessions.items()]
    return results


def remember(engine: Engine, embedder: Embedder, conversation: Conversation, setup: Setup) -> Mapping[str, Session]:
    """A session of each kind that has read the conversation."""
    whole = [message for exchange in conversation.exchanges for message in exchange]
    context = engine.loaded.context_length
    if setup.window_length + StreamingLLM.num_sink_tokens >= context:
        raise ConfigError(f"--window-length={setup.window_length}: must be less than the {context} tokens of context")
    small = StreamingLLM(window_length=setup.window_length)
    full = engine.session(system=conversation.system)
    window = engine.session(small, system=conversation.system)
    recall = engine.session(
        small, system=conversation.system, memory=ThreadMemory(embedder), recall_tokens=setup.recall_tokens
    )
    for session, parts in ((full, [whole]), (window, [whole]), (recall, conversation.exchanges)):
        for part in parts:
            session.append(list[Message](part))
            session.read()
    # What is recalled enters with a question, so up to there both streaming sessions are one.
    return dict(zip(KINDS, (full, window, recall.fork(), recall), strict=True))


def _ask(
    conversation: Conversation, kind: str, session: Session, question: Question, early: bool, setup: Setup
) -> Asked:
    asked = session.fork(session.memory)
    asked.append({"role": "user", "content": question.text})
    held = session.report().tokens_held if kind in KINDS[:2] else 0
    reply = asked.generate(SamplingParams(max_tokens=setup.max_tokens))
    return Asked(
        conversation=conversation.name,
        kind=kind,
        question=question.text,
        answer=reply.text,
        early=early,
        f1=word_overlap(answer_text(reply.text), question.answers).f1,
        prefilled_tokens=held + reply.stats.prompt_tokens,
    )
