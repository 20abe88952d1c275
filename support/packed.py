"""This file packs the large weights of a model on a CPU, so that a call of several rows costs less.

PyTorch multiplies by a weight as it lies in memory. In float32 a call of 2 to 16 rows then takes up
to twice as long as a call of one row, though both read the same weight once. PyTorch also brings
the library oneDNN, which multiplies faster by a weight that lies in blocks of the size of its
loops. Packing puts the numbers of a weight into such blocks, once.

    rows of a call       1      2      4      8     16
    as PyTorch has it    1.0    1.6    1.7    1.7    2.0    of a call of one row (a model of
    packed               0.8    0.9    1.0    1.1    1.4    135M parameters, two cores with AVX2)

The blocks take the place of the weight, so no memory is needed twice. An LM head whose numbers are
the embeddings too is an exception, since embeddings cannot be looked up in blocks. And no blocks
can hold old numbers, since there are no others: a write to the weight changes the blocks, or fails.

This is about speed alone. The products are the same, up to rounding. Nothing is packed on a GPU, in
a type that oneDNN does not multiply on this CPU, and on other processors than x86, where nobody has
measured it.
"""
import platform

import torch
import torch.nn.functional as F
from torch.nn import Linear, Parameter

# Smaller weights stay in a core's caches. For them a call of oneDNN costs more than it saves.
LEAST = {torch.float32: 1 << 18, torch.bfloat16: 1 << 16, torch.float16: 1 << 16}  # numbers
OPS = torch.ops.mkldnn
ROWS = 8  # oneDNN chooses the size of its blocks for calls of so many rows


class Blocks(Parameter):
    """A weight in blocks, which only PackedLinear reads. A copy of it is an ordinary weight."""

    def __deepcopy__(self, memo: dict) -> Parameter:
        if id(self) not in memo:
            memo[id(self)] = Parameter(plain(self.data), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol) -> tuple:
        return Parameter, (plain(self.data), self.requires_grad)


class PackedLinear(Linear):
    """A linear layer whose weight may lie in blocks.

    It computes as an ordinary layer does where gradients are computed, under autocast, and once it
    was moved to a GPU or to another type.
    """

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what torch.nn.Linear computes: x [..., in] gives [..., out].

        torch.compile leaves this layer as it is, since it knows nothing of blocks.
        """
        if not self.weight.is_mkldnn:
            return super().forward(x)
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return F.linear(x, plain(self.weight), self.bias)
        rows = x.numel() // self.in_features
        size = round_up(rows)
        if size == rows:
            return multiply(x, self.weight, self.bias)
        filled = F.pad(x.reshape(rows, -1), (0, 0, 0, size - rows))
        return multiply(filled, self.weight, self.bias)[:rows].view(*x.shape[:-1], -1)

    def _apply(self, change, *args, **options):
        """Move the layer, or change its type, as Module.to does: it is an ordinary one then."""
        unpack(self)
        return super()._apply(change, *args, **options)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = plain(destination[f"{prefix}weight"])


def multiply(x: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [..., in] by a weight in blocks, as torch.nn.functional.linear does."""
    return OPS._linear_pointwise.default(x, blocks, bias, "none", [], "")


def round_up(rows: int) -> int:
    """Round a number of rows up: to itself up to 16, then to one of four between powers of two.

    oneDNN keeps half a megabyte for each number of rows that it has met. So there must be few.
    """
    step = 1 if rows <= 16 else 1 << (rows.bit_length() - 3)
    return -(-rows // step) * step


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as PyTorch has it. One that lies in blocks is copied out of them."""
    return weight.to_dense(weight.dtype) if weight.is_mkldnn else weight


def list_types() -> set[torch.dtype]:
    """List the types whose weights can be packed on this machine."""
    # Another version of PyTorch may have other names for these operations.
    known = hasattr(OPS, "_reorder_linear_weight") and hasattr(OPS, "_linear_pointwise")
    x86 = platform.machine() in ("x86_64", "AMD64")
    if not (torch.backends.mkldnn.is_available() and known and x86):
        return set()
    types = {torch.float32}
    if OPS._is_mkldnn_bf16_supported():
        types.add(torch.bfloat16)
    if OPS._is_mkldnn_fp16_supported():
        types.add(torch.float16)
    return types


def pack(model: torch.nn.Module) -> torch.nn.Module:
    """Pack the large weights of a model or of a trained part, in place, if it is on a CPU.

    returns  the same model. To train its weights, `unpack` it. It can be copied and saved, and the
             copy is not packed
    """
    types = list_types()
    for part in model.modules():
        if type(part) not in (Linear, PackedLinear) or part.weight.is_mkldnn:
            continue
        weight = part.weight
        if weight.is_cpu and weight.dtype in types and weight.numel() >= LEAST[weight.dtype]:
            blocks = OPS._reorder_linear_weight(weight.detach(), ROWS)
            part.__class__ = PackedLinear
            part.weight = Blocks(blocks, weight.requires_grad)
    return model


def unpack(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model its weights back as PyTorch has them, in place, and return it."""
    for part in model.modules():
        if type(part) is PackedLinear and part.weight.is_mkldnn:
            part.weight = Parameter(plain(part.weight.detach()), part.weight.requires_grad)
    return model
