"""Passes of few shapes, on a GPU captured as CUDA graphs and replayed (`--graphs`).

A step of a small model on a fast GPU waits for its hundreds of launches; a graph is one launch. It
needs shapes and places that never change: a pass has the next of WIDTHS rows, the last one repeated
(nobody sees the repeats), looks at all slots of the buffers, and writes where a tensor says. When
the buffers have grown, graphs are captured again. No GPU has run this yet, so it is the plain thing
and off by default; nothing else in the project knows of it."""
import functools

import torch
import torch.nn.functional as F

from common import WIDTHS, CachedLM, KVCache

graph_memory = functools.cache(torch.cuda.graph_pool_handle)  # one pool for all graphs


def capture(function, inputs: tuple[torch.Tensor, ...]):
    """`function` as a CUDA graph: the same for inputs of these shapes, at the cost of one launch.
    The next replay overwrites its result. On a CPU it is the function itself."""
    if not inputs[0].is_cuda:
        return function
    return torch.cuda.make_graphed_callables(function, inputs, pool=graph_memory())


class StaticCache(KVCache):
    """Rows are written at the slots `written`, a tensor, and all slots are attended to."""

    def __init__(self):
        super().__init__()
        self.slots = 0
        self.written = None

    def reserve(self, slots: int) -> bool:
        """Make room for so many; were the buffers renewed for it?"""
        if slots <= self.slots:
            return False
        self.slots = slots + self.slots
        for buffers in self.layers.values():
            buffers[:] = [F.pad(x, (0, 0, 0, self.slots - x.shape[2])) for x in buffers]
        return True

    def update(self, keys, values, layer, *_, **__):
        if layer not in self.layers:
            self.reserve(self.start + keys.shape[2])
            self.layers[layer] = [x.new_zeros(*x.shape[:2], self.slots, x.shape[3])
                                  for x in (keys, values)]
        written = self.written
        if written is None:  # the prefix
            written = torch.arange(keys.shape[2], device=keys.device)
        for buffer, new in zip(self.layers[layer], (keys, values)):
            # Unseen rows are multiplied by 0: they must be finite
            buffer.index_copy_(2, written, new.nan_to_num(0, 0, 0))
        return self.layers[layer]


class GraphedLM(CachedLM):
    """A CachedLM that captures each shape of a pass once: {(shape of the inputs): graph}."""

    def __init__(self, model, vocab: int | None = None):
        super().__init__(model, vocab)
        self.cache = StaticCache()
        self.captured = {}

    def start(self, ids, prefix=()) -> None:
        rows = prefix[0][0].shape[1] if prefix else 0
        if self.cache.reserve(rows):
            self.captured = {}
        self.cache.written = None
        super().start(ids, prefix)

    def run_model(self, inputs, positions, mask, keep: int | None):
        first, n = self.cache.start, inputs.shape[1]
        width = next((width for width in WIDTHS if width >= n), n)
        if self.cache.reserve(first + 2 * width):  # the last ones are for captures
            self.captured = {}
        repeated = torch.arange(width, device=inputs.device).clamp(max=n - 1)
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]
        unseen = self.cache.slots - first - n
        masks = [F.pad(x[:, :, repeated], (0, unseen), value=-torch.inf) for x in masks]
        written = torch.arange(first, first + width, device=inputs.device)
        tensors = (written, inputs[:, repeated], positions[:, repeated], *masks)
        run = self.whole_pass
        if width <= WIDTHS[-1]:
            shape = tensors[1].shape
            if shape not in self.captured:
                self.captured[shape] = self.graph_of(tensors)
            run = self.captured[shape]
        logits, features = run(*tensors)
        read = 0 if keep is None else max(0, n - keep)  # the first row whose logits are wanted
        return logits[:, read:n].clone(), features[:, :n].clone()

    def graph_of(self, tensors: tuple):
        """Captured on other inputs than it is first used with, in the last slots: the check on
        loading sees what a replay gives, not what the captured pass gave."""
        written, inputs, *others = tensors
        spare = self.cache.slots - len(written)
        first, self.cache.start = self.cache.start, spare
        others = [torch.zeros_like(x) for x in others]
        graph = capture(self.whole_pass, (written - written[0] + spare,
                                          torch.zeros_like(inputs), *others))
        self.cache.start = first
        return graph

    def whole_pass(self, written, inputs, positions, *masks):
        """Logits and features of all rows."""
        self.cache.written = written
        mask = dict(zip(self.windows, masks)) if len(masks) > 1 else masks[0]
        return super().run_model(inputs, positions, mask, None)
