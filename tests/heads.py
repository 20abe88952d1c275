"""Trained parts as others release them: random tensors, their files, and written formulas of their
layers."""
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from common import FAR


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()


def rotate(x: torch.Tensor, base: float, factor: float) -> torch.Tensor:
    """Turn [n, heads, d] by rotary positions 0, 1, …, which a linear scaling divides."""
    n, _, d = x.shape
    angles = torch.arange(n)[:, None] / factor * base ** (-torch.arange(0, d, 2) / d)
    cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1) * sin


def attend(w: dict, layer: str, x: torch.Tensor, config: dict, before: torch.Tensor | None = None,
           sees: tuple = (0, FAR)) -> torch.Tensor:
    """Compute attention of a chain of rows [n, ·] with 4 heads.

    before   rows that are only seen, which stand before x in the chain
    sees     low, high: a row sees low to high - 1 places back
    """
    base, size = config.get("rope_theta") or 10000.0, len(w[f"{layer}q_proj.weight"]) // 4
    factor = (config.get("rope_scaling") or {"factor": 1.0})["factor"]
    rows = x if before is None else torch.cat([before, x])
    q, k, v = ((rows @ w[f"{layer}{name}_proj.weight"].T
                + w.get(f"{layer}{name}_proj.bias", 0)).view(len(rows), -1, size) for name in "qkv")
    if f"{layer}q_norm.weight" in w:
        q, k = norm(q, w[f"{layer}q_norm.weight"]), norm(k, w[f"{layer}k_norm.weight"])
    q, k = rotate(q, base, factor), rotate(k, base, factor)
    back = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
    out = F.scaled_dot_product_attention(*(y.transpose(0, 1) for y in (q, k, v)), enable_gqa=True,
                                         attn_mask=(sees[0] <= back) & (back < sees[1]))
    out = out.transpose(0, 1)[-len(x):].reshape(len(x), -1)
    return out @ w[f"{layer}o_proj.weight"].T + w.get(f"{layer}o_proj.bias", 0)


def run_layer(w: dict, layer: str, x: torch.Tensor, residual: torch.Tensor, config: dict,
              *more) -> torch.Tensor:
    """Compute a layer whose attention reads x and adds its output to `residual`.

    more   further arguments of `attend`
    """
    x = residual + attend(w, f"{layer}self_attn.", x, config, *more)
    y = norm(x, w[f"{layer}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    act = getattr(F, config.get("hidden_act", "silu"))
    return x + (act(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T


def draw(shapes: dict, seed: int = 0) -> dict:
    """Draw tensors: matrices that keep the size of what they read, and norms near 1."""
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) / shape[-1] ** 0.5 if len(shape) == 2 else
            (0.0 if name.endswith("bias") else 1.0) + 0.3 * torch.randn(shape, generator=rng)
            for name, shape in shapes.items()}


def write(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> str:
    """Write a head as others release it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")  # as Windows does
    if file.endswith("safetensors"):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)
