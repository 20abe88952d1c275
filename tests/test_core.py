"""Each exact method writes, greedily, what transformers' own `generate` writes.

Copy this file to test a method of your own, or a file that you changed. Put it beside that file and
common.py, and leave in the imports and in METHODS only what is there. Then run `python -m pytest
test_core.py`. A mistake in a mask or a rollback gives another text. That a seed's text is the same
by every method, and that other families work, is tested in test_lossless.py.
"""
import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bita import Tuning, bita
from cllm import cllm
from common import autoregressive, until
from jacobi import jacobi, lookahead, prompt_lookup
from ouroboros import ouroboros
from speculative import speculative

torch.manual_seed(0)
TARGET = LlamaForCausalLM(LlamaConfig(  # of 16 tokens, so that guesses are often right
    vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, initializer_range=0.4)).eval()
DRAFT = copy.deepcopy(TARGET)
for weights in DRAFT.parameters():  # with noise, so that it is sometimes wrong
    weights.data += 0.1 * weights.std() * torch.randn_like(weights)
PROMPT, N = [3, 1, 4, 1, 5], 60

METHODS = [  # each with its models and its own arguments
    (autoregressive, [TARGET], {}), (jacobi, [TARGET], {}), (lookahead, [TARGET], {}),
    (prompt_lookup, [TARGET], {}), (cllm, [TARGET], {}), (speculative, [TARGET, DRAFT], {}),
    (ouroboros, [TARGET, DRAFT], {}),
    (bita, [TARGET], dict(tuning=Tuning(TARGET)))]  # random masks must not change the text


@pytest.mark.parametrize("method, models, options", METHODS)
def test_greedy_text_is_that_of_generate(method, models, options):
    ids = torch.tensor([PROMPT])
    expected = TARGET.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=N,
                               do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(PROMPT):]
    kinds = method.__annotations__  # bita's target is a PrefixLM, and other models are CachedLMs
    lms = [kinds[role](model) for role, model in zip(("target", "draft"), models)]
    chunks = until(method(*lms, PROMPT, **options), N)
    assert [token for chunk in chunks for token in chunk] == expected.tolist()
    assert lms[0].calls < N or method is autoregressive  # some guesses were right
