"""These functions write the layers of trained parts as formulas."""
import torch
import torch.nn.functional as F

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
