"""The order of the steps, and nothing else: prompt, prefill with compression, decode, text.

In: prompts (token ids with marked spans). Out: text as it is made, then one completion per prompt with its statistics.
An engine holds no state between requests; threads may share one.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from ragkv.backend import rope_depends_on_length
from ragkv.chat import Prompt
from ragkv.config import SamplingParams
from ragkv.decode import Decoder
from ragkv.errors import Cancelled, ConfigError, PromptTooLong
from ragkv.kv_store import KVStore
from ragkv.models import LoadedModel, load
from ragkv.policies import Policy, SnapKV, StreamingLLM
from ragkv.prefill import LayerCallback, Prefilled, prefill
from ragkv.progress import Progress
from ragkv.reply import Chunk, Completion, Reply
from ragkv.sampling import Constraint

if TYPE_CHECKING:
    from ragkv.streaming.session import Session

Read = Callable[[LayerCallback], Prefilled]
"""Reads one prompt, and calls what it is given after each layer."""


class Engine:
    """A loaded model that answers prompts on a compressed KV cache.

    Args:
        loaded: the model and its tokenizer.
        policy: what is kept of each prompt's K/V, unless a call says otherwise.
        prefill_chunk_size: tokens per forward pass of a prefill; None reads every prompt in one pass.
        store: where K/V outlive their question, so that prompts which begin alike are read once; None for nowhere.

    Raises:
        ModelError: the architecture cannot be served.
        ConfigError: the model's rotation depends on the prompt's length, which forbids chunks.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: Policy | None = None,
        *,
        prefill_chunk_size: int | None = None,
        store: KVStore | None = None,
    ) -> None:
        if prefill_chunk_size is not None and prefill_chunk_size < 1:
            raise ConfigError(f"prefill_chunk_size={prefill_chunk_size}: must be at least 1, or None for one pass")
        if prefill_chunk_size is not None and rope_depends_on_length(loaded.model):
            raise ConfigError(
                f"prefill_chunk_size={prefill_chunk_size}: {loaded.name} rotates a token by the length of the whole "
                "prompt; leave it at None to read prompts in one pass"
            )
        self.loaded = loaded
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.policy = SnapKV() if policy is None else policy
        self.prefill_chunk_size, self.store = prefill_chunk_size, store

    @classmethod
    def load(
        cls,
        model: str,
        policy: Policy | None = None,
        *,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        attn_implementation: str | None = None,
        prefill_chunk_size: int | None = None,
        store: KVStore | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Load a model by packaged name, hub id, folder or `.gguf` file; see `ragkv.models.load`."""
        loaded = load(model, device=device, dtype=dtype, attn_implementation=attn_implementation, progress=progress)
        return cls(loaded, policy, prefill_chunk_size=prefill_chunk_size, store=store)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        policy: Policy | None = None,
    ) -> list[Completion]:
        """Answer several prompts of any lengths as one batch; the replies equal those of single calls."""
        if not prompts:
            return []
        chunks = self.stream(prompts, sampling, policy=policy)
        done = {chunk.row: chunk.completion for chunk in chunks if chunk.completion is not None}
        return [done[row] for row in range(len(prompts))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        *,
        policy: Policy | None = None,
        constraints: Sequence[Constraint | None] | None = None,
        on_layer: LayerCallback | None = None,
        on_prefilled: Callable[[int, Prefilled], None] | None = None,
        reads: Sequence[Read | None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Iterator[Chunk]:
        """Generate, yielding text as it is made. Closing the iterator stops between two tokens.

        Args:
            prompts: one prompt or a batch; each is read on its own, without padding, and all are decoded together.
            sampling: for all prompts, or one for each.
            policy: for this call instead of the engine's own.
            constraints: grammars that the replies must follow, one entry per prompt.
            on_layer: told of the progress of each prefill.
            on_prefilled: shown each row's number and its prompt as read and compressed, before decoding changes it.
            reads: what reads a prompt in another way than `ragkv.prefill.prefill`, such as on blocks of documents, and
                calls what it is given after each layer; one entry per prompt.
            cancel: when set, every unfinished reply ends with finish_reason "cancelled" before its next token.

        Raises:
            PromptTooLong: a prompt and its `max_tokens` do not fit into the model's context.
            Cancelled: `cancel` was set while a prompt was still being read, so that there is no reply to end.
        """
        prompts = [prompts] if isinstance(prompts, Prompt) else list(prompts)
        options = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        for prompt, option in zip(prompts, options, strict=True):
            self._check_length(prompt, option)
        none = [None] * len(prompts)
        replies = [
            Reply(row, self.loaded, prompt, option, constraint)
            for row, (prompt, option, constraint) in enumerate(zip(prompts, options, constraints or none, strict=True))
        ]
        cancel = cancel or threading.Event()
        return self._run(replies, policy or self.policy, on_layer, on_prefilled, reads or none, cancel)

    def replies(
        self,
        read: Sequence[tuple[Prompt, Prefilled]],
        sampling: SamplingParams = SamplingParams(),
        *,
        constraints: Sequence[Constraint | None] | None = None,
    ) -> list[Completion]:
        """Answer prompts that have been read, as by `ragkv.compare.prefill_many`, as one batch; they are used up.

        The first tokens are there at once, so `ttft_s` says nothing about the prompts.

        Args:
            constraints: grammars that the replies must follow, one entry per prompt.

        Raises:
            PromptTooLong: a prompt and `max_tokens` do not fit into the model's context.
        """
        replies = []
        for row, ((prompt, prefilled), rule) in enumerate(zip(read, constraints or [None] * len(read), strict=True)):
            self._check_length(prompt, sampling)
            replies.append(Reply(row, self.loaded, prompt, sampling, rule))
            replies[-1].prefilled = prefilled
        chunks = self._decode(replies, threading.Event(), time.perf_counter())
        done = {chunk.row: chunk.completion for chunk in chunks if chunk.completion is not None}
        return [done[row] for row in range(len(read))]

    def session(self, policy: StreamingLLM | None = None, **options: Any) -> "Session":
        """A conversation or stream of text that never fills up; see `ragkv.streaming.session.Session` for options.

        Args:
            policy: sinks and recent tokens, together the size of the session's cache; by default 4 and 4092, or as many
                as the model's context has.

        Raises:
            ModelError: the model cannot stream.
            ConfigError: the policy keeps more than the model sees, or an option is out of its bounds.
        """
        from ragkv.streaming.layout import layout_for
        from ragkv.streaming.session import Session

        most = self.loaded.context_length - StreamingLLM.num_sink_tokens
        chosen = policy or StreamingLLM(window_length=min(StreamingLLM.window_length, most))
        return Session(self, layout_for(self, chosen), **options)

    def _check_length(self, prompt: Prompt, sampling: SamplingParams) -> None:
        context = self.loaded.context_length
        if not len(prompt):
            raise ConfigError("the prompt is empty: it needs at least one token")
        if len(prompt) + sampling.max_tokens > context:
            raise PromptTooLong(
                f"a prompt of {len(prompt)} tokens and max_tokens={sampling.max_tokens} do not fit into the "
                f"{context} tokens of context of {self.loaded.name}: give fewer documents or lower max_tokens"
            )

    def _run(
        self,
        replies: list[Reply],
        policy: Policy,
        on_layer: LayerCallback | None,
        on_prefilled: Callable[[int, Prefilled], None] | None,
        reads: Sequence[Read | None],
        cancel: threading.Event,
    ) -> Iterator[Chunk]:
        def watch(done: int, total: int) -> None:
            if cancel.is_set():
                raise Cancelled("the generation was cancelled while its prompt was being read")
            if on_layer is not None:
                on_layer(done, total)

        def prefill_as_usual(prompt: Prompt) -> Prefilled:
            size, store = self.prefill_chunk_size, self.store
            return prefill(self.model, prompt, policy, chunk_size=size, on_layer=watch, store=store)

        started = time.perf_counter()
        for reply, read in zip(replies, reads, strict=True):
            reply.prefilled = read(watch) if read else prefill_as_usual(reply.prompt)
            if on_prefilled is not None:
                on_prefilled(reply.row, reply.prefilled)
        yield from self._decode(replies, cancel, started)

    def _decode(self, replies: list[Reply], cancel: threading.Event, started: float) -> Iterator[Chunk]:
        # A rotation that depends on length would be that of the longest row for all.
        for batch in [[reply] for reply in replies] if rope_depends_on_length(self.model) else [replies]:
            yield from self._decode_batch(batch, cancel, started)

    def _decode_batch(self, running: list[Reply], cancel: threading.Event, started: float) -> Iterator[Chunk]:
        decoder = Decoder(self.model, [reply.prefilled for reply in running])
        while running:
            if cancel.is_set():
                yield from (reply.end("cancelled", started) for reply in running)
                return
            for reply, logits in zip(running, decoder.logits, strict=True):
                yield reply.push(reply.sampler(logits), started)
            going_on = [row for row, reply in enumerate(running) if reply.finish_reason is None]
            if going_on and len(going_on) < len(running):
                decoder.keep_rows(going_on)
            running = [running[row] for row in going_on]
            if running:
                decoder.step([reply.tokens[-1] for reply in running])
