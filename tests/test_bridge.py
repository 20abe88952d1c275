"""A method inside `generate` writes what that writes, and what it cannot honour is refused."""
import re

import pytest
import torch
from transformers import TextStreamer, TopKLogitsWarper

from common import InputError
from families import tiny
from helpers import ROOT
from support.bridge import run_method
from test_lossless import METHODS, PROMPT

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


@pytest.mark.parametrize("named, settings", [
    ("several texts, beam_search", dict(num_beams=2)),
    ("contrastive_search", dict(penalty_alpha=0.6, top_k=4)),
    ("padding", dict(attention_mask=torch.tensor([[0, 1, 1]]))),
    ("RepetitionPenaltyLogitsProcessor", dict(repetition_penalty=1.1, do_sample=True)),
    ("TopKLogitsWarper", dict(logits_processor=[TopKLogitsWarper(1)])),
    ("assistant_model", dict(assistant_model=MODEL)), ("a draft", dict(draft=MODEL)),
    ("no draft", dict(method=METHODS["speculative"](MODEL).method)),
    ("return_dict_in_generate", dict(return_dict_in_generate=True)),
    ("max_length 203", dict(max_new_tokens=200)),
    ("streamer", dict(streamer=TextStreamer(None)))])
def test_what_cannot_be_honoured_is_refused(named, settings, monkeypatch):
    monkeypatch.setattr(TextStreamer, "put", lambda *_: None)
    with pytest.raises(InputError, match=f"what .* can honour, got .*{named}$"):
        write("prompt_lookup", **settings)


@pytest.mark.parametrize("place, name, x", [(MODEL, "_supports_attention_backend", False), (
    MODEL.config, "_attn_implementation", "flash_attention_2")])
def test_a_model_that_reads_no_masks_is_refused(place, name, x, monkeypatch):
    monkeypatch.setattr(place, name, x)
    with pytest.raises(InputError, match="got attention without masks$"):
        write("prompt_lookup")
