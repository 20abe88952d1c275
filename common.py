"""What every method shares: token trees, sampling, a model with its cache, loading. Read it first.

All methods grow a small *token tree* at the end of the text, run the model once over the whole
tree, and keep one path of it.

    context   the text but for its last token: its keys and values are cached
    root      the last token of the text: known, but not cached, so that every call feeds it
    tree      tokens and a parent for each: node 0 is the root, guesses hang below it
    chunk     what became final in a call: guesses first, the target's own choice last

        … the cat ── sat ─┬─ on ── the ── mat     the target chooses  on | sat   a | sat on
         context    root  └─ in ── a              kept: sat, on       chunk: [on, a]

A method is a generator of chunks without end, which `until` cuts. Left out: batches, quantisation,
encoder-decoder models, attention that takes more than a mask and positions (ALiBi)."""
import functools
import hashlib
import heapq
import json
import time
import timeit
from pathlib import Path
from typing import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from huggingface_hub import constants, get_session, try_to_load_from_cache
from tqdm import tqdm
from transformers import (AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM,
                          AutoTokenizer, GenerationConfig)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # rows of a `graphs` pass; buffers have 128 spare slots


class InputError(ValueError):
    """A mistake of the caller's: says what was expected and what was given."""


def ancestor_mask(parents: list[int]) -> torch.Tensor:
    """Bool [n, n]: is node j node i or an ancestor of it? A parent is an earlier node, or -1."""
    n, rows = len(parents), []
    for i, parent in enumerate(parents):
        rows.append(bytearray(n) if parent < 0 else rows[parent].copy())
        rows[i][i] = True
    return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(n, n)


def trie(root: int, sequences: Iterable[list[int]]) -> tuple[list[int], list[int], list[list[int]]]:
    """(ids, parents, paths) of a tree with `root` as node 0 and every sequence as a path below it;
    equal prefixes share their nodes. `paths`: the nodes of each sequence, node 0 first."""
    ids, parents, paths, children = [root], [-1], [], {}
    for sequence in sequences:
        path = [0]
        for token in sequence:
            node = children.setdefault((path[-1], token), len(ids))
            if node == len(ids):
                ids, parents = ids + [token], parents + [path[-1]]
            path.append(node)
        paths.append(path)
    return ids, parents, paths


def walk(ids: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], list[int]]:
    """(path, chunk): from node 0 step to the child with the token chosen after a node, while there
    is one; `chunk`: the tokens stepped to and the one chosen after the last. `chosen[i]`: the
    target's argmax after node i, or ONE draw of it: exact for any tree built before the draws.
    Of nodes with the same path only one is found: `trie` merges them."""
    children = {edge: i for i, edge in enumerate(zip(parents, ids))}
    path = [0]
    while (child := children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(child)
    return path, [chosen[node] for node in path]


def best_tree(accept: list[list[float]], n: int) -> list[tuple[float, int, int, int]]:
    """The n nodes (chance, parent, depth, rank) that are likeliest to be accepted, the root first,
    at depth -1: of these the first m are the best m. `accept[depth][rank]`: how often this guess is
    right where those above it are; a chance is the product along a path, and the sum of all chances
    is the tokens that a call makes final."""
    nodes, heap = [], [(-1.0, -1, -1, 0)]
    while heap and len(nodes) < n:
        loss, parent, depth, rank = heapq.heappop(heap)
        for i, right in enumerate(accept[depth + 1] if depth + 1 < len(accept) else []):
            heapq.heappush(heap, (loss * right, len(nodes), depth + 1, i))
        nodes.append((-loss, parent, depth, rank))
    return nodes


def windows_of(model) -> dict[str, int | None]:
    """For each kind of layer how many tokens it looks back; None where it sees all."""
    config = model.config.get_text_config()
    listed = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    kinds = sorted(set(listed or ["sliding_attention"]))  # not listed: all of one kind
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    if set(kinds) - set(windows):
        raise InputError(f"expected layers of full or sliding attention, got {', '.join(kinds)}")
    return {kind: windows[kind] for kind in kinds}


def context_length(model) -> int:
    """The most tokens a model is made for; with LongRoPE, until it turns all keys another way."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None) or 10 ** 9


def attention_mask(windows: dict, visible, rows, slots, like: torch.Tensor):
    """What a model adds to its attention scores, [B, 1, n, m] of the type of `like`: 0 where
    `visible` [B, n, m] and a layer's window let a row see a slot, else -inf. `rows` [B, n] and
    `slots` [B, m] are positions. For several kinds of layers a dictionary of masks."""
    masks = {}
    for kind, window in windows.items():
        seen = visible if window is None else visible & (rows[..., None] - slots[:, None] < window)
        masks[kind] = seen[:, None].to(like.dtype).log().to(like.device)  # log 1 and log 0
    return masks if len(masks) > 1 else masks[kind]


class Sampler:
    """How tokens are chosen: `sample(logits [n, V])` gives n tokens, one independent draw a row.
    Temperature (0: the argmax), then the `top_k` likeliest tokens (0: all), then the fewest of them
    whose mass reaches `top_p`. Owns a random generator for each device."""

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0):
        if not (temperature == 0 or 1e-6 <= temperature <= 1e6) or top_k < 0 or not 0 < top_p <= 1:
            raise InputError("expected a temperature of 0 (greedy) or 1e-6 to 1e6, top-k from 0 "
                             f"and top-p above 0 up to 1, got {temperature}, {top_k} and {top_p}")
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed
        self.generator = functools.cache(lambda x: torch.Generator(x).manual_seed(seed % 2 ** 63))

    def uniform(self, shape, device) -> torch.Tensor:
        """Numbers in [0, 1) from the device's generator."""
        return torch.rand(shape, device=device, generator=self.generator(device))

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """The distribution [..., V], float32, that tokens are drawn from."""
        logits = logits.float()
        if self.temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            values, order = logits.softmax(-1).sort(descending=True)
            outside = values.cumsum(-1) - values >= self.top_p  # those before it have the mass
            logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
        return logits.softmax(-1)

    def draw(self, probs: torch.Tensor) -> list[int]:
        """One token for each row of probs [n, V]."""
        if self.temperature:  # argmax p / E with E exponential is an exact draw from p
            probs = probs / -self.uniform(probs.shape, probs.device).clamp(min=1e-30).log()
        return probs.float().argmax(-1).tolist()  # in bfloat16 five times slower on a CPU

    def __call__(self, logits: torch.Tensor) -> list[int]:
        return self.draw(logits if self.temperature == 0 else self.probs(logits))


greedy = Sampler(temperature=0)


class KVCache:
    """Keys and values of every layer in buffers of `slots` rows. A pass writes its rows from slot
    `start` on and attends to all slots up to its last row: to roll back is to move `start`. With
    `written`, a tensor of slots, it writes there and attends to all, so that no shape changes."""

    def __init__(self, slots: int):
        self.slots, self.start, self.written, self.layers = slots, 0, None, {}

    def update(self, keys, values, layer, *_, **__):
        """Called by a layer with its new keys and values [B, heads, n, d]; those it attends to."""
        if layer not in self.layers:  # with the batch size, type and device of the first keys
            self.layers[layer] = [new.new_zeros(*new.shape[:2], self.slots, new.shape[3])
                                  for new in (keys, values)]
        both, end = list(zip(self.layers[layer], (keys, values))), self.start + keys.shape[2]
        if self.written is not None:  # unseen rows are multiplied by 0: they must be finite
            return [old.index_copy_(2, self.written, new.nan_to_num(0, 0, 0)) for old, new in both]
        for old, new in both:
            old[:, :, self.start:end] = new
        return [old[:, :, :end] for old, _ in both]

    def get_seq_length(self, *_) -> int:
        return self.start


def grouped_attention(module, query, key, value, attention_mask, **options):
    """Attention [B, heads, n, d] in which the query heads that share a key head become more rows
    of it: under a mask transformers' own path copies the whole cache once for each of them."""
    if attention_mask is None:  # not a pass of ours
        return sdpa_attention_forward(module, query, key, value, None, **options)
    groups, one_row = query.shape[1] // key.shape[1], query.shape[2] == 1
    rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    mask = attention_mask if one_row else torch.cat([attention_mask] * groups, 2)
    out = F.scaled_dot_product_attention(rows, key, value, mask, scale=options.get("scaling"))
    return out.reshape(*query.shape[:3], -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)
graph_memory = functools.cache(torch.cuda.graph_pool_handle)  # one pool for all graphs


def capture(function, inputs: tuple[torch.Tensor, ...]):
    """`function` as a CUDA graph: the same for inputs of these shapes, at the cost of one launch.
    The next replay overwrites its result. On a CPU it is the function itself."""
    if not inputs[0].is_cuda:
        return function
    return torch.cuda.make_graphed_callables(function, inputs, pool=graph_memory())


class CachedLM:
    """A causal language model with its cached context and one pending token tree below it.

    model:    any transformers causal LM that `load` lets pass
    capacity: tokens of context that there is room for, the prompt included
    vocab:    the first so many logits count: embeddings are often padded beyond the tokenizer
    graphs:   run each pass at the next of WIDTHS over the whole buffer; on a GPU as a CUDA graph

    `length` tokens are cached; `parents` are those of the pending nodes. `features` [n, d]: what
    the LM head read in the last `forward`, or for a prompt in `start`. Slots of the buffers:
    prefix, context, pending nodes, spare ones. `calls`, `rows` and `seconds` count the calls of
    `forward`, their nodes and their time; a prompt is no call and takes `prompt_seconds`."""

    def __init__(self, model, capacity: int, vocab: int | None = None, graphs: bool = False):
        self.model, self.vocab, self.graphs, self.windows = model, vocab, graphs, windows_of(model)
        self.capacity, self.context = min(capacity, context_length(model)), context_length(model)
        self.weight = model.get_input_embeddings().weight  # inputs go where it is
        self.cache, self.captured, self.prefix, self.length, self.parents = KVCache(0), {}, 0, 0, []
        self.features, self.costs = self.weight[:0], {}
        self.calls, self.rows, self.seconds, self.prompt_seconds = 0, 0, 0.0, 0.0

    @torch.inference_mode()
    def start(self, ids: list[int], width: int = 1, prefix: list[tuple] = ()) -> None:
        """Forget everything and cache `ids`, with room for a pending tree of `width` nodes.
        `prefix`: (keys, values) [heads, P, d] for each layer that only nodes which ask for them
        see; they have no position and count in no length."""
        if len(ids) > self.capacity:
            raise InputError(f"expected a prompt of at most {self.capacity} tokens, got {len(ids)}")
        self.prefix, self.length, self.parents = prefix[0][0].shape[1] if prefix else 0, 0, []
        slots = self.prefix + self.capacity + width + WIDTHS[-1]
        if self.cache.slots < slots:
            self.cache, self.captured = KVCache(slots), {}
        self.cache.start, self.cache.written = 0, None
        for layer, (keys, values) in enumerate(prefix):
            self.cache.update(keys[None], values[None], layer)
        counted, features = (self.calls, self.rows, self.seconds), []
        for i in range(0, len(ids), WIDTHS[-1]):  # a long prompt comes in parts
            self.forward(ids[i:i + WIDTHS[-1]], keep=1)
            self.commit(range(len(self.parents)))
            features.append(self.features)
        self.features = torch.cat(features) if features else self.weight[:0]
        self.prompt_seconds += self.seconds - counted[2]
        self.calls, self.rows, self.seconds = counted

    @torch.inference_mode()
    def forward(self, ids: list[int] | torch.Tensor, parents: list[int] | None = None, *,
                sees_prefix: list[bool] | None = None, keep: int = 0) -> torch.Tensor:
        """Append n nodes to the pending tree; the logits [n, V] after each.

        ids:         n tokens, or n input embeddings as a tensor [n, d]
        parents:     for each new node an earlier pending one, or -1; None: a chain from the last
        sees_prefix: which of the new nodes see the prefix; None: none does
        keep:        logits of the last `keep` nodes only; 0: of all"""
        n, old = len(ids), len(self.parents)
        parents = list(range(old - 1, old + n - 1)) if parents is None else list(parents)
        sees = [False] * n if sees_prefix is None else sees_prefix
        if n == 0 or not n == len(parents) == len(sees) or any(
                not -1 <= p < old + i for i, p in enumerate(parents)):
            raise ValueError(f"expected {n} parents, earlier nodes or -1, got {parents}, {sees}")
        tree, room = self.prefix + self.length, self.cache.slots - WIDTHS[-1]
        if (end := tree + old + n) > room:
            raise ValueError(f"start gave the cache {room} rows and {end} are needed")
        parents = self.parents + parents
        ancestors = ancestor_mask(parents)
        positions = ancestors.sum(-1) + (self.length - 1)  # of the pending nodes
        rows = positions[old:].clamp(max=self.context - 1)  # guesses beyond the end are cut later
        slots = torch.cat([torch.full((self.prefix,), 10 ** 9),  # no window leaves the prefix out
                           torch.arange(self.length), positions])
        visible = F.pad(ancestors[old:], (tree, 0), value=True)  # [n, end]
        if self.prefix:
            visible[:, :self.prefix] = torch.tensor(sees)[:, None]
        began = time.perf_counter()
        logits, features = self._run(torch.as_tensor(ids), rows, visible, slots, keep)
        logits, self.features = logits[0, :, :self.vocab], features[0]
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self.calls, self.rows, self.parents = self.calls + 1, self.rows + n, parents
        self.seconds += time.perf_counter() - began
        return logits

    def _run(self, inputs, rows, visible, slots, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and features [1, n, …] of n new rows, whose keys and values enter the buffers."""
        (n, end), device = visible.shape, self.weight.device
        self.cache.start = end - n
        if self.graphs:  # few shapes: the last row is repeated, and all slots are looked at
            width = next((width for width in WIDTHS if width >= n), n)
            node, unused = torch.arange(width).clamp(max=n - 1), (0, self.cache.slots - end)
            inputs, rows = inputs[node], rows[node]
            visible, slots = F.pad(visible[node], unused), F.pad(slots, unused)
        masks = attention_mask(self.windows, visible[None], rows[None], slots[None], self.weight)
        masks = list(masks.values()) if isinstance(masks, dict) else [masks]
        tensors = [inputs[None].to(device), rows[None].to(device), *masks]
        if not self.graphs:
            return self._model(None, *tensors, keep=keep)
        tensors.insert(0, torch.arange(end - n, end - n + width, device=device))
        if inputs.shape not in self.captured and width <= WIDTHS[-1]:
            self.captured[inputs.shape] = capture(self._model, tuple(tensors))
        logits, features = self.captured.get(inputs.shape, self._model)(*tensors)
        return logits[:, :n][:, -keep:].clone(), features[:, :n].clone()

    def _model(self, written, inputs, rows, *masks, keep: int = 0):
        """One pass of the model over ids [1, n] or embeddings [1, n, d]."""
        self.cache.written, features = written, []
        # On a CPU by index: for a slice of the rows it copies the whole LM head in bfloat16
        kept = torch.arange(inputs.shape[1])[-keep:] if inputs.device.type == "cpu" else keep
        with self.model.get_decoder().register_forward_hook(lambda *x: features.append(x[2][0])):
            logits = self.model(
                **{"input_ids" if inputs.ndim == 2 else "inputs_embeds": inputs},
                attention_mask=dict(zip(self.windows, masks)) if masks[1:] else masks[0],
                position_ids=rows, past_key_values=self.cache, use_cache=True,
                logits_to_keep=kept).logits
        return logits, features[0]

    @torch.inference_mode()
    def commit(self, path: Iterable[int]) -> None:
        """The rows of `path`, pending nodes from a child of the context downwards, join the
        context; all other nodes vanish."""
        path, tree = list(path), self.prefix + self.length
        if any(self.parents[node] != parent for parent, node in zip([-1, *path], path)):
            raise ValueError(f"expected a path from the context down, got {path} of {self.parents}")
        if path and path[-1] != len(path) - 1:  # else its rows lie in place already
            for buffer in (b for pair in self.cache.layers.values() for b in pair):
                buffer[:, :, tree:tree + len(path)] = buffer[:, :, [tree + node for node in path]]
        self.length, self.parents = self.length + len(path), []

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the context and no pending node."""
        if not 0 <= length <= self.length:
            raise ValueError(f"expected a length of 0 to {self.length}, got {length}")
        self.length, self.parents = length, []


def seconds_of(lm: CachedLM, name, act: Callable) -> float:
    """How long `act` takes on this machine, the best of three; measured once for an `lm`."""
    if name not in lm.costs:
        counted, features = (lm.calls, lm.rows, lm.seconds), lm.features
        lm.costs[name] = min(timeit.repeat(act, number=1, repeat=3))
        (lm.calls, lm.rows, lm.seconds), lm.features = counted, features
    return lm.costs[name]


def row_costs(lm: CachedLM, most: int) -> dict[int, float]:
    """{n: seconds of a call of n rows} for WIDTHS up to `most`, which `start` made room for."""
    return {n: seconds_of(lm, n, lambda: (lm.forward([0] * n), lm.truncate(lm.length)))
            for n in WIDTHS if n <= most}


def autoregressive(target: CachedLM, prompt: list[int], *, sample: Sampler = greedy, log=None):
    """One token a call: the simplest method, and what all others are measured by."""
    target.start(prompt[:-1])
    root = prompt[-1:]
    while True:
        root = sample(target.forward(root))
        target.commit([0])
        yield root


def until(chunks: Iterator[list[int]], limit: int, eos: Iterable[int] = (), log=None):
    """Cut a method's chunks after `limit` tokens or after the first token of `eos`, which stays;
    what is cut does not count as accepted in the method's `log`."""
    while limit > 0:
        chunk = next(chunks)[:limit]
        chunk = chunk[:next((i + 1 for i, token in enumerate(chunk) if token in eos), limit)]
        if log and log[-1].get("accepted", -1) >= len(chunk):
            log[-1] |= {"accepted": len(chunk), "cut": True}
        yield chunk
        limit = 0 if chunk[-1] in eos else limit - len(chunk)


def load(path: str, device: str | None = None, dtype: str | None = None, graphs: bool = False):
    """(model, tokenizer) of a Hugging Face directory or hub id; InputError for what cannot be used.

    device: cpu, cuda, cuda:N, or auto: all GPUs, by accelerate; default: a GPU if there is one
    dtype:  float32, bfloat16 or float16; default: float32 on a CPU, else the checkpoint's own"""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    spread = {"device_map": "auto"} if device == "auto" else {}
    try:
        if not (Path(path).exists() or try_to_load_from_cache(path, "config.json")):
            get_session().head(constants.ENDPOINT, timeout=9)  # offline, the rest tries a minute
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **spread)
        model = model if spread else model.to(device)
    except Exception as error:  # the readers of the many file formats raise all kinds
        raise InputError(f"expected a model directory or hub id that {device} can load as {dtype}, "
                         f"got {str(path)!r}: {' '.join(str(error).split())[:300]}") from error
    return prepare(model, graphs), tokenizer


@torch.inference_mode()
def prepare(model, graphs: bool = False):
    """Make a transformers model ready for CachedLM, and check that a five-node tree gives what its
    paths give alone: InputError where it does not (BLOOM, MPT)."""
    name, context, ids, parents = type(model).__name__, [3, 1, 2], [4, 2, 0, 3, 1], [-1, 0, 0, 1, 2]
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation("grouped")
    lm = CachedLM(model.eval(), capacity=len(context), graphs=graphs)
    try:
        for cached in (context[:1], context):  # a graph is captured first, then replayed
            lm.start(cached, width=len(ids))
            logits = lm.forward(ids, parents).float()
    except Exception as error:  # whatever its forward pass makes of them
        raise InputError(f"expected a model that takes positions, a mask and a cache, got {name}: "
                         f"{' '.join(str(error).split())[:300]}") from error
    paths = torch.tensor([[0, 1, 3], [0, 2, 4]])
    texts = torch.tensor([context + [ids[i] for i in path] for path in paths.tolist()])
    alone = model(input_ids=texts.to(lm.weight.device), use_cache=False).logits[:, 3:].float()
    error = (logits[paths] - alone).abs().mean() / alone.abs().mean()
    if not error < (1e-3 if model.dtype == torch.float32 else 0.1):
        raise InputError(f"expected a model whose token trees equal their paths, got {name}: off "
                         f"by {error:.1e}, attention takes more than a mask and positions")
    return model


def eos_ids(model, tokenizer) -> set[int]:
    """The tokens that end an answer: the tokenizer's and the generation settings'."""
    listed = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}


def encode(tokenizer, text: str, chat: bool = False) -> list[int]:
    """Token ids of a prompt, after BOS if the tokenizer has it so; `chat`: in the chat template."""
    if set(tokenizer.encode(text, add_special_tokens=False)) <= set(tokenizer.all_special_ids):
        raise InputError(f"expected a prompt with some text, got {text!r}")
    if not chat:
        return tokenizer.encode(text)
    if not tokenizer.chat_template:
        raise InputError("expected a model with a chat template for --chat, got one without")
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=True,
                                         add_generation_prompt=True)["input_ids"]


def digest(model, *settings) -> str:
    """A name for files that belong to this model's weights and settings, and to no others."""
    of = hashlib.sha256(repr(settings).encode())
    for x in model.state_dict().values():
        of.update(x.flatten()[::1009].float().cpu().numpy().tobytes())
    return of.hexdigest()[:16]


@torch.inference_mode()
def own_answers(model, tokenizer, prompts: list[list[int]], limit: int, work: Path,
                size: int = 64) -> list[list[int]]:
    """The model's own greedy answers, which drafters learn from; a file in `work` keeps them."""
    eos = eos_ids(model, tokenizer)
    model.generation_config = GenerationConfig(  # no penalties, no sampling: greedy
        max_new_tokens=limit, eos_token_id=sorted(eos) or None, pad_token_id=0)  # masked or cut
    with open(work / f"answers-{digest(model, limit)}.jsonl", "a+") as kept:
        kept.seek(0)
        lines = [line for line in kept if line.endswith("\n")]  # not one that was cut off
        done = {tuple(row["prompt"]): row["answer"] for row in map(json.loads, lines)}
        kept.truncate(sum(map(len, lines)))
        todo = sorted({tuple(p) for p in prompts} - done.keys(), key=lambda p: (len(p), p))
        for i in tqdm(range(0, len(todo), size), desc="answers"):
            some = todo[i:i + size]
            width = max(map(len, some))
            ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in some])
            real = torch.arange(-width, 0) >= -torch.tensor([[len(p)] for p in some])
            rows = model.generate(ids.to(model.device), attention_mask=real.long().to(model.device))
            for prompt, row in zip(some, rows[:, width:].tolist()):
                end = next((n + 1 for n, token in enumerate(row) if token in eos), len(row))
                done[prompt] = row[:end]
                kept.write(json.dumps({"prompt": prompt, "answer": row[:end]}) + "\n")
            kept.flush()
    return [done[tuple(p)] for p in prompts]
