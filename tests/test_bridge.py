"""A method inside `generate` writes what that writes, and what it cannot honour is refused."""
import functools
import re
from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache, TopKLogitsWarper

from common import CachedLM, InputError
from families import near, tiny
from helpers import ROOT, check_refused, tokens_of
from jacobi import prompt_lookup
from mjsd import mjgd
from speculative import speculative
from support import bridge
from support.bridge import run_method
from methods import METHODS, PROMPT

MODEL, IDS = tiny("gpt2"), torch.tensor([PROMPT])
PLAIN = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=20, pad_token_id=1)


def write(name: str, **settings) -> list[int]:
    """Let `generate` write by a method as its line says, or by itself if there is no name."""
    if name:
        line = METHODS[name](MODEL)
        settings = dict(custom_generate=run_method, method=line.method, options=line.options,
                        draft=[*line.drafts, None][0]) | settings
    return MODEL.generate(IDS, **PLAIN | settings)[0].tolist()


def test_readmes_text_runs_in_generate_and_in_a_pipeline(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names, page = {}, (ROOT / "README.md").read_text()
    exec("\n".join(re.findall(r"^```python\n(from .*?)^```$", page, re.M | re.S)), names)
    text = names["tokenizer"].decode(names["ids"], skip_special_tokens=True)
    assert capsys.readouterr().out == f"{text}\n" + f"{names['prompt']}{text}\n" * 2


@pytest.mark.parametrize("name", ["speculative", "ouroboros", "jacobi", "lookahead",
                                  "prompt_lookup", "cllm", "bita", "recycling"])
def test_text_is_that_of_generate(name):
    """The text is cut where a limit, an EOS or a criterion of the user's own says so. Samples from
    the likeliest token only are the same text. Other samples are repeated by torch's seed."""
    whole = write("")
    assert write(name) == whole and len(whole) == 23
    for end in (dict(max_new_tokens=7), dict(eos_token_id=[whole[9]]), dict(stopping_criteria=[
            lambda ids, scores: torch.tensor([ids[0, -1] == whole[11]])])):
        assert write(name, **end) == write("", **end) != whole
    for only in dict(top_k=1), dict(min_p=1.0), dict(temperature=1e-4):
        assert write(name, do_sample=True, **only) == whole
    samples = [torch.manual_seed(seed) and write(name, do_sample=True) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


@pytest.mark.parametrize("settings", [
    dict(temperature=None, top_p=None, top_k=None), dict(do_sample=None),
    dict(past_key_values=None), dict(method=functools.partial(prompt_lookup, G=2)),
    dict(method=functools.partial(speculative, draft=CachedLM(MODEL)), options={})])
def test_usual_ways_to_ask_are_served(settings):
    assert write("prompt_lookup", **settings) == write("")


@functools.wraps(run_method)
def call_inside(*args, **settings):
    return run_method(*args, **settings)


@pytest.mark.parametrize("function", [run_method, call_inside])
def test_a_streamer_gets_what_generate_gives_it(function):
    seen = []
    for name, own in ("", {}), ("prompt_lookup", {"custom_generate": function}):
        streamer = Mock()
        write(name, streamer=streamer, **own)
        seen.append([(name, *map(torch.Tensor.tolist, x)) for name, x, _ in streamer.mock_calls])
    assert seen[0] == seen[1] and len(seen[0]) == 22


@pytest.mark.parametrize("name", ["speculative", "ouroboros", "specinfer"])
def test_a_draft_may_lack_the_last_tokens(name, monkeypatch):
    """Its guesses are right where it has the tokens. A draft that lacks many has others."""
    whole, passes, draft = write(""), [], near(MODEL, 0)
    draft.resize_token_embeddings(max(whole))
    hook = MODEL.register_forward_hook(lambda *_: passes.append(0))
    assert write(name, draft=draft) == whole
    hook.remove()
    assert len(passes) < 15
    monkeypatch.setattr(bridge, "PADDING", 60 - max(whole))
    check_refused("draft", write, name, draft=draft)


def test_a_method_knows_the_tokens_that_end_an_answer():
    expected = tokens_of(mjgd(CachedLM(MODEL), PROMPT, eos={48}), 20, [48])
    assert write("", custom_generate=run_method, method=mjgd, eos_token_id=48) == PROMPT + expected
    assert tokens_of(mjgd(CachedLM(MODEL), PROMPT), 20, [48]) != expected


@pytest.mark.parametrize("named, settings", [
    ("several texts, beam_search", dict(num_beams=2)),
    ("contrastive_search", dict(penalty_alpha=0.6, top_k=4)),
    ("padding", dict(attention_mask=torch.tensor([[0, 1, 1]]))),
    ("RepetitionPenaltyLogitsProcessor", dict(repetition_penalty=1.1, do_sample=True)),
    ("TopKLogitsWarper", dict(logits_processor=[TopKLogitsWarper(1)])),
    ("assistant_model", dict(assistant_model=MODEL)), ("a draft", dict(draft=MODEL)),
    ("no draft", dict(method=speculative)),
    ("return_dict_in_generate", dict(return_dict_in_generate=True)),
    ("max_length 203", dict(max_new_tokens=200)),
    ("position_ids", dict(position_ids=torch.tensor([[2, 3, 4]]))),
    ("past_key_values", dict(past_key_values=DynamicCache()))])
def test_what_cannot_be_honoured_is_refused(named, settings):
    check_refused(f"what .* can honour, got .*{named}$", write, "prompt_lookup", **settings)


@pytest.mark.parametrize("place, name, x, named", [
    (MODEL, "_supports_attention_backend", False, "attention without masks"),
    (MODEL.config, "_attn_implementation", "flash_attention_2", "attention without masks"),
    (MODEL, "prepare_inputs_for_generation", tiny("gpt2").prepare_inputs_for_generation,
     "tuned prompts")])
def test_a_model_that_reads_more_than_masks_is_refused(place, name, x, named, monkeypatch):
    """PEFT tunes prompts, and lets an object of its own put them before the text."""
    monkeypatch.setattr(place, name, x)
    check_refused(f"got {named}$", write, "prompt_lookup")


def test_a_call_outside_generate_is_refused():
    with pytest.raises(InputError, match="^expected to be called by `generate`"):
        run_method(tiny("llama"), torch.tensor([[1]]), None, None, None, method=prompt_lookup)
