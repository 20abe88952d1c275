"""This file changes a model so that the bits of a row do not depend on the other rows of its call.
The field calls such a model *batch-invariant*.

The lossless methods promise the text that a model writes token by token. But a call of many rows
rounds otherwise than a call of one row. In float32 the difference is too small to change a choice.
In half precision two tokens often have nearly the same logit, and many texts part there. A changed
model computes the same bits in a tree, in a prompt and in a call of one row. So all methods write
one text in every type, and so does transformers' own `generate`.

A row depends on others in four ways. This is what becomes of each:

    attention       The number and the order of the slots that are summed change the rounding. Here
                    sums run in float64. There a product of two numbers of half precision is exact,
                    and a sum is off by 2⁻⁵⁰, so that all orders of the slots round alike.
    linear layers   A kernel is chosen by the number of rows. Each number is tried once. If a call
      and norms     of so many rows has other bits than a call of 16, zeros fill it up to a number
                    of rows that has the bits of 16.
    activations     A CPU computes most numbers of a tensor in vectors, and the last ones one by
                    one, some of them by another formula. So activations run in float64.
    experts         An expert gets as many rows of a call as chose it. So they run row by row.

    model = make_invariant(model)     # after `pack`, and on the device where it will run

The change ends with a proof on this machine and in this type. It compares some trees with their
paths in bits, and refuses a model that fails. A model with recurrent layers is refused too: its
states are sums over a text, which each call splits in another place.
"""
from functools import partial

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from common import CachedLM, InputError, ancestor_mask
from support.files import explain_errors
from support.packed import plain
from support.recurrent import has_states

SIZE = 16  # rows of the calls whose bits count
UNSEEN = torch.finfo(torch.float32).min  # with -inf a row that sees no slot would become nan
PART = 1024  # slots whose keys and values few rows read at once in float64
TREES = ((3, 2), (20, 7), (50, 17), (90, 33))  # the proof's trees: tokens of context, and nodes
ACTIVATIONS = {x[0] if isinstance(x, tuple) else x for x in ACT2CLS.values()}


# -------------------------------------------------------------------------------------- attention
def invariant_attention(module, query, key, value, attention_mask, scaling=None, softcap=None,
                        s_aux=None, **_):
    """Compute attention in float64, and round the output to the model's type.

    query           [B, heads, n, d]
    key, value      [B, key heads, slots, d]. Query heads share a key head
    attention_mask  [B, 1, n, slots], true or 0 where a row sees a slot, false or -inf elsewhere.
                    None: each row sees all slots up to its own, which is one of the last n
    scaling         the number that scores are multiplied by. None: 1 / √d
    softcap         the number at which scores are softly capped. None: they are not
    s_aux           [heads], the scores of sinks, which take attention and have no values
    returns         the output [B, n, heads, d], and no weights
    """
    B, heads, n, d = query.shape
    slots, mask = key.shape[2], attention_mask
    if mask is None:
        mask = torch.ones(1, 1, n, slots, device=query.device).tril(slots - n) > 0
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, UNSEEN)
    mask = mask[..., :slots].double().clamp(min=UNSEEN).expand(B, heads, -1, -1)
    if s_aux is not None:  # a sink is one more slot, whose key and value are 0
        sinks = s_aux.double().view(1, -1, 1, 1).expand(B, -1, n, 1)
        mask = torch.cat([mask, sinks], -1)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    # The heads that share a key head are rows of one head.
    rows = query.double().reshape(B, key.shape[1], -1, d)
    mask = mask.reshape(B, key.shape[1], -1, mask.shape[-1])
    if softcap is None and (slots <= PART or n > SIZE):
        keys, values = key.double(), value.double()
        out = F.scaled_dot_product_attention(rows, keys, values, mask, scale=scaling)
    else:  # for few rows new memory for many keys would take longer than all else
        scores = torch.cat([rows @ k.double().mT for k in key.split(PART, 2)], -1)
        scores = scores * (d ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        weights = (scores + mask).softmax(-1).split(PART, -1)
        out = sum(w @ v.double() for w, v in zip(weights, value.split(PART, 2)))
    return out.to(query.dtype).view(B, heads, n, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("invariant", invariant_attention)
AttentionMaskInterface.register("invariant", AttentionMaskInterface()["sdpa"])


# ----------------------------------------------------------------------------------- other layers
def run_rows(part, sizes: dict, x: torch.Tensor) -> torch.Tensor:
    """Run a layer on rows x [..., d], in calls whose numbers of rows all have the same bits.

    sizes   what was tried before: how many rows a call has, for a number of rows and for all else
            that a kernel is chosen by. Layers of one shape share it
    """
    rows = x.reshape(-1, x.shape[-1])
    n = len(rows)
    if n == 0:  # the LM head reads none in a pass over a prompt
        return type(part).forward(part, x)
    packed = type(getattr(part, "weight", None))  # a copy of a packed model has other weights
    tried = n, packed, rows.dtype, rows.device, torch.get_num_threads()
    if tried not in sizes:
        sizes[tried] = find_size(part, rows)
    size = sizes[tried]
    if size == n:
        return type(part).forward(part, rows).view(*x.shape[:-1], -1)
    calls = F.pad(rows, (0, 0, 0, -n % size)).split(size)
    found = [type(part).forward(part, some) for some in calls]
    return torch.cat(found)[:n].view(*x.shape[:-1], -1)


@torch.no_grad()
def find_size(part, rows: torch.Tensor) -> int:
    """Find how many rows a call may have that computes these rows with the bits of SIZE rows.

    The rows of a call that is tried are equal, so all of them must give the same bits. A kernel's
    order of summing depends on shapes, and not on numbers, so this holds for all rows.
    """
    n, probes = len(rows), find_probes(part, rows[0])

    def run(size: int) -> torch.Tensor:
        calls = [row.expand(size, -1).contiguous() for row in probes]
        return torch.stack([type(part).forward(part, call) for call in calls])
    wanted, tried = run(SIZE)[:, :1], (n, n + -n % 4, n + -n % SIZE)
    return next((size for size in tried if (run(size) == wanted).all()), SIZE)


def find_probes(part, like: torch.Tensor) -> torch.Tensor:
    """Make rows [1 or 8, d] that show in which order a layer sums: in the type and place of `like`.

    The order shows little in sums of random numbers. So k of the inputs are chosen such that the
    first k outputs cancel. Twice more, k others cancel what rounding left of them. Then these
    outputs are rounding only, which differs with the order. Where k is small, and for a layer whose
    outputs cannot cancel, one row may show nothing by chance, so there are 8.
    """
    d, rng = len(like), torch.Generator().manual_seed(0)
    rows = torch.randn(8, d, generator=rng).to(like)
    if not isinstance(part, (torch.nn.Linear, Conv1D)):
        return rows
    weight = plain(part.weight)
    weight = (weight.T if isinstance(part, Conv1D) else weight)[:min(8, d // 4)].double()
    k = len(weight)
    places = torch.randperm(d, generator=rng)[:3 * k].to(like.device)
    rows[:, places] = 0
    for some in places.split(k):  # each k cancel the rounding of those before them
        left = rows.double() @ weight.T + (0 if part.bias is None else part.bias[:k])
        rows[:, some] = -(left @ torch.linalg.pinv(weight[:, some], rtol=1e-4).T).to(like)
    return rows if k < 8 else rows[:1]


def run_alone(part, x: torch.Tensor):
    """Run a block of experts row by row. It gives a tensor like x, or a tuple that begins so."""
    found = [type(part).forward(part, row) for row in x.reshape(-1, 1, 1, x.shape[-1])]
    if isinstance(found[0], tuple):
        first, *others = map(torch.cat, zip(*found))
        return first.view(x.shape), *others
    return torch.cat(found).view(x.shape)


def run_double(part, x: torch.Tensor) -> torch.Tensor:
    """Run an activation in float64, and round to the type of its input."""
    return type(part).forward(part, x.double()).to(x.dtype)


def change_layer(part: torch.nn.Module, alike: dict) -> None:
    """Replace the `forward` of a layer whose rows would depend on each other.

    alike   for each kind and shape of layer the `sizes` that its layers share
    """
    kind, inner = type(part), dict(part.named_children())
    shape = getattr(getattr(part, "weight", None), "shape", None)
    if "experts" in inner:
        part.forward = partial(run_alone, part)
    elif isinstance(part, (torch.nn.Linear, Conv1D)) or ("Norm" in kind.__name__ and not inner):
        part.forward = partial(run_rows, part, alike.setdefault((kind, shape), {}))
    elif kind in ACTIVATIONS:
        part.forward = partial(run_double, part)


# -------------------------------------------------------------------------------------- the model
@torch.inference_mode()
def make_invariant(model, run_as: type[CachedLM] = CachedLM):
    """Change a model, in place, so that the bits of a row do not depend on the rows beside it.

    run_as   the kind of CachedLM that it will run as
    returns  the same model. InputError for one that cannot be changed, or that fails the proof
    """
    name, config = type(model).__name__, model.config.get_text_config()
    if has_states(model) or not model._supports_attention_backend:
        raise InputError("--invariant needs layers that attend by transformers' interface, and no "
                         f"recurrent ones, got {name}")
    ids = torch.tensor([[7, 5, 3, 6, 4, 3, 8]], device=model.device) % config.vocab_size
    before = model(input_ids=ids, use_cache=False).logits.float()
    model.set_attn_implementation("invariant")
    alike = {}
    for part in model.modules():
        change_layer(part, alike)
    with explain_errors("a model of usual layers for --invariant", name):
        after = model(input_ids=ids, use_cache=False).logits.float()
    error = (after - before).abs().mean() / before.abs().mean()
    if not error < (1e-3 if model.dtype == torch.float32 else 0.1):
        raise InputError(f"--invariant changes the logits of {name} by {error:.1e}")
    prove(model, run_as)
    return model


@torch.inference_mode()
def prove(model, run_as: type[CachedLM]) -> None:
    """Check the bits of trees against those of paths. Raise an InputError if they differ.

    A path is fed one row a call, and so is the end of its context.
    """
    lm = run_as(model)
    for length, n in TREES:
        length = min(length, lm.max_length - n.bit_length())  # the levels of the tree
        ids = [(i * i + 5 * i) % lm.vocab for i in range(length + n)]
        context, nodes = ids[:length], ids[length:]
        parents = [(node + 1) // 2 - 1 for node in range(n)]  # two children for each node
        lm.start(context)
        tree = lm.forward(nodes, parents).clone()
        path = ancestor_mask(parents)[-1].nonzero().flatten().tolist()
        lm.start(context[:-2])
        alone = []
        for token in context[-2:] + [nodes[node] for node in path]:
            alone.append(lm.forward([token]))
            lm.commit([0])
        if not torch.equal(torch.cat(alone[2:]), tree[path]):
            raise InputError("--invariant needs trees with the bits of their paths, which "
                             f"{type(model).__name__} lacks in {model.dtype} with {n} nodes")
