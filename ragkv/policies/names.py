"""Policies as text for command lines and tables: "full", "snapkv:1024", "snapkv:2048,pooling=max,kernel_size=13".

NAME[:ENTRIES][,OPTION=VALUE]...: entries kept per KV head, the window (or the sinks) included, and the policy's own
options. `parse(name(policy)) == policy`.
"""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from ragkv.errors import ConfigError
from ragkv.policies import H2O, AdaKV, FullKV, Policy, PyramidKV, RandomKV, SnapKV, StreamingLLM

POLICIES: dict[str, type[Any]] = {
    "full": FullKV,
    "snapkv": SnapKV,
    "h2o": H2O,
    "streaming": StreamingLLM,
    "random": RandomKV,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
}


def parse(text: str) -> Policy:
    """The policy of this name.

    Raises:
        ConfigError: there is no such policy or option (the nearest is named), or a value is out of its bounds.
    """
    head, *pairs = text.strip().split(",")
    family, colon, entries = head.partition(":")
    policy = POLICIES[_known(family, POLICIES, f"{text!r}: there is no policy")]
    own = [field.name for field in fields(policy) if field.name not in ("max_capacity_prompt", "window_length")]
    options: dict[str, Any] = {}
    for pair in pairs:
        option, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or option in options:
            raise ConfigError(f"{text!r}: write options as OPTION=VALUE, each once, behind commas")
        _known(option, own, f"{text!r}: {family} has no option")
        options[option] = _value(policy, option, value)
    if colon:
        options |= _capacity(policy, options, entries, text)
    return policy(**options)  # type: ignore[no-any-return]


def name(policy: Policy) -> str:
    """The short name of a policy: its entries, and the options that are not the usual ones."""
    families = {known: family for family, known in POLICIES.items()}
    if type(policy) not in families:
        raise ConfigError(f"{policy!r} has no name: there are {', '.join(POLICIES)}")
    head, known = families[type(policy)], POLICIES[families[type(policy)]]
    values = {field.name: getattr(policy, field.name) for field in fields(known)}
    usual = {field.name: field.default for field in fields(known)}
    entries = values.pop("max_capacity_prompt", None)
    if isinstance(policy, StreamingLLM):
        entries = policy.num_sink_tokens + values.pop("window_length")
    if entries is not None:
        head += f":{entries}"
    return ",".join([head, *(f"{option}={value}" for option, value in values.items() if value != usual[option])])


def _capacity(policy: type[Any], options: dict[str, Any], entries: str, text: str) -> dict[str, int]:
    if policy is FullKV or not entries.isdecimal():
        raise ConfigError(f"{text!r}: write a number of entries behind the colon, and none for full")
    if policy is not StreamingLLM:
        return {"max_capacity_prompt": int(entries)}
    sinks = options.get("num_sink_tokens", StreamingLLM.num_sink_tokens)
    if int(entries) <= sinks:
        raise ConfigError(f"{text!r}: must keep more than its {sinks} sink tokens")
    return {"window_length": int(entries) - sinks}


def _value(policy: type[Any], option: str, text: str) -> int | float | str:
    """A number where the option takes one, else the text, which the policy checks."""
    kinds = get_type_hints(policy)[option]
    for number in (int, float):
        if number is kinds or number in get_args(kinds):
            try:
                return number(text)
            except ValueError:
                if number is kinds:
                    raise ConfigError(f"{option}={text!r}: must be a number") from None
    return text


def _known(given: str, known: Iterable[str], complaint: str) -> str:
    names = list(known)
    if given not in names:
        near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}" if names else "it has none"
        raise ConfigError(f"{complaint} {given!r}; {hint}")
    return given
