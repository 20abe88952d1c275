"""This file runs a model in passes of few shapes, which a GPU captures as CUDA graphs and replays.

A pass of a small model on a fast GPU waits for its hundreds of launches, and a replay is one
launch. A graph needs shapes and places that never change, so a pass is made to fit a captured one:

    a pass of 3 rows a, b and c after a context of 10, in buffers of 18 slots

    slot     0 … 9     10  11  12    13    14 … 17
    holds    context   a   b   c     c     nothing       4 is the next of WIDTHS: c is there twice
    mask     x         .   .   .     -     -             - is unseen; x and . as in CachedLM

* The number of rows is rounded up to the next of WIDTHS. The last row is repeated, and no row sees
  the repeats.
* A pass of a new shape runs as it is, and the second one captures it. A capture takes as long as
  many passes, and a clock that is still learning may use a shape only once.
* All slots of the buffers are attended to, and the mask hides those that hold nothing.
* New keys and values are written where a tensor says, since a Python number would be baked in.
* When the buffers have grown, graphs are captured again.

A GPU decodes like this unless the command line says `--no-graphs`. Nothing else in the project
depends on this file. results/gpu.md has what it brings.
"""
import gc

import torch
import torch.nn.functional as F

from common import InputError, KVCache
from support.engine import EngineLM, require
from support.files import shorten


WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # rows of the passes that are captured


def capture(function, inputs: tuple[torch.Tensor, ...]):
    """Capture a function as a CUDA graph, which does the same at the cost of one launch.

    inputs   tensors to capture it with, which become its own; later ones have the same shapes
    returns  the graph, a function whose next call overwrites what the last one returned. On a CPU:
             the function itself. InputError for what cannot be captured
    """
    if not inputs[0].is_cuda:
        return function
    function(*inputs)  # kernels are loaded when they first run, which no capture allows
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # a capture fails if an old graph is freed meanwhile
    try:
        with torch.cuda.graph(graph):
            results = function(*inputs)
    except RuntimeError as error:
        raise InputError("expected a pass that can be captured as a CUDA graph; --no-graphs does "
                         f"without: {shorten(error)}") from error
    finally:
        gc.enable()

    def replay(*new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for old, x in zip(inputs, new):
            old.copy_(x)
        graph.replay()
        return results
    return replay


class StaticCache(KVCache):
    """Keep rows in buffers whose every slot is attended to.

    slots    the length of the buffers
    written  a tensor with the slots that a pass writes to; None while a prefix is cached
    """

    def __init__(self):
        super().__init__()
        self.slots = 0
        self.written = None

    def reserve(self, slots: int) -> None:
        """Make room for this many slots. If there are fewer, the buffers are renewed."""
        if slots > self.slots:
            self.slots += slots
            for buffers in self.layers.values():
                buffers[:] = [F.pad(x, (0, 0, 0, self.slots - x.shape[2])) for x in buffers]

    def update(self, keys, values, layer, *_, **__):
        self.reserve(self.start + keys.shape[2])
        if layer not in self.layers:
            self.layers[layer] = [x.new_zeros(*x.shape[:2], self.slots, x.shape[3])
                                  for x in (keys, values)]
        written = self.written
        if written is None:  # a prefix stands in front of everything
            written = torch.arange(keys.shape[2], device=keys.device)
        for buffer, new in zip(self.layers[layer], (keys, values)):
            # Attention multiplies unseen rows by 0, which makes nan of an infinity.
            buffer.index_copy_(2, written, new.nan_to_num(0, 0, 0))
        return self.layers[layer]


class GraphedLM(EngineLM):
    """Be a CachedLM whose passes are captured, once for each shape, and then replayed.

    captured  the graphs, by the number of slots, by the taps, and by the shape of their inputs:
              [1, rows], of embeddings [1, rows, d]. After the first pass of a shape it has the
              pass itself
    waits     whether the first pass of a shape is not captured. The check on loading goes through a
              replay, so it does not wait
    """
    PART = WIDTHS[-1]  # so that the passes over a prompt are captured

    def __init__(self, model, vocab: int | None = None, waits: bool = True):
        super().__init__(model, vocab)
        require(type(self.cache) is KVCache, "graphs", "off for a model with recurrent layers",
                type(model).__name__)
        self.cache = StaticCache()
        self.captured = {}
        self.waits = waits

    def run_model(self, inputs, positions, mask, keep: int):
        first, n = self.cache.start, inputs.shape[1]
        width = next((width for width in WIDTHS if width >= n), n)
        self.cache.reserve(first + 2 * width)  # `graph_of` writes into the last ones
        repeated = torch.arange(width, device=inputs.device).clamp(max=n - 1)
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]
        unseen = self.cache.slots - first - n
        masks = [F.pad(x[:, :, repeated], (0, unseen), value=-torch.inf) for x in masks]
        written = torch.arange(first, first + width, device=inputs.device)
        tensors = (written, inputs[:, repeated], positions[:, repeated], *masks)
        run = self.whole_pass
        if width <= WIDTHS[-1]:
            name = self.cache.slots, str(self.taps), tensors[1].shape
            if name not in self.captured and self.waits:
                self.captured[name] = run
            elif self.captured.get(name, run) == run:
                # Graphs of older buffers are freed. Another CachedLM may have renewed them.
                self.captured = {x: self.captured[x] for x in self.captured if x[0] == name[0]}
                self.captured[name] = self.graph_of(tensors)
            run = self.captured[name]
        logits, features = run(*tensors)
        self.features = features[:n].clone()
        return logits[:, n - keep:n].clone()

    def graph_of(self, tensors: tuple):
        """Capture a pass over tensors of these shapes, and return its graph.

        The captured pass runs on zeros and in the last slots. If it ran on the tensors themselves,
        the check on loading would see what this pass gave, and not what a replay gives.
        """
        written, inputs, *others = tensors
        spare = self.cache.slots - len(written)
        first, self.cache.start = self.cache.start, spare
        others = [torch.zeros_like(x) for x in others]
        graph = capture(self.whole_pass, (written - written[0] + spare,
                                          torch.zeros_like(inputs), *others))
        self.cache.start = first
        return graph

    def whole_pass(self, written, inputs, positions, *masks):
        """Run the model as CachedLM does, with the buffers' slots to write to in a tensor.

        returns  logits and features of all rows
        """
        self.cache.written = written
        mask = dict(zip(self.windows, masks)) if len(masks) > 1 else masks[0]
        logits = EngineLM.run_model(self, inputs, positions, mask, inputs.shape[1])
        self.cache.written = None
        return logits, self.features
