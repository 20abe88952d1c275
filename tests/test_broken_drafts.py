"""Drafts of other shapes, drafts that overflow, and targets that do.

A draft may overflow: its guesses, chances and features are then no finite numbers. The output is
the target's all the same, for each line of test_lossless.METHODS that drafts with a model, a layer
or heads."""
import copy
import random

import pytest
import torch

from cli.run import kind_for
from common import InputError, Sampler
from helpers import tokens_of
from support.engine import EngineLM
from test_lossless import METHODS, PROMPT, autoregressive_text, chunks_of, model_of

LINES = {name: line(model_of("llama")) for name, line in METHODS.items()}
SPOIL = [  # what becomes of the logits [n, V] of a call
    lambda logits: logits.fill_(torch.nan),
    lambda logits: logits[::2, 7].fill_(torch.nan),
    lambda logits: logits[:, 5:9].fill_(torch.inf),
    lambda logits: logits.fill_(-torch.inf)]


def check(name: str, run_as: type = EngineLM) -> None:
    model = model_of("llama")
    for sample in Sampler(0), Sampler(1e-4):  # of the second only the likeliest token has any mass
        target = kind_for(LINES[name].method, run_as)(model)
        chunks = chunks_of(LINES[name], target, PROMPT, run_as, sample=sample)
        assert tokens_of(chunks, 8) == autoregressive_text(model, tuple(PROMPT), 8)


@pytest.mark.parametrize("name", ["draft_verify", *(x for x in LINES if LINES[x].drafts)])
def test_a_draft_model_that_overflows(name):
    """Each of its calls is spoiled in another way."""
    rng = random.Random(0)

    class Broken(EngineLM):
        def forward(self, *args, **options):
            logits = super().forward(*args, **options).clone()
            if self.model is not model_of("llama"):
                rng.choice(SPOIL)(logits)
            return logits
    check(name, Broken)


@pytest.mark.parametrize("name", LINES)
def test_a_target_that_overflows_is_refused(name):
    """So is a model that writes in the target's place."""
    class Broken(EngineLM):
        def run_model(self, *args):
            return super().run_model(*args) * (torch.nan if self.writes else 1)
    target = kind_for(LINES[name].method, Broken)(model_of("llama"))
    with pytest.raises(InputError, match="that are numbers, got others of LlamaForCausalLM"):
        tokens_of(chunks_of(LINES[name], target, PROMPT, Broken), 8)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", [x for x in LINES if LINES[x].drafts and x != "another_tokenizer"])
def test_a_draft_with_tokens_that_the_target_lacks(name, temperature):
    """As where tokens were added to a tokenizer and not to the target, which then has 61 rows."""
    drafts, target = copy.deepcopy(LINES[name].drafts), EngineLM(model_of("llama"), 99)
    for draft in drafts:
        draft.resize_token_embeddings(99)
    chunks = chunks_of(LINES[name]._replace(drafts=drafts), target, PROMPT,
                       lambda x, _: EngineLM(x, 99), sample=Sampler(temperature))
    found = tokens_of(chunks, 8)
    assert max(found) < target.vocab and target.vocab == 61
    assert temperature or found == autoregressive_text(target.model, tuple(PROMPT), 8)


@pytest.mark.parametrize("name", [x for x in LINES if x.startswith(
    ("eagle", "medusa", "hydra", "dflash", "early_exit", "mtp"))])
def test_heads_and_layers_whose_weights_overflow(name):
    LINES[name] = METHODS[name](model_of("llama"))
    shared = {p.data_ptr() for p in model_of("llama").parameters()}
    for p in LINES[name].options["trained"].parameters():
        if p.data_ptr() not in shared:
            p.data[:1] = torch.inf
    check(name)
