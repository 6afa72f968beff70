"""Which K/V of a prompt are kept: each policy is one small frozen dataclass in a file of its own."""

from ragkv.policies.ada_kv import AdaKV
from ragkv.policies.base import Observation, Policy, SplitsBudget
from ragkv.policies.full import FullKV
from ragkv.policies.h2o import H2O
from ragkv.policies.pyramid_kv import PyramidKV
from ragkv.policies.random_kv import RandomKV
from ragkv.policies.snapkv import SnapKV
from ragkv.policies.streaming_llm import StreamingLLM

__all__ = [
    "H2O",
    "AdaKV",
    "FullKV",
    "Observation",
    "Policy",
    "PyramidKV",
    "RandomKV",
    "SnapKV",
    "SplitsBudget",
    "StreamingLLM",
]
