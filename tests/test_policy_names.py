"""Policies by name: there and back, and errors that say what was meant."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv import policies
from ragkv.errors import ConfigError
from ragkv.policies import H2O, AdaKV, FullKV, Policy, PyramidKV, RandomKV, SnapKV, StreamingLLM
from ragkv.policies.names import POLICIES, name, parse

NAMES: list[tuple[str, Policy]] = [
    ("full", FullKV()),
    ("snapkv:1024", SnapKV(1024)),
    ("snapkv:2048,window_size=32,kernel_size=13,pooling=max", SnapKV(2048, 32, 13, "max")),
    ("snapkv:512,kernel_size=1,gqa_reduction=sum", SnapKV(512, kernel_size=1, gqa_reduction="sum")),
    ("h2o:4096", H2O(4096)),
    ("h2o:1024,window_size=32", H2O(1024, 32)),
    ("streaming:2048", StreamingLLM(4, 2044)),
    ("streaming:2048,num_sink_tokens=0", StreamingLLM(0, 2048)),
    ("random:1024", RandomKV(1024)),
    ("random:1024,seed=3", RandomKV(1024, seed=3)),
    ("pyramidkv:2048", PyramidKV(2048)),
    ("pyramidkv:2048,window_size=8,beta=10", PyramidKV(2048, 8, beta=10)),
    ("adakv:2048", AdaKV(2048)),
    ("adakv:2048,safeguard=0.5", AdaKV(2048, safeguard=0.5)),
]


def test_every_policy_has_a_name() -> None:
    assert {policy.__name__ for policy in POLICIES.values()} == {
        name for name in policies.__all__ if name not in ("Policy", "Observation", "SplitsBudget")
    }
    assert {type(policy) for _, policy in NAMES} == set(POLICIES.values())


@pytest.mark.parametrize(("text", "policy"), NAMES)
def test_names_are_read_and_written(text: str, policy: Policy) -> None:
    assert parse(text) == policy
    assert type(parse(text)) is type(policy)
    assert name(policy) == text


def test_options_may_come_in_any_order_and_entries_may_be_left_out() -> None:
    assert parse(" snapkv:2048, pooling = max,window_size=32 ") == SnapKV(2048, 32, pooling="max")
    assert parse("snapkv") == SnapKV()
    assert parse("snapkv:100,window_size=auto") == SnapKV(100)
    assert parse("streaming,num_sink_tokens=2") == StreamingLLM(2)


@given(
    st.builds(
        SnapKV,
        st.integers(65, 9999),
        st.one_of(st.just("auto"), st.integers(1, 64)),
        st.integers(0, 20).map(lambda n: 2 * n + 1),
        st.sampled_from(["avg", "max"]),
        st.sampled_from(["mean", "max", "sum"]),
    )
    | st.builds(StreamingLLM, st.integers(0, 50), st.integers(1, 9999))
    | st.builds(AdaKV, st.integers(65, 9999), safeguard=st.floats(0, 1))
)
def test_there_and_back(policy: Policy) -> None:
    assert parse(name(policy)) == policy


ERRORS = [
    ("snapvk:1024", "'snapvk:1024': there is no policy 'snapvk'; did you mean 'snapkv'?"),
    ("quux:3", "there is no policy 'quux'; there are full, snapkv, h2o, streaming, random, pyramidkv, adakv"),
    ("", "'': there is no policy ''"),
    ("full:3", "'full:3': write a number of entries behind the colon, and none for full"),
    ("snapkv:many", "'snapkv:many': write a number of entries behind the colon"),
    ("snapkv:-5", "'snapkv:-5': write a number of entries behind the colon"),
    ("snapkv:", "'snapkv:': write a number of entries behind the colon"),
    ("snapkv:1024,kernal_size=3", "snapkv has no option 'kernal_size'; did you mean 'kernel_size'?"),
    ("snapkv:1024,beta=3", "snapkv has no option 'beta'; there are window_size, kernel_size, pooling, gqa_reduction"),
    ("snapkv:1024,max_capacity_prompt=9", "snapkv has no option 'max_capacity_prompt'"),
    ("full,seed=3", "full has no option 'seed'; it has none"),
    ("snapkv:1024,", "'snapkv:1024,': write options as OPTION=VALUE, each once, behind commas"),
    ("snapkv:1024,pooling", "write options as OPTION=VALUE"),
    ("random:64,seed=1,seed=2", "write options as OPTION=VALUE, each once"),
    ("snapkv:1024,kernel_size=x", "kernel_size='x': must be a number"),
    ("adakv:1024,safeguard=much", "safeguard='much': must be a number"),
    ("snapkv:1024,kernel_size=4", "kernel_size=4: must be an odd number"),
    ("snapkv:1024,window_size=wide", "window_size='wide': must be at least 1, or 'auto'"),
    ("snapkv:10", "max_capacity_prompt=10: must be larger than the observation window"),
    ("streaming:4", "'streaming:4': must keep more than its 4 sink tokens"),
]


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_errors_say_what_was_meant(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        parse(text)
    assert "\n" not in str(raised.value)


def test_policies_of_ones_own_have_no_name() -> None:
    class Mine(SnapKV):
        pass

    with pytest.raises(ConfigError, match=r"Mine\(.*\) has no name: there are full, snapkv"):
        name(Mine())
