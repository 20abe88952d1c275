"""Models whose output a test writes down, for decoding methods that take them for a CachedLM.

A method sees of a model only what common.CachedLM offers: `start`, `forward`, `commit`, `truncate`.
`ScriptedLM` offers the same and computes logits with a Python function of the whole text. It has no
weights and no cache, so it is fast, exact, and does whatever a test wants:

    target = ScriptedLM(logits_of)                    logits_of(text: list[int]) -> logits [V]
    chunks = speculative(target, draft, [0, 1])       any method of the project
    assert tokens_of(chunks, 4) == [2, 3, 4, 5]       of helpers.py: the first four tokens
    assert target.calls == 1 and target.rows == 5     counted as CachedLM counts them

These make one, or the logits for one:

    scripted(following, vocab)    after a text comes the token following(text)
    tabled(rows)                  the distribution after token i is row i
    counting(vocab, exceptions)   after token i comes i + 1, but for {i: what comes instead}
    markov(seed, vocab)           random logits that depend on the last two tokens: for sampling,
                                  as the law of such an output can be enumerated (laws.py)

It keeps the token tree of each call in `trees`, to compare it with one drawn by hand. Of a tree it
keeps ids and parents, which are None for a chain.

A method that needs weights (heads on features, a layer of its own) gets a tiny random model of
families.py instead. There `near(model, noise)` is a draft that is often right."""
import random

import torch
import torch.nn.functional as F

from common import KVCache
from support.engine import EngineLM


class ScriptedLM:
    """Stand in for a CachedLM: `logits_of(tokens)` gives the logits [V] after a whole text, the
    prompt included."""

    def __init__(self, logits_of):
        self.logits_of, self.tokens, self.parents, self.ids, self.trees = logits_of, [], [], [], []
        self.calls, self.rows, self.passes = 0, 0, []
        self.memo, self.weight, self.cache = {}, torch.zeros(10 ** 9, 0), KVCache()

    once = EngineLM.once
    vocab = full_vocab = 10 ** 9
    setup_seconds = 0.0

    @property
    def length(self):
        return len(self.tokens)

    def start(self, ids, prefix=()):
        self.tokens, self.parents, self.ids = list(ids), [], []

    def forward(self, ids, parents=None, keep=None):
        start, ids = len(self.parents), torch.as_tensor(ids).tolist()
        self.trees.append((ids, None if parents is None else [*parents]))
        self.parents += range(start - 1, start + len(ids) - 1) if parents is None else parents
        self.ids, self.calls, self.rows = self.ids + ids, self.calls + 1, self.rows + len(ids)
        self.passes.append((len(ids), len(ids), 0.0))
        if keep is not None:
            start = len(self.parents) - keep
        texts = [[self.ids[j] for j in path_to(i, self.parents)]
                 for i in range(start, len(self.parents))]
        self.places = [len(self.tokens) + len(text) for text in texts]
        return torch.stack([self.logits_of(self.tokens + text) for text in texts])

    def commit(self, path):
        path = list(path)
        assert all(self.parents[node] == parent for parent, node in zip([-1, *path], path))
        self.tokens, self.parents = self.tokens + [self.ids[i] for i in path], []
        self.ids = []

    def truncate(self, length):
        assert length <= len(self.tokens)
        self.tokens, self.parents, self.ids = self.tokens[:length], [], []


def scripted(following, vocab: int) -> ScriptedLM:
    """Make a model that puts the token following(text) after a text."""
    return ScriptedLM(lambda text: F.one_hot(torch.tensor(following(text)), vocab).float())


def counting(vocab: int = 20, exceptions: dict = {}) -> ScriptedLM:
    """Make a model that counts, with `exceptions` {token: the token that follows it}."""
    return scripted(lambda text: exceptions.get(text[-1], (text[-1] + 1) % vocab), vocab)


def tabled(rows, last: bool = True) -> ScriptedLM:
    """Make a model of distributions: rows[the last token] after a text, or rows[the text]."""
    return ScriptedLM(lambda text: torch.as_tensor(rows[text[-1] if last else tuple(text)]).log())


def markov(seed: int, vocab: int = 4, scale: float = 1.2):
    """Make random logits, a function of a text, that depend on its last two tokens."""
    table = scale * torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed))
    return lambda tokens: table[tokens[-2], tokens[-1]]


class Oranges(random.Random):
    """Choose the first window of lookahead decoding, W = 5 and N = 4: the oranges 101 to 106."""

    def choices(self, prompt, k):
        assert k == 6  # W + N - 3
        return [101, 102, 103, 104, 105, 106]


def branches(tree: tuple) -> list[list[int]]:
    """Return the tokens from the root of a tree (ids, parents) down to each leaf."""
    ids, parents = tree
    paths = paths_of(ids, parents)
    return [[ids[0], *path] for node, path in enumerate(paths) if node not in parents]


def paths_of(ids: list, parents: list[int]) -> list[tuple]:
    """Return the tokens from below the root of a tree down to each node."""
    return [tuple(ids[i] for i in path_to(node, parents)[1:]) for node in range(len(ids))]


def path_to(node: int, parents: list[int]) -> list[int]:
    """Find the nodes from the root of a tree down to a node."""
    return [] if node < 0 else path_to(parents[node], parents) + [node]
