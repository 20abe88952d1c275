"""A draft may overflow: its guesses, chances and features are then no finite numbers. Output is the
target's all the same."""
import functools

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import bita
from common import InputError, Sampler, autoregressive, greedy
from families import near, tiny
from helpers import ROOT, tokens_of
from mjsd import mjsd
from ouroboros import ouroboros
from speculative import speculative
from survey.eagle import EagleLayer, eagle, load_draft, save_draft
from survey.lossy import bild, specdec
from survey.medusa import Heads, load_heads, medusa, save_heads
from survey.sequoia import sequoia
from survey.several_drafts import specinfer, spectr
from training.layers import FeatureLM
from training.parts import save_facts

PROMPT = [3, 14, 15, 9]
NEARLY_GREEDY = Sampler(1e-4)  # the likeliest token has all of the mass, so it alone is right


class Broken(FeatureLM):
    """Make some logits of a draft infinite or no number: in all rows, in every second one, or now
    and then."""

    def __init__(self, model, kind: str):
        super().__init__(model)
        self.kind = kind
        self.rng = torch.Generator().manual_seed(0)

    def forward(self, *args, **options) -> torch.Tensor:
        logits = super().forward(*args, **options).clone()
        some = logits if "all" in self.kind else logits[self.calls % 2::2]
        if self.kind == "now and then":
            logits[torch.rand(len(logits), generator=self.rng) < 0.3] = torch.nan
        elif "nan" in self.kind:
            some[:] = torch.nan
        elif "one" in self.kind:
            some[:, 7] = torch.nan
        elif "overflow" in self.kind:
            some[:, 5:9] = torch.inf
        else:
            some[:] = -torch.inf
        return logits


KINDS = ("nan", "all nan", "one nan", "all overflow", "nothing", "now and then")


@functools.cache
def target_text() -> list[int]:
    """Return what the tiny model writes without a draft."""
    return tokens_of(autoregressive(FeatureLM(tiny("llama")), PROMPT), 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sample", [greedy, NEARLY_GREEDY], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method, options", [
    (speculative, {}), (specinfer, dict(K=3)), (spectr, dict(K=3)), (bild, dict(rollback=0.0)),
    (specdec, dict(beta=1)), (specdec, dict(tau=0.0)), (ouroboros, {}), (mjsd, dict(tau=1.0)),
    (sequoia, dict(nodes=7, depth=3))], ids=lambda x: x.__name__ if callable(x) else "")
def test_a_draft_model_that_overflows(method, options, sample, kind, tmp_path):
    model = tiny("llama")
    target, draft = FeatureLM(model), Broken(near(model, 0.01), kind)
    if method is sequoia:
        pair = {"target": model, "draft": draft.model}
        save_facts(tmp_path / "rates", pair, rates={"0.0": [0.6, 0.3, 0.1]})
        options = options | {"rates": str(tmp_path / "rates")}
    written = tokens_of(method(target, draft, PROMPT, sample=sample, **options), 20)
    assert written == target_text()


def test_of_two_draft_models_the_one_that_overflows_loses_nothing_of_the_other():
    model = tiny("llama")
    drafts = [FeatureLM(near(model, 0.01)), Broken(near(model, 0.01), "all nan")]
    for sample in greedy, NEARLY_GREEDY:
        log, expected = [], tokens_of(autoregressive(FeatureLM(model), PROMPT), 30)
        for first, more in (drafts, drafts[::-1]):
            chunks = specinfer(FeatureLM(model), first, PROMPT, more_drafts=[more], sample=sample,
                               log=log)
            assert tokens_of(chunks, 30) == expected
        assert sum(r["accepted"] for r in log) > 10


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("some", [slice(None), slice(0, 1)])
def test_heads_and_layers_that_overflow(value, some):
    model = tiny("llama")
    expected = tokens_of(autoregressive(FeatureLM(model), PROMPT), 30)
    for kind in ("medusa", "hydra"):
        heads = Heads(model, kind, 3)
        heads.accept = [[0.5, 0.2, 0.1]] * 3
        heads.W[1].weight.data[some] = value
        chunks = medusa(FeatureLM(model), PROMPT, nodes=9, trained=heads.requires_grad_(False))
        assert tokens_of(chunks, 30) == expected
    for dynamic in (False, True):
        draft = EagleLayer(model)
        draft.accept = [[0.5, 0.2, 0.1]] * 3
        draft.fc.weight.data[some] = value
        chunks = eagle(FeatureLM(model), PROMPT, nodes=9, dynamic=dynamic, trained=draft)
        assert tokens_of(chunks, 30) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_some_of_whose_passes_overflow(dynamic, kind):
    """Chances that are no numbers have no order, so a node could come before its parent."""
    model = tiny("llama", vocab_size=12)
    expected = tokens_of(autoregressive(FeatureLM(model), PROMPT[:1]), 80)
    draft, target = EagleLayer(model), FeatureLM(model)
    draft.accept = [[0.5, 0.4, 0.3, 0.2]] * 5
    target.memo[draft, "cached"] = Broken(draft.lm, kind)
    chunks = eagle(target, PROMPT[:1], nodes=12, dynamic=dynamic, trained=draft)
    assert tokens_of(chunks, 80) == expected


def test_files_of_numbers_that_are_not_finite_are_refused(tmp_path, embedded):
    model, path = tiny("llama"), tmp_path / "part"
    heads, draft = Heads(model, "hydra", 2), EagleLayer(model)
    heads.W[0].bias.data[3], draft.fc.weight.data[0] = torch.nan, torch.inf
    save_heads(path, heads, model)
    with pytest.raises(InputError, match="expected finite numbers, got"):
        load_heads(path, "hydra", model)
    save_draft(path, draft, model)
    with pytest.raises(InputError, match="expected finite numbers, got"):
        load_draft(path, model)
    with safe_open(ROOT / "models/bita.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        header = file.metadata()
    tensors["masks"][0, 0] = torch.nan
    save_file(tensors, path, header)
    with pytest.raises(InputError, match="expected finite numbers, got"):
        bita.load_tuning(str(path), embedded[0])
