"""Values made from a schema satisfy it."""

from __future__ import annotations

import pytest
from turnwise_fake_engine.examples import example_of

SCHEMAS = {
    "object": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "boolean"}}, "required": ["a"]},
    "nullable": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 4}]},
    "types": {"type": ["null", "string"], "maxLength": 2},
    "enum": {"enum": ["red", "blue"]},
    "const": {"const": 7},
    "array": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 2}, "minItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    "all": {"allOf": [{"type": "object", "properties": {"x": {"type": "integer"}}}, {"required": ["x"]}]},
    "multiple": {"type": "integer", "minimum": 5, "multipleOf": 4},
    "below": {"type": "integer", "exclusiveMaximum": 0},
    "date": {"type": "string", "format": "date-time"},
    "tree": {
        "$defs": {"leaf": {"type": "object", "properties": {"w": {"type": "string"}}, "required": ["w"]}},
        "type": "object",
        "properties": {"v": {"type": "integer"}, "child": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}},
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_example_satisfies_its_schema(name):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(example_of(SCHEMAS[name]), SCHEMAS[name])


def test_numbers_are_taken_from_the_conversation_where_they_fit():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "maximum": 5}}}
    # 12 is the first number and fits a; for b, at most 5, the 3 is left
    assert example_of(schema, "add 12 and 3") == {"a": 12, "b": 3}


def test_a_recursive_schema_gives_a_finite_example():
    schema = {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
    assert isinstance(example_of(schema), dict)
