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
the embeddings too is an exception, since embeddings cannot be looked up in blocks. `unpack` a model
before you write to its weights. A write to a packed weight fails. A write to the embeddings does
not reach the blocks of such a head. The tensors of a packed model's `state_dict` are copies.

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
from torch.nn import Embedding, Linear, ModuleList, Parameter

from common import InputError

OPS = torch.ops.mkldnn
LEAST = 1 << 16  # numbers in a weight. For smaller ones a call of oneDNN costs more than it saves
ROWS = 8  # oneDNN chooses the size of its blocks for calls of so many rows
SOME = 8  # so many layers of a size are timed. Together they do not fit into a core's cache
# Attributes of a weight in blocks that can be read, since they need none of its numbers
READS = {*"""__len__ device dim dtype element_size grad grad_fn is_complex is_cpu is_cuda
is_floating_point is_inference is_leaf is_meta is_mkldnn is_quantized is_sparse itemsize layout
nbytes ndim nelement numel requires_grad requires_grad_ shape size""".split()}


class Blocks(Parameter):
    """A weight in blocks, which only PackedLinear reads. A copy of it is an ordinary weight.

    Its size, its type and the like can be asked for. All else raises an InputError, since a write
    might miss the padding of the blocks, or change a copy that nobody reads.

    inside    the blocks, a tensor that oneDNN multiplies by
    table     the embeddings whose numbers these are too. A copy of both is one weight again. None:
              there are none
    """
    table = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        asked = getattr(function, "__self__", function)  # of a property, its descriptor
        if getattr(asked, "__name__", "") not in READS:
            raise InputError("expected packed weights to be left as they are: to read, write or "
                             "move them, unpack the model first")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **options or {})

    def __deepcopy__(self, memo: dict) -> Parameter:
        return plain(self) if self.table is None else deepcopy(self.table, memo)


class PackedLinear(Linear):
    """A linear layer whose weight may lie in blocks.

    It computes as an ordinary layer does where gradients are computed, and under autocast.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what torch.nn.Linear computes: x [..., in] gives [..., out]."""
        weight = self.weight
        if type(weight) is not Blocks:
            return super().forward(x)
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return F.linear(x, plain(weight), self.bias)
        rows = x.numel() // self.in_features
        size = round_up(rows)
        if size == rows:
            return multiply(x, weight.inside, self.bias)
        filled = F.pad(x.reshape(rows, -1), (0, 0, 0, size - rows))
        return multiply(filled, weight.inside, self.bias)[:rows].view(*x.shape[:-1], -1)

    def _apply(self, change, *args, **options):
        """Leave blocks as they are if Module.to asks for the place and type that they have."""
        if type(self.weight) is Blocks:
            asked = change(torch.empty(0, dtype=self.weight.dtype))
            if (asked.device, asked.dtype) == (self.weight.device, self.weight.dtype):
                return self
        return super()._apply(change, *args, **options)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        for name, x in self.named_parameters(recurse=False):
            destination[f"{prefix}{name}"] = plain(x) if keep_vars else plain(x).detach()


def multiply(x: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [..., in] by a weight in blocks, as torch.nn.functional.linear does."""
    return OPS._linear_pointwise.default(x, blocks, bias, "none", [], "")


def round_up(rows: int) -> int:
    """Return a number of rows, rounded up to one of four between powers of two if it is above 16.

    oneDNN keeps half a megabyte for each number of rows that it has met. So there must be few.
    """
    step = 1 if rows <= 16 else 1 << (rows.bit_length() - 3)
    return -(-rows // step) * step


def plain(weight: Parameter) -> Parameter:
    """Return a weight as PyTorch has it: itself, the embeddings, or a copy out of blocks."""
    if type(weight) is not Blocks:
        return weight
    if weight.table is not None:
        return weight.table
    return Parameter(weight.inside.to_dense(weight.dtype), weight.requires_grad)


def list_types() -> set[torch.dtype]:
    """List the types whose weights can be packed on this machine."""
    # Another version of PyTorch may have other names for these operations.
    known = hasattr(OPS, "_reorder_linear_weight") and hasattr(OPS, "_linear_pointwise")
    x86 = platform.machine() in ("x86_64", "AMD64")
    if not (torch.backends.mkldnn.is_available() and known and x86):
        return set()
    supported = {torch.float32: True, torch.bfloat16: OPS._is_mkldnn_bf16_supported(),
                 torch.float16: OPS._is_mkldnn_fp16_supported()}
    return {dtype for dtype, can_be_packed in supported.items() if can_be_packed}


def pack(model: torch.nn.Module) -> torch.nn.Module:
    """Pack the large weights of a model or of a trained part, in place, where that is faster.

    returns  the same model. To move it, or to train its weights, `unpack` it. It can be copied and
             saved, and the copy is not packed
    """
    types = list_types()
    layers_of, alike = defaultdict(list), defaultdict(list)
    for part in model.modules():
        if is_usual(part) and part.weight.numel() >= LEAST:
            if part.weight.is_cpu and part.weight.dtype in types:
                layers_of[part.weight].append(part)
    for weight, layers in layers_of.items():
        alike[weight.shape, weight.dtype].append(layers)
    layers_of.clear()  # or no weight would be freed before all are packed
    tables = {part.weight for part in model.modules() if isinstance(part, Embedding)}
    for sharing in alike.values():
        faster = is_faster(sharing[:SOME], tables)
        for layers in sharing:
            if faster:
                pack_layers(layers, tables)
            else:
                unpack(ModuleList(layers))
    return model


def is_usual(part: torch.nn.Module) -> bool:
    """Tell whether a part is a linear layer like any other.

    Quantised layers have a weight of another class, and accelerate's hooks give a layer a `forward`
    of its own. Such layers are left as they are.
    """
    usual = type(part) in (Linear, PackedLinear) and "forward" not in vars(part)
    return usual and type(part.weight) is Parameter and not part.weight.is_inference()


def is_packed(model: torch.nn.Module) -> bool:
    """Tell whether some weights of a model are in blocks."""
    return any(type(weight) is Blocks for weight in model.parameters())


def pack_layers(layers: list[Linear], tables: set[Parameter]) -> None:
    """Put the weight that some layers share into blocks, if it is not in blocks yet.

    tables   the weights of the model's embeddings
    """
    weight = layers[0].weight
    if type(weight) is Blocks:
        return
    inside = OPS._reorder_linear_weight(weight.detach(), ROWS)
    blocks = Blocks(inside, weight.requires_grad)
    blocks.inside = inside
    if weight in tables:
        blocks.table = weight
    for layer in layers:
        layer.__class__ = PackedLinear
        layer.weight = blocks


def is_faster(sharing: list[list[Linear]], tables: set[Parameter]) -> bool:
    """Pack layers, and tell whether a call of one row and one of 8 take less time together now.

    This differs between types, sizes and processors. For one row a packed model took 0.7 of the
    time on one CPU, and 1.3 of it on another.

    sharing   the layers, in lists of those that share a weight. They stay packed
    tables    as for `pack_layers`
    """
    first = [layers[0] for layers in sharing]
    before = time_calls(first)
    for layers in sharing:
        pack_layers(layers, tables)
    return time_calls(first) < before


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
    made = {}  # layers that share a weight get one weight again
    for part in model.modules():
        if type(part) is PackedLinear:
            if part.weight not in made:
                made[part.weight] = plain(part.weight)
            part.weight = made[part.weight]
    return model
