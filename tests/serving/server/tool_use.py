"""Tools for tests of the server."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def check_call(name: str, arguments: str) -> None:
    """Check the arguments of a call against the schema of its function."""
    assert jsonschema_rs.is_valid(SCHEMAS[name], json.loads(arguments)), arguments
