"""A draft may overflow: its guesses, chances and features are then no finite numbers. The output is
the target's all the same, for each line of test_lossless.METHODS that drafts with a model, a layer
or heads."""
import random

import pytest
import torch

from cli.run import TimedLM
from common import Sampler
from helpers import tokens_of
from test_lossless import METHODS, PROMPT, autoregressive_text, chunks_of, model_of

SAMPLERS = Sampler(0), Sampler(1e-4)  # of the second only the likeliest token has any mass
LINES = {name: line(model_of("llama")) for name, line in METHODS.items()}
SPOIL = [  # what becomes of the logits [n, V] of a call
    lambda logits: logits.fill_(torch.nan),
    lambda logits: logits[::2, 7].fill_(torch.nan),
    lambda logits: logits[:, 5:9].fill_(torch.inf),
    lambda logits: logits.fill_(-torch.inf)]


def check(name: str, run_as: type = TimedLM) -> None:
    model = model_of("llama")
    for sample in SAMPLERS:
        chunks = chunks_of(LINES[name], run_as(model), PROMPT, run_as, sample=sample)
        assert tokens_of(chunks, 8) == autoregressive_text(model, tuple(PROMPT), 8)


@pytest.mark.parametrize("name", ["draft_verify", *(x for x in LINES if LINES[x].drafts)])
def test_a_draft_model_that_overflows(name):
    """Each of its calls is spoiled in another way."""
    rng = random.Random(0)

    class Broken(TimedLM):
        def forward(self, *args, **options):
            logits = super().forward(*args, **options).clone()
            if self.model is not model_of("llama"):
                rng.choice(SPOIL)(logits)
            return logits
    check(name, Broken)


@pytest.mark.parametrize("name", [x for x in LINES if x.startswith(
    ("eagle", "medusa", "hydra", "dflash", "early_exit", "mtp"))])
def test_heads_and_layers_whose_weights_overflow(name):
    LINES[name] = METHODS[name](model_of("llama"))
    shared = {p.data_ptr() for p in model_of("llama").parameters()}
    for p in LINES[name].options["trained"].parameters():
        if p.data_ptr() not in shared:
            p.data[:1] = torch.inf
    check(name)
