"""Trained parts as others release them: random tensors, their files, and written formulas of their
layers."""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from common import InputError


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()


def rotate(x: torch.Tensor, base: float, factor: float) -> torch.Tensor:
    """Turn [n, heads, d] by rotary positions 0, 1, …, which a linear scaling divides."""
    n, _, d = x.shape
    angles = torch.arange(n)[:, None] / factor * base ** (-torch.arange(0, d, 2) / d)
    cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1) * sin


def attend(w: dict, layer: str, x: torch.Tensor, config: dict) -> torch.Tensor:
    """Compute causal attention of a chain of rows [n, ·] with 4 heads."""
    base, size = config.get("rope_theta") or 10000.0, len(w[f"{layer}q_proj.weight"]) // 4
    factor = (config.get("rope_scaling") or {"factor": 1.0})["factor"]
    q, k, v = ((x @ w[f"{layer}{name}_proj.weight"].T
                + w.get(f"{layer}{name}_proj.bias", 0)).view(len(x), -1, size) for name in "qkv")
    q, k = rotate(q, base, factor), rotate(k, base, factor)
    out = F.scaled_dot_product_attention(*(y.transpose(0, 1) for y in (q, k, v)), is_causal=True,
                                         enable_gqa=True).transpose(0, 1).reshape(len(x), -1)
    return out @ w[f"{layer}o_proj.weight"].T + w.get(f"{layer}o_proj.bias", 0)


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


def check_refused(folder: Path, kind: SimpleNamespace, model, changes: dict, said: str) -> None:
    """Load a head of a kind with changes in its tensors or its configuration."""
    config, tensors = dict(kind.config), kind.tensors()
    for key, value in changes.items():
        (tensors if value is None or torch.is_tensor(value) else config)[key] = value
    tensors = {key: x for key, x in tensors.items() if x is not None}
    with pytest.raises(InputError, match=said) as error:
        kind.load(write(folder, config, tensors), model)
    assert "\n" not in str(error.value)
