"""LayerSkip: no layer runs twice for a row, a tuning changes the model that decodes, and the loss
is the paper's. That the text is the model's own is in test_lossless.py."""
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from common import autoregressive
from families import deep
from helpers import CLOSE, take, tokens_of
from support.engine import EngineLM
from support.parts import save_part
from survey.layerskip import export, layerskip, load_tuned, measure_exit, tuning_loss
from training.low_rank import add_low_rank
from trainings import DATA, WORDLESS

PROMPT = [3, 14, 15]


# ----------------------------------------------------------------------------------------- decoding

def test_no_layer_runs_twice_for_a_row_and_the_head_reads_no_row_in_vain(monkeypatch):
    """A round has γ + 1 rows. The late layers run in one call. The head reads a row for each guess,
    and all rows of the verification, but none of the prompt."""
    monkeypatch.setattr(EngineLM, "PART", 128)
    model, runs, heads, how = deep("llama"), [], [], dict(E=2, gamma=3, tuning="")
    target = EngineLM(model)
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, x, i=i: runs.append((i, x[0].shape[1])))
    model.lm_head.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0].shape[-2]))
    next(layerskip(target, PROMPT, **how))  # the check of the two halves is over
    for seen in runs, heads:
        seen.clear()
    calls, rows = target.calls, target.rows
    chunks = layerskip(target, [5] * 140, **how)
    take(chunks, 5)
    prompt = [(0, 128), (1, 128), (0, 11), (1, 11), (2, 128), (3, 128), (2, 11), (3, 11)]
    assert runs == prompt + ([(0, 1), (1, 1)] * 4 + [(2, 4), (3, 4)]) * 5
    assert sum(heads) == 5 * (3 + 4)
    assert (target.calls - calls, target.rows - rows) == (5, 20)


# -------------------------------------------------------------------------------- what an exit says

@pytest.mark.parametrize("layers", [1, 3, 4])
def test_an_exit_is_right_where_the_next_token_is_its_likeliest(layers):
    model, right = deep("llama"), []
    for prompt, answer in DATA:  # x: the states before each token of the answer
        x = model(input_ids=torch.tensor([prompt + answer]), use_cache=False,
                  output_hidden_states=True).hidden_states[layers][0, len(prompt) - 1:-1]
        logits = model.lm_head(x if layers == 4 else model.model.norm(x))
        right += [token == row.argmax() for token, row in zip(answer, logits)]
    assert measure_exit(model, DATA, layers) == pytest.approx(sum(right) / 12)


# ----------------------------------------------------------------------------------------- training

def coins_of(left, turn: int) -> SimpleNamespace:
    """Make coins so close to the chance of each layer that the layers in `left` are left out."""
    chances = [0.1 * (2 ** (l / 3) - 1) for l in range(4)]  # 0, 0.026, 0.0587 and 0.1
    coins = iter([x - 1e-6 if layer in left else x for layer, x in enumerate(chances, 1)])
    return SimpleNamespace(random=lambda: next(coins), randrange={3: turn}.get)


@pytest.mark.parametrize("left, turn, weights", [
    ((), 0, {3: 3, 4: 6}), ((2,), 1, {1: 0, 4: 6}), ((3, 4), 2, {2: 1, 4: 6})])
def test_the_tuning_loss_by_hand(left, turn, weights):
    """Exits of one turn and the last layer count by their weights, on the tokens of answers alone.
    A layer that is left out hands on what it reads."""
    model, sums = deep("llama"), dict.fromkeys(range(1, 5), 0.0)
    with torch.inference_mode():
        loss = tuning_loss(model, lambda x: x, DATA, coins_of(left, turn))
        for prompt, answer in DATA:
            ids = torch.tensor([prompt + answer])
            x = model.model.embed_tokens(ids)
            at = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
            for l, layer in enumerate(model.model.layers, 1):
                if l not in left:
                    x = layer(x, position_embeddings=at, attention_mask=None)
                logp = model.lm_head(model.model.norm(x))[0, len(prompt) - 1:].log_softmax(-1)
                sums[l] -= sum(row[token].item() for row, token in zip(logp, answer))
    expected = sum(w * sums[l] / 12 for l, w in weights.items()) / sum(weights.values())
    assert loss.item() == pytest.approx(expected, rel=1e-4)


# -------------------------------------------------------------------------------- files and reports

def test_a_tuning_decodes_as_its_tuned_model(tmp_path):
    model, tuned, ids = deep("llama"), deep("llama"), torch.tensor([PROMPT])
    expected, part = model(input_ids=ids).logits, add_low_rank(tuned, 3)
    for p in part.values():
        p.data = 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p)))
        p.data = p.data.bfloat16().float()  # as a file keeps them
    file = tmp_path / "t"
    save_part(file, "a LayerSkip tuning", model, part, E=2, rank=3)
    loaded, _ = load_tuned(file, model)
    torch.testing.assert_close(loaded(ids).logits, tuned(ids).logits, **CLOSE)
    for given, layers in ((0, 2), (3, 3)):  # as the file says, or as is asked for
        log, lm = [], EngineLM(model)
        chunks = layerskip(lm, PROMPT, tuning=str(file), E=given, gamma=2, log=log)
        assert tokens_of(chunks, 8) == tokens_of(autoregressive(EngineLM(loaded), PROMPT), 8)
        assert log[0]["layers"] == 2 * layers + 4 and lm.memo["writer"] is not model
    assert not torch.allclose(loaded(input_ids=ids).logits, expected)
    export(model, WORDLESS, tuning=file, out=tmp_path / "exported")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(again(input_ids=ids).logits, loaded(input_ids=ids).logits)
