"""Run token trees on layers that have a state instead of keys: the gated delta rule, Mamba-2 and
short convolutions, as in Qwen3.5, Granite 4 and LFM2.

    Mamba-2           Dao and Gu 2024, arXiv 2405.21060
    Gated DeltaNet    Yang et al. 2024, arXiv 2412.06464
    trees on it       Wu et al. 2025, "STree", arXiv 2505.14969, on Mamba-2; arXiv 2608.20961.
                      Kimi Linear's decay of each channel by itself fits as well

Such a layer reads the text token by token into one matrix S, its state. Token j first shrinks
the state by the decay exp(g_j). Then it adds the product of a key k_j and a value u_j:

    S_j = exp(g_j) S_(j-1) + k_j u_jᵀ        the output is S_jᵀ q_j, for a query q_j

This looks as if each node of a tree needed a state of its own. But if the sum is written out, the
state after a node is the state at the end of the context and what the node's ancestors added:

    … the cat      sat ─┬─ on ── the           node            reads of u         reads of S₀
        S₀              └─ in                                 sat  on  the  in
                                               sat (k₀, u₀)    x                   exp(G₀)
    One S₀ for the whole tree.                 on  (k₁, u₁)    x    x              exp(G₁)
    Each node keeps only its                   the (k₂, u₂)    x    x   x          exp(G₂)
    k, u and g.                                in  (k₃, u₃)    x             x     exp(G₃)

It is the ancestor mask of common.py again. In the place of an x stands decay_ij (q_i · k_j), with
G_i, the sum of g on the path down to node i, and decay_ij = exp(G_i - G_j):

    output        o_i = exp(G_i) S₀ᵀ q_i + Σ decay_ij (q_i · k_j) u_j, over i and its ancestors j
    delta rule    u_i = β_i (v_i - exp(G_i) S₀ᵀ k_i - Σ decay_ij (k_i · k_j) u_j), over ancestors j
    Mamba-2       u_i = dt_i x_i, k = B, q = C, g = dt A
    fold          S₀ ← exp(G_n) S₀ + Σ exp(G_n - G_j) k_j u_jᵀ, over the n oldest rows

A short convolution reads the last inputs on the node's path, so what is kept of it are inputs.

The last rows of the context are kept out of the state, as a chain above the tree, so that a draft
can take them back. One that takes back more reads its text again. The models' own code runs as it
is. Only the functions with which it reads a whole text give way to those at the end of this file,
while a pass of a RecurrentCache runs.
"""
import inspect
import sys
import threading
from collections import defaultdict
from typing import Callable

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from common import CachedLM, InputError, KVCache, ancestor_mask, windows_of

KEEP = 32  # how many of the context's last tokens are not in the states, at least
running = threading.local()
running.cache = None  # the cache of the pass that runs now in this thread


class RecurrentLM(CachedLM):
    """Be a CachedLM whose layers may have states. A model without such layers runs as in CachedLM.

    recurrent  whether some layers have states. Then `cache` is a RecurrentCache
    keeps      whether `start` keeps the beginning that the old and the new text share, as in a
               conversation. The model must not have changed between them
    text       with `keeps`, and of a recurrent model: the tokens of the context, and then those of
               the pending nodes. A node that was fed as an embedding is None
    """
    keeps = False
    KINDS = (*CachedLM.KINDS, "linear_attention", "conv", "hybrid", "mlp", "moe")

    def __init__(self, model, vocab: int | None = None):
        super().__init__(model, vocab)
        self.recurrent, self.text = has_states(model), []
        if self.recurrent:
            self.cache = RecurrentCache(model)

    def forward(self, ids, parents: list[int] | None = None, **options) -> torch.Tensor:
        logits = super().forward(ids, parents, **options)
        if self.recurrent or self.keeps:
            ids = torch.as_tensor(ids)
            self.text += ids.tolist() if ids.ndim == 1 else [None] * len(ids)
        return logits

    def layout(self, parents: list[int], n: int, **seen):
        if self.recurrent:
            self.cache.ancestors = ancestor_mask(parents)
        return super().layout(parents, n, **seen)

    def run_model(self, inputs: torch.Tensor, positions: torch.Tensor, mask, keep: int):
        if not self.recurrent:
            return super().run_model(inputs, positions, mask, keep)
        n, device = inputs.shape[1], inputs.device
        name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
        given = {name: inputs, "logits_to_keep": torch.arange(n - keep, n, device=device)}
        return self.cache.run(self.model, mask, position_ids=positions, **given).logits

    def commit(self, path: list[int]) -> None:
        first = self.length
        super().commit(path)
        if self.recurrent or self.keeps:
            self.text[first:] = [self.text[first + node] for node in path]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the context, and no pending node.

        States cannot go back. If they have read later tokens, the text is read anew. From then on
        twice as many rows are kept as this took back, so that later rounds need not do it again.
        """
        if self.recurrent and 0 < length < self.cache.folded:
            self.cache.keep = 2 * (self.length - length)
            if None in self.text[:length]:
                raise InputError("expected a recurrent model that was fed tokens, got embeddings")
            return CachedLM.start(self, self.text[:length])
        super().truncate(length)
        del self.text[length:]
        if self.recurrent:
            self.cache.truncate(length)


def has_states(model) -> bool:
    """Tell whether some layers of a model have states."""
    return not {*windows_of(model)} <= {*CachedLM.KINDS}


class RecurrentCache(KVCache):
    """Be a KVCache that holds states as well.

    keep       how many of the context's last tokens are not in the states, at least
    folded     how many of the context's first tokens are in the states
    kept       how many of its last tokens are not in the states yet
    states     for each layer what its states are called (`S`, and `inputs` for a convolution), and
               the states at the end of the context except the kept tokens
    rows       for each layer the rows of the kept and the pending nodes: x, k, u and g, by name
    ancestors  which pending nodes each pending node sees. RecurrentLM says so before a pass
    """

    def __init__(self, model):
        super().__init__()
        replace_functions(model)
        self.takes, self.keep = inspect.signature(model.forward).parameters, KEEP
        self.truncate(0)

    def run(self, model, attention_mask, **inputs):
        """Run the model once. Its layers find this cache in `running`."""
        if not isinstance(attention_mask, dict):  # layers of one kind
            attention_mask = {"full_attention": attention_mask}
        masks = {"full_attention": next(iter(attention_mask.values()))} | attention_mask
        cache = {"attention_mask": masks | {"linear_attention": None, "conv": None},
                 "past_key_values": self}
        if "cache_params" in self.takes:  # Mamba-2 alone, which has no attention
            cache = {"cache_params": self}
            del inputs["position_ids"]
        # The ancestor mask of the kept nodes, a chain, with the pending ones below it
        above = torch.ones([self.kept + len(self.ancestors)] * 2, dtype=torch.bool).tril()
        above[self.kept:, self.kept:] = self.ancestors
        self.above = above.to(inputs["logits_to_keep"].device)
        running.cache = self
        try:
            return model(**inputs, **cache, use_cache=True)
        finally:
            running.cache = None

    def join(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """Append the rows [n, …] of the newest nodes to a layer's rows [all, …]; return these."""
        rows = self.rows[self.layer]
        old = self.kept + len(self.ancestors) - len(new)
        rows[name] = torch.cat([rows[name][:old], new]) if old else new
        return rows[name]

    def commit(self, first: int, path: list[int]) -> None:
        super().commit(first, path)
        nodes = [*range(self.kept), *(self.kept + node for node in path)]
        nodes = torch.tensor(nodes, dtype=torch.long)
        self.kept = len(nodes)
        for rows in self.rows.values():
            for name, row in rows.items():
                nodes = nodes.to(row.device)  # only the first of them is copied to a GPU
                rows[name] = row[nodes]
        if self.kept > 2 * self.keep:
            self.fold(self.kept - self.keep)

    def fold(self, n: int) -> None:
        """Add the first n kept tokens to the states."""
        for layer, rows in self.rows.items():
            state = self.states[layer]
            first = {name: row[:n] for name, row in rows.items()}
            rows.update({name: row[n:] for name, row in rows.items()})
            state["inputs"] = torch.cat([state["inputs"], first["x"]])[n:]  # as many as before
            if "S" in state:
                G = first["g"].cumsum(0)
                keys = first["k"] * (G[-1] - G).exp()
                added = torch.einsum("nhk,nhv->hkv", keys, first["u"])
                state["S"] = G[-1].exp()[..., None] * state["S"] + added
        self.folded, self.kept = self.folded + n, self.kept - n

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the context: none, or all that the states have read."""
        if length == 0:
            self.folded, self.states, self.rows = 0, defaultdict(dict), defaultdict(dict)
        self.kept = length - self.folded

    # The layers ask a cache for these. They get nothing: the functions below know the states.
    def update_conv_state(self, inputs: torch.Tensor, layer: int, **_) -> torch.Tensor:
        self.layer = layer  # a layer calls this before it calls the functions below
        return inputs

    def get_conv_state(self, *_, **__) -> None:
        pass

    def has_previous_state(self, *_, **__) -> bool:
        return False

    get_recurrent_state = update_recurrent_state = get_conv_state


# ------------------------------------------------------------------------------ the three layers
def convolve(hidden_states, weight, bias=None, activation=None, **_) -> torch.Tensor:
    """Let each node's inputs and the K - 1 before them on its path pass the convolution.

    hidden_states   [1, d, n], the inputs of the new nodes
    weight          [d, K], a filter for each channel
    bias            [d], or None
    activation      the name of a function that comes after it, or None
    returns         [1, d, n]
    """
    cache, K = running.cache, weight.shape[1]
    new = hidden_states[0].T
    x = cache.join("x", new)
    before = cache.states[cache.layer].setdefault("inputs", new.new_zeros(K - 1, len(weight)))
    # Each node sees the K - 1 inputs before the kept ones too. Ancestors come before their nodes,
    # so the last K inputs that a node sees are those on its path, in order.
    seen = F.pad(cache.above[-len(new):], (K - 1, 0), value=True)
    last = torch.where(seen, torch.arange(seen.shape[1], device=x.device), -1).sort().values[:, -K:]
    window = torch.cat([before, x])[last]  # [n, K, d]
    out = torch.einsum("nkd,dk->dn", window.to(weight.dtype), weight)[None]
    if bias is not None:
        out = out + bias[:, None]
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def read_states(q, k, v, g, beta=None) -> torch.Tensor:
    """Read the new nodes into a layer's rows, and let each query read the states on its path.

    q, k      [n, H, d_k]
    v         [n, H, d_v]
    g         [n, H, 1], the log decays. [n, H, d_k] if each channel has its own
    beta      [n, H, 1], how much of what the key reads the delta rule replaces. None: Mamba-2
    returns   o [n, H, d_v]
    """
    cache, n = running.cache, len(q)
    k_all, g_all = cache.join("k", k), cache.join("g", g)
    S = cache.states[cache.layer].setdefault("S", k.new_zeros(k.shape[1], k.shape[2], v.shape[2]))
    above = cache.above
    G = torch.einsum("ij,jhc->hic", above.to(g), g_all)  # [H, all, 1 or d_k]
    decay = (G[:, -n:, None] - G[:, None]).masked_fill(~above[-n:, :, None], -torch.inf).exp()

    def weigh(a: torch.Tensor) -> torch.Tensor:
        """Compute decay_ij (a_i · k_j), [H, n, all], for rows a [H, n, d_k]."""
        if decay.shape[-1] == 1:
            return a @ k_all.permute(1, 2, 0) * decay[..., 0]
        return torch.einsum("hic,jhc,hijc->hij", a, k_all, decay)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    shrunk = G[:, -n:].exp()
    if beta is not None:
        beta = beta.transpose(0, 1)
        weights = beta * weigh(k)
        v = beta * (v - shrunk * k @ S)
        if len(k_all) > n:
            old = cache.rows[cache.layer]["u"][:len(k_all) - n]
            v = v - weights[..., :-n] @ old.transpose(0, 1)
        # u_i + Σ over the new ancestors of i of weights_ij u_j = v_i: a triangle, solved at once
        v = torch.linalg.solve_triangular(weights[..., -n:], v, upper=False, unitriangular=True)
    u = cache.join("u", v.transpose(0, 1))
    return (shrunk * q @ S + weigh(q) @ u.transpose(0, 1)).transpose(0, 1).contiguous()


def delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **_):
    """Compute the gated delta rule over a tree, as transformers calls it: [1, n, heads, d] each."""
    q, k, v, g, beta = (x[0].float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
    g = g if g.ndim == 3 else g[..., None]
    out = read_states(q * q.shape[-1] ** -0.5, k, v, g, beta[..., None])
    return out[None].to(query.dtype), out  # it is asked for a state too, which no one reads


def mamba2(hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False,
           dt_limit=(0.0, float("inf")), return_final_states=False, **_):
    """Be Mamba-2 over a tree, as transformers calls it: hidden_states [1, n, H, d_v], dt [1, n, H],
    A and D [H], B and C [1, n, groups, d_k]."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[0].float()[..., None]
    x, B, C = (rows[0].float() for rows in (hidden_states, B, C))
    B, C = (rows.repeat_interleave(x.shape[1] // rows.shape[1], 1) for rows in (B, C))
    out = read_states(C, B, dt * x, dt * A.float()[:, None])
    out = out[None] if D is None else (out + D.float()[:, None] * x)[None]
    return (out, out) if return_final_states else out


FUNCTIONS = {"causal_conv1d_fn": convolve, "torch_chunk_gated_delta_rule": delta_rule,
             "chunk_kimi_delta_attention": delta_rule, "mamba2_chunk_scan": mamba2}


def replace_functions(model) -> None:
    """Let the layers of a model call the functions above while a pass of a RecurrentCache runs.

    model   a model of a family whose layers are of these three kinds. InputError for others
    """
    module = sys.modules[type(model).__module__]
    names = [name for name in FUNCTIONS if hasattr(module, name)]
    kinds = windows_of(model)
    if len(names) < 2 and not (names and "conv" in kinds):
        raise InputError("expected recurrent layers of Mamba-2, the gated delta rule or short "
                         f"convolutions, got {', '.join(kinds)} of {type(model).__name__}")
    for name in names:
        if not hasattr(getattr(module, name), "theirs"):
            setattr(module, name, either_of(getattr(module, name), FUNCTIONS[name]))


def either_of(theirs: Callable, ours: Callable) -> Callable:
    """Make a function that calls `ours` in a pass of a RecurrentCache, else `theirs`."""
    def either(*args, **options):
        cached = getattr(running, "cache", None) is not None
        return (ours if cached else theirs)(*args, **options)
    either.theirs = theirs
    return either
