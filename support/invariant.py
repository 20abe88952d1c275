"""This file changes a model so that the bits of a row do not depend on the other rows of its call.
The field calls such a model *batch-invariant*.

The lossless methods promise the text that the model writes token by token. But a call of many rows
rounds otherwise than a call of one row. In float32 the difference is too small to change a choice.
In half precision two tokens often have nearly the same logit, and many texts part there. A model
that this file has changed computes the same bits in a tree, in a prompt and in a call of one row.
So all methods write one text, in every type, and so does transformers' own `generate`.

Four things may make a row depend on others. This is what becomes of each:

    attention     The order in which slots are summed, and their number, change the rounding. Here
                  sums run in float64. A product of two numbers of half precision is exact there,
                  and a sum is off by 2⁻⁵⁰, so any order of the slots rounds to the same bits.
    linear layers A kernel is chosen by the number of rows. Each number is tried once. If a call of
      and norms   this many rows has other bits than a call of 16, zeros fill the rows up to a
                  number that has the bits of 16, or the rows are taken 16 by 16.
    activations   A CPU computes most numbers of a tensor in vectors, and the last ones one by one,
      and rotary  by other formulas. So activations run in float64, and angles 16 positions at a
      positions   time, which are whole vectors.
    experts       A call gives an expert as many rows as chose it. So rows are taken one by one.

    model = make_invariant(model)     # after `pack`, and on the device where it will run

What was tried holds for this machine, device, type and number of threads. At the end of the change
some trees are compared with their paths in bits, and a model that fails is refused. So are models
with recurrent layers, whose states are sums over a text that other calls split in other places.
"""
import random
from functools import partial

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from common import CachedLM, InputError
from support.recurrent import has_states

SIZE = 16  # rows of the calls whose bits count
MOST = 1 << 22  # scores that attention computes at once, of 8 bytes each
TREES = ((3, 2), (20, 7), (70, 33))  # tokens of context and nodes of the trees that are compared
ACTIVATIONS = {x[0] if isinstance(x, tuple) else x for x in ACT2CLS.values()}


def invariant_attention(module, query, key, value, attention_mask, scaling=None, softcap=None,
                        s_aux=None, **_):
    """Compute attention in float64, and round the output to the model's type.

    query           [B, heads, n, d]
    key, value      [B, key heads, slots, d]
    attention_mask  [B, 1, n, slots], true or 0 where a row sees a slot. None: each row sees all
                    slots up to its own, which is one of the last n
    scaling         what scores are multiplied by. None: 1 / √d
    softcap         scores are softly capped at this number. None: they are not
    s_aux           [heads], the scores of sinks, which take attention and have no values
    returns         the output [B, n, heads, d], and no weights
    """
    n, slots = query.shape[2], key.shape[2]
    if attention_mask is None:
        seen = torch.ones(n, slots, dtype=torch.bool, device=query.device)
        attention_mask = seen.tril(slots - n)[None, None]
    sinks = None if s_aux is None else s_aux.double().view(1, -1, 1, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = key.double().transpose(2, 3), value.double()
    rows = max(1, MOST // (query.shape[0] * query.shape[1] * slots))
    parts = []
    for q, mask in zip(query.split(rows, 2), attention_mask[..., :slots].split(rows, 2)):
        scores = multiply_groups(q.double(), keys) * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        # The number is finite, so that a row of padding, which sees nothing, does not become nan.
        unseen = ~mask if mask.dtype == torch.bool else mask < -1e4
        scores = scores.masked_fill(unseen, -1e300)
        if sinks is not None:
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
        parts.append(multiply_groups(scores.softmax(-1)[..., :slots], values))
    return torch.cat(parts, 2).to(query.dtype).transpose(1, 2).contiguous(), None


def multiply_groups(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply x [B, heads, n, i] by y [B, key heads, i, j], which heads of a group share."""
    B, heads, n, i = x.shape
    return (x.reshape(B, y.shape[1], -1, i) @ y).view(B, heads, n, -1)


AttentionInterface.register("invariant", invariant_attention)
AttentionMaskInterface.register("invariant", AttentionMaskInterface()["sdpa"])


# -------------------------------------------------------------------------------- rows of a layer
def run_rows(part, sizes: dict, x: torch.Tensor) -> torch.Tensor:
    """Run a layer on rows [..., d], in calls of numbers of rows that have the same bits.

    sizes   for numbers of rows that were met before, how many rows a call has. Layers alike share
            this dictionary. Its entry 0 is what a call of SIZE rows gave for `make_row`
    """
    rows = x.reshape(-1, x.shape[-1])
    n = len(rows)
    if n == 0:  # an LM head that reads no row
        return type(part).forward(part, x)
    if n not in sizes:
        sizes[n] = find_size(part, sizes, rows)
    size = sizes[n]
    if n == size:
        return type(part).forward(part, rows).view(*x.shape[:-1], -1)
    parts = F.pad(rows, (0, 0, 0, -n % size)).split(size)
    out = torch.cat([type(part).forward(part, some) for some in parts])
    return out[:n].view(*x.shape[:-1], -1)


@torch.no_grad()
def find_size(part, sizes: dict, rows: torch.Tensor) -> int:
    """Find how many rows a call may have, to compute these rows with the bits of a call of SIZE.

    All rows of the calls that are tried are equal, so all must give the same bits. This depends on
    the order of sums, which a kernel chooses by shapes and not by numbers.
    """
    rng = torch.Generator().manual_seed(0)
    row = torch.randn(1, rows.shape[1], generator=rng).to(rows)

    def run(size: int) -> torch.Tensor:
        return type(part).forward(part, row.expand(size, -1).contiguous())
    if 0 not in sizes:
        sizes[0] = run(SIZE)
    n, right = len(rows), sizes[0][:1]
    if not (sizes[0] == right).all():  # a row's place in a call of SIZE rows changes its bits
        return 1
    tried = (n, n + -n % 4, n + -n % SIZE)
    return next((size for size in tried if (run(size) == right).all()), SIZE)


def run_alone(part, x: torch.Tensor):
    """Run a block of experts on one row at a time. It may return a tuple, hidden states first."""
    found = [type(part).forward(part, row) for row in x.reshape(-1, 1, 1, x.shape[-1])]
    if isinstance(found[0], torch.Tensor):
        return torch.cat(found).view(x.shape)
    first, *others = (torch.cat(some) for some in zip(*found))
    return first.view(x.shape), *others


def run_double(part, x: torch.Tensor) -> torch.Tensor:
    """Run an activation in float64, and round to the type of its input."""
    return type(part).forward(part, x.double()).to(x.dtype)


def run_positions(part, x: torch.Tensor, position_ids: torch.Tensor, *kind, **named):
    """Compute rotary positions for [B, n] positions, SIZE of them at a time."""
    n = position_ids.shape[1]
    parts = F.pad(position_ids, (0, -n % SIZE)).split(SIZE, 1)
    found = [type(part).forward(part, x, some, *kind, **named) for some in parts]
    if isinstance(found[0], torch.Tensor):
        return torch.cat(found, 1)[:, :n]
    return tuple(torch.cat(some, 1)[:, :n] for some in zip(*found))


def widen(head, args: tuple, logits: torch.Tensor) -> torch.Tensor:
    """Let the model's own code cap logits in float64, as the LM head's hook."""
    return logits.double()


def narrow(model, args: tuple, output):
    """Round capped logits to the model's type, as the model's hook."""
    output.logits = output.logits.to(model.dtype)
    return output


# -------------------------------------------------------------------------------------- the model
def make_invariant(model, run_as: type[CachedLM] = CachedLM):
    """Change a model, in place, so that the bits of a row do not depend on the rows beside it.

    run_as   the kind of CachedLM that it will run as
    returns  the same model. InputError for one that cannot be changed so, or that fails the proof
    """
    name = type(model).__name__
    if has_states(model) or not model._supports_attention_backend:
        raise InputError("--invariant needs layers that attend by transformers' interface, and no "
                         f"recurrent ones, got {name}")
    if model.config._attn_implementation == "invariant":
        return model
    ids = torch.tensor([[7, 5, 3, 6, 4, 3, 8]], device=model.device) % model.config.vocab_size
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits.float()
    model.set_attn_implementation("invariant")
    alike = {}
    for part in model.modules():
        change_layer(part, alike)
    if getattr(model.config.get_text_config(), "final_logit_softcapping", None):
        model.get_output_embeddings().register_forward_hook(widen)
        model.register_forward_hook(narrow)
    with torch.no_grad():
        after = model(input_ids=ids, use_cache=False).logits.float()
    error = (after - before).abs().mean() / before.abs().mean()
    if not error < (1e-3 if model.dtype == torch.float32 else 0.1):
        raise InputError(f"--invariant changes the logits of {name} by {error:.1e}")
    return prove(model, run_as)


def change_layer(part: torch.nn.Module, alike: dict) -> None:
    """Give one layer of a model a `forward` of this file, if its bits depend on other rows.

    alike   for each kind of layer the dictionary that its layers share
    """
    kind, inner = type(part), {name for name, _ in part.named_children()}
    if "experts" in inner:
        part.forward = partial(run_alone, part)
    elif isinstance(part, (torch.nn.Linear, Conv1D)) or "Norm" in kind.__name__ and not inner:
        weight = getattr(part, "weight", None)
        key = kind, getattr(weight, "shape", None), getattr(weight, "is_mkldnn", None)
        part.forward = partial(run_rows, part, alike.setdefault(key, {}))
    elif "Rotary" in kind.__name__:
        part.forward = partial(run_positions, part)
    elif kind in ACTIVATIONS:
        part.forward = partial(run_double, part)


@torch.inference_mode()
def prove(model, run_as: type[CachedLM]):
    """Compare trees with their paths in bits, and refuse a model where they differ.

    A path is fed one row a call, and the end of the context too.
    """
    rng, lm = random.Random(0), run_as(model)
    differ = rows = 0
    for length, n in TREES:
        length = min(length, lm.max_length - n)
        context = [rng.randrange(lm.vocab) for _ in range(length)]
        ids = [rng.randrange(lm.vocab) for _ in range(n)]
        parents = [-1, *(rng.randrange(node) for node in range(1, n))]
        lm.start(context)
        tree = lm.forward(ids, parents).clone()
        for node in (n - 1, n // 2):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            lm.start(context[:-2])
            for token in context[-2:]:
                lm.forward([token])
                lm.commit([0])
            for node in path:
                differ += not torch.equal(lm.forward([ids[node]])[0], tree[node])
                lm.commit([0])
                rows += 1
    if differ:
        raise InputError(f"--invariant makes no trees with the bits of their paths of "
                         f"{type(model).__name__} in {model.dtype}: {differ} of {rows} rows differ")
    return model
