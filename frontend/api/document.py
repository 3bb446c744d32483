"""The OpenAPI document: bodies that the routes parse themselves, and the parts these consist of.

It does not know the routes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


@cache
def documented(body: type[BaseModel]) -> dict[str, Any]:
    """The body for the document; the routes parse it themselves, to bound its size and word its
    errors. Made once a body, which several routes may take: pydantic needs 10 ms for one. Nobody
    changes it, as FastAPI copies it into the document."""
    schema = body.model_json_schema(ref_template=f"#/components/schemas/{body.__name__}.{{model}}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class DocumentedApp(FastAPI):
    """Puts the parts of documented bodies where their references say: pydantic keeps them inside of
    each body, where a reference from the document's root finds nothing."""

    def __init__(self, **about: Any) -> None:
        # FastAPI's pages around the document load their scripts from a CDN: where there is no
        # internet they are empty, and where there is one a third party's code runs beside the API.
        super().__init__(docs_url=None, redoc_url=None, **about)

    def openapi(self) -> dict[str, Any]:
        """The document; made once."""
        document = super().openapi()
        components = document.setdefault("components", {}).setdefault("schemas", {})
        for path in document["paths"].values():
            for operation in path.values():
                schema = _body(operation)
                for name, part in schema.pop("$defs", {}).items():
                    components[f"{schema['title']}.{name}"] = part
        return document


def _body(operation: dict[str, Any]) -> dict[str, Any]:
    content = operation.get("requestBody", {}).get("content", {})
    schema: dict[str, Any] = content.get("application/json", {}).get("schema", {})
    return schema
