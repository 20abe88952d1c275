"""A trained part guesses for hybrid.py what comes after a text and a path of guesses.

    Head     medusa, hydra: a head guesses the token after the root
    Block    dflash: the draft guesses a whole block, and so for all paths of its depth
    Chain    mtp: the block guesses on from what it made of the path above

Head and Block make one pass a round, at the root. Chain makes a pass for each path that it is asked
for. So it is asked where a pass pays, which is mostly along one chain of likely guesses.
"""
import math
from statistics import median
from typing import Sequence

from common import KVCache
from support.engine import MODELS, EngineLM, depth_of, require
from support.parts import load_facts, logits_of
from support.trees import rank_tokens
from survey.dflash import load_draft, run_block
from survey.eagle import LEVELS, Pairs, feed
from survey.medusa import load_heads
from survey.mtp import load_draft as load_mtp

import torch

FLOOR = 0.001  # the least chance that a trained part or the n-grams give, if both are joined


class Trained:
    """Hold a trained part that guesses what comes after the text.

    The part reads features of the target, which wait until the part is asked. A subclass guesses in
    `run_root`, which makes the first pass of a round, and in `score`.

    target   the model whose features the part reads
    part     the trained part
    depth    for how many levels of a tree the part guesses

    taps     the layers whose inputs are this part's features, side by side
    waiting  the features that the part has not read, in some tensors [n, d] one after the other
    tokens   the tokens that follow those of these features
    root     the last token of the text, below which paths begin
    made     {path: what the pass for this path gave}, for all passes of this round
    seconds  what one more pass of a round takes
    """
    seconds = 0.0

    def __init__(self, target: EngineLM, part: torch.nn.Module, depth: int):
        self.target, self.part, self.depth = target, part, depth
        self.taps = part.taps or [depth_of(target.model)]

    def start(self, features: torch.Tensor, tokens: list[int]) -> None:
        """Forget everything and begin a text.

        features  [n, d] of the tokens of the prompt, except the last one
        tokens    the n tokens that follow these. A prompt of one token has none
        """
        self.waiting, self.tokens, self.made = [], [], {}
        if tokens:
            self.add(features, tokens)

    def add(self, features: torch.Tensor, tokens: list[int]) -> None:
        """Append what became final, and forget the round before.

        features  [n, d] of the tokens before those that became final
        tokens    the n tokens that became final, 1 or more
        """
        self.waiting.append(features)
        self.tokens += tokens
        self.root, self.made = tokens[-1], {}

    @torch.inference_mode()
    def predict(self, path: Sequence[int] = (), worth: float = math.inf) -> dict[int, float]:
        """Guess the next token after the text, or after a path of guesses below its root.

        path     the guesses, fewer than `depth`. The first path of a round is ()
        worth    how many passes, besides the one at the root, these guesses are worth at most
        returns  {next token: its chance} for the RANKS likeliest tokens. {} if there is no feature,
                 or if the guesses take more passes
        """
        if self.waiting:
            self.made[()] = self.run_root(torch.cat(self.waiting))
            self.waiting, self.tokens = [], []
        z = self.score(tuple(path), worth) if self.made else None
        if z is None:
            return {}
        tokens, chances = rank_tokens(z[:self.target.vocab], self.part.vocab)
        return dict(zip(tokens, chances))


class Head(Trained):
    """Guess the token after the root with the first head of Medusa or Hydra."""

    def __init__(self, target: EngineLM, kind: str, path: str):
        super().__init__(target, target.once(load_heads, path, kind, target.model), 1)
        self.embed = target.model.get_input_embeddings()
        self.to_logits = target.once(logits_of, target.model)
        self.lm_head = [*self.part.lm_heads, self.part.lm_head][0]  # its own, or the target's

    def run_root(self, features: torch.Tensor) -> torch.Tensor:
        """Run the head; return logits [1, V']."""
        between = self.embed(torch.tensor([self.root], device=features.device))[:, None]
        return self.to_logits(self.lm_head(self.part(1, features[-1:], between)))

    def score(self, path: tuple[int, ...], worth: float) -> torch.Tensor:
        """Return the logits [V'] after the root."""
        return self.made[()][0]


class Block(Trained):
    """Guess as many tokens as a block of DFlash's draft has. Its cache has the earlier features."""

    def __init__(self, target: EngineLM, kind: str, path: str):
        part = target.once(load_draft, path, target.model)
        super().__init__(target, part, part.B - 1)

    def start(self, features: torch.Tensor, tokens: list[int]) -> None:
        self.cache = KVCache()
        super().start(features, tokens)

    def run_root(self, features: torch.Tensor) -> torch.Tensor:
        """Run a block; return logits [B - 1, V']. Row k guesses after k guesses."""
        return run_block(self.part, self.cache, features, self.root)

    def score(self, path: tuple[int, ...], worth: float) -> torch.Tensor:
        """Return the logits [V'] after a path, by its length and its last token."""
        z = self.made[()][len(path)]
        return self.part.add_markov(z, torch.tensor((self.root, *path)[-1], device=z.device))


class Chain(Trained):
    """Guess with an MTP block, whose row for each path reads what the row of the path above made.

    lm   the block's layer with its cache
    """

    def __init__(self, target: EngineLM, kind: str, path: str):
        super().__init__(target, target.once(load_mtp, path, target.model), LEVELS)
        self.lm = target.once(type(target), self.part.lm, target.vocab)

    @property
    def seconds(self) -> float:
        return median([0.0, *(seconds for *_, seconds in self.lm.passes[-20:])])

    def start(self, features: torch.Tensor, tokens: list[int]) -> None:
        self.lm.start([])
        super().start(features, tokens)

    def run_root(self, features: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Read all that waits; return a row, a feature and logits, as `score` keeps them."""
        self.lm.truncate(self.lm.length)  # rows that read guessed features never join the context
        logits = feed(self.part, self.lm, [Pairs(features, self.tokens)])
        return -1, self.lm.features[-1:], logits[0]

    def score(self, path: tuple[int, ...], worth: float) -> torch.Tensor | None:
        """Return the logits [V'] after a path. None: they take more passes than they are worth.

        Where the n-grams were sure, no pass was made. These are made up for when a pass pays below.
        For each path the row of its last token is kept, with the feature that this row made.
        """
        missing = [n for n in range(1, len(path) + 1) if path[:n] not in self.made]
        if len(missing) > worth:
            return None
        for n in missing:
            row, feature, _ = self.made[path[:n - 1]]
            [logits] = self.lm.forward(self.part.join(feature, path[n - 1:n]), [row])
            self.made[path[:n]] = len(self.lm.parents) - 1, self.lm.features, logits
        return self.made[path][-1]


KINDS = {"medusa": Head, "hydra": Head, "dflash": Block, "mtp": Chain}
GUESSES = ("none", *KINDS)


def load_guesser(target: EngineLM, guess: str, adapter: str, facts: dict,
                 trust: str) -> Trained | None:
    """Load the trained part that guesses. InputError unless the trust was fitted for its kind.

    For another part of this kind than the one that was measured the chances are less true. Then
    trees are worse, and the text is the same.

    facts    what `load_trust` read
    trust    its file, for the message of the error
    returns  the part, or None if only n-grams guess

    The other arguments are those of `hybrid`.
    """
    require(guess in facts["pools"], "guess", f"one that {trust!r} was fitted for", guess)
    if guess == "none":
        return None
    # Without a file, an MTP block is that of the target's own files.
    path = adapter if guess == "mtp" else adapter or f"{MODELS}/{guess}.safetensors"
    return KINDS[guess](target, guess, path)


def load_trust(path: str, model) -> dict:
    """Read a file that `fit` made for this model.

    path     the file
    model    the model that the file must be for
    returns  a dictionary with "trust", as for `NGrams`, and "pools", {guess: what `fit_pool` of
             fit.py returned}. InputError if the file is damaged, or for another model
    """
    expected = "a file that `python -m hybrid fit` made for this model"
    return load_facts(path, {"model": model}, expected, lambda facts: {
        name: facts[name] for name in ("trust", "pools")})


def pool_chances(guessed: dict[int, float], chances: dict[int, float],
                 exponents: list[float]) -> dict[int, float]:
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
