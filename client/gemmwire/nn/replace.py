"""Every linear layer of a model that a server holds, replaced by a remote one, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from gemmwire.client import Client
from gemmwire.errors import InvalidArgument
from gemmwire.facts import LayerInfo
from gemmwire.replies import columns_of

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
    stay. Without it, it is the name under which the server has the most of the model's linears.

    Where the server has fused neighbours (q, k and v into one layer), each of them becomes a `RemotePart` and
    takes its columns of one answer. A module that stands at several places is replaced at each. A subclass of
    `nn.Linear` stays, since it may do something else, and so do one with forward hooks, which would be lost,
    and the model itself if it is one.

    Errors, before anything is replaced: `InvalidArgument` where the shape or the bias of a layer is another,
    two checkpoints fit equally well, or `match` is a name that the server has none of the linears by; those
    of `Client.layers`.
    """
    named = model.named_modules(remove_duplicate=False)
    linears = {name: module for name, module in named if isinstance(module, nn.Linear)}
    layers = {layer.name: layer for layer in client.layers()}
    plan = _Plan(client, layers, _served_as(layers, linears) if match is None else match)
    for name, module in linears.items():
        plan.add(name, module)
    plan.refuse_misfits()
    if isinstance(match, str):
        plan.refuse_strangers()
    # All of them before the first is replaced: a module that stands at two places is found there twice.
    originals = {name: model.get_submodule(name) for name in plan.found}
    for name, (_, remote) in plan.found.items():
        _put(model, name, remote)
    made = {name: layer for name, (layer, _) in plan.found.items()}
    return Replaced(model, made, tuple(plan.left), originals)


def _served_as(layers: Iterable[str], modules: Iterable[str]) -> str:
    """The name in front of the layers, as "demo" of "demo.encoder.q", that fits the most modules.

    One name for all, because a module "fc" by itself is the end of many a layer's name. Where q, k and v are
    fused there is no layer of a module's own name, but one beside it.
    Errors: `InvalidArgument` where two fit as many.
    """
    fitting: Counter[str] = Counter()
    for module in filter(None, modules):
        own = {_in_front_of(module, layer) for layer in layers}
        parent = module.rpartition(".")[0]
        beside = {_in_front_of(parent, layer.rpartition(".")[0]) for layer in layers if parent}
        fitting.update({name for name in own | beside if name is not None})
    most = max(fitting.values(), default=0)
    best = sorted(name for name, count in fitting.items() if count == most)
    if len(best) > 1:
        several = " or of ".join(map(repr, best[:4]))
        raise InvalidArgument(
            f"The model's linears could be those of {several}; say which is meant: match={best[0]!r}"
        )
    return best[0] if best else ""


def _in_front_of(module: str, layer: str) -> str | None:
    """What stands before a module's name in a layer's; None where the layer does not end with it."""
    if layer == module:
        return ""
    return layer[: -len(module) - 1] if layer.endswith("." + module) else None


class _Plan:
    """What becomes of each linear of a model."""

    def __init__(
        self, client: Client, layers: Mapping[str, LayerInfo], match: str | Callable[[str], str | None]
    ) -> None:
        self._client = client
        self._layers = layers
        self._match = match
        self._remote: dict[str, nn.Module] = {}  # by layer, or by layer and part
        self._fused: dict[str, dict[str, str]] = {}  # by module: the fused layer of each part
        self._misfits: list[str] = []
        self.found: dict[str, tuple[str, nn.Module]] = {}  # by module
        self.left: list[Left] = []
        self.absent: list[str] = []  # layers that the server lacks

    def add(self, name: str, module: nn.Linear) -> None:
        if not name:
            self._leave(name, "it is the model itself: use a RemoteLinear in its place")
        elif type(module) is not nn.Linear:
            self._leave(name, f"it is a {type(module).__name__}, which may do more than nn.Linear")
        elif module._forward_hooks or module._forward_pre_hooks:
            self._leave(name, "it has forward hooks, which would be lost with it: remove them first")
        else:
            self._find(name, module)

    def refuse_misfits(self) -> None:
        if self._misfits:
            raise InvalidArgument(
                "Nothing was replaced, because the server's layers are others: "
                + "; ".join(self._misfits[:8])
            )

    def refuse_strangers(self) -> None:
        """Where the server has none of the layers by the name that was given."""
        if self.absent and len(self.absent) == len(self.left) and not self.found:
            served = ", ".join(sorted({name.partition(".")[0] for name in self._layers})[:8]) or "nothing"
            raise InvalidArgument(
                f"Nothing was replaced: match is {self._match!r}, and the server has no layer "
                f"{self.absent[0]!r} nor any other of the model's; its names begin with {served}. Serve the "
                f"checkpoint by this name (--model {self._match}=PATH), or pass the one that it has"
            )

    def _find(self, name: str, module: nn.Linear) -> None:
        layer = self._layer_of(name)
        if layer is None:
            self._leave(name, "no layer of the server is meant by it")
        elif layer in self._layers:
            info = self._layers[layer]
            self._check(name, module, layer, info.n, info.k, info.bias)
            self.found[name] = (layer, self._remote.setdefault(layer, _remote(self._client, info)))
        elif (fused := self._fused_layer(layer)) is not None:
            info = self._layers[fused]
            part = self._remote[layer]
            self._check(name, module, layer, getattr(part, "out_features", 0), info.k, info.bias)
            self.found[name] = (f"{layer} in {fused}", part)
        else:
            self.absent.append(layer)
            self._leave(name, f"the server has no layer {layer!r}")

    def _layer_of(self, module: str) -> str | None:
        """The name that its layer has to have, whether or not there is one of it."""
        if callable(self._match):
            return self._match(module)
        return f"{self._match}.{module}" if self._match else module

    def _fused_layer(self, layer: str) -> str | None:
        """The fused layer that `layer` is a part of; its parts are then in `_remote`."""
        module = layer.rpartition(".")[0]
        if module not in self._fused:
            self._fused[module] = dict(self._parts_in(module))
        return self._fused[module].get(layer)

    def _parts_in(self, module: str) -> Iterator[tuple[str, str]]:
        """(part, fused layer) of each fused layer that stands in a module."""
        for fused, info in self._layers.items():
            if fused.rpartition(".")[0] != module:
                continue
            columns = columns_of(self._client.layer(fused))
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


def _remote(client: Client, info: LayerInfo) -> RemoteLinear:
    return RemoteLinear(client, info.name, in_features=info.k, out_features=info.n, bias=info.bias)


def _with(bias: bool | None) -> str:
    return "a bias" if bias else "no bias"


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
