"""This file holds everything that the methods share: token trees, a model with its cache, masks,
sampling, decoding and loading.

Read it first. Every method here does one thing in its own way. It grows a small *token tree* at the
end of the text, runs the model once over the whole tree, and keeps one path of the tree.

    target     the model whose output is wanted
    draft      a smaller model, or a part of the target, that guesses what the target will say.
               Also the tokens that it guesses in a round, as in "a draft of 5 tokens"
    call       one pass of a model over some tokens at once
    row        one token of a call
    round      one turn of a method's loop: some guesses, and one call of the target to verify them
    context    the text without its last token; its keys and values are cached
    root       the last token of the text: it is known but not cached, so each round feeds it
    tree       tokens, and a parent for each; node 0 is the root, and guesses hang below it
    accepted   a guess is accepted if it and every guess above it passed verification. In most
               methods a guess passes if the target chose it
    chunk      the tokens that a round adds to the text: the accepted guesses, then one token that
               the target chose itself

        … the cat ── sat ─┬─ on ── the ── mat     The target chooses "on" after "sat", and "my"
         context    root  └─ in ── a              after "on". The guess "on" is accepted, and the
                                                  chunk is [on, my].

The life of a round, with this tree:

    1. start     Once for each prompt, cache the context: … the cat.

    2. grow      Guess. How to guess is what a method is about. `trie` makes a tree of guesses:

                     node        0    1    2    3    4    5
                     ids        sat  on  the  mat   in    a
                     parents     -1   0    1    2    0    4

    3. mask      Build the mask. Siblings are alternatives and must not see each other, so each node
                 sees the context, its ancestors and itself. Nodes of one depth have one position.

                                 … the cat   sat  on  the  mat  in   a
                            sat   x   x  x    x
                            on    x   x  x    x    x
                            the   x   x  x    x    x   x
                            mat   x   x  x    x    x   x    x
                            in    x   x  x    x                  x
                            a     x   x  x    x                  x   x

    4. forward   Run the model once over all rows. Each row predicts the next token as if the text
                 were the context and the path to this row:   sat → on   on → my   the → …   in → …

    5. walk      From the root, follow what the target chose: 0 (sat), 1 (on). No child of node 1
                 holds "my". The path is [0, 1], and the chunk is [on, my].

    6. commit    The rows of "sat" and "on" join the context, and the others are forgotten. "my" is
                 the root of the next round, which begins with step 2.

Step 1 is `begin`, steps 3 and 4 are `CachedLM.forward`, step 5 is `walk`, and step 6 is
`CachedLM.commit`. `jacobi`, cllm.py, speculative.py and mjsd.py verify a chain only, in ways of
their own.

A method is a generator that yields chunks for ever. `until` cuts them at a limit or at the end of
the answer. The limit must keep the text within the model's `max_length`, since no position comes
after that. In a method's docstring a name with a colon is an option of its command line, and a name
without one is an argument for Python only.

Left out:
    batches                          these methods speed up one text at a time
    quantisation                     a question of the model, not of the method
    encoder-decoder models           their cache has two parts
    attention by distance (ALiBi)    it takes more than a mask and positions; `load` refuses it
"""
import inspect
import itertools
import time
import traceback
from typing import Callable, Container, Iterable, Iterator

import torch
import torch.nn.functional as F
from transformers import (AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM,
                          AutoTokenizer)


class InputError(ValueError):
    """Report a mistake of the user's: what was expected, and what was given.

    A ValueError that is not an InputError is a mistake in the code.
    """


# ------------------------------------------------------------------------------------- trees
def trie(root: int, sequences: Iterable[list[int]]) -> tuple[list[int], list[int], list[list[int]]]:
    """Build a tree that has every sequence as a path below the root; equal prefixes share nodes.

    root        the token of node 0
    sequences   lists of tokens
    returns     ids, the token of each node. parents, the parent of each node, -1 for the root.
                paths, the nodes of each sequence with node 0 first
    """
    ids, parents, paths = [root], [-1], []
    node_of = {}  # (parent, token): node
    for sequence in sequences:
        path = [0]
        for token in sequence:
            edge = (path[-1], token)
            if edge not in node_of:
                node_of[edge] = len(ids)
                ids.append(token)
                parents.append(path[-1])
            path.append(node_of[edge])
        paths.append(path)
    return ids, parents, paths


def walk(ids: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], list[int]]:
    """Verify a tree: move from node to node as long as the target chose one of the guesses.

    The walk begins at the root. It moves to the child that holds the token which the target chose
    after the current node, and ends where no child does.

    ids       the token of each node
    parents   the parent of each node
    chosen    the token that the target chooses after each node: its argmax, or one sample
    returns   path, the accepted nodes with the root first; and chunk, the tokens chosen after each
              of them: the accepted guesses and, last, one token of the target's own

    Sampling stays exact if `chosen` is sampled after the tree was built, since no guess then
    depends on a sample. The children of a node must hold different tokens, as those of `trie` do.
    Of equal ones the walk would see only the last.
    """
    node_of = {edge: node for node, edge in enumerate(zip(parents, ids))}
    path = [0]
    while (path[-1], chosen[path[-1]]) in node_of:
        path.append(node_of[path[-1], chosen[path[-1]]])
    # The last token is not a guess. The target chose it, so it is final as well.
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


# ----------------------------------------------------------------------- a model with a cache
class KVCache:
    """Hold the keys and values of every layer, in buffers that double when they are full.

    transformers hands this object to every layer. A pass writes its rows from slot `start` on, over
    whatever was there, and attends to all slots up to its last one. So a rollback copies nothing:
    it sets `start` back.
    """

    def __init__(self):
        self.start, self.layers = 0, {}  # layer: [keys, values], each [B, heads, slots, d]

    def update(self, keys, values, layer, *_, **__):
        """Store a layer's new keys and values; return all those that its queries may attend to.

        keys, values   [B, heads, n, d] of the n rows of this pass
        layer          the number of the layer
        returns        keys and values [B, heads, start + n, d]
        """
        # New buffers have the batch size, type and device of the first keys.
        buffers = self.layers.setdefault(layer, [keys[:, :, :0], values[:, :, :0]])
        end = self.start + keys.shape[2]
        for i, new in enumerate((keys, values)):
            if end > buffers[i].shape[2]:
                buffers[i] = F.pad(buffers[i], (0, 0, 0, end))
            buffers[i][:, :, self.start:end] = new
        return [buffer[:, :, :end] for buffer in buffers]

    def get_seq_length(self, *_) -> int:
        return self.start

    def run(self, model, **inputs):
        """Run the model once on this cache; return what it returns."""
        return model(**inputs, past_key_values=self, use_cache=True)

    def commit(self, first: int, path: list[int]) -> None:
        """Move the rows of a path of pending nodes to where the first pending node is.

        first   the slot of pending node 0
        path    the nodes
        """
        if path == list(range(len(path))):
            return  # they are in place already
        rows = first + torch.tensor(path)
        for buffer in itertools.chain(*self.layers.values()):
            rows = rows.to(buffer.device)  # only the first of them is copied to a GPU
            # The rows on the right are a copy, so the two places may overlap.
            buffer[:, :, first:first + len(path)] = buffer[:, :, rows]

    def reset(self) -> None:
        """Forget everything."""
        self.start = 0

    def truncate(self, n: int) -> None:
        """Forget the last n tokens of the context: the next pass writes over their rows."""


class CachedLM:
    """Run a causal language model on a cached context and one pending tree below the context.

    Pending nodes are those that were fed since the last commit. Each has a slot in every buffer, in
    the order in which they were fed. If the guess "in" of the header's tree had been accepted
    instead of "on", commit([0, 4]) would have done this to the slots:

        before   │ prefix │ … the cat │ sat  on  the  mat  in  a │ free …
        after    │ prefix │ … the cat  sat  in │ the  mat  in  a  free …
                                                 the next call writes over these

    model            any model that `load` lets pass
    vocab            how many logits count, since embeddings are often padded beyond the tokenizer.
                     None or a larger number: one for each token that has an embedding
    max_length       how many tokens the model is made for. No limit in its config: 10 ** 9
    length           how many tokens of context are cached
    parents          the parents of the pending nodes: earlier pending nodes, or -1 for the context
    prefix           how many rows lie before the context, for nodes with `sees_prefix` (in BiTA)
    passes           for each pass its rows, how many of them the LM head read, and its seconds. A
                     GPU may still be at work after them
    calls            how many passes had rows that the LM head read
    memo             results of `once`, by what was asked for. A method that writes another model's
                     text keeps that model here as "writer"
    owner            the frame of the generator that called `start` last. None: no generator did
    dtype            the model's type, which must stay as it is
    """
    PART = 128  # tokens of a prompt in one pass, which keeps its mask small

    def __init__(self, model, vocab: int | None = None):
        self.model, self.windows = model, windows_of(model)
        self.max_length = context_length(model)
        self.weight = model.get_input_embeddings().weight  # inputs and masks go where it is
        self.vocab = min(vocab or len(self.weight), len(self.weight))
        self.cache = make_cache(model)
        self.prefix, self.length, self.parents = 0, 0, []
        self.passes, self.calls = [], 0
        self.memo, self.owner, self.dtype = {}, None, self.weight.dtype

    @torch.inference_mode()
    def start(self, ids: list[int], prefix: Iterable[tuple] = ()) -> None:
        """Drop the cached context, the prefix and the pending nodes, and cache a new context.

        ids      its tokens: those of a prompt without the last one, which is the first root. Or a
                 tensor [n] of them, or of their input embeddings [n, d]
        prefix   for each layer keys and values [heads, P, d] of P rows. Only nodes with
                 `sees_prefix` attend to these rows. They have no position and are not part of
                 `length`
        """
        if len(ids) > self.max_length:
            raise InputError(f"expected at most {self.max_length} tokens, got {len(ids)}")
        if self.model.training or self.weight.dtype != self.dtype:
            raise InputError(f"expected a model in eval mode, and still in {self.dtype}")
        self.owner = next(iter(running_generators()), None)
        self.prefix, self.length, self.parents = 0, 0, []
        self.cache.reset()
        for layer, (keys, values) in enumerate(prefix):
            self.cache.update(keys[None], values[None], layer)
            self.prefix = keys.shape[1]
        for i in range(0, len(ids), self.PART):
            # No part needs logits, which take much memory if the vocabulary is large.
            self.forward(ids[i:i + self.PART], keep=0)
            self.commit(range(len(self.parents)))

    @torch.inference_mode()
    def forward(self, ids: list[int] | torch.Tensor, parents: list[int] | None = None, *,
                sees_prefix: list[bool] | None = None, keep: int | None = None) -> torch.Tensor:
        """Run the model once over n new nodes, which join the pending tree.

        ids          tokens, a list or a tensor [n], or input embeddings [n, d]
        parents      for each node an earlier pending node, or -1 for the context's end. None: a
                     chain from the last pending node
        sees_prefix  for each node whether it sees the prefix. None: no node does
        keep         how many of the last nodes the LM head reads. None: it reads all. With 0 it
                     reads none, if only the cache is wanted. This is no call
        returns      the logits [n or keep, V] after each node that the LM head read
        """
        began = time.perf_counter()
        self.check_owner()
        n, old = len(ids), len(self.parents)
        parents = list(range(old - 1, old + n - 1) if parents is None else parents)
        sees_prefix = [False] * n if sees_prefix is None else sees_prefix
        ordered = all(-1 <= parent < old + i for i, parent in enumerate(parents))
        if not (0 < n == len(parents) == len(sees_prefix) and ordered):
            raise ValueError(f"expected {n} parents, earlier nodes or -1, and {n} sees_prefix, got "
                             f"{parents} and {sees_prefix}")
        positions, mask = self.layout(self.parents + parents, sees_prefix)
        # The new rows get the slots after all earlier pending nodes.
        self.cache.start = self.prefix + self.length + old
        inputs = torch.as_tensor(ids)[None].to(self.weight.device)
        logits = self.run_model(inputs, positions, mask, n if keep is None else keep)
        # The tree changes only now, so a pass that raises leaves it as it was.
        self.parents = self.parents + parents
        self.passes.append((n, logits.shape[1], time.perf_counter() - began))
        self.calls += logits.shape[1] > 0
        return logits[0, :, :self.vocab]

    def layout(self, parents: list[int], sees_prefix: list[bool]):
        """Compute the positions of the newest pending nodes and what they see.

        parents       the parents of all pending nodes
        sees_prefix   for each of the newest n nodes whether it sees the prefix
        returns       their positions [1, n], and the mask [1, 1, n, slots]
        """
        n = len(sees_prefix)
        ancestors = self.cache.ancestors = ancestor_mask(parents)
        # The position of a node is how many tokens come before it: those of the context and its
        # ancestors. `ancestors` counts the node too, so 1 is taken off. A guess beyond max_length
        # gets the last position. It is in no answer, since the limit of `until` comes before it.
        places = (self.length - 1 + ancestors.sum(-1)).clamp(max=self.max_length - 1)
        # A node sees the prefix if it asks for it, the whole context, its ancestors and itself.
        prefix = torch.tensor(sees_prefix)[:, None].expand(n, self.prefix)
        context = torch.ones(n, self.length, dtype=torch.bool)
        visible = torch.cat([prefix, context, ancestors[-n:]], 1)
        # A window hides slots far before a node. Position 10 ** 9 keeps the prefix in every window.
        slots = torch.cat([torch.full((self.prefix,), 10 ** 9), torch.arange(self.length), places])
        positions = places[None, -n:]
        mask = attention_mask(self.windows, visible[None], positions, slots[None], self.weight)
        return positions.to(self.weight.device), mask

    def run_model(self, inputs: torch.Tensor, positions: torch.Tensor, mask, keep: int):
        """Run the model once, on the cache as it is.

        inputs      ids [1, n], or embeddings [1, n, d]
        positions   [1, n]
        mask        as `attention_mask` makes it
        keep        how many of the last rows the LM head reads
        returns     logits [1, keep, V]
        """
        name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
        # The rows are given by index. For a count of 0 transformers would read all rows. For any
        # other count it would take a slice, for which PyTorch copies the LM head on a CPU in
        # bfloat16.
        read = torch.arange(inputs.shape[1] - keep, inputs.shape[1], device=inputs.device)
        return self.cache.run(self.model, **{name: inputs}, position_ids=positions,
                              attention_mask=mask, logits_to_keep=read).logits

    @torch.inference_mode()
    def commit(self, path: Iterable[int]) -> None:
        """Move the rows of a path to the end of the context, and forget all other pending nodes.

        path   pending nodes, each the child of the one before it; the first is a child of the
               context
        """
        path = list(path)
        if min(path, default=0) < 0 or [self.parents[i] for i in path] != [-1, *path][:-1]:
            raise ValueError(f"expected a path from the context down, got {path} of {self.parents}")
        self.cache.commit(self.prefix + self.length, path)
        self.length, self.parents = self.length + len(path), []

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the context, and no pending node."""
        self.check_owner()
        if not 0 <= length <= self.length:
            raise ValueError(f"expected a length of 0 to {self.length}, got {length}")
        self.cache.truncate(self.length - length)
        self.length, self.parents = length, []

    def check_owner(self) -> None:
        """Refuse a generator that goes on after another one has cached a text of its own here."""
        running = running_generators()
        if self.owner and running and self.owner not in running:
            raise InputError("expected one method at a time on a CachedLM, got one that goes on "
                             "after another has begun")

    def once(self, make: Callable, *args, **options):
        """Return make(*args, **options), which runs only the first time it is asked for.

        A method is called anew for each prompt, and prepares here what serves all prompts. All
        arguments must be hashable.
        """
        key = make, args, *options.items()
        if key not in self.memo:
            self.memo[key] = make(*args, **options)
        return self.memo[key]


def running_generators() -> list:
    """List the frames of the generators that are running now, the innermost first."""
    stack = traceback.walk_stack(inspect.currentframe())
    return [frame for frame, _ in stack if frame.f_code.co_flags & inspect.CO_GENERATOR]


def context_length(model) -> int:
    """Find how many tokens a model is made for.

    With LongRoPE the limit is the original length. Beyond it all keys are turned at another rate,
    so the keys in the cache would be wrong.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(x for x in rope.values() if isinstance(x, dict))]  # nested by kind of layer
    lengths = [x["original_max_position_embeddings"] for x in kinds if "longrope" in x.values()]
    return min([getattr(config, "max_position_embeddings", None) or 10 ** 9, *lengths])


CACHES = {}  # the class of the cache for each kind of layer with a state: support/recurrent.py


def layer_kinds(model) -> list[str]:
    """Return the kinds of a model's layers."""
    config = model.config.get_text_config()
    listed = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    # Not listed: all layers are alike, and have a window if the config has one.
    return sorted(set(listed or ["sliding_attention"]))


def make_cache(model) -> KVCache:
    """Make the cache that a model's layers need. InputError if there is none."""
    others = set(layer_kinds(model)) - {"full_attention", "sliding_attention", "mlp", "moe"}
    if others - set(CACHES):
        raise InputError(f"expected layers of full or sliding attention, got {', '.join(others)}")
    return CACHES[others.pop()](model) if others else KVCache()


def require_keys(model) -> None:
    """Raise an InputError for a model with recurrent layers, if all layers must have keys."""
    if type(make_cache(model)) is not KVCache:
        raise InputError(f"expected layers that all have keys, got {type(model).__name__}")


def windows_of(model) -> dict[str, int | None]:
    """Find how many tokens each kind of layer looks back; None where it sees all of them."""
    known = {"full_attention": None,
             "sliding_attention": getattr(model.config.get_text_config(), "sliding_window", None)}
    # Recurrent layers read no mask. A model that has only such layers is given one all the same.
    kinds = [kind for kind in layer_kinds(model) if kind in known] or ["full_attention"]
    return {kind: known[kind] for kind in kinds}


def attention_mask(windows: dict, visible, row_places, slot_places, like: torch.Tensor):
    """Make the mask that a model adds to its attention scores.

    It is 0 where a row sees a slot, and -inf elsewhere.

    windows       for each kind of layer its window, as `windows_of` gives them
    visible       bool [B, n, m], what each row may see apart from windows
    row_places    [B, n], the positions of the rows. A window hides what lies too far before them
    slot_places   [B, m], the positions of what is in the slots
    like          a tensor of the wanted type and device
    returns       [B, 1, n, m]; for several kinds of layers a dictionary of such masks
    """
    masks, past = {}, row_places[..., None] - slot_places[:, None]
    for kind, window in windows.items():
        seen = visible if window is None else visible & (past < window)
        masks[kind] = torch.where(seen[:, None], 0.0, -torch.inf).to(like)
    return masks if len(masks) > 1 else next(iter(masks.values()))


# ---------------------------------------------------------------------------------- sampling
class Sampler:
    """Draw tokens from logits; `sample(logits)` returns one token for each row of logits [n, V].

    temperature, top_k and top_p turn logits into a distribution, in this order, as in transformers.
    A value out of range raises InputError.

    temperature   divides the logits. 0 stands for the argmax
    top_k         keeps this many of the largest, and all that tie with the last one. 0 keeps all
    top_p         keeps the fewest of the likeliest tokens that sum to at least top_p
    seed          starts the random generators, one for each device
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0):
        if not (1e-6 <= (temperature or 1) <= 1e6 and top_k >= 0 and 1e-30 <= top_p <= 1):
            raise InputError("expected temperature 0 or 1e-6 to 1e6, top_k >= 0, top_p 1e-30 to 1, "
                             f"got {temperature}, {top_k} and {top_p}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.seed, self.rngs = seed, {}

    def uniform(self, shape, device) -> torch.Tensor:
        """Draw numbers in [0, 1) of this shape, float64, from the device's generator."""
        if device not in self.rngs:
            self.rngs[device] = torch.Generator(device).manual_seed(self.seed % 2 ** 63)
        return torch.rand(shape, dtype=torch.float64, device=device, generator=self.rngs[device])

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Turn logits [..., V] into the distribution [..., V], float32, that tokens come from."""
        logits = logits.float()
        if self.temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            values, order = logits.softmax(-1).sort(descending=True)
            # True where the tokens that rank before this one sum to top_p already
            outside = values.cumsum(-1) - values >= self.top_p
            # `scatter` puts what is in the order of ranks back into the order of tokens.
            logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
        return logits.softmax(-1)

    def draw(self, probs: torch.Tensor) -> torch.Tensor:
        """Draw one token from each row of probs [n, V]; return them [n], on the device of probs.

        With u ~ U[0, 1) it is the first token at which the sum of the probabilities exceeds u.
        """
        # In float32 the sums would lose tokens with a probability of 1e-8.
        mass = probs.double().cumsum(-1)
        # The probabilities sum to 1 only nearly. A u beyond their sum would draw no token.
        u = self.uniform((len(probs), 1), probs.device) * mass[:, -1:]
        return torch.searchsorted(mass, u, right=True)[:, 0].clamp(max=mass.shape[1] - 1)

    def __call__(self, logits: torch.Tensor) -> list[int]:
        if self.temperature == 0:
            return logits.float().argmax(-1).tolist()  # argmax of bfloat16 is slow on a CPU
        return self.draw(self.probs(logits)).tolist()


greedy = Sampler(temperature=0)


# ---------------------------------------------------------------------------------- decoding
def begin(prompt, target: CachedLM, *drafts: CachedLM, **options) -> list[int]:
    """Put the context of a prompt into the cache of each model. Each method calls this first.

    A draft gives at most as many logits as the target, since a guess must be a token of the target.

    prompt    token ids, a list or a tensor [n]
    target    the model whose output is wanted
    drafts    models with the same tokenizer that draft
    options   other arguments of the target's `start`
    returns   the prompt as a list. InputError for a prompt or for models that cannot be used
    """
    prompt = prompt.tolist() if isinstance(prompt, torch.Tensor) else list(prompt)
    if not prompt or not all(isinstance(token, int) for token in prompt):
        raise InputError(f"expected a prompt of 1 or more token ids, got {str(prompt)[:60]}")
    if len({target, *drafts}) < 1 + len(drafts):
        raise InputError("expected a CachedLM of its own for each model, got one of them twice")
    target.start(prompt[:-1], **options)
    for draft in drafts:
        if draft.vocab < target.vocab:
            raise InputError(f"expected a draft that can say the target's {target.vocab} tokens, "
                             f"got {draft.vocab}; `vocab` of CachedLM leaves padding out")
        draft.vocab = target.vocab
        draft.start(prompt[:-1])
    return prompt


def autoregressive(target: CachedLM, prompt: list[int], *, sample: Sampler = greedy, log=None):
    """Decode one token a call: the simplest method, and the one that all others are compared with.

    prompt   token ids, a list or a tensor [n]
    sample   `greedy`, or a Sampler
    log      a list to which methods append a record of each round; this one has none
    Yields chunks of 1 token.
    """
    prompt = begin(prompt, target)
    root = prompt[-1:]
    while True:  # the tree of each round has only a root
        root = sample(target.forward(root))
        target.commit([0])
        yield root


def until(chunks: Iterator[list[int]], limit: int, eos: Container[int] = ()):
    """Yield a method's chunks up to `limit` tokens, or up to the first token that ends an answer.

    chunks   what a method yields
    limit    how many tokens are wanted at most
    eos      the tokens that end an answer. The one that ended it is kept
    """
    while limit > 0:
        chunk = next(chunks)[:limit]
        ends = [i + 1 for i, token in enumerate(chunk) if token in eos]
        yield chunk[:ends[0]] if ends else chunk
        limit = 0 if ends else limit - len(chunk)


# ----------------------------------------------------------------------------------- loading
def load(path: str, device: str | None = None, dtype: str | None = None, **options):
    """Load a model and its tokenizer. Code that comes with a checkpoint is never run.

    path     a Hugging Face directory or hub id
    device   cpu, cuda or cuda:N. Default: cuda if there is a GPU, else cpu
    dtype    float32, bfloat16 or float16. Default: float32 on a CPU, else the checkpoint's own
    options  other arguments of transformers' `from_pretrained`
    returns  the model, ready for CachedLM, and its tokenizer. InputError for what cannot be used
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True, **options)  # weights of a wrong size are reported below
        model.to(device)
    except Exception as error:  # each reader of a file format raises errors of its own
        raise InputError(f"expected a model directory or hub id that {device} can load as {dtype}, "
                         f"got {str(path)!r}: {' '.join(str(error).split())[:300]}") from error
    # Scales that were not read are of quantised weights, which would be read as plain numbers.
    scales = [name for name in found["unexpected_keys"] if "scale" in name.rpartition(".")[2]
              and not hasattr(model, "is_quantized")]  # transformers marks what it can read
    wrong = [*scales, *found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]
    if wrong:  # what is missing would stay random, and the output would be garbage
        raise InputError(f"expected all weights of {type(model).__name__}, got {str(path)!r} with "
                         f"{len(wrong)} quantised, missing or of another size: {min(wrong)}")
    return check(model), tokenizer


@torch.inference_mode()
def check(model, run_as: type[CachedLM] = CachedLM):
    """Refuse a model for which a tree gives other logits than each of its paths by itself.

        d b c     e ─┬─ c ── d     a to e are five ordinary tokens from the middle of the
        context      └─ a ── b     vocabulary, since the first ones are often special

    Models whose attention takes more than a mask and positions (BLOOM, MPT) fail this check.
    Settings that the model ignores, or that ask for other outputs than logits, are changed.

    model    a model of transformers, which gets the attention at the end of this file
    run_as   the kind of CachedLM that is checked
    returns  the same model
    """
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation("grouped")
    text = model.eval().config.get_text_config()
    for config in (model.config, text):  # other outputs than logits are not read here
        config.update({"return_dict": True, "output_router_logits": False})
    weight = model.get_input_embeddings().weight
    a, b, c, d, e = (len(weight) // 2 + i for i in range(-2, 3))
    paths = torch.tensor([[d, b, c, e, c, d], [d, b, c, e, a, b]], device=weight.device)
    try:
        alone = model(input_ids=paths, use_cache=False).logits[:, 3:].float().flatten(0, 1)
        window = getattr(text, "sliding_window", None)
        if window is not None:  # some families ignore it. To them 1 token would be the same
            text.sliding_window = 1
            near = model(input_ids=paths, use_cache=False).logits[:, 3:].float().flatten(0, 1)
            text.sliding_window = None if torch.equal(alone, near) else window
        lm = run_as(model)
        lm.start([d, b, c])
        # Nodes 0, 1, 3 are the path e c d, and nodes 0, 2, 4 are the path e a b.
        tree = lm.forward([e, c, a, d, b], [-1, 0, 0, 1, 2])[[0, 1, 3, 0, 2, 4]].float()
    except Exception as error:  # a pass that does not take what it is given raises anything
        raise InputError("expected a model that takes positions, a mask and a cache, got "
                         f"{type(model).__name__}: {' '.join(str(error).split())[:200]}") from error
    alone = alone[:, :lm.vocab]
    error = (tree - alone).abs().mean() / alone.abs().mean()
    # Half precision rounds; a wrong mask or position is off by far more. A nan is refused as well.
    if not error < (1e-3 if model.dtype == torch.float32 else 0.1):
        raise InputError(f"expected a model whose token trees equal their paths, got "
                         f"{type(model).__name__}: off by {error:.1e}")
    return model


def eos_ids(model, tokenizer) -> set[int]:
    """Collect the tokens that end an answer: the tokenizer's and the generation settings'."""
    listed = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}


# ------------------------------------------------------------------------- grouped attention
def grouped_attention(module, query, key, value, attention_mask, **options):
    """Compute attention, treating query heads that share a key head as extra rows of that head.

    transformers' own function, given a mask, would copy the whole cache for each query head.

    query           [B, heads, n, d]
    key, value      [B, key heads, slots, d]
    attention_mask  [B, 1, n, slots]. None: the pass is not one of ours
    returns         the output [B, n, heads, d], and no weights
    """
    if attention_mask is None:
        return AttentionInterface()["sdpa"](module, query, key, value, None, **options)
    B, heads, n, d = query.shape
    rows = query.reshape(B, key.shape[1], -1, d)
    mask = attention_mask.expand(-1, heads // key.shape[1], -1, -1).reshape(B, 1, -1, key.shape[2])
    out = F.scaled_dot_product_attention(rows, key, value, mask, scale=options.get("scaling"))
    return out.reshape(B, heads, n, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", AttentionMaskInterface()["sdpa"])
