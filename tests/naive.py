"""A CachedLM without a cache, which every method can take in the place of the real one.

    lm = NaiveLM(model)        instead of EngineLM(model), for a target and for drafts
    lm.forward(ids, parents)   runs the context anew, and then each node's path on its own

It keeps what it was fed. It uses no positions, masks, slots or buffers of common.py. So a mistake
in those gives other logits than this class does.

Left out: sliding windows, and the blocks of DFlash, whose rows see each other both ways.
"""
import torch
from transformers import DynamicCache

from bita import PrefixLM
from fake_models import path_to
from support.engine import EngineLM, tap_layers


class Context:
    """Hold the input embeddings of a text, and the model that computes its rows."""

    def __init__(self, model):
        self.model, self.fed = model, []

    def run(self, prefix: list[tuple], n: int) -> DynamicCache:
        """Compute the rows anew, for n paths that begin with this text, after rows of a prefix."""
        past, copies = DynamicCache(), DynamicCache()
        for i, rows in enumerate(prefix):
            copies.update(*(x.expand(n, -1, -1, -1) for x in rows), i)
        if self.fed:
            self.model(inputs_embeds=torch.stack(self.fed)[None], past_key_values=past)
        for i, layer in enumerate(past.layers):
            if layer.keys is not None:  # a view of the late layers has no early ones
                copies.update(*(x.expand(n, -1, -1, -1) for x in (layer.keys, layer.values)), i)
        return copies


class NaiveLM(PrefixLM, EngineLM):
    """Compute the logits and the features of each node from its path.

    cache     the context. A draft can be given that of another model, as a CachedLM can
    before    the rows of the prefix, for each layer
    pending   for each pending node what was fed, and whether it sees the prefix
    """

    def __init__(self, model, vocab: int | None = None):
        super().__init__(model, vocab)
        self.cache, self.before, self.pending = Context(model), [], []

    def embed(self, ids) -> torch.Tensor:
        fed = torch.as_tensor(ids)
        return self.model.get_input_embeddings()(fed) if fed.ndim == 1 else fed

    @torch.inference_mode()
    def start(self, ids, prefix=(), taps=None) -> None:
        self.truncate(0)
        self.taps = taps
        self.before, self.features = [*prefix], self.weight[:0]
        if len(ids):
            self.forward(ids, keep=0)
            self.commit(range(len(ids)))

    @torch.inference_mode()
    def forward(self, ids, parents=None, *, sees_prefix=None, keep=None):
        n, old = len(ids), len(self.parents)
        chain = range(old - 1, old + n - 1)
        self.parents = [*self.parents, *(chain if parents is None else parents)]
        self.pending = self.pending[:old] + [*zip(self.embed(ids), sees_prefix or [False] * n)]
        paths = [path_to(node, self.parents) for node in range(old, old + n)]
        results = self.run_paths([[self.pending[node] for node in path] for path in paths])
        logits, self.features = map(torch.stack, zip(*results))
        logits = logits[0 if keep is None else n - keep:, :self.vocab]
        self.passes.append((n, len(logits), 0.0))
        self.calls += len(logits) > 0
        return logits

    def run_paths(self, paths: list[list[tuple]]) -> list[tuple]:
        """Run paths after the context in a batch, where shorter ones have padding at their end.

        returns  the logits and the features of each path's last node
        """
        n, depth, seen = len(paths), max(map(len, paths)), []
        padded = [path + path[-1:] * (depth - len(path)) for path in paths]
        fed = torch.stack([torch.stack([x for x, _ in path]) for path in padded])
        asks = torch.tensor([[sees for _, sees in path] for path in padded])
        before = self.before[0][0].shape[1] if self.before else 0
        text = torch.ones(n, depth, self.length + depth).tril(self.length).bool()
        visible = torch.cat([asks[:, :, None].expand(-1, -1, before), text], 2)
        mask = torch.where(visible[:, None], 0.0, -torch.inf).to(fed)
        positions = (self.length + torch.arange(depth)).clamp(max=self.max_length - 1)[None]
        past = self.cache.run(self.before, n)
        with tap_layers(self.model, self.taps, seen):
            logits = self.model(inputs_embeds=fed, position_ids=positions, attention_mask=mask,
                                past_key_values=past).logits
        ends = [len(path) - 1 for path in paths]
        return [*zip(logits[range(n), ends], torch.cat(seen, -1)[range(n), ends])]

    def commit(self, path) -> None:
        fed = [self.pending[node][0] for node in path]
        self.cache.fed, self.length = self.cache.fed + fed, self.length + len(fed)
        self.parents = []

    def truncate(self, length: int) -> None:
        self.cache.fed, self.length, self.parents = self.cache.fed[:length], length, []
