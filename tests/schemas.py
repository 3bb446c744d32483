"""Small JSON schemas at random, of what models are usually asked for."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def random_schema(rng: random.Random) -> Schema:
    """An object of one to four properties, two levels deep at most."""
    return _object(rng, 2)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["name", "age", "city", "tags", "ok", "id"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(1, len(names))),
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    kinds: list[Schema] = [
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)},
        {"type": "string", "maxLength": rng.randint(1, 8)},
        {"type": "string", "pattern": "^[a-z]{1,4}(-[0-9]{2})?$"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": rng.sample(["red", "green", "blue", 7, None, True], rng.randint(1, 4))},
        {"const": rng.choice(["x", 3, False])},
        {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    ]
    if depth > 0:
        kinds += [_object(rng, depth), {**_array(rng, depth)}]
    return rng.choice(kinds)


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    items = _value(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
