"""Options as plain values by name, as frameworks pass them, and what becomes of them: sampling, policy, engine.

Both adapters have these fields with these defaults, and take any of them again for a single call. Nothing is loaded
before `ChatOptions.engine` is called.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from ragkv.config import SamplingParams
from ragkv.document_blocks import DocumentBlocks
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.kv_store import DISK_BYTES, MEMORY_BYTES, DiskDType, KVStore
from ragkv.placement import choose_device, choose_dtype
from ragkv.policies import FullKV, Policy, SnapKV, StreamingLLM
from ragkv.registry import shared_model, shared_store
from ragkv.scoring import Pooling

PolicyName = Literal["snapkv", "full", "streaming"]


@dataclass(frozen=True)
class ChatOptions:
    """Everything that `ChatSnapKV(...)` takes.

    Attributes:
        model: packaged name, folder, `.gguf` file or hub id.
        max_capacity_prompt: entries of the KV cache kept of a prompt, per layer and KV head.
        window_size: snapkv: length of the observation window, or "auto" for that of the question.
        kernel_size: snapkv: odd width of the pool over the votes.
        pooling: snapkv: "avg" or "max".
        policy: "snapkv", "full" (everything is kept), "streaming" (StreamingLLM: the prompt's two ends), or a policy
            of your own, which the four options above do not reach.
        max_tokens ... stop: see `ragkv.config.SamplingParams`.
        context_tokens: tokens of documents in the prompt of a cited answer; the lowest-ranked that do not fit are left
            out. None puts in all, and is an error when they do not fit into the model's context.
        device, dtype, attn_implementation: see `ragkv.models.load`; None chooses for this machine.
        prefill_chunk_size: tokens per forward pass of a prefill; None reads a prompt in one pass.
        kv_memory_bytes: bound on the K/V of earlier prompts in host memory, which prompts that begin alike take up; 0
            keeps none there.
        kv_dir: folder where they outlive the process, and which processes may share; None for nowhere.
        kv_disk_bytes, kv_disk_dtype: bound on that folder, and "model" for what is exact or "int8" for half the size.
        namespace: K/V of one namespace are never used for another; give each tenant its own.
        recompute: read each document of a cited answer once, whatever set and order it comes in, join their K/V and
            compute so many tokens anew for a question (0 to 1: a share of them). Approximate; None reads prompts as
            they are. See `ragkv.document_blocks`.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    model: str = "qwen2.5-coder-1.5b"
    max_capacity_prompt: int = 4096
    window_size: int | Literal["auto"] = "auto"
    kernel_size: int = 7
    pooling: Pooling = "avg"
    policy: PolicyName | Policy = "snapkv"
    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    context_tokens: int | None = None
    device: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    prefill_chunk_size: int | None = None
    kv_memory_bytes: int = MEMORY_BYTES
    kv_dir: str | None = None
    kv_disk_bytes: int = DISK_BYTES
    kv_disk_dtype: DiskDType = "model"
    namespace: str = ""
    recompute: float | None = None

    def __post_init__(self) -> None:
        if self.context_tokens is not None and self.context_tokens < 1:
            raise ConfigError(f"context_tokens={self.context_tokens}: must be at least 1, or None for no limit")
        for name, value in (("kv_memory_bytes", self.kv_memory_bytes), ("kv_disk_bytes", self.kv_disk_bytes)):
            if value < 0:
                raise ConfigError(f"{name}={value}: must be at least 0, which keeps nothing there")
        if self.kv_disk_dtype not in get_args(DiskDType):
            raise ConfigError(f"kv_disk_dtype={self.kv_disk_dtype!r}: choose one of {', '.join(get_args(DiskDType))}")
        self.sampling()
        self.kv_policy()
        if self.blocks() is not None and not self._keeps_kv():
            raise ConfigError(
                f"recompute={self.recompute:g} joins documents whose K/V are kept, and nothing is: set kv_memory_bytes "
                "or kv_dir"
            )

    def override(self, **values: Any) -> Self:
        """These options with some changed for one call; None leaves an option as it is.

        Raises:
            ConfigError: there is no such option, or a value is out of its bounds.
        """
        check_names(values, OPTION_NAMES, "a call")
        return replace(self, **{name: value for name, value in values.items() if value is not None})

    def sampling(self) -> SamplingParams:
        """How replies are generated."""
        return SamplingParams(**{field.name: getattr(self, field.name) for field in fields(SamplingParams)})

    def kv_policy(self) -> Policy:
        """What is kept of a prompt's K/V."""
        if not isinstance(self.policy, str):
            if not callable(getattr(self.policy, "budget", None)):
                raise ConfigError(f"policy={self.policy!r}: give a name or a policy object")
            return self.policy
        if self.policy == "snapkv":
            return SnapKV(self.max_capacity_prompt, self.window_size, self.kernel_size, self.pooling)
        if self.policy == "full":
            return FullKV()
        if self.policy != "streaming":
            raise ConfigError(f"policy={self.policy!r}: choose one of {', '.join(get_args(PolicyName))}")
        sinks = StreamingLLM.num_sink_tokens
        if self.max_capacity_prompt <= sinks:
            raise ConfigError(
                f"max_capacity_prompt={self.max_capacity_prompt}: must be larger than the {sinks} sink tokens of "
                "policy='streaming'"
            )
        return StreamingLLM(window_length=self.max_capacity_prompt - sinks)

    def blocks(self) -> DocumentBlocks | None:
        """How documents are joined; None reads prompts as they are."""
        return None if self.recompute is None else DocumentBlocks(self.recompute)

    def engine(self) -> Engine:
        """An engine on the process's copy of the model, which is loaded now if it was not before."""
        loaded = shared_model(
            self.model,
            device=self.device,
            dtype=None if self.dtype is None else choose_dtype(choose_device(self.device), self.dtype),
            attn_implementation=self.attn_implementation,
        )
        return Engine(loaded, self.kv_policy(), prefill_chunk_size=self.prefill_chunk_size, store=self.kv_store())

    def kv_store(self) -> KVStore | None:
        """The process's store of K/V, as the namespace sees it; None if it may hold nothing."""
        if not self._keeps_kv():
            return None
        return shared_store(self.kv_memory_bytes, self.kv_dir, self.kv_disk_bytes, self.kv_disk_dtype, self.namespace)

    def _keeps_kv(self) -> bool:
        return bool(self.kv_memory_bytes or (self.kv_dir is not None and self.kv_disk_bytes))


OPTION_NAMES = tuple(field.name for field in fields(ChatOptions))


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise a ConfigError that suggests the nearest name, for the first name that is not known.

    Args:
        where: what the names were given to, such as "ChatSnapKV".
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"{where} has no option {name!r}: {hint}")
