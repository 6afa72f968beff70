"""What all streaming caches of a model and a policy have in common, found out once."""

from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedModel

from ragkv.backend import rope_original_length
from ragkv.cache import new_cache
from ragkv.engine import Engine
from ragkv.errors import ConfigError
from ragkv.policies import StreamingLLM
from ragkv.streaming.rotation import Rotation, find_rotations


@dataclass(frozen=True)
class Layout:
    """What a model's streaming caches have in common.

    Attributes:
        policy: how many sinks and recent tokens; no sinks is plain window attention.
        slots: positions per layer, of which `capacity` are in use at most; the rest is for moving on.
        rotations: each layer's rotation.
        sliding: whether each layer has a sliding window of its own.
        sight: most tokens at once of which the model sees the first in some layer, and rotates as it always does; None
            if only its length of context limits them.
    """

    policy: StreamingLLM
    slots: int
    rotations: tuple[Rotation | None, ...]
    sliding: tuple[bool, ...]
    sight: int | None = None

    @property
    def capacity(self) -> int:
        """Most tokens that a cache holds."""
        return self.policy.num_sink_tokens + self.policy.window_length

    @classmethod
    def of(cls, model: PreTrainedModel, policy: StreamingLLM) -> Self:
        """Find out by trial how the model marks positions.

        Raises:
            ModelError: in a way that forbids streaming.
            ConfigError: the model cannot see as many tokens as the policy keeps.
        """
        rotations = tuple(find_rotations(model))
        capacity = policy.num_sink_tokens + policy.window_length
        windows: list[int | None] = [getattr(layer, "sliding_window", None) for layer in new_cache(model.config).layers]
        trained = rope_original_length(model)
        own = [window for window in windows if window is not None]
        widest = max(own) if len(own) == len(windows) else None
        sight = min((limit for limit in (trained, widest) if limit is not None), default=None)
        if sight is not None and capacity > sight:
            raise ConfigError(
                f"num_sink_tokens={policy.num_sink_tokens} and window_length={policy.window_length}: "
                f"{type(model).__name__} sees at most {sight} tokens at once, so the sinks would be out of sight; "
                f"set window_length to {sight - policy.num_sink_tokens} or less"
            )
        slots = min(capacity + max(1, capacity // 2), trained or 2 * capacity)
        return cls(policy, slots, rotations, tuple(window is not None for window in windows), sight)


def layout_for(engine: Engine, policy: StreamingLLM) -> Layout:
    """What all sessions of a model and a policy have in common; takes one small forward pass.

    Raises:
        ModelError: the model cannot stream.
        ConfigError: the cache would hold more than the model can see.
    """
    capacity, context = policy.num_sink_tokens + policy.window_length, engine.loaded.context_length
    if capacity > context:
        raise ConfigError(
            f"num_sink_tokens={policy.num_sink_tokens} and window_length={policy.window_length}: more than the "
            f"{context} tokens of context of {engine.loaded.name}; set window_length to "
            f"{context - policy.num_sink_tokens} or less"
        )
    return Layout.of(engine.model, policy)
