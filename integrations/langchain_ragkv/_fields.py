"""The fields of `ChatSnapKV`, and what LangChain wants to know about a model beside its replies."""

from collections.abc import Sequence
from typing import Any, Literal

from langchain_core.language_models import LangSmithParams, ModelProfile
from langchain_core.messages import BaseMessage
from langchain_core.utils import from_env
from pydantic import Field, SecretStr, SkipValidation, model_validator

from langchain_ragkv._batch import BatchingChatModel
from langchain_ragkv._calls import read_call
from ragkv import registry
from ragkv.chat_model import count_tokens
from ragkv.kv_store import DiskDType
from ragkv.model_info import context_length
from ragkv.options import OPTION_NAMES, ChatOptions, PolicyName, check_names
from ragkv.packaged import PACKAGED
from ragkv.policies import Policy
from ragkv.scoring import Pooling


class ChatSnapKVFields(BatchingChatModel):
    """Options, checked when the model is made; nothing is loaded for them. See `ragkv.options.ChatOptions`."""

    model: str = Field(default_factory=from_env("RAGKV_MODEL", default=ChatOptions.model))
    max_capacity_prompt: int = ChatOptions.max_capacity_prompt
    window_size: int | Literal["auto"] = ChatOptions.window_size
    kernel_size: int = ChatOptions.kernel_size
    pooling: Pooling = ChatOptions.pooling
    policy: SkipValidation[PolicyName | Policy] = ChatOptions.policy
    max_tokens: int = ChatOptions.max_tokens
    temperature: float = ChatOptions.temperature
    top_p: float = ChatOptions.top_p
    top_k: int = ChatOptions.top_k
    min_p: float = ChatOptions.min_p
    repetition_penalty: float = ChatOptions.repetition_penalty
    seed: int | None = ChatOptions.seed
    stop: list[str] = Field(default_factory=list)
    context_tokens: int | None = ChatOptions.context_tokens
    device: str | None = ChatOptions.device
    dtype: str | None = ChatOptions.dtype
    attn_implementation: str | None = ChatOptions.attn_implementation
    prefill_chunk_size: int | None = ChatOptions.prefill_chunk_size
    kv_memory_bytes: int = ChatOptions.kv_memory_bytes
    kv_dir: str | None = ChatOptions.kv_dir
    kv_disk_bytes: int = ChatOptions.kv_disk_bytes
    kv_disk_dtype: DiskDType = ChatOptions.kv_disk_dtype
    namespace: str = ChatOptions.namespace
    recompute: float | None = ChatOptions.recompute
    timeout: float | None = None
    streaming: bool = False
    max_retries: int | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_names(values, cls.model_fields, cls.__name__)
        return values

    @model_validator(mode="after")
    def _within_bounds(self) -> "ChatSnapKVFields":
        self.options()
        return self

    def options(self) -> ChatOptions:
        """The options in ragkv's terms."""
        return ChatOptions(**{name: getattr(self, name) for name in OPTION_NAMES})

    def unload(self) -> int:
        """Forget the process's copies of this model, whoever shares them; returns how many there were."""
        return registry.unload(self.model)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by the model's own tokenizer. Loads the model."""
        ids: list[int] = self.options().engine().tokenizer.encode(text, add_special_tokens=False)
        return ids

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages (and tools) become, chat template included. Loads the model."""
        call = read_call(self.options(), None, messages, {"tools": tools})
        return count_tokens(call.options.engine(), call.request)

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(text_inputs=True, text_outputs=True, max_output_tokens=self.max_tokens)
        profile |= ModelProfile(image_inputs=False, audio_inputs=False, video_inputs=False, pdf_inputs=False)
        profile |= ModelProfile(tool_calling=True, tool_choice=True, reasoning_output=False)
        # Agents ask here whether JSON and tools go together in one request. They do not, so schemas become tools.
        profile |= ModelProfile(structured_output=False)
        if self.model in PACKAGED:  # of any other model nothing is read before it is used
            profile["max_input_tokens"] = context_length(self.model)
        return profile

    @property
    def _llm_type(self) -> str:
        return "chat-snapkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What makes two models answer differently."""
        return {name: getattr(self, name) for name in OPTION_NAMES} | {"policy": str(self.policy)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop or None, **kwargs)
        return params | LangSmithParams(ls_provider="ragkv")

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """Key of the cache. LangChain's own leaves out what it cannot serialise, such as a policy's options."""
        return f"{super()._get_llm_string(stop, **kwargs)}---{self.policy}"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether LangChain can save and load the model; with a policy object it saves, but does not load."""
        return True
