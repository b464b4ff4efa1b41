"""glassllm's model in PyTorch: its weights as `nn.Linear` under the names that a checkpoint of it has."""

from __future__ import annotations

import torch
from glassllm import load_pretrained
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, groups: int, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        self.size = d // heads
        self.cos, self.sin = cos, sin
        self.W_Q, self.W_O = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.W_K, self.W_V = (nn.Linear(d, groups * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.size)).transpose(-2, -3) for w in (self.W_Q, self.W_K, self.W_V)
        )
        repeats = q.shape[-3] // k.shape[-3]
        k, v = (each.repeat_interleave(repeats, dim=-3) for each in (self.rope(k), v))
        y = scaled_dot_product_attention(self.rope(q), k, v, is_causal=True)
        out: Tensor = self.W_O(y.transpose(-2, -3).flatten(-2))
        return out

    def rope(self, x: Tensor) -> Tensor:
        """Neighbours are the pair that is turned."""
        cos, sin = (each[: x.shape[-2]].to(x.dtype) for each in (self.cos, self.sin))
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.W1, self.W3 = (nn.Linear(d, hidden, bias=False) for _ in range(2))
        self.W2 = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.W2(silu(self.W1(x)) * self.W3(x))
        return y


class Block(nn.Module):
    def __init__(self, d: int, attention: Attention, feed_forward: FeedForward, eps: float) -> None:
        super().__init__()
        self.attn, self.ffn, self.eps = attention, feed_forward, eps
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(d)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(rms_norm(x, x.shape[-1:], self.norm1, self.eps))
        y: Tensor = x + self.ffn(rms_norm(x, x.shape[-1:], self.norm2, self.eps))
        return y


class Glass(nn.Module):
    """Token ids [..., T] -> logits [..., T, vocabulary], with the weights of the installed package."""

    def __init__(self, language: str = "en") -> None:
        super().__init__()
        theirs, self.tokenizer = load_pretrained(language)
        cfg, weights = theirs.cfg, theirs.named_parameters()
        cos, sin = (torch.from_numpy(getattr(theirs.blocks[0].attn, name)) for name in ("cos", "sin"))
        self.eps, hidden = cfg.eps, weights["blocks.0.ffn.W1"].shape[1]
        self.blocks = nn.Sequential(
            *(
                Block(
                    cfg.d_model,
                    Attention(cfg.d_model, cfg.n_heads, cfg.n_kv_heads, cos, sin),
                    FeedForward(cfg.d_model, hidden),
                    cfg.eps,
                )
                for _ in range(cfg.n_layers)
            )
        )
        self.norm_f = nn.Parameter(torch.ones(cfg.d_model))
        self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        self.load_state_dict({_name(name): _value(name, each.data) for name, each in weights.items()})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(embedding(ids, self.lm_head.weight))
        y: Tensor = self.lm_head(rms_norm(x, x.shape[-1:], self.norm_f, self.eps))
        return y


def _name(theirs: str) -> str:
    if theirs == "E":
        return "lm_head.weight"
    return theirs.removesuffix(".gamma") if theirs.endswith(".gamma") else f"{theirs}.weight"


def _value(theirs: str, array: object) -> Tensor:
    """Their weights are [in, out]."""
    value = torch.as_tensor(array)
    return value.T.contiguous() if value.ndim == 2 and theirs != "E" else value
