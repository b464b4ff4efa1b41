"""FastAPI with lists of numbers as JSON: the endpoint that most people write first."""

from __future__ import annotations

import sys

import torch
import uvicorn
from fastapi import FastAPI
from gemm import multiply
from pydantic import BaseModel

app = FastAPI()


class Rows(BaseModel):
    x: list[list[float]]


@app.post("/")
def infer(rows: Rows) -> dict[str, list[list[float]]]:
    return {"y": multiply(torch.tensor(rows.x).to(torch.bfloat16)).tolist()}


uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False)
