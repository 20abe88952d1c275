"""What every method shares: models with a cache and a pending token tree, sampling, the driver and the command line.

One idea carries it: a method grows a small *token tree* below the context, runs one forward pass over it and keeps one path.

    root     the last final token, at first the prompt's; it is not cached yet, so every target call feeds it as node 0
    tree     token ids and a parent for each: a node of the pending tree, or -1 for the cached context
    chunk    what a method yields after a call: the tokens that became final, guessed ones first, the target's own last

A method is a generator of chunks, without end: it knows nothing of EOS, length limits or printing; `until` cuts its output.
Left out on purpose: batches of prompts, quantisation, encoder-decoder models, attention biases by slot (ALiBi).
"""
import argparse
import inspect
import json
import re
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
PREFILL_CHUNK = 512  # rows of one prefill pass
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # rows of a static pass
SIDE_STREAMS = {}  # of each GPU, where graphs are captured


class InputError(ValueError):
    """A mistake of the caller's: says what was expected and what was given. The command line prints it and exits with 2."""


# ---------------------------------------------------------------- token trees

def ancestor_mask(parents: list[int]) -> torch.Tensor:
    """Bool [n, n]: is node j node i itself or one of its ancestors? `parents[i]` is a node before i, or -1."""
    n = len(parents)
    if parents == list(range(-1, n - 1)):  # a chain
        return torch.ones(n, n, dtype=torch.bool).tril()
    mask = torch.zeros(n, n + 1, dtype=torch.bool)
    parent, node = torch.tensor([*parents, -1]), torch.arange(n)
    while (node >= 0).any():
        mask[torch.arange(n), node] = True  # walks that have ended mark the extra column, -1
        node = parent[node]
    return mask[:, :n]


def trie(root: int, sequences: Iterable[list[int]]) -> tuple[list[int], list[int]]:
    """(ids, parents) of a tree with `root` as node 0 and every sequence as a path below it; equal prefixes share their nodes."""
    ids, parents, children = [root], [-1], {}
    for sequence in sequences:
        node = 0
        for token in sequence:
            if (node, token) not in children:
                children[node, token] = len(ids)
                ids.append(token)
                parents.append(node)
            node = children[node, token]
    return ids, parents


def walk(ids: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], list[int]]:
    """(path, tokens): from node 0 step to the child that carries the token chosen after this node, while there is one.

    `chosen[i]` is the target's argmax after node i, or ONE sample of its distribution. `path` lists the nodes, node 0 first;
    `tokens` are the final tokens: those stepped to and the one chosen after the last of them, len(path) in all.
    Exact for guesses that do not depend on the samples, provided that no two nodes have the same path (`trie` merges them).
    """
    children = {edge: i for i, edge in enumerate(zip(parents, ids))}
    path = [0]
    while (child := children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(child)
    return path, [chosen[i] for i in path]


# ---------------------------------------------------------------- sampling

def probs(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """The distribution [..., V] (float32) that tokens are drawn from: temperature, then the top_k largest, then the fewest
    tokens whose mass reaches top_p (0 and 1.0 switch these off). Temperature 0 is the limit: one on the argmax."""
    logits = logits.float()
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        values, order = logits.softmax(-1).sort(descending=True)
        outside = values.cumsum(-1) - values >= top_p  # the mass before a token already reaches top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return logits.softmax(-1)


class Sampler:
    """How tokens are chosen: `sample(logits [n, V])` -> n tokens, one independent draw a row. Owns one random generator."""

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0):
        if not 0 <= temperature < float("inf"):
            raise InputError(f"expected a temperature of 0 (greedy) or more, got {temperature}")
        if top_k < 0:
            raise InputError(f"expected top-k of 0 (off) or more, got {top_k}")
        if not 0 < top_p <= 1:
            raise InputError(f"expected top-p above 0 and at most 1, got {top_p}")
        self.temperature, self.top_k, self.top_p, self.seed, self.generator = temperature, top_k, top_p, seed, None

    def generator_on(self, device) -> torch.Generator:
        """The one generator, made on the device that first asks."""
        if self.generator is None:
            self.generator = torch.Generator(device).manual_seed(self.seed)
        return self.generator

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        return probs(logits, self.temperature, self.top_k, self.top_p)

    def draw(self, probs: torch.Tensor) -> list[int]:
        """One token for each row of probs [n, V]."""
        if self.temperature == 0:
            return probs.argmax(-1).tolist()
        return torch.multinomial(probs, 1, generator=self.generator_on(probs.device)).flatten().tolist()

    def uniform(self, n: int, device) -> torch.Tensor:
        """[n] numbers in [0, 1)."""
        return torch.rand(n, device=device, generator=self.generator_on(device))

    def __call__(self, logits: torch.Tensor) -> list[int]:
        return logits.argmax(-1).tolist() if self.temperature == 0 else self.draw(self.probs(logits))


greedy = Sampler(temperature=0)


# ---------------------------------------------------------------- a model and its cache

def grouped_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Attention [B, n, H, d] in which the query heads that share a key head become extra query rows of it: transformers' own
    path copies the whole cache once for each of them when there is a mask."""
    if attention_mask is None:  # not one of our passes: plain causal
        return sdpa_attention_forward(module, query, key, value, None, dropout=dropout, scaling=scaling, **kwargs)
    groups = query.shape[1] // key.shape[1]
    rows = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # [B, key heads, groups * n, d]
    mask = attention_mask if groups == 1 or query.shape[2] == 1 else attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(*query.shape[:3], -1).transpose(1, 2).contiguous(), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


class KVCache:
    """Keys and values of every layer in preallocated buffers of `slots` rows; stands in for transformers' Cache.

    A forward pass writes its rows at slot `used` and attends to all slots before its end. Moving `used` is all that a rollback takes.
    With `rows`, a tensor of slots, it writes there and attends to the whole buffer: a shape that never changes.
    """

    def __init__(self, slots: int):
        self.slots, self.used, self.rows, self.layers = slots, 0, None, {}

    def update(self, keys, values, layer, *_, **__):
        """Called by layer `layer` with its new [B, heads, n, d]; returns views of everything up to them."""
        if layer not in self.layers:  # with the batch size, on the device and in the type of the first keys
            self.layers[layer] = tuple(x.new_zeros(*x.shape[:2], self.slots, x.shape[3]) for x in (keys, values))
        if self.rows is not None:
            return tuple(buffer.index_copy_(2, self.rows, new) for buffer, new in zip(self.layers[layer], (keys, values)))
        end = self.used + keys.shape[2]
        for buffer, new in zip(self.layers[layer], (keys, values)):
            buffer[:, :, self.used:end] = new
        return tuple(buffer[:, :, :end] for buffer in self.layers[layer])

    def move(self, sources: list[int], start: int):
        """Copy the rows at slots `sources` to `start`, `start` + 1, …, which may overlap them."""
        for buffer in (b for pair in self.layers.values() for b in pair):
            buffer[:, :, start:start + len(sources)] = buffer[:, :, sources]  # the right side is a copy

    def get_seq_length(self, *_) -> int:
        return self.used


def context_length(model) -> int:
    """The most tokens that the model was made for; without a limit a number beyond all use."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 10 ** 9


def windows_of(model) -> dict[str, int | None]:
    """For each kind of layer the tokens that it looks back, None where it sees all. InputError for attention of other kinds."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ["every layer"])
    if not kinds <= {"full_attention", "sliding_attention", "every layer"}:
        raise InputError(f"expected layers of full or sliding-window attention, got {', '.join(sorted(kinds))}")
    return {kind: None if kind == "full_attention" else window for kind in kinds}


class CachedLM:
    """A causal language model with its cached context and one pending token tree below it.

    model:    any transformers causal LM that takes `position_ids` and a 4D attention mask (`load` checks).
    capacity: tokens of context that the buffers hold, the prompt included.
    vocab:    look at the first `vocab` logits only (embeddings are often padded, differently for target and draft).
    static:   run passes of up to WIDTHS[-1] rows at the next of these widths over the whole buffer, on a GPU as CUDA graphs, each
              captured when its width comes again: an eager pass of a small model takes a GPU less time than Python needs to launch it.
              None: on a GPU, if the model is on one alone.

    `length` tokens are cached; `parents` and `depths` describe the pending nodes. Slots: prefix rows, context, pending nodes.
    `calls`, `rows` and `seconds` count forward passes, their rows and their time; a prefill is one call. `capturing` are the seconds
    spent on CUDA graphs, which are not in `seconds`.
    """

    def __init__(self, model, capacity: int, vocab: int | None = None, static: bool | None = None):
        self.model, self.capacity, self.vocab = model, capacity, vocab
        self.context, self.windows = context_length(model), windows_of(model)
        self.device, self.dtype = model.get_input_embeddings().weight.device, model.dtype
        alone = len(set(getattr(model, "hf_device_map", {}).values())) < 2
        self.static = self.device.type == "cuda" and alone if static is None else static and alone
        self.graphs = {} if self.static and self.device.type == "cuda" else None
        self.cache, self.slack, self.prefix = KVCache(0), 0, 0
        self.length, self.parents, self.depths, self.waiting = 0, [], [], []
        self.calls, self.rows, self.seconds, self.capturing = 0, 0, 0.0, 0.0

    @torch.inference_mode()
    def start(self, ids: list[int], width: int = 1) -> None:
        """Forget everything and take `ids` as the context. The last rows of a prompt are computed along with the first tree, in one call.
        `width`: the most nodes that the pending tree will have, for which room is made here: buffers are never replaced later."""
        if len(ids) > self.capacity:
            raise InputError(f"expected a prompt of at most {self.capacity} tokens, got {len(ids)}")
        self.truncate(0)
        slots = self.prefix + self.capacity + width
        if self.cache.slots < slots + self.slack:
            self.slack = WIDTHS[-1] + -slots % 8 if self.static else 0  # padding's, and attention kernels like multiples of 8
            old, self.cache = self.cache, KVCache(slots + self.slack)
            self.graphs = self.graphs and {}
            for layer, pair in old.layers.items():  # the prefix rows stay
                self.cache.update(*(buffer[:, :, :self.prefix] for buffer in pair), layer)
        for buffer in (b for pair in self.cache.layers.values() for b in pair if self.static):
            buffer[:, :, self.prefix:] = 0  # a static pass multiplies unseen rows by 0, also an infinity that an earlier prompt left
        calls, first = self.calls, 0
        while len(ids) - first > PREFILL_CHUNK:
            self.forward(ids[first:first + PREFILL_CHUNK], last_only=True)
            self.commit(range(PREFILL_CHUNK))
            first += PREFILL_CHUNK
        self.calls, self.waiting, self.length = calls, list(ids[first:]), len(ids)  # a prompt and the first tree count as one call

    def prefill(self, ids: list[int], width: int = 1) -> torch.Tensor:
        """Forget everything and cache all of `ids`, one token or more; the logits [1, V] after the last."""
        if not 1 <= len(ids) <= self.capacity:
            raise InputError(f"expected a prompt of 1 to {self.capacity} tokens, got {len(ids)}")
        self.start(ids[:-1], width)
        logits = self.forward(ids[-1:])
        self.commit([0])
        return logits

    @torch.inference_mode()
    def forward(self, ids: list[int] | None, parents: list[int] | None = None, *, embeds: torch.Tensor | None = None,
                sees_prefix: list[bool] | None = None, last_only: bool = False) -> torch.Tensor:
        """Append n nodes to the pending tree; the logits [n, V] after each (`last_only`: [1, V], after the last).

        parents:     for each new node a pending node before it, or -1 for the context; None: a chain from the last pending node.
        embeds:      [n, d] input embeddings in place of ids.
        sees_prefix: which of the new nodes see the rows of `set_prefix`; None: none does.
        """
        n, start = len(ids) if embeds is None else len(embeds), len(self.parents)
        parents = list(range(start - 1, start + n - 1)) if parents is None else parents
        if n == 0 or len(parents) != n or any(not -1 <= p < start + i for i, p in enumerate(parents)):
            raise ValueError(f"expected for each of {n} nodes a parent between -1 and the node before it, got {parents}")
        waiting, self.waiting = self.waiting, []  # context rows that this call computes too
        end = self.prefix + self.length + start + n
        rows = len(waiting) + n
        static = self.static and rows <= WIDTHS[-1]
        padding = next(width for width in WIDTHS if width >= rows) - rows if static else 0
        if end > self.cache.slots - self.slack:
            raise ValueError(f"the cache has {self.cache.slots - self.slack} rows and {end} are needed: "
                             f"capacity {self.capacity} or the width given with the prompt is too small")
        for parent in parents:
            self.parents.append(parent)
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        if embeds is None:
            tokens = torch.tensor([[*waiting, *ids, *ids[-1:] * padding]])  # padding repeats the last row
        else:
            before = self.model.get_input_embeddings()(torch.tensor(waiting, dtype=torch.long, device=self.device))
            tokens = torch.cat([before, embeds, embeds[-1:].expand(padding, -1)])[None]
        positions = [*range(self.length - len(waiting), self.length), *(self.length + depth for depth in self.depths[start:])]
        positions = [min(position, self.context - 1) for position in positions]  # guesses beyond the context are cut later
        inputs = [tokens, torch.tensor([positions + positions[-1:] * padding]), *self._masks(start, len(waiting), sees_prefix, padding if static else None)]
        kept, replay, self.cache.used = 1 if last_only else n, static and self.graphs is not None, end - rows
        if not replay:
            inputs = [x.to(self.device) for x in inputs]
        slots = torch.arange(end - rows, end + padding, device=None if replay else self.device) if static else None
        began = time.perf_counter() - self.capturing
        logits = self._replay(*inputs, slots) if replay else self._run(*inputs, slots, keep=0 if static else kept)
        if static:
            logits = logits[:, rows - kept:rows].clone()
        began += self.capturing
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        self.calls, self.rows, self.seconds = self.calls + 1, self.rows + rows, self.seconds + time.perf_counter() - began
        return logits[0, :, :self.vocab]

    def _run(self, tokens, positions, *masks_and_slots, keep: int = 0) -> torch.Tensor:
        """One pass of the model: ids [1, n] or embeddings [1, n, d], positions [1, n], a mask for each kind of layer, the slots [n] to write or None."""
        *masks, self.cache.rows = masks_and_slots
        masks = dict(zip(self.windows, masks))
        return self.model(**{"input_ids" if tokens.ndim == 2 else "inputs_embeds": tokens}, position_ids=positions, logits_to_keep=keep,
                          attention_mask=masks if len(masks) > 1 else masks.popitem()[1], past_key_values=self.cache, use_cache=True).logits

    def _replay(self, *inputs) -> torch.Tensor:
        """The same as a CUDA graph, which is captured when inputs of these shapes come for the second time. The logits are the graph's own."""
        shape = inputs[0].shape
        if self.graphs.get(shape) is None:
            fresh, began = [x.to(self.device) for x in inputs], time.perf_counter()
            self.graphs[shape] = self._capture(fresh) if shape in self.graphs else None
            self.capturing += time.perf_counter() - began
            if self.graphs[shape] is None:
                return self._run(*fresh)
        graph, own, logits = self.graphs[shape]
        for into, new in zip(own, inputs):
            into.copy_(new)
        graph.replay()
        return logits

    def _capture(self, inputs: list[torch.Tensor]):
        """(graph, its inputs, its logits). A model whose pass waits for the GPU cannot be captured: None, a warning, and no more static passes."""
        with torch.cuda.device(self.device):
            if self.device not in SIDE_STREAMS:
                SIDE_STREAMS[self.device] = torch.cuda.Stream()
            stream = SIDE_STREAMS[self.device]
            stream.wait_stream(torch.cuda.current_stream())
            mode = torch.cuda.get_sync_debug_mode()
            try:
                torch.cuda.set_sync_debug_mode("error")
                with torch.cuda.stream(stream):
                    self._run(*inputs)  # warm-up
            except RuntimeError as error:
                warnings.warn(f"{type(self.model).__name__} runs without CUDA graphs: {error}")
                self.static = False
                return None
            finally:
                torch.cuda.set_sync_debug_mode(mode)
                torch.cuda.current_stream().wait_stream(stream)
            graph, pool = torch.cuda.CUDAGraph(), next((made[0].pool() for made in self.graphs.values() if made), None)
            torch._C._cuda_clearCublasWorkspaces()  # a graph must not share them with graphs of other pools, which may go first
            with torch.cuda.graph(graph, pool=pool, stream=stream):  # graphs of a pool may overwrite each other's logits, not those read already
                logits = self._run(*inputs)
            torch._C._cuda_clearCublasWorkspaces()
        return graph, inputs, logits

    def _masks(self, start: int, waiting: int, sees_prefix: list[bool] | None, padding: int | None = None) -> list[torch.Tensor]:
        """What is added to the attention scores, 0 or -inf, [1, 1, n, slots in use]: the pending nodes from `start` on see the whole
        context, their ancestors and themselves; `waiting` rows before them, the end of the context, see what precedes them. All
        as far as a layer's window reaches. One for each kind of layer. With `padding` more rows that see what the last one does, and columns for all slots."""
        context, n = self.prefix + self.length, len(self.parents) - start
        visible = torch.ones(waiting + n, context + start + n, dtype=torch.bool)
        visible[waiting:, context:] = ancestor_mask(self.parents)[start:]
        visible[:waiting] = visible[:waiting].tril(context - waiting)
        if self.prefix:
            visible[:, :self.prefix] = False
            visible[waiting:, :self.prefix] |= torch.tensor(sees_prefix or [False] * n)[:, None]
        masks = []
        for window in self.windows.values():
            seen = visible
            if window is not None and self.length + max(self.depths) >= window:
                positions = torch.cat([torch.arange(self.length), self.length + torch.tensor(self.depths)])
                seen = visible.clone()
                seen[:, self.prefix:] &= positions[len(positions) - len(seen):, None] - positions < window
            if padding is not None:
                seen = F.pad(torch.cat([seen, seen[-1:].expand(padding, -1)]), (0, self.cache.slots - seen.shape[1]))
            masks.append(torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, -torch.inf)[None, None])
        return masks

    @torch.inference_mode()
    def commit(self, path: Iterable[int]) -> None:
        """The rows of `path`, pending nodes from a child of the context downwards, join the context; all other nodes vanish."""
        path = list(path)
        if any(self.parents[node] != parent for parent, node in zip([-1, *path], path)):
            raise ValueError(f"expected a path from the context downwards, got nodes {path} of parents {self.parents}")
        stay = next((i for i, node in enumerate(path) if i != node), len(path))  # rows that lie in their place already
        if stay < len(path):
            context = self.prefix + self.length
            self.cache.move([context + node for node in path[stay:]], context + stay)
        self.length += len(path)
        self.parents, self.depths = [], []

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the context and no pending node."""
        if not 0 <= length <= self.length:
            raise ValueError(f"expected a length of 0 to {self.length}, got {length}")
        self.waiting = self.waiting[:max(0, length - self.length + len(self.waiting))]
        self.length, self.parents, self.depths = length, [], []

    @torch.inference_mode()
    def set_prefix(self, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Extra (keys, values) [heads, P, d] for each layer, seen by `sees_prefix` nodes only; they have no position and count in no
        length. Forgets everything else; prefill comes next."""
        if self.prefix != rows[0][0].shape[1] or not self.cache.layers:  # else the buffers, and graphs over them, stay
            self.prefix, self.cache, self.slack = rows[0][0].shape[1], KVCache(rows[0][0].shape[1]), 0
        self.truncate(0)
        self.cache.used, self.cache.rows = 0, None
        for layer, (keys, values) in enumerate(rows):
            self.cache.update(keys[None], values[None], layer)


def autoregressive(target: CachedLM, prompt: list[int], *, sample: Sampler = greedy,
                   log: list | None = None) -> Iterator[list[int]]:
    """One token a call: the baseline."""
    target.start(prompt[:-1])
    root = prompt[-1:]
    while True:
        root = sample(target.forward(root))
        target.commit([0])
        yield root


def until(chunks: Iterator[list[int]], max_new_tokens: int, eos: Iterable[int] = ()) -> Iterator[list[int]]:
    """Cut a method's chunks after `max_new_tokens` tokens or after the first token of `eos`, which is kept."""
    left, eos = max_new_tokens, set(eos)
    while left > 0:
        chunk = next(chunks)[:left]
        end = next((i + 1 for i, token in enumerate(chunk) if token in eos), None)
        yield chunk[:end]
        left = 0 if end else left - len(chunk)


# ---------------------------------------------------------------- loading

def load(path: str | Path, device: str | None = None, dtype: str | None = None):
    """(model, tokenizer) of a Hugging Face directory or hub id.

    device: "cpu", "cuda", "cuda:1", …, or "auto" to spread the model over all GPUs (needs the accelerate package); default: a GPU
            if there is one.
    dtype:  "float32", "bfloat16" or "float16"; default: float32 on a CPU, the checkpoint's own elsewhere.
    Raises InputError for what cannot be loaded, and for models that a token tree would get wrong.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", device):
        raise InputError(f"expected a device of cpu, cuda, cuda:N or auto, got {device!r}")
    if device.startswith("cuda") and int(device[5:] or 0) >= torch.cuda.device_count():
        raise InputError(f"expected a device that is there, got {device!r} with {torch.cuda.device_count()} CUDA devices")
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise InputError(f"expected a dtype of float32, bfloat16 or float16, got {dtype!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or ("float32" if device == "cpu" else "auto"),
                                                     device_map="auto" if device == "auto" else None)
    except Exception as error:  # the readers of the many file formats raise all kinds
        raise InputError(f"expected a model directory or hub id, got {str(path)!r}: {' '.join(str(error).split())[:300]}") from error
    return prepare(model if device == "auto" else model.to(device)), tokenizer


def prepare(model):
    """Make a transformers causal LM ready for CachedLM: evaluation mode, attention that does not copy the cache, and a check of
    a five-node tree against its paths run alone, which raises InputError where they differ (ALiBi: BLOOM, MPT)."""
    name, model = type(model).__name__, model.eval()
    missing = {"position_ids", "past_key_values"} - set(inspect.signature(model.forward).parameters)
    if missing:
        raise InputError(f"expected a model whose forward pass takes position_ids and past_key_values, got {name} without "
                         + ", ".join(sorted(missing)))
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation("grouped")
    context, ids, parents = [3, 1, 2], [4, 2, 0, 3, 1], [-1, 0, 0, 1, 2]
    lm = CachedLM(model, capacity=len(context))
    lm.prefill(context, width=len(ids))
    logits = lm.forward(ids, parents).float()
    for path in ([0, 1, 3], [0, 2, 4]):
        sequence = torch.tensor([context + [ids[i] for i in path]], device=lm.device)
        with torch.inference_mode():
            alone = model(input_ids=sequence, use_cache=False).logits[0, -len(path):].float()
        error = (logits[path] - alone).abs().mean() / alone.abs().mean()
        if not error < (1e-3 if lm.dtype == torch.float32 else 0.1):
            raise InputError(f"expected a model whose token trees equal their paths, got {name}, off by {error:.1e}: "
                             "its attention depends on more than mask and position ids")
    return model


def eos_ids(model, tokenizer) -> set[int]:
    """The tokens that end an answer: the tokenizer's and the generation settings'."""
    listed = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}


def encode(tokenizer, text: str, chat: bool = False) -> list[int]:
    """Token ids of a prompt, with the special tokens that the model begins with; `chat` wraps it in the tokenizer's chat template."""
    if chat and not tokenizer.chat_template:
        raise InputError("expected a model with a chat template for --chat, got one without")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"expected a prompt in UTF-8, got other bytes ({error.reason})") from error
    if not set(tokenizer(text, add_special_tokens=False)["input_ids"]) - set(tokenizer.all_special_ids):
        raise InputError(f"expected a prompt with some text, got {text!r}")
    if not chat:
        return tokenizer(text)["input_ids"]
    message = {"role": "user", "content": text}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)["input_ids"]


# ---------------------------------------------------------------- the command line

PROMPTS = [  # one of each kind that the embedded models know
    "team(id, name, city, wins); player(id, name, age, goals, team_id)\nShow the name of players of teams whose city is Madrid.",
    "Mia has 12 apples. She buys 3 bags of 4 apples each. Then she gives half of them to Tom. How many apples does Mia have now?",
    'def sum_even_squares(nums):\n    """Return the sum of the squares of the even numbers in nums."""']


class Run:
    """What one method did: its tokens for each prompt, its seconds, its log, and its models with their counters."""

    def __init__(self, method: Callable, models: dict[str, CachedLM], options: dict):
        self.method, self.models = method, models
        self.options = {name: make() for name, make in getattr(method, "shared", {}).items()} | options  # shared by all prompts
        self.prompts, self.outputs, self.log, self.seconds = [], [], [], 0.0

    def chunks(self, prompt: list[int], limit: int, eos: set[int], sample: Sampler) -> Iterator[list[int]]:
        """The final chunks for one more prompt; what the caller does between them takes no time of ours."""
        self.prompts.append(prompt)
        self.outputs.append([])
        self.eos = eos
        endless = self.method(**self.models, prompt=prompt, sample=sample, log=self.log, **self.options)
        chunks, chunk = until(endless, limit, eos), None
        while chunk != []:
            began = time.perf_counter() - self.capturing
            chunk = next(chunks, [])
            self.seconds += time.perf_counter() - self.capturing - began
            self.outputs[-1] += chunk
            yield chunk

    @property
    def capturing(self) -> float:
        """Seconds spent on CUDA graphs, once for each width: not counted in `seconds`."""
        return sum(lm.capturing for lm in self.models.values())

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def figures(self) -> str:
        calls, shares = self.models["target"].calls, {name: lm.seconds / self.seconds for name, lm in self.models.items()}
        shares["rest"] = 1 - sum(shares.values())
        graphs = sum(graph is not None for lm in self.models.values() for graph in (lm.graphs or {}).values())
        return (f"{self.method.__name__}: {self.tokens} tokens in {self.seconds:.2f} s ({self.speed:.1f} tokens/s), "
                f"{calls} target calls ({self.tokens / calls:.2f} tokens per call); "
                f"time: {', '.join(f'{name} {share:.0%}' for name, share in shares.items())}"
                + (f"; {graphs} CUDA graphs captured in {self.capturing:.1f} s before" if graphs else ""))

    def compared(self, ar: "Run", exact: bool) -> tuple[str, bool]:
        """(what to print, is all well): the speed-up over `ar` and, where `exact`, equality with its outputs."""
        text, target = f"speed-up {self.speed / ar.speed:.2f}x", ar.models["target"]
        for number, (ours, theirs) in enumerate(zip(self.outputs, ar.outputs), 1):
            if exact and ours != theirs:
                same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
                first, second = target.prefill(self.prompts[number - 1] + theirs[:same]).topk(2).values[0].tolist()
                return (f"{text}; output of prompt {number} differs from autoregressive output at token {same + 1}, where the target's "
                        f"two largest logits are {first - second:.2g} apart", target.dtype != torch.float32)
        return text + ("; output equals autoregressive output" if exact else ""), True


class Streamer:
    """Prints chunks as text as they come: with `colour` guessed tokens green, the target's own plain."""

    def __init__(self, tokenizer, colour: bool, log: list):
        self.tokenizer, self.colour, self.log, self.ids, self.shown = tokenizer, colour, log, [], 0

    def put(self, chunk: list[int]) -> None:
        for i, token in enumerate(chunk):
            self.ids.append(token)
            self.write(guessed=i < len(chunk) - 1)

    def write(self, guessed: bool = False, end: str = "") -> None:
        before, after = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (self.ids[:self.shown], self.ids))
        text = after[len(before):]
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not end:  # a character that is not complete yet
            return
        print(f"\033[32m{text}\033[0m" if guessed and self.colour and text else text, end=end, flush=True)
        self.ids, self.shown = self.ids[self.shown:], len(self.ids) - self.shown  # kept as context for decoding the next


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(message)


def parse(methods: list[Callable], argv: list[str] | None, actions: dict[str, Callable] = {}):
    """(arguments, the chosen method, its options). A method's own options are its keyword arguments; their help stands in its
    docstring, a line `name: help` for each."""
    parser = Parser(description=inspect.getmodule(methods[0]).__doc__.strip().partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--prompt", action="append", help="text to continue, or - for standard input; repeatable (default: three examples)")
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add("--target", default=str(HERE / getattr(methods[0], "target", "models/target")), help="model directory or hub id (default: %(default)s)")
    if any("draft" in inspect.signature(m).parameters for m in methods):
        add("--draft", default=str(HERE / "models/draft"), help="a small model with the target's tokenizer (default: %(default)s)")
    add("--max-new-tokens", type=int, default=256, help="(default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0 is off (default)")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this mass; 1 is off (default)")
    add("--seed", type=int, default=0, help="of sampling (default: 0)")
    add("--device", help="cpu, cuda, cuda:N or auto (default: cuda where there is one)")
    add("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, the checkpoint's own elsewhere)")
    add("--static", action=argparse.BooleanOptionalAction, help="passes of a few fixed widths, on a GPU as CUDA graphs (default: on a GPU)")
    add("--show", nargs="?", const="always", default="auto", choices=["auto", "always", "never"],
        help="colour the guessed tokens; auto: on a terminal (default)")
    add("--compare", action="store_true", help="also decode autoregressively: speed-up, and equality of greedy output")
    if len(methods) > 1:
        add("--method", default=methods[0].__name__, choices=[m.__name__ for m in methods], help="(default: %(default)s)")
    parser.set_defaults(action=None)
    for name, action in actions.items():
        add(f"--{name}", dest="action", action="store_const", const=action, help=action.__doc__.partition(".")[0].lower())
    takers = {}  # option: names of the methods that take it
    for method in methods:
        for name, parameter in inspect.signature(method).parameters.items():
            if parameter.kind is not parameter.KEYWORD_ONLY or name == "sample" or parameter.default is None:
                continue
            if name not in takers:
                line = re.search(rf"^\s*{name}:\s*(.*)$", method.__doc__ or "", re.M)
                default = parameter.default
                kind = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
                add("--" + name.replace("_", "-"), default=argparse.SUPPRESS, help=f"{line[1] if line else ''} (default: {default})", **kind)
            takers.setdefault(name, []).append(method.__name__)
    args = parser.parse_args(argv)
    chosen = getattr(args, "method", methods[0].__name__)
    options = {name: getattr(args, name) for name in takers if hasattr(args, name)}
    for name in options:
        if chosen not in takers[name]:
            raise InputError(f"expected --{name.replace('_', '-')} with --method {' or '.join(takers[name])}, got --method {chosen}")
    return args, next(m for m in methods if m.__name__ == chosen), options


def read_prompts(given: list[str]) -> list[str]:
    """The prompts of the command line, with - replaced by standard input."""
    if given.count("-") > 1:
        raise InputError("expected - once, standard input can be read only once")
    try:
        return [sys.stdin.buffer.read().decode() if text == "-" else text for text in given]
    except UnicodeDecodeError as error:
        raise InputError(f"expected standard input in UTF-8, got other bytes ({error.reason})") from error


def read_prompt_file(path: Path) -> list[str]:
    """The prompts of a file: one a line, or JSON lines with "prompt" or "question"."""
    try:
        rows = [json.loads(line) if line.startswith("{") else {"prompt": line} for line in filter(str.strip, path.read_text().split("\n"))]
        texts = [row["prompt"] if "prompt" in row else row["question"] for row in rows]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError) as error:
        raise InputError(f"expected a file of prompts, one a line or JSON lines, got {str(path)!r}: {error}") from error
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"expected one prompt or more, all of them text, got {str(path)!r}")
    return texts


@dataclass
class Job:
    """What a command line asked for, with its models loaded and its prompts encoded."""
    args: argparse.Namespace
    method: Callable
    options: dict  # of the method
    models: dict  # "target" and perhaps "draft": a transformers model
    tokenizer: object
    texts: list[str]
    prompts: list[list[int]]  # token ids
    limits: list[int]  # new tokens for each prompt: --max-new-tokens, or up to the end of the context
    eos: set[int]

    def sampler(self) -> Sampler:
        return Sampler(self.args.temperature, self.args.top_k, self.args.top_p, self.args.seed)

    def run(self, method: Callable, options: dict) -> Run:
        """A fresh Run, with caches of its own, of this or another method."""
        capacity = max(len(prompt) + limit for prompt, limit in zip(self.prompts, self.limits))
        vocab = min(model.config.get_text_config().vocab_size for model in self.models.values())
        names = [name for name in self.models if name in inspect.signature(method).parameters]
        return Run(method, {name: CachedLM(self.models[name], capacity, vocab, self.args.static) for name in names}, options)

    def finished(self, method: Callable, options: dict, title: str | None = None) -> Run:
        """A fresh Run that has decoded all prompts without printing them; with a `title` a progress bar shows how far it is."""
        run = self.run(method, options)
        for prompt, limit in zip(tqdm(self.prompts, desc=title, disable=title is None), self.limits):
            for _ in run.chunks(prompt, limit, self.eos, self.sampler()):
                pass
        return run


def prepare_job(args, method: Callable, options: dict) -> Job:
    texts, models = read_prompts(args.prompt or PROMPTS), {}
    Sampler(args.temperature, args.top_k, args.top_p)  # complains before models are loaded
    if args.max_new_tokens < 1:
        raise InputError(f"expected --max-new-tokens of 1 or more, got {args.max_new_tokens}")
    models["target"], tokenizer = load(args.target, args.device, args.dtype)
    if "draft" in inspect.signature(method).parameters:
        models["draft"], other = load(args.draft, args.device, args.dtype)
        if tokenizer.get_vocab() != other.get_vocab():
            raise InputError(f"expected a draft with the target's tokenizer, got vocabularies of {len(tokenizer)} and {len(other)} "
                             f"entries that differ: {args.target} and {args.draft}")
    prompts, context = [encode(tokenizer, text, args.chat) for text in texts], min(map(context_length, models.values()))
    if max(map(len, prompts)) >= context:
        raise InputError(f"expected a prompt shorter than the context of {context} tokens, got {max(map(len, prompts))}")
    limits = [min(args.max_new_tokens, context - len(prompt)) for prompt in prompts]
    return Job(args, method, options, models, tokenizer, texts, prompts, limits, eos_ids(models["target"], tokenizer))


def decode(job: Job, report: Callable[[Run], str] | None) -> int:
    """Stream the prompts' continuations to stdout and figures to stderr; the exit status."""
    args, run, ar = job.args, job.run(job.method, job.options), job.run(autoregressive, {})
    colour, status = args.show == "always" or args.show == "auto" and sys.stdout.isatty(), 0
    try:
        for text, prompt, limit in zip(job.texts, job.prompts, job.limits):
            if len(job.prompts) > 1:  # several outputs: say which is whose
                print(f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
            viewer = getattr(job.method, "viewer", Streamer) if args.show == "always" else Streamer
            stream = viewer(job.tokenizer, colour, run.log)
            for chunk in run.chunks(prompt, limit, job.eos, job.sampler()):
                stream.put(chunk)
            stream.write(end="\n")
            if len(run.outputs[-1]) == limit < args.max_new_tokens:
                print(f"stopped at the end of the context of {len(prompt) + limit} tokens", file=sys.stderr)
            if args.compare:
                for _ in ar.chunks(prompt, limit, job.eos, job.sampler()):
                    pass
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        status = 130
    if run.tokens:
        print(run.figures() + (f"\n{report(run)}" if report else ""), file=sys.stderr)
    if ar.tokens and status == 0:
        line, well = run.compared(ar, exact=args.temperature == 0 and not getattr(job.method, "lossy", False))
        print(f"{ar.figures()}\n{line}", file=sys.stderr)
        status = 0 if well else 1
    return status


def main(methods: list[Callable], report: Callable[[Run], str] | None = None, argv: list[str] | None = None,
         actions: dict[str, Callable[[Job], int]] = {}) -> int:
    """The command line of a method file: `methods` are its generators, the first one the default, `report(run)` makes further
    lines of figures, and `actions` are further things to do instead of decoding: the switch --name calls the function.
    Returns the exit status: 0, 1 (--compare found a difference), 2 (wrong input), 130 (interrupted)."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us quietly
    try:
        args, method, options = parse(methods, argv, actions)
        job = prepare_job(args, method, options)
        return args.action(job) if args.action else decode(job, report)
    except InputError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
