"""Tensors in shared memory: those in are read when a request has come, those out written at its end."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from gemmwire.wire import ITEMSIZE, InferRequest, Shared, Tensor, WireError

from .backlog import Answer
from .call import Call
from .outputs import Columns, cut
from .shm import Region, Regions


class Source(NamedTuple):
    region: Region
    place: Shared


def any_shared(request: InferRequest) -> bool:
    return any(each.shared for each in request.inputs) or any(each.shared for each in request.outputs or ())


def fetch(request: InferRequest, regions: Regions, limit: int) -> InferRequest:
    """The request with the bytes of its inputs. Errors: WireError, before anything is read or allocated."""
    for tensor in request.inputs:
        if tensor.shared is not None:
            regions.find(tensor.shared, f"Input {tensor.name[:80]!r}")
    nbytes = sum(tensor.shared.nbytes for tensor in request.inputs if tensor.shared is not None)
    if nbytes > limit:
        raise WireError(
            "body_too_large",
            f"The inputs in shared memory have {nbytes} bytes, the limit is {limit}; send fewer rows at a "
            "time, or raise --max-body-bytes",
            status=413,
            expected=f"<= {limit}",
            got=nbytes,
        )
    return replace(request, inputs=tuple(_fetched(tensor, regions) for tensor in request.inputs))


def _fetched(tensor: Tensor, regions: Regions) -> Tensor:
    if tensor.shared is None:
        return tensor
    region = regions.find(tensor.shared, f"Input {tensor.name[:80]!r}")
    return tensor._replace(data=region.read(tensor.shared))


def source_of(request: InferRequest, regions: Regions) -> Source | None:
    """Where all of x is, of a request whose only tensor in is x as it stands."""
    if len(request.inputs) != 1 or request.inputs[0].shared is None:
        return None
    place = request.inputs[0].shared
    return Source(regions.find(place, "The input"), place)


def hold(call: Call, regions: Regions) -> Call:
    """The call with the regions that its outputs go to.

    Errors: WireError `region_unknown`, `region_range`, before anything is computed.
    """
    columns, targets = [], []
    for each in call.columns:
        if each.shared is not None:
            region = regions.find(each.shared, f"Output {each.name[:80]!r}")
            place = _taken(each, each.shared, call)
            each = each._replace(shared=place)
            targets.append((each, place, region))
        columns.append(each)
    return call._replace(columns=tuple(columns), targets=tuple(targets))


def _taken(each: Columns, place: Shared, call: Call) -> Shared:
    """What an output takes of the place that it is given."""
    needed = call.rows * (each.stop - each.start) * ITEMSIZE[call.datatype]
    if place.nbytes < needed:
        raise WireError(
            "region_range",
            f"Output {each.name[:80]!r} has {needed} bytes, but shared_memory_byte_size is {place.nbytes}",
            expected=f">= {needed}",
            got=place.nbytes,
        )
    return place._replace(nbytes=needed)


def deliver(call: Call, n: int, answer: Answer) -> None:
    """Write the outputs that are wanted in shared memory. Errors: WireError `region_gone`."""
    for each, place, region in call.targets:
        region.write(cut(answer.data, call.rows, n, each), place.offset)
