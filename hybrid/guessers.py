"""A trained part of any kind guesses for hybrid.py what comes after a text and a path of guesses.

    medusa, hydra    a head guesses the token after the root, for all paths in one pass
    eagle, eagle3    the layer guesses the tokens after any path, by a pass for each of its nodes
    dflash           the draft guesses a whole block in one pass, and so for all paths
"""
import math
import timeit

from common import CachedLM
from support.clock import row_costs
from support.layers import BlockLM, FeatureLM, depth_of
from support.parts import MODELS, load_facts, logits_of, require
from support.released import is_head
from survey.dflash import run_block
from survey.dflash import load_draft as load_block
from survey.eagle import Pairs, feed, load_draft
from survey.eagle3 import load_draft as load_eagle3
from survey.medusa import load_heads
from survey.rest import as_text, as_tokens

import torch

MOST = 64  # the most nodes of a tree
RANKS = 10  # how many guesses a trained part gives
FLOOR = 0.001  # the least chance that a trained part or the n-grams give, if both are joined
HEADS, LAYERS = ("medusa", "hydra"), ("eagle", "eagle3")
GUESSES = ("none", *HEADS, *LAYERS, "dflash")


def load_kind(kind: str, path: str, model):
    """Load a trained part of a kind from its file, for a model."""
    if kind in HEADS:
        return load_heads(path, kind, model)
    return {"eagle": load_draft, "eagle3": load_eagle3, "dflash": load_block}[kind](path, model)


class Trained:
    """Hold a trained part that guesses what comes after the text.

    A pair is a token, and the target's feature of the token before it. The part reads pairs, which
    wait until the part is asked. A head of Medusa or Hydra reads only the last pair. The layer of
    EAGLE or EAGLE-3 and DFlash's draft read all waiting pairs, because their caches have the
    earlier ones.

    target   the model whose features the part reads
    kind     medusa, hydra, eagle, eagle3 or dflash
    path     the file of the heads, of the layer or of the draft

    taps     the layers whose inputs are this part's features, side by side
    depth    for how many levels of a tree the part guesses
    waiting  the pairs that the part has not read, in some Pairs one after the other
    root     the last token of the text, below which paths begin
    passes   {path: what a pass of the part made} in this round. EAGLE's layer has a pass for each
             path, which made a row, given by its number, and a feature. DFlash's draft and a head
             have one pass for all paths, under the path "". It made logits
    """

    def __init__(self, target: FeatureLM, kind: str, path: str):
        model = target.model
        self.embed = model.get_input_embeddings()
        self.vocab = target.vocab
        self.kind = kind
        self.layer = None  # EAGLE's layer or DFlash's draft, with its cache
        self.part = target.once((kind, path), lambda: load_kind(kind, path, model))
        self.taps = self.part.taps or [depth_of(model)]
        self.depth = 1
        if kind in HEADS:
            self.to_logits = target.once((self.part, "logits"), lambda: logits_of(model))
        else:
            self.depth = self.part.B if kind == "dflash" else MOST
            cached = BlockLM if kind == "dflash" else type(target)
            self.layer = target.once((self.part, "cached"),
                                     lambda: cached(self.part.lm, target.vocab))

    def start(self, pairs: Pairs) -> None:
        """Forget everything and begin a text.

        pairs    the pairs of the prompt. A prompt of one token has none
        """
        self.waiting = []
        self.passes = {}
        if self.layer:
            self.layer.start([])
            if len(pairs.tokens) > 1:
                # The prompt is read here. Otherwise the first round would seem to take that long.
                self.add(pairs.part(slice(0, -1)))
                self.compute_logits("")
                pairs = pairs.part(slice(-1, None))
        if pairs.tokens:
            self.add(pairs)

    def add(self, pairs: Pairs) -> None:
        """Append pairs, and forget the round before.

        pairs    the pairs of the tokens that became final, one or more
        """
        self.waiting = [*self.waiting, pairs] if self.layer else [pairs]
        self.root = pairs.tokens[-1]
        self.passes = {}
        if self.layer:  # rows that read guessed features never join the context
            self.layer.truncate(self.layer.length)

    def count_passes(self, path: str) -> int:
        """Count the passes that a guess after a path takes.

        EAGLE's layer needs a pass for each node of the path, from the root on. Some of them were
        made for other paths of this round.
        """
        last = len(path) if self.kind in LAYERS else 0
        return sum(path[:k] not in self.passes for k in range(last + 1))

    def time_pass(self) -> float:
        """Measure the seconds of a pass, which is of one row, of a block or of a head.

        A block guesses for all its depths, so each depth pays an equal share of the pass.
        """
        if self.layer:
            rows = self.depth if self.kind == "dflash" else 1
            return row_costs(self.layer, rows)[rows] / rows
        return min(timeit.repeat(self.predict, number=1, repeat=4))

    def predict(self, path: str = "") -> dict[str, float]:
        """Guess the next token after the text, or after a path of guesses below its root.

        path     the guesses, fewer than `depth`
        returns  {next token: its chance} for the RANKS likeliest tokens. {} if there is no pair
        """
        if not self.passes and not self.waiting:
            return {}
        p = self.compute_logits(path)[:self.vocab].float().softmax(-1)
        p = p.nan_to_num(0.0)  # so that a part that overflows guesses nothing
        best = p.topk(min(RANKS, len(p)))
        guessed = as_text(self.part.vocab[best.indices].tolist())
        return dict(zip(guessed, best.values.tolist()))

    def join_waiting(self) -> Pairs:
        """Return all pairs that wait, joined. They do not wait any more."""
        features, tokens = zip(*self.waiting)
        self.waiting = []
        return Pairs(torch.cat(features), sum(tokens, []))

    @torch.inference_mode()
    def compute_logits(self, path: str) -> torch.Tensor:
        """Compute the logits [V'] after a path, by the kind of part that this is."""
        if self.kind in HEADS:
            return self.compute_head(path)
        return self.compute_row(path) if self.kind in LAYERS else self.compute_block(path)

    def compute_block(self, path: str) -> torch.Tensor:
        """Compute the logits [V'] after a path. The first path of a round runs the block."""
        if not self.passes:
            features = self.join_waiting().features
            self.passes[""] = run_block(self.part, self.layer, features, self.root)
        z, k = self.passes[""], len(path)  # row k of the block guesses after k guesses
        before = torch.tensor([self.root, *as_tokens(path)][-1], device=z.device)
        return self.part.add_markov(z[k], before)

    def compute_row(self, path: str) -> torch.Tensor:
        """Compute the logits [V'] after a path, by a pass of EAGLE's layer.

        The path's row reads its last token, and the feature that its parent's row made (eagle.py).
        It hangs below the parent's row, so that it sees only the rows of its path.
        """
        if not path:
            logits = feed(self.part, self.layer, [self.join_waiting()])
        else:
            if path[:-1] not in self.passes:
                self.compute_row(path[:-1])
            row, feature = self.passes[path[:-1]]
            inputs = self.part.join(feature[None], as_tokens(path[-1]))
            logits = self.layer.forward(inputs, [row])
        # The root's row has joined the context. So its number is that of the context's end, -1.
        self.passes[path] = len(self.layer.parents) - 1, self.layer.features[-1]
        return logits[0]

    def compute_head(self, path: str) -> torch.Tensor:
        """Compute the logits [V'] after the text, by the first head."""
        feature = self.waiting[-1].features[-1:]  # [1, d]
        between = self.embed(torch.tensor([self.root], device=feature.device))[:, None]
        logits = self.to_logits(self.part.lm_head_of(1)(self.part(1, feature, between)))
        self.passes[path] = logits
        return logits[0]


def load_guesser(target: CachedLM, guess: str, adapter: str, facts: dict,
                 trust: str) -> Trained | None:
    """Load the trained part that guesses. InputError unless the trust was fitted for this part.

    facts    what `load_trust` read
    trust    its file, for the message of the error
    returns  the part, or None if only n-grams guess

    The other arguments are those of `hybrid`.
    """
    require(guess in facts["pools"], "guess", f"one that {trust!r} was fitted for", guess)
    if guess == "none":
        return None
    trained = Trained(target, guess, adapter or f"{MODELS}/{guess}.safetensors")
    require(is_head(facts["parts"][guess], trained.part), "trust",
            f"a file that was fitted for this part of {guess}", f"{trust!r}, for another one")
    return trained


def load_trust(path: str, model) -> dict:
    """Read a file that `fit` made for this model.

    path     the file
    model    the model that the file must be for
    returns  a dictionary with "trust", as for `NGrams`, "pools", {guess: what `fit_pool` of fit.py
             returned}, and "parts", {guess: the part's fingerprint}. InputError if the file is
             damaged, or for another model
    """
    expected = "a file that `python -m hybrid fit` made for this model"
    return load_facts(path, {"model": model}, expected, lambda facts: {
        name: facts[name] for name in ("trust", "pools", "parts")})


def pool_chances(guessed: dict[str, float], chances: dict[str, float],
                 exponents: list[float]) -> dict[str, float]:
    """Compute one chance from the chances p of a trained part and q of the n-grams.

        score(x) = e^c p(x)^a q(x)^b          chance(x) = score(x) / (1 + Σ score)

    The 1 stands for all tokens that neither names. A token that both name is likelier than either
    says, as in a product of experts. A token that only one of them names has FLOOR from the other.

    guessed     {token: p}
    chances     {token: q}
    exponents   c, a and b
    returns     {token: its chance}, for all tokens that either names
    """
    c, a, b = exponents
    scores = {x: math.exp(c) * max(guessed.get(x, 0.0), FLOOR) ** a
              * max(chances.get(x, 0.0), FLOOR) ** b for x in chances | guessed}
    total = 1 + sum(scores.values())
    return {x: score / total for x, score in scores.items()}
