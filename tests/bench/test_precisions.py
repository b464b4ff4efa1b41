"""The precisions of bench/fidelity: each computes what its name says, and leaves the model as it was."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import frexp

import pytest
import torch
from fidelity import floor, precisions
from torch import nn

from edge_blocks import bf16_patterns, exponents, one_in_a_block
from gemmwire import Client
from gemmwire.nn import replace_linears
from gemmwire_service.mxfp8.format import dequantize
from oracle import assert_rows_close, assert_same_bits, reference, rounded_once, sparse, spread
from serving import Served


def test_the_floor_rule_of_every_finite_amax() -> None:
    """Guards: a logarithm that is rounded, and what lies above 1.75 * 2^e not clamped at 448."""
    amax = bf16_patterns()
    amax = amax[amax.isfinite()]
    codes, scales = floor.quantize(one_in_a_block(amax))
    wrong = [
        (value, got)
        for value, got in zip(amax.double().tolist(), scales[:, 0].tolist(), strict=True)
        if got != (max(0, frexp(value)[1] - 1 - 8 + 127) if value else 0)
    ]
    assert not wrong, wrong[:5]
    exponent, mantissa = exponents(amax)
    above = (exponent > 8) & (mantissa > 96)
    values = dequantize(codes, scales)[:, 7].abs()
    assert torch.equal(
        values[above], torch.ldexp(torch.full_like(values[above], 1.75), exponent[above] - 127)
    )
    assert int(above.sum()) == 2 * 246 * 31


def test_the_floor_rule_of_elements_by_exact_arithmetic() -> None:
    """Guards: a double rounding of elements on their way to E4M3."""
    x = spread(4, 64, seed=3)
    codes, scales = floor.quantize(x)
    found = dequantize(codes, scales, torch.float64)
    for row, k in itertools.product(range(4), range(64)):
        step = Fraction(2) ** (int(scales[row, k // 32]) - 127)
        exact = Fraction(x[row, k].item()) / step
        spacing = Fraction(2) ** (max(frexp(abs(float(exact)))[1] - 1, -6) - 3)
        nearest = round(exact / spacing) * spacing  # ties to even
        clamped = max(min(nearest, Fraction(448)), Fraction(-448))
        assert found[row, k].item() == clamped * step, (row, k)


def test_rounded_operands_are_summed_with_the_bias_and_rounded_once() -> None:
    """Guards: a bias that is added after the rounding, and an output of more bits than a server's."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(96, 16)
    linear.weight.data, linear.bias.data = sparse(16, 96, generator), sparse(1, 16, generator)[0]
    x = sparse(5, 96, generator)
    layer = precisions.Rounded(linear, precisions.to_mxfp8, precisions.to_mxfp8)
    exact = reference(x, linear.weight.detach(), linear.bias.detach())
    with torch.no_grad():
        assert_same_bits(layer(x), rounded_once(exact).float())


def test_a_ragged_k_is_padded() -> None:
    x = spread(3, 40, seed=1)
    assert precisions.to_mxfp8(x).shape == precisions.to_mxfp8_floor(x).shape == (3, 40)
    assert torch.equal(precisions.to_mxfp8(x)[:, :32], precisions.to_mxfp8(x[:, :32]))


def test_the_linears_are_back_afterwards() -> None:
    """Guards: a precision that the next one starts from, also after an error."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ModuleDict({"inner": nn.Linear(32, 8)}))
    before = dict(model.named_modules())

    def inside() -> None:
        with precisions.rounded(model, precisions.to_bf16, precisions.to_bf16):
            assert not any(type(module) is nn.Linear for module in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert dict(model.named_modules()) == before


def test_a_server_computes_what_the_other_rule_is_compared_with(server: Served) -> None:
    """Guards: a comparison of two rules that is one of two arithmetics, or of two layers: MXFP8 by the server
    is MXFP8 here, but for the last bit of BF16."""
    language = pytest.importorskip("fidelity.language")
    local, _ = language.load_pretrained("en")
    linears = language.Hosted(local).linears
    names = [name for name, module in linears.named_modules() if isinstance(module, nn.Linear)]
    assert len(names) == 29
    with Client(server.url) as client, torch.no_grad():
        for name in names:
            x = spread(4, linears.get_submodule(name).in_features, seed=len(name)) / 2**8
            with precisions.rounded(linears, precisions.to_mxfp8, precisions.to_mxfp8):
                here = linears.get_submodule(name)(x)
            with replace_linears(linears, client, "demo") as replaced:
                assert (len(replaced.layers), replaced.left) == (29, ())
                assert_rows_close(linears.get_submodule(name)(x), here.double())
