"""A trained exit: its guesses, output of the frozen model, a loss that reaches the exit alone,
files and commands."""
import random
from types import SimpleNamespace

import pytest
import torch

from cli.graphs import GraphedLM
from common import CachedLM, InputError, Sampler, autoregressive
from families import deep, tiny
from helpers import ROOT, main, per_call, said_in_one_line, tokens_of
from survey.early_exit import Exit, early_exit, exit_loss, fit, load_exit, report, train

PROMPT = [3, 14, 15]
WORDLESS = SimpleNamespace(eos_token_id=None)


def random_exit(model, E: int, seed: int = 0) -> Exit:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Exit(model, E, 8)
        torch.nn.init.normal_(network.W_2.weight)
    return network.requires_grad_(False)


# ---------------------------------------------------------------------------- the exit and its loss

def test_a_new_exit_is_the_models_own():
    model = deep("llama")
    x = torch.randn(3, 32)
    torch.testing.assert_close(Exit(model, 2, 8)(x), model.model.norm(x))


def test_the_loss_by_hand():
    """The cross-entropy of the exit's distribution with the model's; the exit learns from it alone,
    and an exit that says what the model says has the entropy of p."""
    model = deep("llama").requires_grad_(False)
    network, early = random_exit(model, 2).requires_grad_(True), torch.randn(5, 32)
    last = torch.randn(5, 32)
    loss = exit_loss(model, lambda x: 2 * x, network, early, last)
    p = (2 * model.lm_head(last)).softmax(-1)
    logq = (2 * model.lm_head(network(early))).log_softmax(-1)
    assert loss.item() == pytest.approx(-(p * logq).sum(-1).mean().item(), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in network.parameters())
    assert all(p.grad is None for p in model.parameters())


# ----------------------------------------------------------------------------------------- decoding

def test_graphs_too():
    model = tiny("llama", num_hidden_layers=3, run_as=GraphedLM)
    expected = tokens_of(autoregressive(CachedLM(model), PROMPT), 20)
    chunks = early_exit(GraphedLM(model), PROMPT, trained=random_exit(model, 1))
    assert tokens_of(chunks, 20) == expected


class Recording(Sampler):
    """Keep all tokens that were drawn."""

    def draw(self, probs):
        tokens = super().draw(probs)
        self.drawn = [*getattr(self, "drawn", []), *tokens.tolist()]
        return tokens


def test_guesses_are_the_exits():
    """Each guess is the likeliest token of the exit after the text and the guesses before it."""
    model, sample = deep("llama"), Recording(0)
    network = random_exit(model, 2)
    network.W_2.weight.mul_(30)  # so that it guesses otherwise than the model's own norm
    next(early_exit(CachedLM(model), PROMPT, gamma=3, trained=network, sample=sample))
    text, without = list(PROMPT), []
    for guess in sample.drawn[:3]:
        with torch.inference_mode():
            state = model(input_ids=torch.tensor([text]), use_cache=False,
                          output_hidden_states=True).hidden_states[2][0, -1:]
            assert model.lm_head(network(state)).argmax().item() == guess
            without.append(model.lm_head(model.model.norm(state)).argmax().item())
        text.append(guess)
    assert without != sample.drawn[:3]


def test_a_new_exit_of_a_model_whose_later_layers_add_nothing_is_accepted_whole():
    model, log = deep("llama"), []
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    chunks = early_exit(CachedLM(model), PROMPT, gamma=4, trained=Exit(model, 2, 4), log=log)
    assert tokens_of(chunks, 30) == tokens_of(autoregressive(CachedLM(model), PROMPT), 30)
    assert log[0] == {"drafted": 4, "accepted": 4, "layers": 4 * 2 + 4}


# ----------------------------------------------------------------------------------------- training

def test_training_an_exit_lowers_its_loss_and_reaches_nothing_else():
    model, rng = deep("llama"), random.Random(0)
    data = [([rng.randrange(61)], [rng.randrange(61) for _ in range(6)]) for _ in range(3)]
    before = {name: p.clone() for name, p in model.named_parameters()}
    network = Exit(model, 1, 64)
    curve = fit(model, network, data, data, steps=120, batch=16, lr=1e-2)
    assert curve[120]["right"] > curve[0]["right"] + 0.3
    assert all(torch.equal(p, before[name]) and p.grad is None
               for name, p in model.named_parameters())


# ------------------------------------------------------------------------------- files and commands

def test_files_belong_to_their_model(tmp_path):
    model = deep("llama")
    train(model, WORDLESS, [[2, 3], [4, 5], [6, 7]], out=tmp_path / "e", E=2, width=4, steps=1,
          batch=2, max_new_tokens=5)
    network = load_exit(tmp_path / "e", model)
    assert network.E == 2 and network.W_1.weight.shape == (4, 32)
    chunks = early_exit(CachedLM(model), PROMPT, exit=str(tmp_path / "e"))
    assert tokens_of(chunks, 20) == tokens_of(autoregressive(CachedLM(model), PROMPT), 20)
    for other in (tiny("llama", seed=9), tiny("qwen2")):
        with pytest.raises(InputError, match="an early exit for this model"):
            load_exit(tmp_path / "e", other)


def test_bad_options_are_refused():
    with pytest.raises(InputError, match="--gamma must be 1 or more, got 0"):
        next(early_exit(CachedLM(tiny("llama")), PROMPT, gamma=0))


@pytest.mark.parametrize("options, said", [
    (dict(E=0), "--E must be 1 to 1, got 0"), (dict(E=2), "--E must be 1 to 1, got 2"),
    (dict(steps=0), "--steps must be 1 or more"), (dict(width=0), "--width must be 1 or more"),
    (dict(lr=0), "--lr must be above 0"),
    (dict(max_new_tokens=0), "--max-new-tokens must be 1 or more")])
def test_bad_options_of_the_training_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        train(tiny("llama"), WORDLESS, [[2], [3]], out="o", **options)


def command(*argv) -> int:
    return main([early_exit], report, [*map(str, argv), "--device", "cpu"], commands=[train])


def test_the_embedded_exit(embedded, held_out):
    """Held-out prompts: AR's output, four tokens a round or more, under 5.5 layers each."""
    log = []
    assert per_call(early_exit, embedded[0], held_out, log=log) > 4
    tokens = sum(len(expected) for _, expected in held_out)
    assert sum(r["layers"] for r in log) / tokens < 5.5
    assert (ROOT / "models/exit.safetensors").stat().st_size < 1_000_000


def test_from_the_command_line(capfd):
    argv = ["--prompt", "Tom has 3 apples.", "--max-new-tokens", "20", "--compare"]
    assert command(*argv) == 0
    err = capfd.readouterr().err
    assert "output equals autoregressive output" in err and "layers run a token" in err
    assert command("--prompt", "x", "--exit", "none") == 2
    said_in_one_line("expected a file of an early exit, got 'none'", capfd)
