"""JSON schemas made ready to be grammars: closed where they list properties, movable, and without what cannot be kept.

Pure functions on decoded schemas; the ones given are never changed.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_JOINED = ("allOf", "anyOf", "oneOf", "$ref", "additionalProperties", "patternProperties")
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")

Node = dict[str, Any]


def transform(schema: Any, change: Callable[[Node], Node]) -> Any:
    """A copy of a schema in which `change` has been applied to every subschema, the innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    node = dict(schema)
    for key, value in node.items():
        if key in _OF_SCHEMAS and isinstance(value, Mapping):
            node[key] = {name: transform(item, change) for name, item in value.items()}
        elif key in _LISTS and isinstance(value, list):
            node[key] = [transform(item, change) for item in value]
        elif key in _SCHEMAS:
            node[key] = transform(value, change)
    return change(node)


def closed(schema: Mapping[str, Any]) -> Node:
    """Objects that list their properties take no others, unless they say so: models make up endless extra ones.

    A schema with `allOf` of several parts stays open: there a part may describe some of the properties only.
    """
    joins = False

    def note_joins(node: Node) -> Node:
        nonlocal joins
        joins = joins or len(node.get("allOf", ())) > 1
        return node

    def close(node: Node) -> Node:
        if "properties" in node and not any(key in node for key in _JOINED):
            node["additionalProperties"] = False
        return node

    copy: Node = transform(schema, note_joins)
    return copy if joins else dict(transform(copy, close))


def moved(schema: Mapping[str, Any], pointer: str) -> Node:
    """The schema with references that hold when it stands at a JSON pointer inside another one."""

    def change(node: Node) -> Node:
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            node["$ref"] = f"#{pointer}{reference[1:]}"
        return node

    return dict(transform(schema, change))


def without_look_around(schema: Mapping[str, Any]) -> Node:
    """The schema without patterns that look ahead or behind: no grammar can follow them."""

    def change(node: Node) -> Node:
        if _LOOK_AROUND.search(str(node.get("pattern", ""))):
            del node["pattern"]
        return node

    return dict(transform(schema, change))
