"""GET /docs: the routes and their forms, read from /openapi.json by a page that needs no other site."""

from __future__ import annotations

from fastapi import APIRouter, Response

from .page import Page


def docs_routes() -> APIRouter:
    routes = APIRouter()
    page = Page("docs.html")

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return page.response()

    return routes
