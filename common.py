"""This file has what the methods share: token trees, masks, a model with its cache, sampling,
decoding, loading and a small command line. Read it first. The sections on masks, on loading and on
the command line can wait.

Nearly every method does the same thing in its own way. It grows a small *token tree* at the end of
the text, runs the target once over the whole tree, and keeps one path of the tree.

    target     the model whose output is wanted
    draft      a smaller model, or a part of the target, that guesses what the target will say.
               The tokens that it guesses in a round are called a draft, too
    call       one pass of a model that gives logits, over one or more tokens at once
    row        one token of a call, with its keys, values and logits
    slot       where the cache holds the keys and values of a row
    round      one turn of a method's loop: some guesses, and one call of the target to verify them
    context    the text without its last token; its keys and values are cached
    root       the last token of the text: it is known but not cached, so each round feeds it
    tree       tokens, and a parent for each; node 0 is the root, and guesses hang below it. Nodes
               that were fed and may still join the context are *pending*
    accepted   an accepted guess joins the text, and so do all guesses above it
    chunk      the tokens that a round adds to the text: the accepted guesses, then one token of the
               target's own. Its mean length is the *acceptance length*

        … the cat ── sat ─┬─ on ── the ── mat     The target chooses "on" after "sat", and "my"
         context    root  └─ in ── a              after "on". The guess "on" is accepted, and the
                                                  chunk is [on, my].

The life of a prompt, with this tree. Steps 2 to 5 are a round:

    1. begin     Cache the context once: … the cat. This is the *prefill*.
    2. trie      Guess. How to guess is what a method is about. `trie` makes a tree of guesses:

                     node        0    1    2    3    4    5
                     ids        sat  on  the  mat   in    a
                     parents     -1   0    1    2    0    4

    3. forward   Run the model once over all nodes. Siblings are alternatives and must not see each
                 other, so a node sees the context, its ancestors and itself (*tree attention*):

                                 … the cat   sat  on  the  mat  in   a     position
                            sat   x   x  x    x                               n = len(context)
                            on    x   x  x    x    x                          n + 1
                            the   x   x  x    x    x   x                      n + 2
                            mat   x   x  x    x    x   x    x                 n + 3
                            in    x   x  x    x                  x            n + 1
                            a     x   x  x    x                  x   x        n + 2

                 Each row predicts the next token as if the text were the context and the path to
                 this row:   sat → on   on → my   the → …   in → …
    4. walk      From the root, follow what the target chose: 0 (sat), 1 (on). No child of node 1
                 holds "my". The path is [0, 1], and the chunk is [on, my].
    5. commit    The rows of "sat" and "on" join the context, and the others are forgotten. "my" is
                 the root of the next round.

A method is a generator that yields chunks for ever, and `until` cuts them. A CachedLM serves one
generator at a time. A lossless method writes the text of AR (`autoregressive`), apart from near
ties: a call of many rows may round otherwise than a call of one, mostly in half precision. If its
rule draws coins, as that of speculative.py, its text has the distribution of AR's.

In a method's docstring a name with a colon, as `gamma:`, is an option of the command line, too.

Which models: Llama, Qwen, Mistral, Gemma, Phi, GPT-2, … In each of their layers a row sees all rows
before it, or a window of the newest. `load` refuses other attention, and CachedLM other layers.
Left out: batches, encoder-decoder models, and layers with a state (support/recurrent.py).
"""
import argparse
import functools
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers


FAR = 10 ** 9  # more than any position or length


class InputError(ValueError):
    """Report a mistake of the user's: what was expected, and what was given."""


# ------------------------------------------------------------------------------------- trees
def trie(root: int, sequences: list[list[int]]) -> tuple[list[int], list[int], list[list[int]]]:
    """Build a tree that has every sequence as a path below the root; equal prefixes share nodes.

    returns   ids, the token of each node. parents, the parent of each node, -1 for the root.
              paths, the nodes of each sequence with node 0 first
    """
    node_of = {(-1, root): 0}  # the node of each pair of a parent and a token, in order
    paths = []
    for sequence in sequences:
        path = [0]
        for token in sequence:
            path.append(node_of.setdefault((path[-1], token), len(node_of)))  # an old or a new node
        paths.append(path)
    parents, ids = map(list, zip(*node_of))
    return ids, parents, paths


def walk(ids: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], list[int]]:
    """Verify a tree: move from node to node as long as the target chose one of the guesses.

    ids       the token of each node. The children of a node must be different tokens
    chosen    the token that the target chooses after each node: its argmax, or the Sampler's token
              for its place
    returns   path, the accepted nodes with the root first; and chunk, the tokens chosen after each
              of them: the accepted guesses and, last, one token of the target's own
    """
    node_of = {edge: node for node, edge in enumerate(zip(parents, ids))}
    path = [0]
    while (path[-1], chosen[path[-1]]) in node_of:
        path.append(node_of[path[-1], chosen[path[-1]]])
    return path, [chosen[node] for node in path]


def ancestor_mask(parents: list[int]) -> torch.Tensor:
    """Say for each pair of nodes i and j whether j is i itself or one of its ancestors.

    parents   for each node an earlier node, or -1
    returns   bool [n, n]
    """
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]  # a parent comes before its children, so its row is complete
    return mask


# ------------------------------------------------------------------------------------- masks
def windows_of(model) -> dict[str, int | None]:
    """Find how many tokens a row sees in each kind of layer, the row included. None: all of them.

    If a config lists no kinds of layers, every layer counts as "sliding_attention". It has the
    window of the config, or None if there is none, as in Llama.
    """
    config = model.config.get_text_config()
    # Some checkpoints name a window that the code of their family never reads. It does not count.
    window = config.sliding_window if hasattr(type(config)(), "sliding_window") else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def attention_mask(windows: dict, visible, positions, slots, like: torch.Tensor):
    """Make the mask that a model adds to its scores: 0 where a row sees a slot, and else -inf.

    windows    for each kind of layer its window. It hides what lies too far before a row
    visible    bool [B, n, m], what each row may see apart from windows. B is 1, or in a training
               the size of a batch
    positions  [B, n], the positions of the rows
    slots      [B, m], the position of the row in each slot. No window hides a slot at FAR
    like       has the dtype and the device of the mask
    returns    [B, 1, n, m]; for several kinds of layers a dictionary of masks
    """
    past = positions[..., None] - slots[:, None]  # how far before a row: [B, n, m]
    seen = {kind: visible & (past < (window or FAR)) for kind, window in windows.items()}
    masks = {kind: torch.where(x[:, None], 0.0, -torch.inf).to(like) for kind, x in seen.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


# ----------------------------------------------------------------------- a model with a cache
class KVCache:
    """Hold the keys and values of every layer, in buffers that grow when they are full.

    transformers hands this object to every layer. A pass writes its rows from slot `start` on, and
    attends to all slots up to its last row. So a rollback costs nothing: the next `start` is lower.
    """

    def __init__(self):
        self.start, self.layers = 0, {}  # layer: [keys, values], each [B, heads, slots, d]

    def update(self, keys, values, layer: int, *_, **__):
        """Store a layer's new keys and values, [B, heads, n, d]; return all up to these."""
        buffers = self.layers.setdefault(layer, [keys[:, :, :0], values[:, :, :0]])
        end = self.start + keys.shape[2]
        for i, new in enumerate((keys, values)):
            if end > buffers[i].shape[2]:
                buffers[i] = F.pad(buffers[i], (0, 0, 0, end))  # `end` more: copies are rare
            buffers[i][:, :, self.start:end] = new
        return [buffer[:, :, :end] for buffer in buffers]

    def get_seq_length(self, *_) -> int:
        return self.start

    def commit(self, first: int, path: list[int]) -> None:
        """Move the rows of a path to the slots from `first` on. Node i lies in slot first + i."""
        if path == list(range(len(path))):
            return  # they are in place already
        rows = first + torch.tensor(path)
        for buffer in [x for buffers in self.layers.values() for x in buffers]:
            rows = rows.to(buffer.device)  # copied once if all layers share a device
            buffer[:, :, first:first + len(path)] = buffer[:, :, rows]


class CachedLM:
    """Run a causal language model on a cached context and one pending tree below the context.

    Pending nodes are those that were fed since the last commit or truncate. If the guess "in" of
    the header's tree had been accepted instead of "on", commit([0, 4]) would have done this to the
    slots:

        before   │ … the cat │ sat  on  the  mat  in  a │ free …
        after    │ … the cat  sat  in │ the  mat  in  a  free …
                                        the next call writes over these

    model        a model in eval mode, as `load` returns it
    vocab        how many logits count, since embeddings may be padded beyond the tokenizer. None:
                 all. `begin` cuts a draft's to the target's. `full_vocab` keeps the first value

    It also has:

    max_length   how many tokens the model is made for
    length       how many tokens of context are cached
    parents      the parents of the pending nodes: earlier pending nodes, or -1 for the context
    calls        how many passes gave logits; those of the prefill give none
    places       for each row of the newest logits the place of the token that it predicts: how many
                 tokens of the text come before this token. Siblings predict for the same place
    """
    PART = 256  # tokens of a prompt in one pass, which keeps its mask small
    KINDS = ("full_attention", "sliding_attention")  # the layers that it can run
    prefix = 0  # rows before the context. PrefixLM of bita.py has some

    def __init__(self, model, vocab: int | None = None):
        self.model, self.windows, self.max_length = model, windows_of(model), context_length(model)
        if not set(self.windows) <= set(self.KINDS):
            raise InputError(f"expected layers of {self.KINDS}, got {[*self.windows]}")
        self.cache = KVCache()
        # Some quantised weights wrap other tensors, and fail in inference mode
        self.plain = not any(hasattr(x, "__tensor_flatten__") for x in model.parameters())
        self.weight = model.get_input_embeddings().weight  # inputs and masks go where it is
        self.vocab = self.full_vocab = min(vocab or len(self.weight), len(self.weight))
        self.length, self.parents, self.calls, self.places = 0, [], 0, []

    def start(self, ids: list[int], kept: int = 0) -> None:
        """Forget the old text, and cache ids: a prompt without its last token, which is the root.

        kept   how many of the first ids the cache holds already, from the old text
        """
        if len(ids) >= self.max_length:  # no room for the root
            raise InputError(f"expected a context below {self.max_length}, got {len(ids)} tokens")
        self.truncate(kept)
        for i in range(kept, len(ids), self.PART):
            # No part needs logits, which take much memory if the vocabulary is large.
            self.forward(ids[i:i + self.PART], keep=0)
            self.commit(range(len(self.parents)))

    def forward(self, ids, parents: list[int] | None = None, *, keep: int | None = None, **options):
        """Run the model once over n new nodes, which join the pending tree.

        ids       tokens, a list or a tensor [n], or input embeddings [n, d]
        parents   for each node an earlier pending node, or -1 for the context's end. None: a chain
                  from the last pending node
        keep      how many of the last nodes the LM head reads. None: all. A pass with 0 is no call
        options   further arguments of a subclass's `layout`, if it takes any
        returns   the logits [n or keep, V] after each node that the LM head read
        """
        n, old = len(ids), len(self.parents)
        parents = list(range(old - 1, old + n - 1) if parents is None else parents)
        if n == 0 or n != len(parents) or any(not -1 <= x < i for i, x in enumerate(parents, old)):
            raise ValueError(f"expected nodes with a parent each, earlier or -1, got {parents}")
        visible, positions, slots = self.layout(self.parents + parents, n, **options)
        mask = attention_mask(self.windows, visible[None], positions[None], slots[None],
                              self.weight)
        self.cache.start = self.prefix + self.length + old  # the slot after all pending nodes
        inputs = torch.as_tensor(ids)[None].to(self.weight.device)
        keep = n if keep is None else keep
        with torch.inference_mode(self.plain), torch.no_grad():
            logits = self.run_model(inputs, positions[None].to(inputs.device), mask, keep)
        # The tree changes only now, so a pass that raises leaves it as it was.
        self.parents = self.parents + parents
        self.places = (positions[n - keep:] + 1).tolist()
        self.calls += keep > 0
        return logits[0, :, :self.vocab]

    def layout(self, parents: list[int], n: int):
        """Compute what the newest n nodes see, and where they and all rows in the cache are.

        parents   those of all pending nodes. The newest n come last
        returns   visible, bool [n, m]. positions of the nodes, [n]. slots, the positions of all m
                  rows that the cache has after the pass
        """
        ancestors = ancestor_mask(parents)
        # The position of a node is how many tokens come before it: those of the context and its
        # ancestors. `ancestors` counts the node too, so 1 is taken off. A guess beyond max_length
        # gets the last position. It is never part of the answer, which ends before it.
        pending = (self.length - 1 + ancestors.sum(-1)).clamp(max=self.max_length - 1)
        # A node sees the whole context, its ancestors and itself, apart from windows.
        visible = F.pad(ancestors[-n:], (self.length, 0), value=True)
        return visible, pending[-n:], torch.cat([torch.arange(self.length), pending])

    def run_model(self, inputs: torch.Tensor, positions: torch.Tensor, mask, keep: int):
        """Run the model on tokens [B, n] or embeddings [B, n, d]; return logits [B, keep, V]."""
        name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
        if inputs.ndim > 2 and hasattr(self.model.get_decoder(), "embed_tokens_per_layer"):
            raise InputError(f"expected layers fed by embeddings, got {type(self.model).__name__}")
        # The LM head gets the numbers of rows. A count would not do, since transformers takes 0 for
        # all rows. A slice is slower in bfloat16 on a CPU, where PyTorch copies the LM head first.
        read = torch.arange(inputs.shape[1] - keep, inputs.shape[1], device=inputs.device)
        return self.model(**{name: inputs}, position_ids=positions, attention_mask=mask,
                          past_key_values=self.cache, use_cache=True, return_dict=True,
                          logits_to_keep=read).logits

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        """Move the rows of a path to the end of the context, and forget all other pending nodes.

        path   nodes, each the child of the one before it; the first is a child of the context
        """
        above = [-1, *path]  # each node hangs below the one before it
        if not set(zip(path, above)) <= set(enumerate(self.parents)):
            raise ValueError(f"expected a path from the context down, got {path} of {self.parents}")
        self.cache.commit(self.prefix + self.length, list(path))
        self.length, self.parents = self.length + len(path), []

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the context, and no pending node."""
        if not 0 <= length <= self.length:
            raise ValueError(f"expected a length of 0 to {self.length}, got {length}")
        self.length, self.parents = length, []  # the next pass writes over the other rows


def context_length(model) -> int:
    """Find how many tokens a model is made for, or FAR if its config has no limit.

    With LongRoPE it is the original length, since beyond it even cached keys would have to change.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(x for x in rope.values() if isinstance(x, dict))]  # nested by kind of layer
    lengths = [x["original_max_position_embeddings"] for x in ropes if "longrope" in x.values()]
    return min([getattr(config, "max_position_embeddings", None) or FAR, *lengths])


# ---------------------------------------------------------------------------------- sampling
class Sampler:
    """Choose tokens by logits. `sample(logits [n, V], places)` returns one token for each row.

    A seed and a place of the text (`CachedLM.places`) fix a random number E(x) ~ Exp(1) for every
    token x. The token of this place is the first in a race, in which x arrives at time E(x) / p(x):

        argmax_x  p(x) / E(x)

    Why it is a sample of p: x arrives with rate p(x), whatever the others do. Of independent
    exponential times the one of x is the least with probability p(x) / Σ p = p(x).

    Why any guesses leave it exact: p depends on the tokens before the place, and they depend on the
    numbers of earlier places only. So the E of this place are independent of p, and the token is a
    sample of p whatever was guessed. A guess only decides which rows are computed. The choice in a
    row does not depend on it, so a draft may even sample with the same E. Of every method that
    compares guesses with `sample(…)` the text is a function of model and seed. Daliri et al., arXiv
    2408.07978.

    temperature, top_k, top_p and min_p turn logits into p, in this order, by the code of
    transformers. Temperature 0 stands for the argmax. Top_k 0, top_p 1 and min_p 0 keep all tokens.

    coupling   draft and target sample with the same E. A rule that compares p and q is then given 1
               for the sampled token and 0 for all others. So it accepts a guess exactly if both
               sampled the same token
    """

    def __init__(self, temperature: float = 1.0, *, top_k: int = 0, top_p: float = 1.0,
                 min_p: float = 0.0, seed: int = 0, coupling: bool = False):
        self.temperature, self.seed, self.rngs = temperature, seed, {}
        self.sure = coupling or temperature == 0  # whether rules see one-hot distributions
        self.times = functools.lru_cache(128)(self.draw_times)  # a place is asked for many times
        warpers = [(transformers.TemperatureLogitsWarper, float(temperature or 1), 1.0),
                   (transformers.TopKLogitsWarper, top_k, 0),
                   (transformers.TopPLogitsWarper, top_p, 1.0),
                   (transformers.MinPLogitsWarper, min_p, 0.0)]  # the last number switches it off
        self.warp = transformers.LogitsProcessorList(f(x) for f, x, off in warpers if x != off)

    def draw_times(self, place: int, V: int, device) -> torch.Tensor:
        """Draw the E [V] of a place, by the CPU, so that all devices have the same numbers."""
        # A rare token wins by a tiny E, which comes from a u near 1. There the steps of float32 are
        # too coarse. A hash mixes seed and place. In Python hash(-1) equals hash(-2). With the
        # remainder these two seeds differ, too.
        rng = torch.Generator().manual_seed(hash((self.seed % (2 ** 61 - 1), place)) % 2 ** 63)
        u = torch.rand(V, dtype=torch.float64, generator=rng).clamp_(min=1e-300)
        return -u.log_().float().to(device)

    def race(self, logits: torch.Tensor, places: list[int]) -> torch.Tensor:
        """Compute p / E [n, V]: the largest number of a row wins. At temperature 0: the logits."""
        rows = self.warped(logits)
        if self.temperature == 0:
            return rows
        E = torch.stack([self.times(place, rows.shape[1], rows.device) for place in places])
        return rows.softmax(-1) / E

    def __call__(self, logits: torch.Tensor, places: list[int] = ()) -> list[int]:
        """Choose a token for each row of logits [n, V] at these places, which greedy ignores."""
        return self.race(logits, places).argmax(-1).tolist()

    def uniform(self, shape, device) -> torch.Tensor:
        """Draw numbers in [0, 1) of this shape, float64, for the rules of papers."""
        if device not in self.rngs:
            self.rngs[device] = torch.Generator(device).manual_seed(self.seed % 2 ** 63)
        return torch.rand(shape, dtype=torch.float64, device=device, generator=self.rngs[device])

    def warped(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the warpers to logits [n, V]; return them in float32."""
        rows = self.warp(None, logits.float())
        if not rows.amax(-1).isfinite().all():
            raise InputError("expected logits that are numbers, got nan or infinity from a model "
                             f"at temperature {self.temperature}")
        return rows

    def probs(self, logits: torch.Tensor, places: list[int] = ()) -> torch.Tensor:
        """Turn logits [..., V] into the distribution [..., V], float32, that a rule judges.

        It is p. With `coupling` and places [n], and at temperature 0, it is 1 for the winner of the
        row's race and 0 for all others.
        """
        rows = logits.reshape(-1, logits.shape[-1])
        if self.temperature == 0 or (self.sure and places):
            winners = self.race(rows, places).argmax(-1)
            return F.one_hot(winners, rows.shape[1]).float().view(logits.shape)
        return self.warped(rows).softmax(-1).view(logits.shape)

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        """Draw a token from each row of probs [n, V] by a race of new numbers; return them [n]."""
        E = -self.uniform(probs.shape, probs.device).clamp(min=1e-300).log()
        return (probs / E).argmax(-1)


greedy = Sampler(temperature=0)


# ---------------------------------------------------------------------------------- decoding
def begin(prompt, target: CachedLM, *drafts: CachedLM, **options) -> list[int]:
    """Put the context of a prompt into the cache of each model. Each method calls this first.

    prompt    token ids, a list or a tensor [n]. It is returned as a list
    drafts    models with the same tokenizer. Their logits beyond the target's vocabulary are cut
    options   further arguments of the target's `start`, if its class takes any
    """
    prompt = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    V = len(target.weight)
    if not prompt or not all(isinstance(token, int) and 0 <= token < V for token in prompt):
        raise InputError(f"expected 1 or more token ids below {V}, got {str(prompt)[:60]}")
    if len({target, *drafts}) < 1 + len(drafts):
        raise InputError("expected a CachedLM of its own for each model, got one of them twice")
    target.vocab = target.full_vocab  # it may have been a draft before
    target.start(prompt[:-1], **options)
    for draft in drafts:
        if draft.full_vocab < target.vocab:
            raise InputError(f"expected a draft of {target.vocab} tokens, got {draft.full_vocab}")
        draft.vocab = target.vocab
        draft.start(prompt[:-1])
    return prompt


def autoregressive(target: CachedLM, prompt: list[int], *, sample: Sampler = greedy, log=None):
    """Decode one token a call: the simplest method, and the one that all others are compared with.

    prompt   token ids, a list or a tensor [n]
    sample   `greedy`, or a Sampler
    log      a list to which methods append a record of each round. This one appends nothing
    Yields chunks of 1 token.
    """
    chunk = begin(prompt, target)[-1:]  # the root, which is fed first
    while True:  # the tree of each round has only a root
        chunk = sample(target.forward(chunk), target.places)
        target.commit([0])
        yield chunk


def until(chunks, limit: int, eos=()):
    """Yield a method's chunks up to `limit` tokens, or up to the first token that ends an answer.

    chunks   what a method yields
    limit    how many tokens are wanted at most. All must fit into each model's `max_length`
    eos      the tokens that end an answer. The one that ended it is kept
    """
    while limit > 0:
        chunk = next(chunks)[:limit]
        end = next((i for i, token in enumerate(chunk, 1) if token in eos), None)
        yield chunk[:end]
        limit = 0 if end else limit - len(chunk)


# ----------------------------------------------------------------------------------- loading
def load(path: str, device: str | None = None, dtype: str | None = None, **options):
    """Load a model and its tokenizer. Code that comes with a checkpoint is never run.

    path     a Hugging Face directory or hub id
    device   cpu, cuda or cuda:N. Default: cuda if there is a GPU, else cpu
    dtype    float32, bfloat16 or float16. Default: float32 on a CPU, else the checkpoint's own
    options  other arguments of transformers' `from_pretrained`
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options)
        model = model.to(device).eval()
    except Exception as error:  # each reader of a file format raises errors of its own
        raise InputError(f"expected a model directory or hub id, got {path}: {error}") from error
    # Missing weights would stay random. An unexpected tensor of a module that has weights would
    # change the text: a scale of quantised weights, a bias, LoRA.
    names = [name for x in (model, model.base_model) for name, _ in x.named_parameters()]
    modules = {name.rpartition(".")[0] for name in names}
    wrong = [x for x in found["unexpected_keys"] if x.rpartition(".")[0] in modules or "lora_" in x]
    wrong += [*found["missing_keys"], *map(str, Path(path).glob("adapter_config.json"))]
    if not model._supports_attention_backend:  # other attention may need more than a mask
        wrong.append("attention that takes a mask")
    if wrong:
        raise InputError(f"expected a whole {type(model).__name__}, got {path}; missing, or without"
                         f" a place in the model: {', '.join(sorted(wrong)[:3])}")
    # With router logits a model computes a loss, which takes our mask for padding.
    model.config.get_text_config().output_router_logits = False
    return model, tokenizer


def eos_ids(model, tokenizer) -> set[int]:
    """Collect the tokens that end an answer: the tokenizer's and the generation settings'."""
    listed = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}


# -------------------------------------------------------------------------- the command line
MODELS = Path(__file__).resolve().parent / "models"  # the embedded models, if they are there
PROMPT = "Mia has 12 apples. She buys 3 bags of 4 apples each. How many apples does Mia have now?"
LOADING = {"device": "", "dtype": "", "chat": False}  # options, with their defaults
DECODING = {"prompt": "", "compare": False, "max_new_tokens": 128}
SAMPLING = {"temperature": 0.0} | Sampler.__init__.__kwdefaults__  # its arguments


def parse(function, defaults: dict, argv: list[str], parents=()) -> dict:
    """Parse the options of a command line, and return {name: value}.

    function  a method or a command. Its arguments that are numbers, switches or texts are options
    defaults  further options with their defaults. None stands for a required one. The defaults of
              the function's own options are in its signature
    parents   parsers of argparse, whose options are listed too
    """
    parser = argparse.ArgumentParser(
        description=function.__doc__, usage=argparse.SUPPRESS, allow_abbrev=False, parents=parents,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    types = {name: str if x is None else type(x) for name, x in defaults.items()}
    types |= {name: x for name, x in function.__annotations__.items()
              if x in (bool, int, float, str, Path)}
    for name, kind in types.items():
        x = (defaults | function.__kwdefaults__).get(name)
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument(f"--{name}".replace("_", "-"), default=x, required=x is None,
                            help="required" if x is None else f"default: {x}", **how)
    return vars(parser.parse_args(argv))


def encode(tokenizer, messages: list[str], chat: bool) -> list[int]:
    """Turn the messages of a conversation into token ids: a prompt, an answer, a prompt, ….

    chat   whether they come within the model's chat template. If not, there is one message
    """
    messages[-1].encode()  # an error for half of a character, which no tokenizer takes
    if chat:
        said = [{"role": ("user", "assistant")[i % 2], "content": x}
                for i, x in enumerate(messages)]
        return tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    return tokenizer.encode(messages[-1])


def call(command, argv: list[str]) -> None:
    """Call a command of a file, such as `train`, with a model and its tokenizer.

    A command that takes prompts gets those of --prompts. This file has one on each line, as a text
    or as {"prompt": text}.
    """
    reads = {"prompts": None} if "prompts" in command.__annotations__ else {}
    args = parse(command, {"target": f"{MODELS}/target"} | LOADING | reads, argv)
    model, tokenizer = load(*(args.pop(name) for name in ("target", "device", "dtype")))
    chat = args.pop("chat")
    if reads:
        lines = Path(args["prompts"]).read_text(encoding="utf-8-sig").split("\n")
        rows = [json.loads(x) if x[:1] == "{" else {"prompt": x} for x in lines if x.strip()]
        if not rows or not all(isinstance(row.get("prompt"), str) for row in rows):
            raise InputError(f'expected a "prompt" on each line, got {args["prompts"]}')
        args["prompts"] = [encode(tokenizer, [row["prompt"]], chat) for row in rows]
    command(model, tokenizer, **args)


def answer(method, lms: list[CachedLM], tokenizer, prompt: list[int], args: dict) -> tuple:
    """Decode a prompt, and print the text as it comes.

    args     what a command line said, with "eos", "sample" and "limit"
    returns  the tokens of the answer, and how many of them a second gave. The time counts the
             prompt, what the method loads and all rounds
    """
    options = {name: x for name, x in args.items() if name in method.__kwdefaults__}
    calls, ids, text, seconds, began = lms[0].calls, [], "", 0.0, time.perf_counter()
    for chunk in until(method(*lms, prompt, **options), args["limit"], args["eos"]):
        seconds += time.perf_counter() - began
        ids += chunk
        # All tokens are decoded anew, since a blank or a character may need several of them. U+FFFD
        # stands for the first bytes of a character whose other bytes are still to come.
        whole = tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        print(whole[len(text):], end="", flush=True)
        text, began = whole, time.perf_counter()
    print(f"\n{method.__name__}: {len(ids)} tokens in {lms[0].calls - calls} calls of the "
          f"target, {len(ids) / seconds:.1f} tokens/s", file=sys.stderr)
    return ids, len(ids) / seconds


def decode(method, lossy: bool, target: str, argv: list[str], parser, shared: dict) -> None:
    """Decode an answer by a method. With --compare also decode token by token.

    With --chat and without --prompt it is a conversation: an empty line or Ctrl-D ends it. All
    turns have what `shared` makes, as a pool of phrases. The arguments are as for `main`, which has
    parsed --method by the parser.
    """
    classes = {x: kind for x, kind in method.__annotations__.items() if x in ("target", "draft")}
    paths = {x: f"{MODELS}/{x}" for x in classes} | {"target": f"{MODELS}/{target}"}
    args = parse(method, paths | LOADING | DECODING | SAMPLING, argv, [parser])
    models, (tokenizer, *_) = zip(*(load(args[x], args["device"], args["dtype"]) for x in classes))
    vocab = 1 + max(tokenizer.get_vocab().values())  # ids may have gaps, so it is not their number
    lms = [kind(model, vocab) for kind, model in zip(classes.values(), models)]
    args["sample"] = sample = Sampler(**{name: args[name] for name in SAMPLING})
    args |= {"eos": eos_ids(models[0], tokenizer)} | {x: make() for x, make in shared.items()}
    talks = args["chat"] and not args["prompt"]
    messages = []
    for text in iter(lambda: input("\n> "), "") if talks else [args["prompt"] or PROMPT]:
        messages.append(text)
        prompt = encode(tokenizer, messages, args["chat"])
        room = min(lm.max_length for lm in lms) - len(prompt)
        args["limit"] = min(args["max_new_tokens"], room)
        if args["limit"] < 1:
            raise InputError(f"expected 1 new token or more, got {args['limit']} (room: {room})")
        ours, fast = answer(method, lms, tokenizer, prompt, args)
        messages.append(tokenizer.decode(ours, skip_special_tokens=True))
        if args["compare"]:
            theirs, slow = answer(autoregressive, lms[:1], tokenizer, prompt, args)
            # If a rule drew coins, the text depends on more than model and seed
            said = ("may differ from" if lossy or (sample.rngs and not sample.sure) else
                    "equals" if ours == theirs else "differs from")
            print(f"speed-up {fast / slow:.2f}x; output {said} autoregressive output",
                  file=sys.stderr)


def main(methods: list, commands=(), lossy=(), target="target", shared={}, argv=None, **_) -> None:
    """Be the command line of a method file: `python FILE.py [options]`.

    methods   the methods. `--method NAME` names one of them, and the first is the default
    commands  functions that `python FILE.py NAME [options]` calls
    lossy     methods whose text may differ from autoregressive text
    target    the folder in models/ that has the default target
    shared    {the name of an argument of methods: a function that makes it}
    argv      the command line. None: that of this process
    _         what else a COMMAND_LINE says, for `python -m cli` and the tests
    """
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--method", choices=[x.__name__ for x in methods],
                        help="first words of other command lines: " + ", ".join(
                            x.__name__ for x in commands) if commands else None)
    args, argv = parser.parse_known_args(argv)
    transformers.utils.logging.disable_progress_bar()  # only the answer and figures are printed
    try:
        for command in commands:
            if argv[:1] == [command.__name__]:
                return call(command, argv[1:])
        method = {x.__name__: x for x in methods}.get(args.method, methods[0])
        decode(method, method in lossy, target, argv, parser, shared)
    except (KeyboardInterrupt, EOFError) as ended:  # Ctrl-C, or Ctrl-D in a conversation
        sys.exit(130 if isinstance(ended, KeyboardInterrupt) else 0)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split())[:600])
