"""Every linear of a model on a server, and back."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gemmwire import Client, InvalidArgument
from gemmwire.nn import RemoteLinear, RemotePart, Replaced, replace_linears
from oracle import assert_rows_close, sparse
from serving import Served, serving, settings

D, F = 64, 96


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, n) for n in (D, 32, 32))
        self.o_proj = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        heads = torch.cat([torch.tanh(q / 64)[..., :32] * k, v], dim=-1)
        y: Tensor = self.o_proj(heads / 64)
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.gate_proj = nn.Linear(D, F, bias=False)
        self.up_proj = nn.Linear(D, F, bias=False)
        self.down_proj = nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(x + self.attn(x), (D,))
        y: Tensor = self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x) / 64)
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(D, 16)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                rows = parameter.view(len(parameter), -1)
                rows.copy_(sparse(len(rows), rows.shape[1], generator))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(dict(Model().state_dict()), path)
    return path


@pytest.fixture(scope="module", params=[(), ("qkv", "gate_up")], ids=["plain", "fused"])
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(settings(model=(f"m={folder}",), fuse=request.param)) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as made:
        yield made


@pytest.fixture
def fused(served: Served) -> bool:
    return "m.blocks.0.attn.qkv_proj" in served.engine.layers


@pytest.fixture
def model() -> Model:
    return Model().eval().requires_grad_(False)


def attention_of(model: nn.Module, block: int) -> Any:
    return model.get_submodule(f"blocks.{block}.attn")


# Of each part: the fused layer, and its columns.
PARTS = {
    "q_proj": ("qkv_proj", 0, D),
    "k_proj": ("qkv_proj", D, D + 32),
    "v_proj": ("qkv_proj", D + 32, D + 64),
    "gate_proj": ("gate_up_proj", 0, F),
    "up_proj": ("gate_up_proj", F, 2 * F),
}


class Direct(nn.Module):
    """One linear by a call of the client, as a reader of the pages would write it."""

    def __init__(self, client: Client, name: str, fused: bool) -> None:
        super().__init__()
        module, _, last = f"m.{name}".rpartition(".")
        layer, start, stop = PARTS[last] if fused and last in PARTS else (last, None, None)
        self.columns = slice(start, stop)
        self.ask: Callable[[Tensor], Tensor] = lambda x: client.infer(f"{module}.{layer}", x)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ask(x)[..., self.columns]
        return y


def directly(client: Client, fused: bool) -> Tensor:
    """What the model answers with each linear asked for by itself."""
    model = Model().eval().requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Direct(client, name, fused))
    y: Tensor = model(rows())
    return y


def requests(client: Client) -> int:
    return sum(client.stats(layer.name)["inference_stats"]["success"]["count"] for layer in client.layers())


def rows(m: int = 5) -> Tensor:
    return sparse(m, D, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("match", [None, "m", lambda name: f"m.{name}"], ids=["found", "prefix", "function"])
def test_every_linear_is_replaced_and_put_back(
    client: Client, model: Model, fused: bool, match: object
) -> None:
    """Guards: a layer that stays local unnoticed, and one that is remote for ever."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = model(rows())
    replaced = replace_linears(model, client, match)  # type: ignore[arg-type]
    assert set(replaced.layers) == set(linears)
    assert replaced.left == ()
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert list(model.state_dict()) == []
    assert torch.equal(model(rows()), directly(client, fused))

    replaced.restore()
    assert {name: model.get_submodule(name) for name in linears} == linears
    assert torch.equal(model(rows()), expected)


def test_the_parts_of_a_fused_layer_are_one_request(client: Client, model: Model, fused: bool) -> None:
    """Guards: q, k and v computed three times over."""
    replace_linears(model, client)
    model(rows())
    before = requests(client)
    model(rows())
    assert requests(client) - before == 2 * (4 if fused else 7) + 1
    kinds = {type(model.get_submodule(f"blocks.0.attn.{name}_proj")) for name in "qkv"}
    assert kinds == {RemotePart if fused else RemoteLinear}


def test_each_part_has_its_own_numbers(client: Client, model: Model) -> None:
    """Guards: the columns of k taken for those of q."""
    expected = {
        name: getattr(attention_of(model, 1), name)(rows()) for name in ("q_proj", "k_proj", "v_proj")
    }
    replace_linears(model, client)
    attention = attention_of(model, 1)
    for name in ("v_proj", "q_proj", "k_proj"):
        part = getattr(attention, name)
        assert part.in_features == D
        assert part.out_features == expected[name].shape[-1]
        y = part(rows())
        assert y.is_contiguous()
        assert_rows_close(y, expected[name].double(), tolerance=2.0**-4)


def test_another_x_or_a_changed_one_is_asked_for_anew(client: Client, model: Model) -> None:
    """Guards: k of the x before, in cross attention or after a write in place."""
    replace_linears(model, client)
    attention = attention_of(model, 0)
    x = rows()
    q = attention.q_proj(x)
    other = rows() * 2
    assert not torch.equal(attention.k_proj(other), attention.k_proj(x))
    before = attention.k_proj(x)
    attention.q_proj(x)
    x.mul_(2)
    assert torch.equal(attention.k_proj(x), attention.k_proj(other))
    assert not torch.equal(attention.k_proj(x), before)
    assert not torch.equal(attention.q_proj(x), q)


def test_threads_share_a_model(client: Client, model: Model) -> None:
    """Guards: the v of another thread's x."""
    replace_linears(model, client)
    xs = [rows() * (i + 1) for i in range(6)]
    expected = [model(x) for x in xs]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(8) if not torch.equal(model(xs[i]), expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_copy_of_a_replaced_model_answers_alike(client: Client, model: Model) -> None:
    replace_linears(model, client)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(rows()), model(rows()))
    assert attention_of(twin, 0).q_proj is not attention_of(model, 0).q_proj


def test_a_replaced_model_compiles_whole(client: Client, model: Model) -> None:
    """Guards: a graph break at the first remote layer, and a part that is cut from another x."""
    replace_linears(model, client)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for factor in (1, 3):
            assert torch.equal(compiled(rows() * factor), model(rows() * factor))


def test_a_block_ends_with_the_originals(client: Client, model: Model) -> None:
    expected = model(rows())
    with replace_linears(model, client) as replaced:
        assert isinstance(model.head, RemoteLinear)
        assert isinstance(replaced, Replaced)
    assert torch.equal(model(rows()), expected)


def test_what_stays_is_told_with_its_reason(client: Client, model: Model) -> None:
    """Guards: a multi-head attention whose out_proj has lost the weight that it reads itself."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model.get_submodule("blocks.0").down_proj = Scaled(F, D, bias=False)
    model.extra = nn.Linear(D, D)
    model.attention = nn.MultiheadAttention(D, 2)
    replaced = replace_linears(model, client, lambda name: None if name == "head" else f"m.{name}")
    reasons = {left.name: left.reason for left in replaced.left}
    assert set(reasons) == {"blocks.0.down_proj", "extra", "attention.out_proj", "head"}
    assert "Scaled" in reasons["blocks.0.down_proj"]
    assert reasons["extra"] == "the server has no layer 'm.extra'"
    assert reasons["head"] == "no layer of the server is meant by it"
    assert str(replaced).startswith("13 linear layers are remote, 4 are not\n")
    assert isinstance(model.head, nn.Linear)


def test_a_linear_with_hooks_stays(client: Client, model: Model) -> None:
    """Guards: a hook that is no longer called, and nobody says so."""
    handle = model.head.register_forward_hook(lambda module, given, y: y * 0)
    replaced = replace_linears(model, client)
    assert [(left.name, left.reason[:22]) for left in replaced.left] == [("head", "it has forward hooks, ")]
    assert not model(rows()).any()
    handle.remove()


@pytest.mark.parametrize(
    ("name", "linear", "words"),
    [
        pytest.param("head", nn.Linear(D, 17), "N=17, K=64, a bias, layer 'm.head' has N=16", id="n"),
        pytest.param("head", nn.Linear(D, 16, bias=False), "no bias, layer", id="bias"),
        pytest.param("up_proj", nn.Linear(D + 1, F, bias=False), "K=65", id="k"),
    ],
)
def test_another_shape_is_refused_before_anything_is_replaced(
    client: Client, model: Model, name: str, linear: nn.Linear, words: str
) -> None:
    """Guards: a model that is half of one checkpoint and half of another."""
    setattr(model if name == "head" else model.blocks[1], name, linear)
    with pytest.raises(InvalidArgument, match=words):
        replace_linears(model, client)
    assert not any(isinstance(module, (RemoteLinear, RemotePart)) for module in model.modules())


def test_a_module_at_two_places_is_replaced_at_both(client: Client, model: Model) -> None:
    """Guards: an original left at one of them, or put back at one of them only."""
    model.blocks[1] = model.blocks[0]
    expected = model(rows())
    replaced = replace_linears(model, client)
    assert attention_of(model, 0).o_proj is attention_of(model, 1).o_proj
    assert isinstance(attention_of(model, 1).o_proj, RemoteLinear)
    replaced.restore()
    assert torch.equal(model(rows()), expected)


def test_two_checkpoints_that_fit_have_to_be_told_apart(folder: Path, model: Model) -> None:
    with serving(settings(model=(f"a={folder}", f"b={folder}"))) as served, Client(served.url) as client:
        with pytest.raises(InvalidArgument, match=r"those of 'a' or of 'b'.*match='a'"):
            replace_linears(model, client)
        replaced = replace_linears(model, client, "b")
        assert set(replaced.layers.values()) == {f"b.{name}" for name in replaced.layers}


def test_a_layer_of_another_part_of_the_server_is_not_taken(client: Client, model: Model) -> None:
    """Guards: "o_proj" taken for the only layer whose name ends with it."""
    model.o_proj = nn.Linear(D, D)
    replaced = replace_linears(model, client)
    assert [(left.name, left.reason) for left in replaced.left] == [
        ("o_proj", "the server has no layer 'm.o_proj'")
    ]


def test_a_part_of_a_model_finds_its_layers(client: Client, model: Model) -> None:
    """Guards: a prefix that is expected to be a checkpoint's whole name."""
    replaced = replace_linears(model.blocks[1], client, "m.blocks.1")
    assert len(replaced.layers) == 7
    assert replace_linears(nn.Sequential(nn.ReLU()), client).layers == {}
    stranger = replace_linears(nn.ModuleDict({"stranger": nn.Linear(3, 3)}), client)
    assert [left.reason for left in stranger.left] == ["the server has no layer 'stranger'"]


def test_a_name_that_nothing_is_served_by_is_refused(client: Client, model: Model) -> None:
    """Guards: a misspelt name, after which everything runs here and looks right."""
    words = r"match is 'n', .* no layer 'n\.blocks.*; its names begin with m\. .*--model n=PATH"
    with pytest.raises(InvalidArgument, match=words):
        replace_linears(model, client, "n")
