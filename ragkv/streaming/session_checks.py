"""Whether what a session's file holds can be a session at all: checked before memory is taken for it.

Every check raises a ValueError that says what is wrong; what the numbers mean is for a model to say.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ragkv.streaming.layout import Layout
from ragkv.streaming.turns import Turns

_STATES, _PINNED = ("keys", "values"), ("pinned_keys", "pinned_values")


def check_cache(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """The cache's tensors, as `StreamingCache.state` names them, against the layout that they are for."""
    start, pinned = int(tensors["start"]), int(tensors["pinned"])
    kinds = {name.partition(".")[2] for name in tensors} - {""}
    layers = range(len(layout.rotations)) if kinds else ()
    expected = {"start", "pinned", *(f"{layer}.{kind}" for layer in layers for kind in kinds)}
    if kinds not in (set(), {*_STATES}, {*_STATES, *_PINNED}) or expected != set(tensors):
        raise ValueError(f"{len(tensors)} tensors, which are not those of {len(layout.rotations)} layers")
    held = _length(tensors, _STATES, layers)
    if not layout.policy.num_sink_tokens <= pinned < layout.capacity or not held <= layout.capacity:
        raise ValueError(f"{held} tokens and {pinned} pinned ones in a cache of {layout.capacity}")
    if not 0 <= start <= layout.slots - held or (start and "pinned_keys" not in kinds):
        raise ValueError(f"start={start} and {held} tokens in {layout.slots} slots")
    if "pinned_keys" in kinds and not _length(tensors, _PINNED, layers) == pinned <= held:
        raise ValueError(f"copies of pinned tokens that are not {pinned}")


def check_turns(turns: Turns, evictable: int) -> None:
    """The turns, whose tokens must be the `evictable` ones of the cache."""
    found = sum(turn.evictable for turn in turns.live)
    if found != evictable:
        raise ValueError(f"{found} tokens of turns, {evictable} in the cache")
    numbers = [turn.number for turn in turns.live]
    if numbers != sorted(set(numbers)) or not all(0 <= number < turns.count for number in numbers):
        raise ValueError(f"turns {numbers} of {turns.count}")
    if any(min(turn.evictable, turn.dropped, turn.tokens) < 0 for turn in turns.live):
        raise ValueError("turns of less than no tokens")
    if not all(isinstance(turn.text, str) for turn in turns.live):
        raise ValueError("turns without a text")


def check_chat(chat: Mapping[str, Any], vocabulary: int) -> None:
    """What waits to be read: tokens below `vocabulary`, and messages."""
    if not all(type(token) is int and 0 <= token < vocabulary for token in chat["pending"]):
        raise ValueError(f"tokens that are none of the {vocabulary} of the vocabulary")
    for message in (*chat["unread"], *chat["base"]):
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            raise ValueError("messages that are not texts")
    if not isinstance(chat["question"], str):
        raise ValueError("a question that is no text")


def _length(tensors: Mapping[str, Tensor], kinds: tuple[str, ...], layers: range | tuple[()]) -> int:
    """Tokens of every layer's tensors of these kinds, (1, kv_heads, tokens, head_dim)."""
    shapes = [tensors[f"{layer}.{kind}"].shape for layer in layers for kind in kinds]
    lengths = {shape[2] if len(shape) == 4 and shape[0] == 1 else -1 for shape in shapes} or {0}
    if len(lengths) > 1 or -1 in lengths:
        raise ValueError(f"layers of different lengths {sorted(lengths)}")
    return lengths.pop()
