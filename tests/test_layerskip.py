"""LayerSkip: no layer runs twice for a row, output is that of the model that decodes, and the loss
is the paper's."""
import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import parametrize

from cli.graphs import GraphedLM
from common import CachedLM, InputError, Sampler, autoregressive
from families import deep, tiny
from helpers import main, said_in_one_line, tokens_of
from survey.layerskip import (collect_states, layerskip, load_tuned, measure_exit, report, tune,
                              tuning_loss)
from survey.low_rank import add_low_rank
from survey.parts import save_part

PROMPT = [3, 14, 15]
WORDLESS = SimpleNamespace(eos_token_id=None)
DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3, 30], [4, 4, 2, 11, 17, 40]), ([7], [5, 2])]


# ----------------------------------------------------------------------------------------- decoding

def test_graphs_too():
    model = tiny("llama", num_hidden_layers=3, run_as=GraphedLM)
    expected = tokens_of(autoregressive(CachedLM(model), PROMPT), 20)
    assert tokens_of(layerskip(GraphedLM(model), PROMPT, tuning="", E=2), 20) == expected


def test_a_perfect_draft_is_accepted_whole():
    """Where the later layers add nothing, the first exit is the model's own."""
    model = deep("llama")
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    for sample in (Sampler(0), Sampler(1.0, seed=3)):
        for E in (1, 3):
            log = []
            chunks = layerskip(CachedLM(model), PROMPT, E=E, gamma=5, tuning="", sample=sample,
                               log=log)
            tokens_of(chunks, 30)
            assert [r["accepted"] for r in log] == [5] * 5
            assert log[0] == {"drafted": 5, "accepted": 5, "layers": 5 * E + 4}


def test_no_layer_runs_twice_for_a_row():
    """All layers see all rows that were ever fed, once; the last ones in one call a round."""
    model, rows = deep("llama"), [0] * 4
    target, calls, how = CachedLM(model), [], dict(E=2, gamma=3, tuning="")
    chunks = layerskip(target, PROMPT, **how)
    next(chunks)  # set-up and the prompt are over

    def count(i):
        def hook(_, args, options):
            rows[i] += args[0].shape[1]
            calls.append(i)
        return hook
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(count(i), with_kwargs=True)
    before = target.calls
    for _ in range(5):
        next(chunks)
    assert rows == [5 * 4] * 4 and target.calls == before + 5
    assert calls == ([0, 1] * 4 + [2, 3]) * 5
    target.calls, target.rows = 0, 0  # as between two measurements
    next(layerskip(target, PROMPT, **how))
    assert (target.calls, target.rows) == (1, 4)


def test_the_head_reads_only_what_somebody_asks_for():
    """No row of a prompt, each guess once, and all rows of the verification: none for the last
    guess, after which there is no other one."""
    model, rows = deep("llama"), []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: rows.append(inputs[0].shape[-2]))
    target = CachedLM(model)
    next(layerskip(target, PROMPT, E=2, gamma=3, tuning=""))  # the check of the two halves is over
    for prompt in (PROMPT, [5] * 140):
        rows.clear()
        chunks = layerskip(target, prompt, E=2, gamma=3, tuning="")
        for n in range(1, 4):
            next(chunks)
            assert sum(rows) == n * (3 + 4)


# -------------------------------------------------------------------------------- what an exit says

def test_hidden_states_are_those_before_each_token_of_an_answer():
    model = deep("gemma3")
    for layers in (1, 3, 4):
        found = collect_states(model, DATA, layers).float()
        expected = []
        for prompt, answer in DATA:
            with torch.inference_mode():
                states = model(input_ids=torch.tensor([prompt + answer]), use_cache=False,
                               output_hidden_states=True).hidden_states[layers][0]
            expected.append(states[len(prompt) - 1:-1])
        torch.testing.assert_close(found, torch.cat(expected), atol=0.02, rtol=0.02)


def test_exit_accuracy_by_hand():
    model = deep("llama")
    for layers, ranks in ((1, 1), (1, 30), (3, 3), (4, 1)):
        right = total = 0
        for prompt, answer in DATA:
            with torch.inference_mode():
                x = model(input_ids=torch.tensor([prompt + answer]), use_cache=False,
                          output_hidden_states=True).hidden_states[layers][0]
                logits = model.lm_head(x if layers == 4 else model.model.norm(x))
            for i, token in enumerate(answer, len(prompt) - 1):
                right += token in logits[i].topk(ranks).indices.tolist()
                total += 1
        assert measure_exit(model, DATA, layers, ranks) == pytest.approx(right / total)
    assert measure_exit(model, DATA, 2, 61) == 1


# ----------------------------------------------------------------------------------------- training

def test_low_rank_changes_are_nothing_at_first_and_are_kept(tmp_path):
    """The tuned model of a file is the one that was saved; the target stays as it is."""
    model, ids = deep("llama"), torch.tensor([PROMPT])
    expected = model(input_ids=ids).logits
    tuned = deep("llama")
    part = add_low_rank(tuned, 3)
    assert len(part) == 2 * 4 * 7
    torch.testing.assert_close(tuned(input_ids=ids).logits, expected)
    for p in part.values():
        p.data = 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p)))
        p.data = p.data.bfloat16().float()  # as a file keeps them
    save_part(tmp_path / "t", "a LayerSkip tuning", model, part, E=2, rank=3)
    loaded, E = load_tuned(tmp_path / "t", model)
    assert E == 2 and not any(parametrize.is_parametrized(x) for x in loaded.modules())
    torch.testing.assert_close(loaded(input_ids=ids).logits, tuned(input_ids=ids).logits,
                               atol=1e-4, rtol=1e-4)
    assert not torch.allclose(loaded(input_ids=ids).logits, expected)
    torch.testing.assert_close(model(input_ids=ids).logits, expected)
    decoded = tokens_of(layerskip(CachedLM(model), PROMPT, tuning=str(tmp_path / "t")), 20)
    assert decoded == tokens_of(autoregressive(CachedLM(loaded), PROMPT), 20)
    assert load_tuned("", model) == (model, 0)


class Coins(random.Random):
    """Layers left out as `left`, exits of one turn."""

    def __init__(self, left, turn):
        super().__init__(0)
        self.left, self.turn, self.thresholds = iter(left), turn, []

    def random(self):
        return 0.0 if next(self.left) else 0.999

    def randrange(self, n):
        assert n == 3
        return self.turn


@pytest.mark.parametrize("left", [(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1)])
def test_the_tuning_loss_by_hand(left):
    """Of a padded batch: exits of one turn and the last layer, weighted, on answers alone; a layer
    that is left out hands on what it reads. The first is never left out."""
    model = deep("llama")
    for turn in range(3):
        with torch.inference_mode():
            loss = tuning_loss(model, lambda x: x, DATA, Coins(left, turn))
        sums, n = {l: 0.0 for l in (1, 2, 3, 4)}, 0
        for prompt, answer in DATA:
            ids = torch.tensor([prompt + answer])
            with torch.inference_mode():
                x = model.model.embed_tokens(ids)
                at = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
                for l, layer in enumerate(model.model.layers, 1):
                    if not left[l - 1]:
                        x = layer(x, position_embeddings=at, attention_mask=None)
                    logp = model.lm_head(model.model.norm(x))[0].log_softmax(-1)
                    sums[l] -= sum(logp[i, token].item()
                                   for i, token in enumerate(answer, len(prompt) - 1))
            n += len(answer)
        weights = {l: w for l, w in ((1, 0), (2, 1), (3, 3)) if l % 3 == turn} | {4: 6}
        expected = sum(w * sums[l] / n for l, w in weights.items()) / sum(weights.values())
        assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert all(p.grad is None for p in model.parameters())


def test_deeper_layers_are_left_out_more_often():
    """By 0.1 (2^{l / 3} - 1): never, 0.026, 0.0587 and 0.1."""
    model, left, rng, states = deep("llama"), [0] * 4, random.Random(0), []
    for _ in range(300):
        states.clear()
        hooks = [layer.register_forward_hook(lambda _, given, out: states.append((given[0], out)))
                 for layer in model.model.layers]
        with torch.inference_mode():
            tuning_loss(model, lambda x: x, DATA[2:], rng)
        for hook in hooks:
            hook.remove()
        for l in range(3):  # the next layer read what this one read
            left[l] += torch.equal(states[l][0], states[l + 1][0])
    assert left[0] == 0 and 1 <= left[1] <= 20 and 7 <= left[2] <= 35  # 7.8 and 17.6 expected


def test_tuning_raises_early_exits_and_is_kept(tmp_path):
    model, rng = deep("llama"), random.Random(0)
    prompts = [[rng.randrange(61) for _ in range(3)] for _ in range(12)]
    tune(model, WORDLESS, prompts, out=tmp_path / "t", E=1, rank=8, steps=120, batch=6, lr=2e-2,
         max_new_tokens=10)
    tuned, E = load_tuned(tmp_path / "t", model)
    answers = [(p, tokens_of(autoregressive(CachedLM(model), p), 10)) for p in prompts]
    assert E == 1
    for given, layers in ((0, 1), (3, 3)):  # as the file says, or as is asked for
        log = []
        next(layerskip(CachedLM(model), PROMPT, E=given, gamma=2, tuning=str(tmp_path / "t"),
                       log=log))
        assert log[0]["layers"] == 2 * layers + 4
    assert measure_exit(tuned, answers, 1) > measure_exit(model, answers, 1) + 0.2
    assert measure_exit(tuned, answers, 4) > 0.8


# ------------------------------------------------------------------------------- files and commands

def test_files_belong_to_their_kind(tmp_path):
    model = deep("llama")
    save_part(tmp_path / "e", "an early exit", model, {}, E=2, width=4)
    with pytest.raises(InputError, match="expected a file of a LayerSkip tuning"):
        load_tuned(tmp_path / "e", model)


def test_the_report():
    log = [{"drafted": 4, "accepted": 3, "layers": 20}, {"drafted": 4, "accepted": 1, "layers": 20}]
    text = report(SimpleNamespace(log=log, tokens=6))
    assert text == "a round: 4.0 guesses, 2.00 accepted; 6.7 layers run a token"


@pytest.mark.parametrize("options, said", [
    (dict(gamma=0), "--gamma must be 1 or more, got 0"), (dict(E=-1), "--E must be 0 or more"),
    (dict(tuning=""), "--E must be 1 or more without --tuning"),
    (dict(tuning="", E=2), "--E must be 1 to 1 for a model of 2 layers, got 2")])
def test_bad_options_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        next(layerskip(CachedLM(tiny("llama")), PROMPT, **options))


@pytest.mark.parametrize("options, said", [
    (dict(E=0), "--E must be 1 to 1, got 0"), (dict(E=2), "--E must be 1 to 1, got 2"),
    (dict(rank=0), "--rank must be 1 or more"), (dict(lr=0), "--lr must be above 0"),
    (dict(max_new_tokens=0), "--max-new-tokens must be 1 or more")])
def test_bad_options_of_the_tuning_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        tune(tiny("llama"), WORDLESS, [[2], [3]], out="o", **options)


def command(*argv) -> int:
    return main([layerskip], report, [*map(str, argv), "--device", "cpu"], lossy=[layerskip],
                commands=[tune])


def test_from_the_command_line(capfd):
    """Without options the embedded tuning decodes: another model, so a difference is no error."""
    assert command("--prompt", "Tom has 3 apples.", "--max-new-tokens", "20", "--compare") == 0
    out, err = capfd.readouterr()
    assert out.strip() and "layerskip: 20 tokens" in err and "layers run a token" in err
    assert command("--prompt", "x", "--tuning", "none") == 2
    said_in_one_line("expected a file of a LayerSkip tuning, got 'none'", capfd)
