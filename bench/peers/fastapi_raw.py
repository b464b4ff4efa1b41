"""FastAPI with raw bytes in and out."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, Request, Response
from gemm import answer

app = FastAPI()


@app.post("/")
async def infer(request: Request) -> Response:
    return Response(answer(await request.body()), media_type="application/octet-stream")


uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False)
