"""One call of a framework: the whole history comes in, and the session that has read most of it reads the rest."""

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import Cancelled, ConfigError
from ragkv.messages import Message
from ragkv.reply import Chunk
from ragkv.sampling import Constraint
from ragkv.streaming.exchanges import as_text, edited_out, exchanges, key_of, text_of
from ragkv.streaming.session import Session
from ragkv.tools import ToolCall, ToolSpec

if TYPE_CHECKING:
    from ragkv.streaming.threads import StreamingMemory

_UNKNOWN = "a session that no history can be compared with"
_PATIENCE_S = 0.05  # between two looks at whether a call that waits was cancelled


@dataclass
class Entry:
    """A session and what it has read.

    Attributes:
        digest: of all messages, replies included.
        keys: of the exchanges of the last history that was answered in whole.
        lock, owner: held while a call goes on, and by which thread of the process.
    """

    session: Session | None = None
    digest: str = _UNKNOWN
    keys: Sequence[str] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)
    owner: int | None = None

    @contextmanager
    def alone(self, cancel: threading.Event) -> Iterator[None]:
        """Wait until no other call of the conversation goes on.

        Raises:
            ConfigError: it waits for this very thread.
            Cancelled: `cancel` was set first.
        """
        if self.owner == threading.get_ident():
            raise ConfigError(
                "this conversation has an unfinished reply, held where this call was made: finish or close it first"
            )
        while not self.lock.acquire(timeout=_PATIENCE_S):
            if cancel.is_set():
                raise Cancelled("the call was cancelled while another of its conversation went on")
        self.owner = threading.get_ident()
        try:
            yield
        finally:
            self.owner = None
            self.lock.release()


class Conversation:
    """One call: its whole history, of which a session may have read the beginning. Calls of one thread take turns.

    Args:
        memory: where sessions are kept.
        engine: model and tokenizer.
        messages: the history; system messages at its head are pinned.
        tools: functions that the model may call; pinned.
        thread_id: of the conversation; None to go by its messages.
    """

    def __init__(
        self,
        memory: "StreamingMemory",
        engine: Engine,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        thread_id: str | None,
    ) -> None:
        self._memory, self._engine, self._tools, self._thread_id = memory, engine, tools, thread_id
        head = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        self._system = "\n\n".join(text_of(message) for message in messages[:head])
        self._messages = messages[head:]
        self._digests = _digests(self._system, tools, self._messages)
        self._entry: Entry | None = None
        self._reply: Message | None = None

    def stream(
        self, sampling: SamplingParams, constraint: Constraint | None, cancel: threading.Event
    ) -> Iterator[Chunk]:
        """The reply; see `Session.stream`. It must be told to `replied` before the iterator is closed.

        Raises:
            ConfigError: an earlier reply of the conversation is not finished, and this thread holds it.
            Cancelled: `cancel` was set while another call of the conversation went on.
        """
        entry = self._memory.take(self._thread_id, self._digests)
        with entry.alone(cancel):
            session, new = self._session(entry)
            try:
                session.append(new)
                chunks = session.stream(sampling, constraint=constraint, cancel=cancel, noted=self._noted)
                if session is not entry.session and session.memory is not None:
                    session.memory.drop(self._edited_out(entry))
                entry.session, entry.digest = session, _UNKNOWN
                self._entry = entry
                yield from chunks
            finally:
                session.discard()
                if self._entry is None and session is entry.session:  # refused, so nothing has changed
                    self._memory.put(entry, self._thread_id)

    def replied(self, reply: Message) -> None:
        """Say what the framework will send as this reply, so that its next call is known to go on from here."""
        self._reply = reply
        if self._entry is not None:
            self._entry.digest = _digest(self._digests[-1], reply)
            self._entry.keys = _keys([*self._messages, reply]) if self._memory.store is not None else ()
            self._memory.put(self._entry, self._thread_id)

    def _noted(self, reply: Message) -> Message | None:
        """The reply as the framework will send it; one that broke off it may never send."""
        return self._reply

    def _session(self, entry: Entry) -> tuple[Session, Sequence[Message]]:
        """The session to go on with, and the messages that are new to it."""
        session = entry.session
        if session is not None and session.engine.model is self._engine.model and entry.digest in self._digests[:-1]:
            return session, self._messages[self._digests.index(entry.digest) :]
        if session is not None:
            session.flush()  # the history may not bring back all that it remembers
        return self._memory.start(self._engine, self._system, self._tools, self._thread_id), self._messages

    def _edited_out(self, entry: Entry) -> set[str]:
        """Exchanges that the history once had, and that an edit took out of it."""
        began_whole = self._messages[0]["role"] == "user"
        return edited_out(entry.keys, _keys(self._messages)) if began_whole else set()


def _keys(history: Sequence[Message]) -> list[str]:
    return [key_of(as_text(exchange)) for exchange in exchanges(history) if exchange]


def _digests(system: str, tools: Sequence[ToolSpec], messages: Sequence[Message]) -> list[str]:
    """Digest i is that of the fixed beginning and of the first i messages."""
    beginning = json.dumps([system, [tool.to_openai() for tool in tools]], sort_keys=True)
    digests = [hashlib.sha256(beginning.encode()).hexdigest()]
    for message in messages:
        digests.append(_digest(digests[-1], message))
    return digests


def _digest(before: str, message: Message) -> str:
    """Frameworks make up ids and trim white space, so neither counts."""
    calls = [ToolCall.from_openai(call) for call in message.get("tool_calls") or ()]
    said = [message["role"], text_of(message).strip(), [[call.name, call.arguments] for call in calls]]
    return hashlib.sha256(f"{before} {json.dumps(said, sort_keys=True)}".encode()).hexdigest()
