"""PaSS and SPACE: any look-ahead tokens and any tuning leave the output as it is; guesses are what
training sees; as many are accepted as the measured chances say."""
import copy
import importlib
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bita import Tuning, sample_anchors, load_tuning, mask_logits, shape_of
from common import CachedLM, InputError, Sampler, autoregressive, greedy
from fake_models import Zeros
from families import tiny
from helpers import ROOT, main, per_call, said_in_one_line, tokens_of
from models import training
from models.training import score_answers
from survey import masks as module
from survey.masks import (list_plans, load_space, measure_all_right, pass_sampling, report, space,
                          train, tune)
from survey.low_rank import add_low_rank
from survey.parts import load_part, save_part

PROMPT = [3, 14, 15]
DATA = [([3, 4], [5, 6, 7, 8]), ([9, 3, 30], [4, 4, 2, 11, 17, 40]), ([7], [5, 2])]


def random_tokens(model, L=3, seed=0, design="none") -> Tuning:
    tokens = Tuning(shape_of(model), design, 4, L)
    rng = torch.Generator().manual_seed(seed)
    for p in tokens.parameters():
        p.data = 0.5 * torch.randn(p.shape, generator=rng)
    return tokens.requires_grad_(False)


def random_space(path, model, k=3, size=0.1, right=None) -> str:
    """A file of random changes of a model, and a random mask."""
    rng, own = torch.Generator().manual_seed(7), add_low_rank(copy.deepcopy(model), 2)
    for p in own.values():
        p.data = size * torch.randn(p.shape, generator=rng)
    width = model.get_input_embeddings().weight.shape[1]
    own["mask"] = torch.nn.Parameter(0.5 * torch.randn(1, width, generator=rng))
    save_part(path, "a SPACE tuning", model, own, rank=2, right=right or [0.5] * k)
    return str(path)


def steady(name="llama"):
    """A model whose layers add nothing and that repeats the last token."""
    model = tiny(name, tie_word_embeddings=True)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    weight = model.get_input_embeddings().weight
    weight.data = torch.nn.functional.normalize(weight.data)  # closest to itself
    return model


# ---------------------------------------------------------------------------------- decoding

def test_of_a_model_that_repeats_itself_all_is_accepted(tmp_path):
    """Look-ahead tokens that are the last token guess the next ones."""
    model, log, tokens = steady(), [], random_tokens(steady(), 4)
    embedded = model.get_input_embeddings().weight[14].detach()
    tokens.masks.data = embedded.repeat(4, 1)
    target = CachedLM(model)
    chunks = pass_sampling(target, [3, 14], trained=tokens, log=log)
    assert [len(next(chunks)) for _ in range(5)] == [6] * 5 and target.calls == 10
    assert log == [{"drafted": 4, "accepted": 4}] * 5
    part = {name: torch.zeros_like(p) for name, p in add_low_rank(copy.deepcopy(model), 2).items()}
    save_part(tmp_path / "t", "a SPACE tuning", model, part | {"mask": embedded[None]}, rank=2,
              right=[0.5] * 3)
    log, target = [], CachedLM(model)
    chunks = space(target, [3, 14], k=3, tuning=str(tmp_path / "t"), log=log)
    assert [len(next(chunks)) for _ in range(5)] == [1] + [4] * 4 and target.calls == 5
    assert log == [{"drafted": 0, "accepted": 0, "rows": 4},
                   *[{"drafted": 3, "accepted": 3, "rows": 16}] * 4]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_pass_guesses_from_what_training_sees(name, monkeypatch):
    """Round by round; and the cache after it is a fresh one's."""
    model, drawn = tiny(name), []
    tokens = random_tokens(model)
    real = module.verify
    monkeypatch.setattr(module, "verify",
                        lambda p, q, *more: drawn.append(q.clone()) or real(p, q, *more))
    text, target = [5, 3, 14, 15, 9, 2, 6], CachedLM(model)
    chunks = pass_sampling(target, text, L=2, trained=tokens, sample=Sampler(1.0))
    for _ in range(5):
        chunk = next(chunks)
        ids, at = torch.tensor([text]), torch.tensor([[len(text) - 1]])
        with torch.inference_mode():
            expected = mask_logits(model, tokens.masks[:2], [], ids, at)[0, 0].softmax(-1)
        torch.testing.assert_close(drawn[-1], expected, atol=1e-4, rtol=1e-4)
        text = text + chunk
        same_cache(target, text, model)


def same_cache(lm, text, model) -> None:
    fresh = CachedLM(model)
    fresh.start(text[:-1])
    assert lm.length == len(text) - 1
    for layer, buffers in lm.cache.layers.items():
        for ours, theirs in zip(buffers, fresh.cache.layers[layer]):
            torch.testing.assert_close(ours[:, :, :lm.length], theirs[:, :, :lm.length],
                                       atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "opt"])
def test_spaces_candidates_are_those_behind_the_last_accepted_token(name, tmp_path, monkeypatch):
    """Call by call, against the logits of training; the cache is a fresh one's."""
    model, fed = tiny(name), []
    file = random_space(tmp_path / "t", model, size=0.3)
    target = CachedLM(model, 6)
    lm, mask, _ = target.once(("space", file), lambda: load_space(file, target))
    real = module.walk
    monkeypatch.setattr(module, "walk", lambda ids, *more: fed.append(ids) or real(ids, *more))
    text = [5, 3, 1, 4, 2]
    chunks = space(target, text, k=2, tuning=file, sample=Sampler(1.0, seed=2))
    lengths = set()
    for _ in range(12):
        chunk = next(chunks)
        lengths.add(len(chunk))
        known = text + chunk[:-1]
        ids, at = torch.tensor([known]), torch.tensor([[len(known) - 1]])
        with torch.inference_mode():
            logits = mask_logits(lm.model, mask.expand(2, -1), [], ids, at)[0, 0]
        text = text + chunk
        same_cache(lm, text, lm.model)
        next_ids = [text[-1], *greedy(logits[:, :6])]
        following = next(chunks)
        assert fed[-1] == next_ids
        text, lengths = text + following, lengths | {len(following)}
    assert len(lengths) > 1


def test_coins_of_zero_accept_all_of_pass():
    """Where every guess could have been the target's."""
    model, log = tiny("llama"), []
    chunks = pass_sampling(CachedLM(model), PROMPT, trained=random_tokens(model), sample=Zeros(1.0),
                      log=log)
    assert tokens_of(chunks, 10) and all(r["accepted"] == 3 for r in log[:-1])


def test_as_many_masks_as_pay(monkeypatch):
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [0.0, *range(1, most + 1)])
    assert list(list_plans(None, [0.5, 0.25])) == [(1, 1.5, 4), (2, 1.75, 9)]


def test_many_masks_are_tried_as_far_as_the_clock_measures(tmp_path):
    """11 masks behind each of 12 candidates are 144 rows, and the clock ends at 128."""
    model = tiny("llama")
    file = random_space(tmp_path / "t", model, right=[0.9] * 11)
    tried = [k for k, _, _ in list_plans(CachedLM(model), [0.9] * 11)]
    assert tried == [*range(1, 11)]
    tuned = load_space(file, CachedLM(model))[0]
    expected = tokens_of(autoregressive(tuned, PROMPT), 20)
    for k in (0, 11):
        assert tokens_of(space(CachedLM(model), PROMPT, k=k, tuning=file), 20) == expected


# ---------------------------------------------------------------------------------- training

def test_how_often_all_guesses_are_right_by_hand():
    model = tiny("llama", vocab_size=6)
    rng = random.Random(1)
    data = [([rng.randrange(6) for _ in range(3)], [rng.randrange(6) for _ in range(n)])
            for n in (9, 2, 14, 3)]
    masks = random_tokens(model, 2).masks
    hits, total = [0, 0], 0
    for prompt, answer in data:
        text = prompt + answer
        for a in range(len(prompt) - 1, len(text) - 3):
            ids = torch.tensor([text[:a + 1]])
            guesses = mask_logits(model, masks, [], ids, torch.tensor([[a]]))[0, 0].argmax(-1)
            first = guesses[0].item() == text[a + 2]
            hits[0] += first
            hits[1] += first and guesses[1].item() == text[a + 3]
            total += 1
    assert sum(hits) > 0
    assert measure_all_right(model, masks, data) == pytest.approx([x / total for x in hits])
    assert measure_all_right(model, masks, []) == [0, 0]


def test_answer_logits_are_those_of_each_answer_alone():
    model = tiny("llama")
    logits, labels = score_answers(model, DATA)
    assert labels.tolist() == [x for _, answer in DATA for x in answer]
    alone = [model(input_ids=torch.tensor([p + a])).logits[0, len(p) - 1:-1] for p, a in DATA]
    torch.testing.assert_close(logits, torch.cat(alone), atol=1e-4, rtol=1e-4)


class Tokenizer:
    eos_token_id = None


PROMPTS = [[x, 3, 7] for x in range(4, 24)]  # of a vocabulary of 24
SMALL = dict(max_new_tokens=8, steps=6, batch=4)


def test_tuning_learns_and_keeps(tmp_path, capsys):
    """Masks become right, the file is loaded again, the frozen model is as it was."""
    model = steady()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    tune(model, Tokenizer, PROMPTS, out=tmp_path / "t", k=2, rank=4, max_new_tokens=12, steps=60,
         batch=8, lr=1e-2)
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("step")]
    first, last = (float(lines[i].split("right ")[1].split()[0]) for i in (0, -1))
    assert last > first + 0.2 and "held-out tokens kept" in lines[-1]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    header, tensors = load_part(tmp_path / "t", "a SPACE tuning", model)
    lm, mask, right = load_space(tmp_path / "t", CachedLM(model, 10))
    assert right == header["right"] and len(right) == 2 and lm.vocab == 10
    assert torch.equal(mask.bfloat16(), tensors["mask"])
    assert last == pytest.approx(right[0], abs=6e-4)
    part = add_low_rank(tuned := copy.deepcopy(model), 4)
    for name, p in part.items():
        p.data = tensors[name].float()
    ids = torch.tensor([PROMPT[:1] * 3])
    torch.testing.assert_close(lm.model(input_ids=ids).logits, tuned(input_ids=ids).logits)


def test_plain_text_counts_as_much_as_masks(tmp_path, monkeypatch):
    """By its divergence from the untuned model, which is 0 at first."""
    model, given = tiny("llama"), []
    real = training.divergence

    def divergence(kind, p, q):
        given.append((kind, real(kind, p, q).mean().item(), q.requires_grad))
        return factor * real(kind, p, q)
    monkeypatch.setattr(training, "divergence", divergence)
    found = []
    for factor in (1.0, 0.0):
        tune(model, Tokenizer, PROMPTS, out=tmp_path / "t", work=tmp_path / f"{factor}", k=2,
             **SMALL)
        found.append(load_file(tmp_path / "t")["mask"])
    assert given[0][0] == "forward-kl" and given[0][1] == pytest.approx(0, abs=1e-5)
    assert all(x[2] for x in given) and len(given) == 12 and given[5][1] > 0
    assert not torch.equal(*found)


TRAININGS = [("survey.masks", "tune", dict(k=2)), ("survey.masks", "train", dict(L=2)),
             ("bita", "train", {}), ("bita", "train", dict(design="shallow")),
             ("survey.medusa", "train", dict(heads="medusa")),
             ("survey.medusa", "train", dict(heads="hydra")),
             ("survey.eagle", "train", {}), ("survey.eagle", "train", dict(begin="last")),
             ("survey.early_exit", "train", dict(E=1)), ("survey.layerskip", "tune", dict(E=1))]


@pytest.mark.parametrize("file, name, options", TRAININGS)
def test_what_is_trained_for_a_model_in_bfloat16_is_float32(tmp_path, monkeypatch, file, name,
                                                            options):
    """A step of AdamW is about lr: bfloat16, whose numbers near 0.02 are 1e-4 apart, rounds most of
    it to nothing."""
    found = {}

    def started(self, part, *more, **how):
        found.update({name: p.dtype for name, p in part.items()})
        raise KeyboardInterrupt
    monkeypatch.setattr(training.Training, "__init__", started)
    command = getattr(importlib.import_module(file), name)
    with pytest.raises(KeyboardInterrupt):
        command(tiny("llama").bfloat16(), Tokenizer, PROMPTS, out=tmp_path / "t", max_new_tokens=8,
                **options)
    assert {*found.values()} == {torch.float32}, found


def test_pass_tokens_are_trained_without_prompt_tokens(tmp_path):
    model = tiny("llama", vocab_size=24)
    train(model, Tokenizer, PROMPTS, out=tmp_path / "t", L=3, **SMALL)
    tokens = load_tuning(str(tmp_path / "t"), model)
    assert tokens.masks.shape == (3, 32) and tokens.soft_prompt.numel() == 0
    expected = tokens_of(autoregressive(CachedLM(model), PROMPT), 20)
    found = pass_sampling(CachedLM(model), PROMPT, tokens=str(tmp_path / "t"))
    assert tokens_of(found, 20) == expected


def test_the_masks_loss_reaches_the_changes_and_the_mask():
    """And plain text's only the changes."""
    model = copy.deepcopy(tiny("llama")).requires_grad_(False)
    part = add_low_rank(model, 2)
    mask = torch.nn.Parameter(torch.ones(1, 32))
    ids, at, labels = sample_anchors(DATA, 2, 3, random.Random(0))
    module.sar_loss(mask_logits(model, mask.expand(2, -1), [], ids, at), labels).backward()
    assert mask.grad.abs().sum() > 0
    assert all(p.grad is not None and p.grad.abs().sum() > 0
               for name, p in part.items() if name.endswith(".B"))


# ------------------------------------------------------------------------------- what is refused

def test_bad_input_is_one_line(capfd, tmp_path):
    for said, *argv in (
            ("--L must be 1 to 5, or 0, got -1", "--L", "-1"),
            ("--L must be 1 to 5, or 0, got 9", "--L", "9"),
            ("--k must be 1 or more, or 0, got -1", "--method", "space", "--k", "-1"),
            ("expected", "--tokens", "nothing"),
            ("--tokens must be a file without prompt tokens, got", "--tokens",
             f"{ROOT}/models/bita.safetensors"),
            ("expected", "--method", "space", "--tuning", "nothing"),
            ("expected", "--method", "space", "--tuning", f"{ROOT}/models/layerskip.safetensors")):
        assert main([pass_sampling, space], report, [*argv, "--prompt", "x"], lossy=[space]) == 2
        said_in_one_line(said, capfd)
    model = tiny("llama")
    for change in (dict(k=0), dict(rank=0), dict(lr=0), dict(steps=0), dict(anchors=0)):
        [option] = change
        with pytest.raises(InputError, match=f"--{option} must be .*, got 0"):
            tune(model, Tokenizer, PROMPTS, out=tmp_path / "t", **SMALL | change)
    with pytest.raises(InputError, match="expected matrices"):
        tune(tiny("gpt2"), Tokenizer, PROMPTS, out=tmp_path / "t", **SMALL)


def test_damaged_and_others_files_are_refused(tmp_path):
    model = tiny("llama")
    file = random_space(tmp_path / "t", model)
    with pytest.raises(InputError, match="another's"):
        load_space(file, CachedLM(tiny("llama", seed=1)))
    known = load_file(file)
    header = safe_open(file, "pt").metadata()
    for change in ({"mask": known["mask"][:, :3]}, {"mask": known["mask"] * torch.nan}):
        save_file(known | change, file, header)
        with pytest.raises(InputError, match="expected"):
            load_space(file, CachedLM(model))


# ------------------------------------------------------------------------- the committed parts

def test_the_embedded_tokens_and_the_formula(embedded, held_out):
    """PaSS's tokens per call on held-out prompts for L = 1 … 5: (2 + Σ chances) / 2, where the
    chances are those of all places of these answers, within 0.1 (six answers of at most 100
    tokens; rounds begin at other places than others)."""
    model, _, tokenizer = embedded
    tokens = load_tuning(module.TOKENS, model)
    for L in range(1, 6):
        right = measure_all_right(model, tokens.masks[:L], held_out, anchors=200)
        found = per_call(pass_sampling, model, held_out, L=L, trained=tokens)
        assert found == pytest.approx((2 + sum(right)) / 2, abs=0.1), L


def test_the_embedded_tuning(embedded, held_out):
    """Output is the tuned model's; it guesses better than BiTA's efficient tree, 1.84."""
    model, _, _ = embedded
    target = CachedLM(model)
    tuned = target.once(("space", module.TUNED), lambda: load_space(module.TUNED, target))[0].model
    tokens = 0
    for prompt, _ in held_out:
        expected = tokens_of(autoregressive(CachedLM(tuned), prompt), 80)
        assert tokens_of(space(target, prompt, k=4), 80) == expected
        tokens += 80
    assert tokens / target.calls > 1.84
