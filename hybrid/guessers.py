"""A trained part guesses for hybrid.py what comes after a text and a path of guesses.

    medusa, hydra    a head guesses the token after the root
    dflash           the draft guesses a whole block, and so for all paths of its depth

All of them make one pass a round, at the root. Layers that need a pass for each node, as EAGLE's,
take more time than they save beside n-grams.
"""
import math
from typing import Sequence

from common import KVCache
from support.engine import MODELS, EngineLM, depth_of, require
from support.parts import load_facts, logits_of
from support.released import is_head
from support.trees import rank_tokens
from survey.dflash import load_draft, run_block
from survey.medusa import load_heads

import torch

GUESSES = ("none", "medusa", "hydra", "dflash")
FLOOR = 0.001  # the least chance that a trained part or the n-grams give, if both are joined


class Trained:
    """Hold a trained part that guesses what comes after the text.

    The part reads features of the target, which wait until the part is asked. A head of Medusa or
    Hydra reads only the last feature. DFlash's draft reads all that wait, because its cache has the
    earlier ones.

    target   the model whose features the part reads
    kind     medusa, hydra or dflash
    path     the file of the heads or of the draft

    taps     the layers whose inputs are this part's features, side by side
    depth    for how many levels of a tree the part guesses
    waiting  the features that the part has not read, in some tensors [n, d] one after the other
    root     the last token of the text, below which paths begin
    logits   [depth, V'] of this round's pass. Row k guesses after k guesses. None: no pass yet
    """

    def __init__(self, target: EngineLM, kind: str, path: str):
        model = target.model
        self.embed = model.get_input_embeddings()
        self.vocab = target.vocab
        self.block = kind == "dflash"
        if self.block:
            self.part = target.once(load_draft, path, model)
        else:
            self.part = target.once(load_heads, path, kind, model)
            self.to_logits = target.once(logits_of, model)
        self.depth = self.part.B - 1 if self.block else 1
        self.taps = self.part.taps or [depth_of(model)]

    def start(self, features: torch.Tensor, tokens: list[int]) -> None:
        """Forget everything and begin a text.

        features  [n, d] of the tokens of the prompt, except the last one
        tokens    the n tokens that follow these. A prompt of one token has none
        """
        self.waiting, self.logits = [], None
        self.cache = KVCache()  # of DFlash's draft
        if tokens:
            self.add(features, tokens)

    def add(self, features: torch.Tensor, tokens: list[int]) -> None:
        """Append what became final, and forget the round before.

        features  [n, d] of the tokens before those that became final
        tokens    the n tokens that became final, 1 or more
        """
        self.waiting = [*self.waiting, features] if self.block else [features]
        self.root, self.logits = tokens[-1], None

    @torch.inference_mode()
    def predict(self, path: Sequence[int] = ()) -> dict[int, float]:
        """Guess the next token after the text, or after a path of guesses below its root.

        path     the guesses, fewer than `depth`. The first path of a round makes the pass
        returns  {next token: its chance} for the RANKS likeliest tokens. {} if there is no feature
        """
        if self.logits is None:
            if not self.waiting:
                return {}
            self.logits = self.run_block() if self.block else self.run_head()
            self.waiting = []
        z = self.logits[len(path)]
        if self.block:
            before = torch.tensor([self.root, *path][-1], device=z.device)
            z = self.part.add_markov(z, before)
        tokens, chances = rank_tokens(z[:self.vocab], self.part.vocab)
        return dict(zip(tokens, chances))

    def run_block(self) -> torch.Tensor:
        """Run a block of DFlash's draft after all that waits; return logits [B - 1, V']."""
        return run_block(self.part, self.cache, torch.cat(self.waiting), self.root)

    def run_head(self) -> torch.Tensor:
        """Run the first head after the last feature; return logits [1, V']."""
        feature = self.waiting[-1][-1:]  # [1, d]
        between = self.embed(torch.tensor([self.root], device=feature.device))[:, None]
        return self.to_logits(self.part.lm_head_of(1)(self.part(1, feature, between)))


def load_guesser(target: EngineLM, guess: str, adapter: str, facts: dict,
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
