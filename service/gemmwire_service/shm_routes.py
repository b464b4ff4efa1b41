"""The shared-memory extensions of the protocol: status, register, unregister, the same for each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from .forms import read_form
from .openapi import problems, takes
from .protocol import CudaRegion, CudaRegionForm, SystemRegion, SystemRegionForm
from .shm import Opener, Region, Regions, refuse_region, unsupported

_LONGEST_NAME = 255
_FORMS: Mapping[str, type[BaseModel]] = {"system": SystemRegionForm, "cuda": CudaRegionForm}
_STATUS: Mapping[str, Any] = {"system": list[SystemRegion], "cuda": list[CudaRegion]}
_PROBLEMS = problems(400, 404, 409, 413, 503)


def shm_routes(regions: Regions, openers: Sequence[Opener]) -> APIRouter:
    """A kind that is not offered has no regions, and takes none."""
    routes = APIRouter()
    by_kind = {opener.kind: opener for opener in openers}
    for kind in _FORMS:
        _add(routes, kind, regions, by_kind.get(kind))
    return routes


def _add(routes: APIRouter, kind: str, regions: Regions, opener: Opener | None) -> None:
    root = f"/v2/{kind}sharedmemory"

    @routes.get(f"{root}/status", response_model=_STATUS[kind])
    async def status_of_all() -> list[dict[str, Any]]:
        return [_document(region) for region in regions.registered(kind)]

    @routes.get(f"{root}/region/{{region}}/status", response_model=_STATUS[kind], responses=_PROBLEMS)
    async def status(region: str) -> list[dict[str, Any]]:
        return [_document(found) for found in regions.registered(kind, region)]

    @routes.post(
        f"{root}/region/{{region}}/register",
        responses=_PROBLEMS,
        openapi_extra=takes(_FORMS[kind], required=True),
    )
    async def register(region: str, request: Request) -> dict[str, str]:
        if opener is None:
            raise unsupported("The request")
        form = await read_form(request, _FORMS[kind])
        _refuse_name(region)
        regions.refuse_new(region)
        regions.add(region, opener.open(form.model_dump()))
        return {"name": region}

    @routes.post(f"{root}/region/{{region}}/unregister")
    async def unregister(region: str) -> dict[str, str]:
        regions.remove(kind, region)
        return {"name": region}

    @routes.post(f"{root}/unregister")
    async def unregister_all() -> dict[str, str]:
        regions.remove(kind)
        return {}


def _document(region: Region) -> dict[str, Any]:
    return {"name": region.name, "byte_size": region.memory.nbytes, **region.memory.facts()}


def _refuse_name(name: str) -> None:
    if len(name) > _LONGEST_NAME:
        refuse_region(
            f"the region's name has {len(name)} characters; at most {_LONGEST_NAME} are taken",
            f"<= {_LONGEST_NAME}",
            len(name),
        )
