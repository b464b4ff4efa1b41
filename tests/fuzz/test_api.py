"""The OpenAPI document of a live server: whatever is sent, the answer is one that the document tells of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from safetensors.torch import save_file

from fuzz.effort import while_there_is_time
from serving import Served, serving
from serving import settings as server_settings

schemathesis = pytest.importorskip("schemathesis", reason="needs what ./dev fuzz installs")

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that offers all that a CPU can, with layers m.a and m.b and the models m, other and broken."""
    root = tmp_path_factory.mktemp("api") / "root"
    for name in ("m", "other"):
        (root / name).mkdir(parents=True)
        save_file(
            {"a.weight": torch.ones(8, 32), "b.weight": torch.ones(4, 64)}, root / name / "model.safetensors"
        )
    (root / "broken").mkdir()
    (root / "broken" / "model.safetensors").write_bytes(b"{")
    options = server_settings(
        model=(f"m={root / 'm'}",), model_root=str(root), shm_prefix="gemmwire-fuzz", random_layer=("r=8x32",)
    )
    with serving(options) as served:
        yield served


def operations(served: Served) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


def test_every_answer_is_one_that_the_document_tells_of(api: Served, subtests: pytest.Subtests) -> None:
    """Guards: a 5xx; a status, a content type or a form that no client of the document expects."""
    found = operations(api)

    def all_of_them() -> None:
        for operation in found:
            with subtests.test(operation.label):
                _try(operation)

    while_there_is_time(all_of_them)


def _try(operation: Any) -> None:
    @settings(
        max_examples=6,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy() | _real(operation))
    def every(case: Any) -> None:
        case.call_and_validate(checks=schemathesis.checks.CHECKS.get_by_names(CHECKS))

    every()


def _real(operation: Any) -> Any:
    """The same, of names that there are."""
    names = {"layer": "m.a", "model": "m", "region": "r", "version": "1"}

    def name(case: Any) -> Any:
        for parameter in case.path_parameters or {}:
            case.path_parameters[parameter] = names[parameter]
        return case

    return operation.as_strategy().map(name)
