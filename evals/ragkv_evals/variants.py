"""What is compared: KV policies by name, and "truncate:N", the full cache on a prompt of at most N tokens.

Policies have the names of `ragkv.policies.names`, such as "full", "snapkv:1024" and "snapkv:1024,pooling=max". With the
option "protect=nothing" they keep what their votes say alone, as in the papers: neither instructions nor headers.
"""

import re
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from ragkv.errors import ConfigError
from ragkv.policies import Policy
from ragkv.policies.names import name as canonical
from ragkv.policies.names import parse

FULL = "full"
_BARE = ",protect=nothing"
_TRUNCATION = re.compile(r"truncate:(\d+)")


@dataclass(frozen=True)
class Truncation:
    """Only the first documents, as many as fit into a prompt of `max_prompt` tokens."""

    max_prompt: int


Variant = Policy | Truncation


def variant(name: str) -> Variant:
    """The policy or truncation of this name.

    Raises:
        ConfigError: there is none, or it protects nothing in any case.
    """
    if truncation := _TRUNCATION.fullmatch(name):
        return Truncation(int(truncation[1]))
    policy = parse(name.replace(_BARE, ""))
    if _BARE not in name:
        return policy
    if not policy.protects:
        raise ConfigError(f"{name!r}: it protects nothing in any case; leave out {_BARE.removeprefix(',')}")
    return unprotecting(policy)


def unprotecting(policy: Policy) -> Policy:
    """A policy that is the same in all else."""
    options: Any = policy
    kind = _unprotecting(type(policy))
    return kind(**{field.name: getattr(options, field.name) for field in fields(options)})  # type: ignore[no-any-return]


@cache
def _unprotecting(kind: type[Any]) -> type[Any]:
    return type(f"Unprotecting{kind.__name__}", (kind,), {"protects": False})


def truncates(name: str) -> bool:
    """Whether it names a truncation."""
    return _TRUNCATION.fullmatch(name) is not None


def split_names(text: str) -> tuple[str, ...]:
    """The names in a list such as "full,snapkv:1024,window_size=16,truncate:1024".

    A part with "=" is an option of the name before it.

    Raises:
        ConfigError: a name is unknown, or stands there twice.
    """
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" in part and names:
            names[-1] += f",{part}"
        else:
            names.append(part)
    if not names:
        raise ConfigError(f"--policies {text!r}: name at least one, such as full,snapkv:1024")
    names = [name if truncates(name) else _canonical(name) for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"--policies {text!r}: a policy stands there twice; name each once")
    return tuple(names)


def _canonical(name: str) -> str:
    variant(name)
    return canonical(parse(name.replace(_BARE, ""))) + (_BARE if _BARE in name else "")
