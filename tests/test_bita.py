"""BiTA's trees, positions, labels and loss are checked by hand. Masks are trained on what they see
in decoding, those of PaSS and SPACE too, which are BiTA with parts left out. That they change no
token of the text is in test_lossless.py."""
import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bita as module
from bita import (PrefixLM, Tuning, bita, build_tree, load_tuning, mask_logits, sample_anchors,
                  sar_loss, save_tuning, train)
from common import CachedLM, Sampler, autoregressive
from fake_models import path_to
from families import FAMILIES, tiny
from helpers import CLOSE, check_refused, interrupting, note_calls, tokens_of
from methods import tuning_of
from support.engine import EngineLM
from survey import masks
from training import loop as training
from trainings import PROMPTS, WORDLESS, run

LLAMA = tiny("llama")


# ---------------------------------------------------------------------------------- decoding

def test_the_tree_of_figure_5_and_the_full_tree():
    """M = 4, k = 3: of each level only the first node has children."""
    levels = [["Yeah", "Yes", "Sure"], [",", "!", "."], ["I", "they", "LLMs"],
              ["have", "read", "am"]]
    ids, parents = build_tree(levels, "?")
    assert ids == ["?", *sum(levels, [])]
    assert parents == [-1, 0, 0, 0, 1, 1, 1, 4, 4, 4, 7, 7, 7]
    assert [ids[i] for i in path_to(12, parents)[1:]] == ["Yeah", ",", "I", "am"]
    full = build_tree([[1, 2], [3, 4], [5]], 9, full=True)
    assert full == ([9, 1, 3, 5, 4, 5, 2, 3, 5, 4, 5], [-1, 0, 1, 2, 1, 4, 0, 6, 7, 6, 9])
    assert build_tree([], 9, full=True) == build_tree([], 9) == ([9], [-1])


@torch.inference_mode()
def guess_alone(model, masks, text: list[int], prompts=()) -> torch.Tensor:
    """Compute the logits of mask tokens after a text, as training does."""
    return mask_logits(model, masks, prompts, torch.tensor([text]),
                       torch.tensor([[len(text) - 1]]))[0, 0]


@pytest.mark.parametrize("tree, k, most", [("efficient", 2, 6), ("full", 2, 14), ("chain", 1, 3)])
def test_candidates_are_those_of_masks_after_the_last_accepted_token(tree, k, most, monkeypatch):
    """The masks must see what training sees. The tokens are few, so candidates are often accepted.
    A chain has only the root's masks, and the first ones are used up (Fig. 4)."""
    model, expected, log = tiny("llama", vocab_size=8), [[]], []
    used = note_calls(monkeypatch, module, "build_tree")
    tuning, text = tuning_of(model, 4, 3), [5, 3, 4, 1, 2, 6]
    chunks = bita(PrefixLM(model), text, tree=tree, k=2, tuning=tuning, log=log)
    for chunk in itertools.islice(chunks, 12):
        ids, text = text, text + chunk
        seen = text[:-1] if tree != "chain" else ids
        logits = guess_alone(model, tuning.masks, seen, tuning.prompts)
        left = logits[len(chunk) - 1:] if tree == "chain" else logits
        expected.append(left.topk(k).indices.tolist())
    assert [given[0] for given in used] == expected[:-1] and max(r["accepted"] for r in log) > 0
    assert max(r["guessed"] for r in log) == most


# ------------------------------------------------------------------------- what training sees

def test_an_anchored_batch_by_hand():
    data = [([5, 6], [7, 8, 9]), ([4], [3, 2, 1, 0])]
    ids, anchors, labels = sample_anchors(data, 2, 9, random.Random(0))
    assert ids.tolist() == [[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]]
    assert anchors.tolist() == [[1, 2, 0], [0, 1, 2]]  # the third of the first is none
    assert labels.tolist() == [[[8, 9], [9, -100], [-100, -100]], [[2, 1], [1, 0], [0, -100]]]


def test_an_answer_has_up_to_so_many_anchors_anywhere():
    """All are different and in order. Of 18 places each is drawn in 200 draws of three."""
    data, rng, drawn = [([1, 2], list(range(3, 22))), ([1], [2, 3, 4])], random.Random(0), []
    for _ in range(200):
        _, anchors, labels = sample_anchors(data, 2, 3, rng)
        first, second = anchors.tolist()
        assert len(first) == 3 and first == sorted({*first}) and second == [0, 1, 0]
        assert (labels[:, :, 0] >= 0).tolist() == [[True] * 3, [True, True, False]]
        drawn += first
    assert {*drawn} == {*range(1, 19)}


@pytest.mark.parametrize("family, P", [
    ("llama", 0), *((name, 4) for name in [*FAMILIES, "gemma2", "gpt-oss", "cohere2"])])
def test_training_sees_what_decoding_sees(family, P):
    """The mask logits of an anchored, padded batch equal those of the cached tree, group by group;
    the first text is longer than the windows of 9 tokens."""
    model, rng = tiny(family), random.Random(5)
    data = [([rng.randrange(2, 61) for _ in range(n)], [rng.randrange(2, 61) for _ in range(m)])
            for n, m in ((13, 5), (1, 3), (7, 4))]
    tuning, lm, made = tuning_of(model, P, 3), PrefixLM(model), []
    ids, anchors, labels = sample_anchors(data, 3, 9, random.Random(0))
    with torch.inference_mode():
        logits = mask_logits(model, tuning.masks, tuning.prompts, ids, anchors)
    model.register_forward_hook(lambda *call: made.append(call[-1].logits[0, 1:]))
    for b, (prompt, answer) in enumerate(data):
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 2)
        assert (labels[b, :, 0] >= 0).sum() == len(places)
        for g, place in enumerate(places):
            next(bita(lm, (prompt + answer)[:place + 1], tree="chain", tuning=tuning))
            torch.testing.assert_close(logits[b, g], made[-1], **CLOSE)


def test_the_loss_by_hand():
    """The loss is Eq. 1 over the labels that there are, each as much as any other."""
    labels = torch.tensor([[[2, 0], [1, -100]], [[-100, -100], [0, -100]]])
    logits = torch.randn(2, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    terms = [-logits[at].softmax(-1)[labels[at]].log()
             for at in itertools.product(range(2), repeat=3) if labels[at] >= 0]
    assert len(terms) == 4
    torch.testing.assert_close(sar_loss(logits, labels), sum(terms) / 4)


# ------------------------------------------------------------------------------------- tuning

def tune(path, model=LLAMA, **how):
    """Tune on the answers to a few prompts, all of them in each step unless told otherwise."""
    options = dict(P=3, M=2, steps=20, batch=8, max_new_tokens=8, lr=1e-2) | how
    train(model, WORDLESS, PROMPTS, out=path, **options)


def test_updates_by_hand(tmp_path):
    """They are Adam's, of a gradient that is cut to a length of 1. The rate falls as a cosine.
    All answers are in each batch, from the prompt's last token on. The model stays as it is."""
    plain = Tuning(LLAMA, 3, 2)
    adam = torch.optim.Adam(plain.parameters(), 0.3)
    data = [(p, tokens_of(autoregressive(CachedLM(LLAMA), p), 8)) for p in PROMPTS]
    batch = sample_anchors(data, 2, 64, random.Random(0))
    for step in range(4):
        adam.param_groups[0]["lr"] = 0.3 * 0.5 * (1 + math.cos(math.pi * step / 4))
        adam.zero_grad()
        sar_loss(mask_logits(LLAMA, plain.masks, plain.prompts, *batch[:2]), batch[2]).backward()
        length = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
        assert length > 1 or step > 1
        for p in plain.parameters():
            p.grad /= max(1, length)
        adam.step()
    tune(tmp_path / "file", steps=4, lr=0.3)
    tuned = load_tuning(str(tmp_path / "file"), LLAMA)
    for x, p, old in zip(tuned.parameters(), plain.parameters(), Tuning(LLAMA, 3, 2).parameters()):
        assert (x - p).abs().mean() < 0.02 * (p - old).abs().mean()
    assert all(map(torch.equal, LLAMA.parameters(), tiny("llama").parameters()))


def test_ctrl_c_saves_what_a_next_run_goes_on_from(tmp_path, monkeypatch, capsys):
    """All answers are in each batch. So the first loss of the run that goes on is that of the step
    at which Ctrl-C came, up to the rounding of the file."""
    losses, backward, loss_of = [], torch.Tensor.backward, module.sar_loss
    monkeypatch.setattr(module, "sar_loss", lambda *x: losses.append(loss_of(*x)) or losses[-1])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "backward", interrupting(backward, 6))
        tune(tmp_path / "half")
    said = capsys.readouterr().err
    assert f"stopped after 5 steps: saved what was learnt to {tmp_path / 'half'}\n" in said
    tune(tmp_path / "whole", start=str(tmp_path / "half"), P=9, M=9, steps=4)
    tune(tmp_path / "fresh", steps=4)
    first, stopped, again, fresh = (losses[i].item() for i in (0, 5, 6, 10))
    assert again == pytest.approx(stopped, rel=1e-2) and first == fresh > 1.05 * stopped
    ends = [load_tuning(str(tmp_path / name), LLAMA).masks for name in ("half", "whole", "fresh")]
    assert {x.shape for x in ends} == {(2, 32)} and len({str(x.tolist()) for x in ends}) == 3


def test_an_old_file_stays_until_a_new_one_is_whole(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("old")
    monkeypatch.setattr(module, "save_file", interrupting(
        lambda tensors, path, facts: Path(path).write_text("half"), 1))
    with pytest.raises(KeyboardInterrupt):
        save_tuning(file, Tuning(LLAMA), LLAMA)
    assert file.read_text() == "old"


@pytest.mark.parametrize("spoil", [
    lambda x: x * math.nan, lambda x: x * math.inf,
    lambda x: x + (0 * x).sqrt()])  # only the gradient of the last is no number
def test_what_is_no_number_is_not_learnt_and_an_old_file_stays(spoil, tmp_path, monkeypatch):
    tune(tmp_path / "file", steps=1)
    before, loss_of = (tmp_path / "file").read_bytes(), module.sar_loss
    monkeypatch.setattr(module, "sar_loss", lambda *x: spoil(loss_of(*x)))
    check_refused("a finite loss, got .*: lower --lr from 0.01", tune, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == before and len([*tmp_path.iterdir()]) == 1


def test_options_that_make_no_sense_are_refused():
    """Numbers are in test_cli.py."""
    for out in "none/file", ".":
        check_refused(f"--out to be a file in a folder that exists, got {out}", tune, Path(out))
    check_refused("--tree .*, got oak", next, bita(PrefixLM(LLAMA), [5], tree="oak"))


# ------------------------------------------------------------------------------ PaSS and SPACE

@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_pass_guesses_from_what_training_sees(name, monkeypatch):
    """The distributions of the guesses are compared round by round."""
    model, judged = tiny(name), note_calls(monkeypatch, masks, "verify")
    tokens = tuning_of(model, 0, 3)
    text, target = [5, 3, 14, 15, 9, 2, 6], EngineLM(model)
    chunks = masks.pass_sampling(target, text, L=2, trained=tokens, sample=Sampler(1.0))
    for _ in range(5):
        chunk = next(chunks)
        expected = guess_alone(model, tokens.masks[:2], text).softmax(-1)
        torch.testing.assert_close(judged[-1][1], expected, **CLOSE)
        text = text + chunk


def test_space_guesses_from_what_training_sees(monkeypatch):
    """Of few tokens guesses are often accepted. They are the likeliest ones at any temperature."""
    model, made, lengths = tiny("llama", vocab_size=8), [], set()
    mask = tuning_of(model, 0, 1).masks
    monkeypatch.setattr(masks, "greedy", lambda x: made.append(x.argmax(-1).tolist()) or made[-1])
    text, target = [5, 3, 4, 1, 2, 6], EngineLM(model)
    target.memo[masks.load_space, ("own", target)] = EngineLM(model), mask
    chunks = masks.space(target, text, k=2, tuning="own", sample=Sampler(1.0))
    for _ in range(9):
        chunk = next(chunks)
        text, lengths = text + chunk, lengths | {len(chunk)}
        assert made[-1] == guess_alone(model, mask.expand(2, -1), text[:-1]).argmax(-1).tolist()
    assert len(lengths) > 1 and target.calls == 9


def test_what_masks_bring():
    assert [*masks.plan_space(0.5)][:2] == [(1, 1.5, 4, 0, 0), (2, 1.75, 9, 0, 0)]


def test_plain_text_counts_as_much_as_masks(tmp_path, monkeypatch):
    """By its divergence from the untuned model, which is 0 at first, and learnt from afterwards. It
    reaches the changes of the layers directly, and the mask hardly."""
    model, given, divergence = tiny("llama"), [], training.divergence

    def spy(kind, p, q):
        given.append((kind, divergence(kind, p, q).mean().item(), q.requires_grad))
        return factor * divergence(kind, p, q)
    monkeypatch.setattr(training, "divergence", spy)
    changes = []
    for factor in (1.0, 0.0):
        out = run("survey.masks tune --k 2", tmp_path / f"{factor}", model, steps=3, lr=1e-3)
        changes.append(load_file(out)["0.self_attn.q_proj.B"])
    assert given[0][0] == "forward-kl" and given[0][1] == pytest.approx(0, abs=1e-5)
    assert all(x[2] for x in given) and len(given) == 6 and given[2][1] > 0
    assert torch.dist(*changes, p=torch.inf) > 5e-4  # of 2e-3, the largest number there
