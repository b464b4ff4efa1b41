"""The OpenAPI document: infer, which FastAPI cannot see, and the refusals that every route has."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from .protocol import (
    CudaRegionForm,
    InferRequestForm,
    InferResponseForm,
    Problem,
    RepositoryIndexRequest,
    RepositoryRequest,
    SystemRegionForm,
)

# Of bodies and answers that the routes read and write by themselves.
_FORMS: tuple[type[BaseModel], ...] = (
    *(InferRequestForm, InferResponseForm, Problem, RepositoryIndexRequest, RepositoryRequest),
    *(SystemRegionForm, CudaRegionForm),
)
# Refused from the head alone, whatever the route (`access`); health needs no key.
_HEAD = {"401": "no API key, or one that is not known", "403": "the API key lacks the scope"}
_KEYLESS = ("/v2/health/",)
_INFER_STATUSES = ("400", "401", "403", "404", "408", "413", "415", "500", "503", "504")


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that refuses with these."""
    return {status: {"model": Problem} for status in statuses}


def takes(form: type[BaseModel], *, required: bool = False) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads this form by `read_form`."""
    return {"requestBody": {"required": required, "content": _content(form.__name__)}}


def document_routes(app: FastAPI, infer_paths: Collection[str]) -> None:
    """Complete the document that FastAPI makes of its routes."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for model in _FORMS:
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas |= schema.pop("$defs", {})
                schemas[model.__name__] = schema
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _complete(operation["responses"], keyless=path.startswith(_KEYLESS))
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            for path in infer_paths:
                document["paths"][path] = {"post": _infer(path)}
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(responses: dict[str, Any], keyless: bool) -> None:
    """FastAPI promises 422 and a form of its own where a parameter is wrong; that is a 400 here."""
    if responses.pop("422", None) is not None:
        responses.setdefault("400", _problem("Bad Request"))
    if not keyless:
        for status, description in _HEAD.items():
            responses.setdefault(status, _problem(description))


def _problem(description: str) -> dict[str, Any]:
    return {"description": description, "content": _content("Problem")}


def _content(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model}"}}}


def _infer(path: str) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return {
        "summary": "y = x @ W.T + b",
        "description": "JSON, or the binary tensor data extension (Inference-Header-Content-Length).",
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ],
        "requestBody": {"required": True, "content": _content("InferRequestForm")},
        "responses": {
            "200": {"description": "y", "content": _content("InferResponseForm")},
            **{status: _problem("Problem") for status in _INFER_STATUSES},
        },
    }
