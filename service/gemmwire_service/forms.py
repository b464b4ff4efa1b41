"""Small JSON bodies of the control plane, as pydantic models."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel

from .body import declared_length, read_body

SMALL = 64 << 10  # bytes of a body without tensors

Form = TypeVar("Form", bound=BaseModel)


async def read_form(request: Request, form: type[Form]) -> Form:
    """An empty body is an empty object. Errors: WireError `body_too_large`; pydantic's ValidationError."""
    body = await read_body(request.receive, declared_length(dict(request.headers.raw), SMALL), SMALL, 0)
    return form.model_validate_json(bytes(body) or b"{}")
