"""Sessions for frameworks that send the whole history with every call: only what is new is read.

A call goes on with the session that has read the messages before it, found by thread id, or by those messages. If the
history is not the one that was read (edited, branched, cut short, of another process) it is read again, as far as it
fits. The long-term memory loses what an edit took out of the history, and nothing else.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack

from transformers import PreTrainedModel

from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.messages import Message
from ragkv.policies import StreamingLLM
from ragkv.streaming.conversation import Conversation, Entry
from ragkv.streaming.layout import Layout, layout_for
from ragkv.streaming.long_term import MemoryStore
from ragkv.streaming.session import Session
from ragkv.tools import ToolSpec


class StreamingMemory:
    """The memory of a chat model: a session of constant size for each thread.

    Args:
        num_sink_tokens, window_length: size of each session's cache, see `ragkv.policies.StreamingLLM`.
        max_turn_tokens: most tokens of new messages that enter a cache at once, see `Session`.
        store: long-term memories by thread id, for what leaves a cache; None for none.
        recall_tokens: most tokens of recalled turns in a prompt.
        max_threads: sessions that are held; the one that was used least recently goes first, into the store, and its
            history is read again when it comes back.

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
        self._entries: OrderedDict[tuple[str | None, str], Entry] = OrderedDict()
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
    ) -> Conversation:
        """A call that is to be answered; see `Conversation`."""
        return Conversation(self, engine, messages, tools, thread_id)

    def flush(self) -> None:
        """Put what is still in the caches into the store too, when the process is at its end.

        Raises:
            ConfigError: this thread holds an unfinished reply; all other conversations are stored.
        """
        with self._lock:
            entries = list(self._entries.values())
        _flush(entries)

    def take(self, thread_id: str | None, digests: Sequence[str]) -> Entry:
        """The entry of a thread, or without one, an entry that has read some of the history, which is its alone."""
        if thread_id is not None:
            return self._put((thread_id, digests[0]))
        with self._lock:
            known = (self._entries.pop((None, digest), None) for digest in reversed(digests[1:]))
            return next((entry for entry in known if entry is not None), Entry())

    def put(self, entry: Entry, thread_id: str | None) -> None:
        """Keep an entry that was taken without a thread id, to be found by what it has read."""
        if thread_id is None:
            self._put((None, entry.digest), entry)

    def _put(self, key: tuple[str | None, str], entry: Entry | None = None) -> Entry:
        """The entry of this key, which is now the one used last; those used least recently make room for it."""
        with self._lock:
            entry = self._entries.setdefault(key, Entry()) if entry is None else entry
            self._entries[key] = entry
            self._entries.move_to_end(key)
            idle = [key for key, each in self._entries.items() if each is not entry and not each.lock.locked()]
            surplus = max(0, len(self._entries) - self.max_threads)
            gone = [self._entries.pop(key) for key in idle[:surplus]]
        _flush(gone)
        return entry

    def start(self, engine: Engine, system: str, tools: Sequence[ToolSpec], thread_id: str | None) -> Session:
        """A new session, with the thread's long-term memory."""
        with self._lock:
            if engine.model not in self._layouts:
                self._layouts[engine.model] = layout_for(engine, self.policy)
            layout = self._layouts[engine.model]
        return Session(
            engine,
            layout,
            system=system,
            tools=tools,
            memory=None if self.store is None or thread_id is None else self.store.thread(thread_id),
            recall_tokens=self._recall_tokens,
            max_turn_tokens=self._max_turn_tokens,
        )


def _flush(entries: Sequence[Entry]) -> None:
    with ExitStack() as stack:  # one that fails keeps none of the others out
        for entry in reversed(entries):
            stack.callback(_flush_one, entry)


def _flush_one(entry: Entry) -> None:
    with entry.alone(threading.Event()):
        if entry.session is not None:
            entry.session.flush()
