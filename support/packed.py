"""This file puts large weights of a model into an order in which a CPU computes calls of several
rows faster.

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

This is about speed alone. The products are the same, up to rounding. Weights on a GPU are not
packed, nor weights of a type that oneDNN cannot multiply on this CPU. Only x86 processors pack,
since others were not measured.
"""
import platform
import time
from collections import defaultdict
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch.nn import Embedding, Linear, Parameter

OPS = torch.ops.mkldnn
LEAST = 1 << 16  # numbers in a weight. For smaller ones a call of oneDNN costs more than it saves
ROWS = 8  # oneDNN chooses the size of its blocks for calls of so many rows
SOME = 8  # so many layers of a size are timed. Together they do not fit into a core's cache


class Blocks(Parameter):
    """A weight in blocks, which only PackedLinear reads. A copy of it is an ordinary weight.

    table   the embeddings whose numbers these are too. A copy of both is one weight again
    """
    table = None

    def __deepcopy__(self, memo: dict) -> Parameter:
        if self.table is not None:
            return deepcopy(self.table, memo)
        if id(self) not in memo:
            memo[id(self)] = ordinary(self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol) -> tuple:
        return ordinary, (ordinary(self),)


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
    """Return a number of rows, rounded up to one of four between powers of two if it is above 16.

    oneDNN keeps half a megabyte for each number of rows that it has met. So there must be few.
    """
    step = 1 if rows <= 16 else 1 << (rows.bit_length() - 3)
    return -(-rows // step) * step


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as PyTorch has it. One that lies in blocks is copied out of them."""
    return weight.to_dense(weight.dtype) if weight.is_mkldnn else weight


def ordinary(weight: Parameter) -> Parameter:
    """Return a parameter as PyTorch has it: itself, the embeddings, or a copy out of blocks."""
    if not weight.is_mkldnn:
        return weight
    if weight.table is not None:
        return weight.table
    return Parameter(plain(weight.detach()), weight.requires_grad)


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
    """Pack the large weights of a model or of a trained part, in place, where that is faster.

    returns  the same model. To train its weights, `unpack` it. It can be copied and saved, and the
             copy is not packed
    """
    types, alike = list_types(), defaultdict(list)
    for part in model.modules():
        if is_usual(part) and part.weight.numel() >= LEAST:
            if part.weight.is_cpu and part.weight.dtype in types and not part.weight.is_mkldnn:
                alike[part.weight.shape, part.weight.dtype].append(part)
    tables = {part.weight for part in model.modules() if isinstance(part, Embedding)}
    for layers in alike.values():
        faster = is_faster(layers[:SOME], tables)
        for layer in layers:
            if faster:
                pack_layer(layer, tables)
            else:
                unpack(layer)
    return model


def is_usual(part: torch.nn.Module) -> bool:
    """Tell whether a part is a linear layer like any other.

    Quantised layers have a weight of another class, and accelerate's hooks give a layer a `forward`
    of its own. Such layers are left as they are.
    """
    usual = type(part) in (Linear, PackedLinear) and "forward" not in vars(part)
    return usual and type(part.weight) in (Parameter, Blocks) and not part.weight.is_inference()


def is_packed(model: torch.nn.Module) -> bool:
    """Tell whether some weights of a model are in blocks."""
    return any(weight.is_mkldnn for weight in model.parameters())


def pack_layer(layer: Linear, tables: set[Parameter]) -> None:
    """Put the weight of a layer into blocks, if it is not in blocks yet.

    tables   the weights of the model's embeddings
    """
    layer.__class__ = PackedLinear
    weight = layer.weight
    if not weight.is_mkldnn:
        blocks = OPS._reorder_linear_weight(weight.detach(), ROWS)
        layer.weight = Blocks(blocks, weight.requires_grad)
        layer.weight.table = weight if weight in tables else None


def is_faster(layers: list[Linear], tables: set[Parameter]) -> bool:
    """Pack layers, and tell whether a call of one row and one of 8 take less time together now.

    This differs between types, sizes and processors. For one row a packed model took 0.7 of the
    time on one CPU, and 1.3 of it on another.
    """
    before = time_calls(layers)
    for layer in layers:
        pack_layer(layer, tables)
    return time_calls(layers) < before


@torch.inference_mode()
def time_calls(layers: list[Linear]) -> float:
    """Return the least seconds that a call of one row and one of ROWS take, of three times."""
    weight, taken = layers[0].weight, []
    for _ in range(3):
        began = time.perf_counter()
        for rows in (1, ROWS):
            x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
            for layer in layers:
                layer(x)
        taken.append(time.perf_counter() - began)
    return min(taken)


def unpack(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model its weights back as PyTorch has them, in place, and return it."""
    for part in model.modules():
        if type(part) is PackedLinear:
            part.weight = ordinary(part.weight)
    return model
