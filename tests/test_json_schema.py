"""Schemas made ready for grammars."""

import copy
from typing import Any

import pytest

from ragkv.json_schema import closed, moved, without_look_around

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}
CLOSED = {**POINT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (POINT, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        ({**POINT, "additionalProperties": {"type": "string"}}, {**POINT, "additionalProperties": {"type": "string"}}),
        ({"$defs": {"P": POINT}, "$ref": "#/$defs/P"}, {"$defs": {"P": CLOSED}, "$ref": "#/$defs/P"}),
        ({"items": {"anyOf": [POINT, {"type": "null"}]}}, {"items": {"anyOf": [CLOSED, {"type": "null"}]}}),
        ({"allOf": [POINT]}, {"allOf": [CLOSED]}),
        ({"allOf": [POINT, POINT]}, {"allOf": [POINT, POINT]}),
        ({"enum": [POINT], "default": POINT}, {"enum": [POINT], "default": POINT}),
        (
            {"type": "object", "properties": {"properties": POINT, "allOf": True}},
            {**CLOSED, "properties": {"properties": CLOSED, "allOf": True}},
        ),
    ],
)
def test_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    assert closed(schema) == expected
    assert schema == before


def test_closed_keeps_the_order_of_properties() -> None:
    schema = {"properties": {name: {"type": "null"} for name in "zab"}}
    assert list(closed(schema)["properties"]) == ["z", "a", "b"]


def test_moved_rewrites_references_and_nothing_else() -> None:
    schema = {
        "properties": {"$ref": {"$ref": "#/$defs/A"}, "whole": {"$ref": "#"}, "far": {"$ref": "other.json#/A"}},
        "$defs": {"A": {"const": "#/$defs/A"}},
    }
    assert moved(schema, "/properties/arguments") == {
        "properties": {
            "$ref": {"$ref": "#/properties/arguments/$defs/A"},
            "whole": {"$ref": "#/properties/arguments"},
            "far": {"$ref": "other.json#/A"},
        },
        "$defs": {"A": {"const": "#/$defs/A"}},
    }


def test_without_look_around() -> None:
    patterns = ["(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?:a)", "(?P<n>a)"]
    schema = {"anyOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    left = [item.get("pattern") for item in without_look_around(schema)["anyOf"]]
    assert left == [None, None, None, None, "(?:a)", "(?P<n>a)"]
