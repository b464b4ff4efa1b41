"""Rows of x that reach the linear layers of a model, recorded for `gemmwire-serve accuracy --calibrate`.

>>> with capture(model, 256) as captured:
...     for batch in batches:
...         model(batch)
>>> captured.save("activations.safetensors")
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from gemmwire.errors import InvalidArgument
from gemmwire.safetensors import header

_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

Name = Callable[[str], str | None]


def capture(
    model: nn.Module,
    n: int = 256,
    *,
    name: Name | None = None,
    kinds: tuple[type[nn.Module], ...] = (nn.Linear,),
    seed: int = 0,
) -> Captured:
    """Records up to `n` rows of x for each module of `kinds` in `model`, from now until the block ends.

    The rows are a uniform sample of all that a module answers, over all calls and all leading dimensions of
    x [..., K], drawn with `seed` (reservoir sampling): the same calls give the same rows. They have the dtype
    of x, BF16, FP16 or FP32; FP64 becomes FP32. They are kept on the CPU, n * K elements a module; nothing of
    autograd is, and the model answers as without.

    A layer is named as its module is in `model`, which is how a checkpoint of the model names it; a module
    that stands at several places has its rows under each of their names. `name` maps a module's name to the
    layer's where the checkpoint has others, None for one that is to be left out. Of a model that goes through
    `torch.compile`, capture before that: compiled code does not see what is added to a module later.

    Errors: InvalidArgument where n is below 1, where there is no module to record, two get one name, or a
    module is compiled already.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidArgument(f"n is {n!r}; it must be a whole number of rows, at least 1")
    return Captured(_targets(model, kinds, name), n, seed)


class Captured:
    """What was recorded; a context manager that records until its end, also where that is an exception."""

    def __init__(self, targets: Mapping[str, nn.Module], n: int, seed: int) -> None:
        self._reservoirs: dict[nn.Module, _Reservoir] = {}
        for name, module in targets.items():
            self._reservoirs.setdefault(module, _Reservoir(name, n, seed))
        self._by_name = {name: self._reservoirs[module] for name, module in targets.items()}
        self._hooks: list[Any] = []

    def __enter__(self) -> Captured:
        if self._hooks:
            raise InvalidArgument("This capture records already; open each block once")
        for module, reservoir in self._reservoirs.items():
            self._hooks.append(module.register_forward_hook(reservoir.hook, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def rows(self) -> dict[str, Tensor]:
        """x [rows, K] of each layer that was called, by name: what `save` writes."""
        found = {name: reservoir.rows for name, reservoir in self._by_name.items()}
        return {name: rows for name, rows in found.items() if rows is not None}

    @property
    def seen(self) -> dict[str, int]:
        """How many rows each layer was called with; 0 for one that was not called."""
        return {name: reservoir.seen for name, reservoir in self._by_name.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to a safetensors file, which is there when it is complete and not before.

        Errors: InvalidArgument where nothing was recorded; OSError.
        """
        rows = self.rows
        if not rows:
            raise InvalidArgument(
                f"None of the {len(self._by_name)} layers was called while rows were recorded; run the model "
                "inside the block: with capture(model, n) as captured: model(x)"
            )
        _write(Path(path), rows)

    def __str__(self) -> str:
        rows = self.rows
        idle = [name for name in self._by_name if name not in rows]
        lines = [f"rows of {len(rows)} layers are recorded, {len(idle)} were not called"]
        lines += [f"  {name}: {len(kept)} of {self.seen[name]} rows" for name, kept in rows.items()]
        return "\n".join([*lines, *(f"  {name} was not called" for name in idle)])


class _Reservoir:
    """A uniform sample of the rows of one module (Vitter's algorithm R)."""

    def __init__(self, name: str, n: int, seed: int) -> None:
        self._name, self._n = name, n
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()  # replicas of a module run in threads of their own
        self._kept: Tensor | None = None
        self.seen = 0

    @property
    def rows(self) -> Tensor | None:
        return None if self._kept is None else self._kept[: self.seen]

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        # After the forward: what it refused is not recorded.
        x = args[0] if args else kwargs.get("input")
        # What torch.export traces with, and a model on the meta device, has no numbers.
        if not isinstance(x, Tensor) or x.is_meta or isinstance(x, FakeTensor):
            return
        if x.ndim and x.numel() and x.is_floating_point():
            # Outside inference mode, or what is kept could not be written to by a call that is not in it.
            with torch.inference_mode(False), torch.no_grad(), self._lock:
                self._take(x.detach().reshape(-1, x.shape[-1]))

    def _take(self, x: Tensor) -> None:
        places = self._places(len(x))
        if not places:
            return
        rows = x[torch.tensor(list(places.values()), device=x.device)].cpu()
        rows = rows if rows.dtype in _DTYPES else rows.float()
        kept = self._room(rows)
        kept[torch.tensor(list(places))] = rows.to(kept.dtype)

    def _places(self, count: int) -> dict[int, int]:
        """Place in the sample -> which of `count` new rows takes it; the last one that was drawn for it."""
        first = self.seen
        self.seen += count
        fill = max(0, min(count, self._n - first))
        places = {first + row: row for row in range(fill)}
        # Row number t (from 0) takes a random place out of t + 1, if that is one of the first n.
        drawn = torch.rand(count - fill, dtype=torch.float64, generator=self._generator)
        drawn = (drawn * torch.arange(first + fill + 1, first + count + 1)).long()
        for row in (drawn < self._n).nonzero().flatten().tolist():
            places[int(drawn[row])] = fill + row
        return places

    def _room(self, rows: Tensor) -> Tensor:
        """What is kept, in a dtype that holds the new rows too, with room for all that were seen, up to n."""
        kept = self._kept
        if kept is None:
            kept = rows.new_zeros(0, rows.shape[1])
        elif kept.shape[1] != rows.shape[1]:
            raise InvalidArgument(
                f"Module {self._name!r} was called with K={kept.shape[1]} and now with K={rows.shape[1]}: it "
                "is no linear layer of one size; leave it out, with name=... or kinds=..."
            )
        kept = kept.to(torch.promote_types(kept.dtype, rows.dtype))
        if len(kept) < min(self._n, self.seen):
            room = min(self._n, max(self.seen, 2 * len(kept)))
            kept = torch.cat([kept, kept.new_zeros(room - len(kept), kept.shape[1])])
        self._kept = kept
        return kept


def _targets(model: nn.Module, kinds: tuple[type[nn.Module], ...], name: Name | None) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        _refuse_compiled(path, module)
        layer = path if name is None else name(path)
        if not isinstance(module, kinds) or layer is None:
            continue
        if not layer:
            raise InvalidArgument(
                "The model is itself a linear layer and has no name; give it one: name=lambda _: 'proj'"
            )
        if layer in found:
            raise InvalidArgument(f"Two modules are named {layer!r}; give each layer a name of its own")
        found[layer] = module
    if not found:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidArgument(
            f"{type(model).__name__} has no {wanted} to record; name the class that it has with kinds=(...,)"
        )
    return found


def _refuse_compiled(path: str, module: nn.Module) -> None:
    if hasattr(module, "_orig_mod"):
        what = f"Module {path!r}" if path else "The model"
        raise InvalidArgument(
            f"{what} has been compiled, and what is compiled does not see that it is recorded; record before "
            "torch.compile, or give and call the module that it was made of (its _orig_mod)"
        )


def _write(path: Path, rows: Mapping[str, Tensor]) -> None:
    entries = [
        (name, _DTYPES[x.dtype], tuple(x.shape), x.numel() * x.element_size())
        for name, x in sorted(rows.items(), key=lambda item: -item[1].element_size())
    ]
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.writelines([header(entries), *_bytes(rows[name] for name, *_ in entries)])
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _bytes(tensors: Iterable[Tensor]) -> Iterable[memoryview]:
    return (x.contiguous().view(-1).view(torch.uint8).numpy().data for x in tensors)
