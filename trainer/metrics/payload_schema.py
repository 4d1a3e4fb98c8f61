"""The payload contract as a JSON Schema, for consumers in other languages."""

from __future__ import annotations

from typing import Any, Final

from trainer.metrics.payload_contract import MODES, NON_FINITE_WORDS, RESTART, SCHEMA_VERSION

_STEP: Final = {"type": "integer", "minimum": 0}
_VERSION: Final = {"type": "integer", "const": SCHEMA_VERSION}
_KEYS: Final = {"minLength": 1}


def _payload() -> dict[str, Any]:
    return {
        "title": "Payload",
        "description": "One row of metrics of one optimizer step.",
        "type": "object",
        "required": ["schema_version", "mode", "global_step", "metrics"],
        "not": {"required": ["event"]},
        "properties": {
            "schema_version": _VERSION,
            "mode": {"enum": list(MODES)},
            "global_step": _STEP,
            "metrics": {"type": "object", "propertyNames": _KEYS, "additionalProperties": {"type": "number"}},
            "non_finite": {
                "description": "Metrics that JSON numbers cannot represent; none of them appears in `metrics` as well.",
                "type": "object",
                "propertyNames": _KEYS,
                "additionalProperties": {"enum": list(NON_FINITE_WORDS)},
            },
        },
        "anyOf": [
            {"properties": {"metrics": {"minProperties": 1}}},
            {"required": ["non_finite"], "properties": {"non_finite": {"minProperties": 1}}},
        ],
        "additionalProperties": True,
    }


def _restart() -> dict[str, Any]:
    return {
        "title": "Restart",
        "description": "Later rows may repeat steps above `global_step`; the last row of a step counts.",
        "type": "object",
        "required": ["schema_version", "event", "global_step"],
        "properties": {"schema_version": _VERSION, "event": {"const": RESTART}, "global_step": _STEP},
        "additionalProperties": True,
    }


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one line of a stream: a payload or a restart event."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Trainer metrics, version {SCHEMA_VERSION}",
        "oneOf": [{"$ref": "#/$defs/payload"}, {"$ref": "#/$defs/restart"}],
        "$defs": {"payload": _payload(), "restart": _restart()},
    }
