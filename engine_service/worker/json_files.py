"""JSON files of a checkpoint, with errors that name the file. It knows none of their fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from tidemill.runtime.errors import InvalidRequest
from tidemill.written import read_written

_Json = TypeVar("_Json", dict[str, Any], list[Any])


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file; raises InvalidRequest otherwise."""
    return _read_json(path, dict)


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The objects of the array in a JSON file, none where there is no file."""
    return [one for one in _read_json(path, list) or () if isinstance(one, dict)]


def _read_json(path: Path, kind: type[_Json]) -> _Json | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(read_written(path))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{path} is not valid JSON ({error}); it is probably truncated: fetch the file again",
            reason="CHECKPOINT_CORRUPT",
            param="model",
        ) from error
    if not isinstance(content, kind):
        wanted = "object" if kind is dict else "array"
        raise InvalidRequest(
            f"{path} must hold a JSON {wanted}, found {type(content).__name__}",
            reason="CHECKPOINT_CORRUPT",
            param="model",
        )
    return content
