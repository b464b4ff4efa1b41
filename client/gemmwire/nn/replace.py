"""Every linear layer of a model that a server holds, replaced by a remote one, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gemmwire.client import Client
from gemmwire.errors import InvalidArgument, WireError
from gemmwire.facts import LayerInfo

from .fused import parts_of
from .linear import RemoteLinear

Match = str | Callable[[str], str | None] | None


@dataclass(frozen=True)
class Left:
    """A linear layer that stayed, and why."""

    name: str
    reason: str


@dataclass(eq=False)
class Replaced:
    """What `replace_linears` did: `layers` by module and what it has become there, and what it `left`.

    As a context manager it puts the originals back at the end of the block.
    """

    model: nn.Module
    layers: dict[str, str]
    left: tuple[Left, ...]
    _originals: dict[str, nn.Module] = field(repr=False, default_factory=dict)

    def restore(self) -> None:
        """Put the originals back where they stood."""
        for name, module in self._originals.items():
            _put(self.model, name, module)
        self._originals.clear()

    def __enter__(self) -> Replaced:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} linear layers are remote, {len(self.left)} are not"]
        lines += [f"  {name} -> {layer}" for name, layer in self.layers.items()]
        lines += [f"  {each.name} stays: {each.reason}" for each in self.left]
        return "\n".join(lines)


def replace_linears(model: nn.Module, client: Client, match: Match = None) -> Replaced:
    """Replace each `nn.Linear` in `model` that the client's server holds by a `RemoteLinear`.

    `match` finds the layer of a module: the name under which the checkpoint is served ("demo" for
    "demo.encoder.q"), or a function from the module's name in `model` to the layer's, None for one that shall
    stay. Without it the layer is the one whose name ends with the module's.

    Where the server has fused neighbours (q, k and v into one layer), each of them becomes a `RemotePart` and
    takes its columns of one answer. A module that stands at several places is replaced at each. A subclass of
    `nn.Linear` stays, since it may do something else, and so does the model itself if it is one.

    Errors, before anything is replaced: `InvalidArgument` where the shape or the bias of a layer is another,
    or several layers fit a module; those of `Client.layers`.
    """
    plan = _Plan(client, _Names(client.layers(), match))
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            plan.add(name, module)
    plan.refuse_misfits()
    # All of them before the first is replaced: a module that stands at two places is found there twice.
    originals = {name: model.get_submodule(name) for name in plan.found}
    for name, (_, remote) in plan.found.items():
        _put(model, name, remote)
    layers = {name: layer for name, (layer, _) in plan.found.items()}
    return Replaced(model, layers, tuple(plan.left), originals)


class _Names:
    """From modules to layers."""

    def __init__(self, layers: list[LayerInfo], match: Match) -> None:
        self._match = match
        self.layers = {layer.name: layer for layer in layers}

    def of(self, module: str) -> str | None:
        """The name that the module's layer has, whether or not there is one of it.

        Errors: `InvalidArgument` where several fit.
        """
        if callable(self._match):
            return self._match(module)
        if self._match is not None:
            return f"{self._match}.{module}"
        fitting = [name for name in self.layers if name == module or name.endswith("." + module)]
        if len(fitting) > 1:
            raise InvalidArgument(
                f"Module {module!r} could be any of {fitting[:5]}; say which checkpoint is meant: match="
                f"{fitting[0][: -len(module) - 1]!r}"
            )
        return fitting[0] if fitting else self._beside(module)

    def _beside(self, module: str) -> str | None:
        """The name that a part of a fused layer would have: that of the layer's module, with its own."""
        parent, _, last = module.rpartition(".")
        modules = {name.rpartition(".")[0] for name in self.layers}
        fitting = [name for name in modules if name == parent or name.endswith("." + parent)]
        return f"{fitting[0]}.{last}" if len(fitting) == 1 and parent else None


class _Plan:
    """What becomes of each linear of a model."""

    def __init__(self, client: Client, names: _Names) -> None:
        self._client = client
        self._names = names
        self._remote: dict[str, nn.Module] = {}  # by layer, or by layer and part
        self._fused: dict[str, dict[str, str]] = {}  # by module: the fused layer of each part
        self._misfits: list[str] = []
        self.found: dict[str, tuple[str, nn.Module]] = {}  # by module
        self.left: list[Left] = []

    def add(self, name: str, module: nn.Linear) -> None:
        if not name:
            self._leave(name, "it is the model itself: use a RemoteLinear in its place")
        elif type(module) is not nn.Linear:
            self._leave(name, f"it is a {type(module).__name__}, which may do more than nn.Linear")
        else:
            self._find(name, module)

    def refuse_misfits(self) -> None:
        if self._misfits:
            raise InvalidArgument(
                "Nothing was replaced, because the server's layers are others: "
                + "; ".join(self._misfits[:8])
            )

    def _find(self, name: str, module: nn.Linear) -> None:
        layer = self._names.of(name)
        if layer is None:
            self._leave(name, "no layer of the server is meant by it")
        elif layer in self._names.layers:
            info = self._names.layers[layer]
            self._check(name, module, layer, info.n, info.k, info.bias)
            self.found[name] = (layer, self._remote.setdefault(layer, _remote(self._client, info)))
        elif (fused := self._fused_layer(layer)) is not None:
            info = self._names.layers[fused]
            part = self._remote[layer]
            self._check(name, module, layer, getattr(part, "out_features", 0), info.k, info.bias)
            self.found[name] = (f"{layer} in {fused}", part)
        else:
            self._leave(name, f"the server has no layer {layer!r}")

    def _fused_layer(self, layer: str) -> str | None:
        """The fused layer that `layer` is a part of; its parts are then in `_remote`."""
        module = layer.rpartition(".")[0]
        if module not in self._fused:
            self._fused[module] = dict(self._parts_in(module))
        return self._fused[module].get(layer)

    def _parts_in(self, module: str) -> Iterator[tuple[str, str]]:
        """(part, fused layer) of each fused layer that stands in a module."""
        for fused, info in self._names.layers.items():
            if fused.rpartition(".")[0] != module:
                continue
            columns = _columns(self._client.layer(fused))
            for part, remote in parts_of(_remote(self._client, info), columns).items():
                self._remote[f"{module}.{part}"] = remote
                yield f"{module}.{part}", fused

    def _check(self, name: str, module: nn.Linear, layer: str, n: int, k: int, bias: bool | None) -> None:
        ours = (module.out_features, module.in_features, module.bias is not None)
        if ours != (n, k, ours[2] if bias is None else bias):
            self._misfits.append(
                f"module {name!r} has N={ours[0]}, K={ours[1]}, {_with(ours[2])}, layer {layer!r} has N={n}, "
                f"K={k}, {_with(bias)}"
            )

    def _leave(self, name: str, reason: str) -> None:
        self.left.append(Left(name, reason))


def _columns(info: LayerInfo) -> dict[str, tuple[int, int]]:
    """Of each part of a fused layer. Errors: `WireError`."""
    parts: Any = info.config.get("parts") or ()
    try:
        return {str(part["name"]): (int(part["start"]), int(part["stop"])) for part in parts}
    except (TypeError, KeyError, ValueError):
        raise WireError(
            "answer_invalid", f"The parts of layer {info.name!r} cannot be read: {parts!r:.200}"
        ) from None


def _remote(client: Client, info: LayerInfo) -> RemoteLinear:
    return RemoteLinear(client, info.name, in_features=info.k, out_features=info.n, bias=info.bias)


def _with(bias: bool | None) -> str:
    return "a bias" if bias else "no bias"


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
