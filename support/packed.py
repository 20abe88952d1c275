"""This file packs the large weights of a model on a CPU, so that a call of several rows costs less.

PyTorch multiplies by a float32 weight as it lies in memory. For a call of 2 to 16 rows this takes
up to twice as long as for one row, though both read the same weight once. PyTorch also brings the
library oneDNN, which multiplies faster by a weight that lies in blocks of the size of its loops.
Packing copies a weight into such blocks, once. So a packed weight takes its memory twice. Besides,
oneDNN keeps half a megabyte for each shape of a weight and each number of rows that it has met.

    rows of a call       1      2      4      8     16
    as PyTorch has it    1.0    1.6    1.7    1.7    2.0    of a call of one row (a model of
    packed               0.8    0.9    1.0    1.1    1.4    135M parameters, two cores with AVX2)

This is about speed alone. The products are the same, up to rounding. Nothing is packed on a GPU or
in half precision.
"""
import torch
from torch.nn import Linear
from torch.utils.weak import WeakIdKeyDictionary

# Smaller weights stay in a core's caches. For them a call of oneDNN costs more than it saves.
LEAST = 1 << 18  # numbers in a weight: 1 MiB of float32
ROWS = 8  # oneDNN chooses the size of its blocks for calls of so many rows
BLOCKS = WeakIdKeyDictionary()  # weight: (its address and version, its numbers, the blocks)


class PackedLinear(Linear):
    """A linear layer that multiplies by a packed weight.

    It is an ordinary layer where gradients are computed, under autocast, and for a weight that was
    moved to a GPU or to half precision.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what torch.nn.Linear computes: x [..., in] gives [..., out]."""
        weight = self.weight
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not fits(weight):
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise.default(
            x, packed_weight(weight), self.bias, "none", [], "")


def fits(weight: torch.nn.Parameter) -> bool:
    """Tell whether a weight can be packed. Those made in inference mode count no changes."""
    return weight.is_cpu and weight.dtype == torch.float32 and not weight.is_inference()


def packed_weight(weight: torch.nn.Parameter) -> torch.Tensor:
    """Return a weight in blocks, which are made anew if a training has changed the weight since.

    Models that share weights share their blocks. The numbers of the weight are kept with them, so
    that no others can come to lie at their address.
    """
    state = (weight.data_ptr(), weight._version)
    known = BLOCKS.get(weight)
    if known is None or known[0] != state:
        x = weight.detach()
        known = state, x, torch.ops.mkldnn._reorder_linear_weight(x, ROWS)
        BLOCKS[weight] = known
    return known[2]


def pack(model: torch.nn.Module) -> torch.nn.Module:
    """Pack the large float32 weights of a model or of a trained part, if it is on a CPU.

    returns  the same model. It can still be trained, copied and saved
    """
    for part in model.modules() if torch.backends.mkldnn.is_available() else ():
        if type(part) is Linear and part.weight.numel() >= LEAST and fits(part.weight):
            part.__class__ = PackedLinear
            packed_weight(part.weight)
    return model
