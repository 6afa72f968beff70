"""Sessions for frameworks that send the whole history with every call: only what is new is read.

A call goes on with the session that has read the messages before it, found by thread id, or by those messages. If the
history is not the one that was read (edited, branched, of another process) it is read again, as far as it fits.
"""

import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from ragkv.config import SamplingParams
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.messages import Message
from ragkv.policies import StreamingLLM
from ragkv.reply import Chunk
from ragkv.sampling import Constraint
from ragkv.streaming.cache import Layout
from ragkv.streaming.exchanges import text_of
from ragkv.streaming.long_term import MemoryStore
from ragkv.streaming.session import Session, layout_for
from ragkv.tools import ToolCall, ToolSpec

_UNKNOWN = "a session that no history can be compared with"


@dataclass
class _Entry:
    """A session and a digest of all messages that it has read, replies included."""

    session: Session | None = None
    digest: str = _UNKNOWN
    lock: threading.Lock = field(default_factory=threading.Lock)


class StreamingMemory:
    """The memory of a chat model: a session of constant size for each thread.

    Args:
        num_sink_tokens, window_length: size of each session's cache, see `ragkv.policies.StreamingLLM`.
        max_turn_tokens: most tokens of new messages that enter a cache at once, see `Session`.
        store: long-term memories by thread id, for what leaves a cache; None for none.
        recall_tokens: most tokens of recalled turns in a prompt.
        max_threads: sessions that are held; the one that was used least recently goes first, and its history is read
            again when it comes back.

    Raises:
        ConfigError: an option is out of its bounds.
    """

    def __init__(
        self,
        num_sink_tokens: int = 4,
        window_length: int = 4092,
        *,
        max_turn_tokens: int | None = None,
        store: MemoryStore | None = None,
        recall_tokens: int = 256,
        max_threads: int = 16,
    ) -> None:
        if max_threads < 1:
            raise ConfigError(f"max_threads={max_threads}: must be at least 1")
        self.policy = StreamingLLM(num_sink_tokens, window_length)
        self.store, self.max_threads = store, max_threads
        self._max_turn_tokens, self._recall_tokens = max_turn_tokens, recall_tokens
        self._entries: OrderedDict[tuple[str | None, str], _Entry] = OrderedDict()
        self._layouts: weakref.WeakKeyDictionary[PreTrainedModel, Layout] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def session(self, thread_id: str) -> Session | None:
        """The session of a thread that was used last, for its report; None if there is none."""
        with self._lock:
            found = [entry.session for (thread, _), entry in self._entries.items() if thread == thread_id]
        return found[-1] if found else None

    def forget(self, thread_id: str) -> None:
        """Drop a thread, its long-term memory included."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == thread_id]:
                del self._entries[key]
        if self.store is not None:
            self.store.delete(thread_id)

    def conversation(
        self, engine: Engine, messages: Sequence[Message], tools: Sequence[ToolSpec], thread_id: str | None
    ) -> "Conversation":
        """A call that is to be answered; see `Conversation`."""
        return Conversation(self, engine, messages, tools, thread_id)

    def take(self, thread_id: str | None, digests: Sequence[str]) -> _Entry:
        """The entry of a thread, or without one, an entry that has read some of the history, which is its alone."""
        with self._lock:
            if thread_id is not None:
                entry = self._entries.setdefault((thread_id, digests[0]), _Entry())
                self._entries.move_to_end((thread_id, digests[0]))
                self._trim()
                return entry
            known = (self._entries.pop((None, digest), None) for digest in reversed(digests[1:]))
            return next((entry for entry in known if entry is not None), _Entry())

    def put(self, entry: _Entry, thread_id: str | None) -> None:
        """Keep an entry that was taken without a thread id, to be found by what it has read."""
        if thread_id is None:
            with self._lock:
                self._entries[None, entry.digest] = entry
                self._trim()

    def _trim(self) -> None:
        while len(self._entries) > self.max_threads:
            self._entries.popitem(last=False)

    def start(
        self, engine: Engine, system: str, tools: Sequence[ToolSpec], thread_id: str | None, *, edited: bool
    ) -> Session:
        """A new session; one for an edited history forgets what the long-term memory has of the old one."""
        memory = None if self.store is None or thread_id is None else self.store.thread(thread_id)
        if memory is not None and edited:
            memory.delete()
        with self._lock:
            if engine.model not in self._layouts:
                self._layouts[engine.model] = layout_for(engine, self.policy)
            layout = self._layouts[engine.model]
        return Session(
            engine,
            layout,
            system=system,
            tools=tools,
            memory=memory,
            recall_tokens=self._recall_tokens,
            max_turn_tokens=self._max_turn_tokens,
        )


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
        memory: StreamingMemory,
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
        self._entry: _Entry | None = None

    def stream(
        self, sampling: SamplingParams, constraint: Constraint | None, cancel: threading.Event
    ) -> Iterator[Chunk]:
        """The reply; see `Session.stream`. It must be told to `replied` before the iterator is closed."""
        entry = self._memory.take(self._thread_id, self._digests)
        with entry.lock:
            session, new = self._session(entry)
            try:
                session.append(new)
                chunks = session.stream(sampling, constraint=constraint, cancel=cancel)
                entry.session, entry.digest = session, _UNKNOWN
                self._entry = entry
                yield from chunks
            finally:
                session.discard()
                if self._entry is None and session is entry.session:  # refused, so nothing has changed
                    self._memory.put(entry, self._thread_id)

    def replied(self, reply: Message) -> None:
        """Say what the framework will send as this reply, so that its next call is known to go on from here."""
        if self._entry is not None:
            self._entry.digest = _digest(self._digests[-1], reply)
            self._memory.put(self._entry, self._thread_id)

    def _session(self, entry: _Entry) -> tuple[Session, Sequence[Message]]:
        """The session to go on with, and the messages that are new to it."""
        session = entry.session
        if session is not None and session.engine.model is self._engine.model and entry.digest in self._digests[:-1]:
            return session, self._messages[self._digests.index(entry.digest) :]
        new = self._memory.start(self._engine, self._system, self._tools, self._thread_id, edited=session is not None)
        return new, self._messages


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
