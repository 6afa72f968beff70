"""Which K/V of a prompt are kept: each policy is one small frozen dataclass in a file of its own."""

from ragkv.policies.base import Observation, Policy
from ragkv.policies.full import FullKV
from ragkv.policies.snapkv import SnapKV
from ragkv.policies.streaming_llm import StreamingLLM

__all__ = ["FullKV", "Observation", "Policy", "SnapKV", "StreamingLLM"]
