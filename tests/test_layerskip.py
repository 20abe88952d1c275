"""LayerSkip, and Kangaroo's exit, which has the same loop. No layer runs twice for a row. Drafts
end where they should. A tuning changes the model that decodes. The losses are the papers'. That
the text is the model's own is in test_lossless.py."""
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from common import autoregressive
from families import deep, rand
from heads import attend
from helpers import CLOSE, note_calls, rows_of, take, tokens_of
from support.engine import EngineLM
from support.layers import view
from support.parts import save_part, score_with
from survey import layerskip as module
from survey.early_exit import Exit, early_exit, evaluate, exit_loss
from survey.layerskip import export, layerskip, load_tuned, tuning_loss
from training.texts import Text, compute_features, measure_right, read_texts
from training.low_rank import add_low_rank
from trainings import DATA, WORDLESS

PROMPT, E = [3, 14, 15], 2  # E: how many layers stand before an exit


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
    calls, rows = target.calls, rows_of(target)
    take(layerskip(target, [5] * 140, **how), 5)
    prompt = [(0, 128), (1, 128), (0, 11), (1, 11), (2, 128), (3, 128), (2, 11), (3, 11)]
    assert runs == prompt + ([(0, 1), (1, 1)] * 4 + [(2, 4), (3, 4)]) * 5
    assert sum(heads) == 5 * (3 + 4)
    assert (target.calls - calls, rows_of(target) - rows) == (5, 20)


# -------------------------------------------------------------------------------- what an exit says

@pytest.mark.parametrize("layers", [1, 3, 4])
def test_an_exit_is_right_where_the_next_token_is_its_likeliest(layers):
    model, right = deep("llama"), []
    for prompt, answer in DATA:  # x: the states before each token of the answer
        x = model(input_ids=torch.tensor([prompt + answer]), use_cache=False,
                  output_hidden_states=True).hidden_states[layers][0, len(prompt) - 1:-1]
        logits = model.lm_head(x if layers == 4 else model.model.norm(x))
        right += [token == row.argmax() for token, row in zip(answer, logits)]
    assert measure_right(view(model, 0, layers), DATA) == pytest.approx(sum(right) / 12)


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
        loss = tuning_loss(model, model.lm_head, DATA, coins_of(left, turn))
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


# ---------------------------------------------------------------------------------- Kangaroo's exit

def run_by_hand(network, x: torch.Tensor) -> torch.Tensor:
    """Compute norm_2(x + Attention(norm_1(x))) of x [T, 32]."""
    read = F.rms_norm(x, (32,), network.before.weight, 1e-6)
    return network.norm(x + attend(dict(network.named_parameters()), "attention.", read, {}))


@pytest.mark.parametrize("family, threshold, drafts", [
    ("llama", 0.0, {3}), ("llama", 0.25, {1, 2, 3}), ("gemma3", 0.0, {3})])
@torch.no_grad()
def test_rounds_are_those_of_the_equations(family, threshold, drafts, monkeypatch):
    """The adapter reads the whole text, even in the place of a layer with a window of nine tokens.
    That the caches are those of the text is in test_lossless.py, where a method that begins anew
    guesses alike."""
    model, judged = deep(family, vocab_size=8), note_calls(monkeypatch, module, "verify")
    network = rand(Exit(model, E), scale=0.3)
    target, text, log = EngineLM(model), [3, 1, 4, 1, 5], []
    chunks = early_exit(target, text, gamma=3, threshold=threshold, trained=network, log=log)
    for _ in range(12):
        guesses, sure = [], True
        while sure and len(guesses) < 3:
            states = model(input_ids=torch.tensor([text + guesses]), output_hidden_states=True)
            probs = model.lm_head(run_by_hand(network, states.hidden_states[E][0])[-1]).softmax(-1)
            guesses.append(probs.argmax().item())
            sure = probs.max() >= threshold
        chunk = next(chunks)
        text = text + chunk
        assert judged[-1][2] == guesses and chunk[:-1] == guesses[:len(chunk) - 1]
        assert log[-1] == {"guessed": len(guesses), "accepted": len(chunk) - 1,
                           "layers": (len(guesses) + 1) * 2.5 + 2}
    assert {record["guessed"] for record in log} == drafts
    assert len({record["accepted"] for record in log}) > 1


def test_the_loss_is_the_cross_entropy_with_the_model_and_reaches_the_exit_alone():
    """A new exit is the model's own."""
    model, x = deep("llama").requires_grad_(False), torch.randn(1, 3, 32)
    network = Exit(model, E)
    new = network.norm(network(x, position_ids=torch.arange(3)[None]))
    torch.testing.assert_close(new, model.model.norm(x))
    rand(network).requires_grad_(True)
    batch = [Text(torch.zeros(T), torch.randn(T, 64), length) for T, length in ((8, 6), (6, 2))]
    loss, each = exit_loss(lambda x: 2 * model.lm_head(x), network, batch, 61), []
    for _, features, length in batch:
        read, last = run_by_hand(network, features[:, :32]), features[:, 32:]
        p, log_q = (2 * model.lm_head(last)).softmax(-1), (2 * model.lm_head(read)).log_softmax(-1)
        each.append(-(p * log_q).sum(-1)[length - 1:-1])
    assert loss.item() == pytest.approx(torch.cat(each).mean().item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in network.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_the_figure_of_held_out_answers_counts_all_their_tokens():
    model, rng = deep("llama"), random.Random(0)
    data = [([rng.randrange(61)], [rng.randrange(61) for _ in range(100)]) for _ in range(6)]
    network = Exit(model, 1)
    figures, _ = evaluate(score_with(model), network, compute_features(model, data, [1, 4]))
    texts = [prompt + answer[:-1] for prompt, answer in data]
    early, last = (torch.cat(read_texts(view(model, 0, n), texts)).float() for n in (1, 4))
    right = model.lm_head(model.model.norm(early)).argmax(-1) == model.lm_head(last).argmax(-1)
    assert figures == {"right": right.float().mean().item()}
