"""The options of ChatSnapKV as pydantic fields, and what LlamaIndex plans with. Nothing here loads weights."""

from typing import Any, Literal

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.llms.function_calling import FunctionCallingLLM
from pydantic import Field, SkipValidation

from ragkv import registry
from ragkv.kv_store import DISK_BYTES, MEMORY_BYTES, DiskDType
from ragkv.model_info import context_length
from ragkv.options import OPTION_NAMES, ChatOptions, PolicyName, check_names
from ragkv.policies import Policy
from ragkv.scoring import Pooling
from ragkv.streaming.threads import StreamingMemory


class OptionFields(FunctionCallingLLM):
    """The fields of `ragkv.options.ChatOptions`, with the same defaults. A name that is no field is an error."""

    model: str = Field(ChatOptions.model, description="Packaged name, folder, .gguf file or hub id.")
    max_capacity_prompt: int = Field(4096, description="KV cache entries kept of a prompt, per layer and KV head.")
    window_size: int | Literal["auto"] = Field("auto", description="snapkv: last tokens of the prompt, which vote.")
    kernel_size: int = Field(7, description="snapkv: odd width of the pool over the votes.")
    pooling: Pooling = Field("avg", description="snapkv: how votes are pooled.")
    policy: SkipValidation[PolicyName | Policy] = Field("snapkv", description="What is kept of a prompt.")
    max_tokens: int = Field(512, description="Most tokens to write.")
    temperature: float = Field(0.0, description="0 is greedy.")
    top_p: float = Field(1.0, description="Keep the smallest set of tokens of this probability.")
    top_k: int = Field(0, description="Keep this many tokens; 0 keeps all.")
    min_p: float = Field(0.0, description="Drop tokens below this fraction of the likeliest.")
    repetition_penalty: float = Field(1.0, description="Above 1 makes repetition less likely.")
    seed: int | None = Field(None, description="Makes sampling repeatable.")
    stop: list[str] | str = Field(default_factory=list, description="Strings that end a reply; never part of it.")
    context_tokens: int | None = Field(None, description="Most tokens of documents in a cited answer's prompt.")
    device: str | None = Field(None, description="Such as cpu or cuda:0; None chooses.")
    dtype: str | None = Field(None, description="bfloat16, float16 or float32; None chooses.")
    attn_implementation: str | None = Field(None, description="sdpa, flash_attention_2 or eager; None chooses.")
    timeout: float | None = Field(None, description="Most seconds for a reply; one that takes longer is an error.")
    prefill_chunk_size: int | None = Field(None, description="Tokens per forward pass of a prefill; None is one pass.")
    kv_memory_bytes: int = Field(MEMORY_BYTES, description="K/V in memory for prompts that begin alike; 0 keeps none.")
    kv_dir: str | None = Field(None, description="Folder for them that outlives the process.")
    kv_disk_bytes: int = Field(DISK_BYTES, description="Most bytes in that folder.")
    kv_disk_dtype: DiskDType = Field("model", description="int8 halves its files; reuse is then no longer exact.")
    namespace: str = Field("", description="K/V of one namespace are never used for another.")
    recompute: float | None = Field(None, description="Join documents read one by one, compute so many tokens anew.")
    memory: SkipValidation[StreamingMemory | None] = Field(None, exclude=True, description="Sessions of long chats.")
    thread_id: str | None = Field(None, description="Whose session in the memory; None goes by the history.")

    def __init__(self, **kwargs: Any) -> None:
        check_names(kwargs, (*type(self).model_fields, "class_name"), "ChatSnapKV")
        super().__init__(**kwargs)
        self.options()  # values out of bounds are an error now, not at the first call

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans with. Loads no weights."""
        return LLMMetadata(
            context_window=context_length(self.model),
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=True,
            model_name=self.model,
        )

    def options(self, **overrides: Any) -> ChatOptions:
        """The options of a call."""
        return ChatOptions(**{name: getattr(self, name) for name in OPTION_NAMES}).override(**overrides)

    def unload(self) -> int:
        """Forget the process's copies of this model, whoever shares them; returns how many there were."""
        return registry.unload(self.model)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, for `Settings.tokenizer`. Loads the model."""
        ids: list[int] = self.options().engine().tokenizer.encode(text, add_special_tokens=False)
        return ids
