"""What an agent still knows at the end of a long conversation, and what each question costs, by kind of memory.

A sample of the questions is put to every kind. An answer that another kind must give as well, word for word, since it
would be made from the same tokens, is not made again.
"""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from ragkv.config import SamplingParams
from ragkv.embedding import Embedder
from ragkv.engine import Engine
from ragkv.reply import Chunk
from ragkv_evals.memory_data import Conversation, Question
from ragkv_evals.memory_lengths import Lengths, lengths
from ragkv_evals.memory_sessions import FULL, KINDS, RECALL, STREAMING, WINDOW, Sessions, Setup
from ragkv_evals.metrics import answer_text, word_overlap

Once = Callable[[str, Callable[[], "list[Asked]"]], "list[Asked]"]
"""Gives what is known of a piece of work, by its name, or does it."""


@dataclass(frozen=True)
class Asked:
    """One question put to one kind of memory.

    Attributes:
        answer: the reply up to the end of its first line.
        early: whether what answers it had left the window when the question came.
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


def ask_all(
    engine: Engine,
    embedder: Embedder,
    conversation: Conversation,
    setup: Setup,
    once: Once = lambda piece, ask: ask(),
    progress: Callable[[str], None] = lambda text: None,
) -> list[Asked]:
    """Ask a sample of a conversation's questions, to all kinds of memory; a piece of work is one question to one."""
    found = lengths(engine.tokenizer, conversation)
    sessions = Sessions(engine, embedder, conversation, found, setup, progress)
    questions = sample(conversation.questions, found.newest(setup.capacity), setup.questions, setup.seed)
    asked: dict[str, list[Asked]] = {kind: [] for kind in KINDS}
    for kind in (STREAMING, RECALL, WINDOW, FULL):  # the first one's answers may be those of the others
        for number, question in enumerate(questions):
            progress(f"{conversation.name}: {kind}, question {number + 1} of {len(questions)}")
            streamed = None if kind == STREAMING else asked[STREAMING][number]
            ask = partial(_ask, sessions, kind, question, streamed)
            asked[kind] += once(f"{conversation.name}, {kind}, {number}", ask)
    return [each for kind in KINDS for each in asked[kind]]


def sample(questions: Sequence[Question], held: Collection[int], count: int, seed: int) -> list[Question]:
    """This many questions, half of them early, or as near to that as there are."""
    order = random.Random(seed)  # noqa: S311 (a sample, not a secret)
    shuffled = order.sample(questions, len(questions))
    late = [question for question in shuffled if question.answerable(held)]
    early = [question for question in shuffled if not question.answerable(held)]
    few = max(count // 2, count - len(late))
    return [*early[:few], *late[: count - min(few, len(early))]]


def _ask(sessions: Sessions, kind: str, question: Question, streamed: Asked | None) -> list[Asked]:
    """The answer of one kind of memory, given that of streaming if this is another."""
    found, setup = sessions.lengths, sessions.setup
    held = found.newest(setup.capacity)
    before = {FULL: found.total, WINDOW: found.held(setup.capacity)}.get(kind, 0)
    if streamed is not None and _is_streaming(kind, found, streamed.prefilled_tokens, setup):
        return [replace(streamed, kind=kind, prefilled_tokens=before + streamed.prefilled_tokens)]
    session = sessions.fork(kind)
    seen = session.report().tokens_seen
    session.append({"role": "user", "content": question.text})
    stream = session.stream(SamplingParams(max_tokens=setup.max_tokens))
    first = next(stream)  # the prompt has been read
    report = session.report()
    if streamed is not None and kind == RECALL and not report.recalled_turns:
        return [replace(streamed, kind=kind)]
    text = first_line(chain([first], stream))
    return [
        Asked(
            conversation=sessions.conversation.name,
            kind=kind,
            question=question.text,
            answer=text,
            early=not question.answerable(held),
            f1=word_overlap(answer_text(text), question.answers).f1,
            prefilled_tokens=before + report.tokens_seen - seen,
        )
    ]


def _is_streaming(kind: str, found: Lengths, prompt_tokens: int, setup: Setup) -> bool:
    """Whether this kind sees the very tokens that streaming sees: nothing has been dropped yet, or will be."""
    if kind == FULL:
        return found.total + prompt_tokens + setup.max_tokens <= setup.capacity
    return kind == WINDOW and found.total <= setup.capacity


def first_line(chunks: Iterable[Chunk]) -> str:
    """The text up to the end of its first line, which is all of a reply that counts; the rest is not made."""
    text = ""
    for chunk in chunks:
        text += chunk.text
        if "\n" in text.lstrip():
            break
    return text
