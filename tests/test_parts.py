"""Files of trained parts: what is kept, whose they are, and an LM head of fewer rows."""
import functools
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import bita
from families import deep, tiny
from helpers import ROOT, check_refused
from support.engine import EngineLM
from support.layers import split_layers
from support.parts import (belongs, fill, head_for, load_facts, load_trained, logits_of, save_facts,
                           save_part, save_trained, score_with, some_embeddings)
from survey import dflash, eagle, eagle3, early_exit, layerskip, masks, medusa, mtp
from trainings import TRAININGS, make_llama, run

LLAMA = tiny("llama")


def part() -> dict[str, torch.nn.Parameter]:
    return {"w": torch.nn.Parameter(torch.zeros(2, 2)), "b": torch.nn.Parameter(torch.ones(2))}


@pytest.mark.parametrize("changes, said", [
    ({"b": None}, r"tensors {'b': \(2,\)}, got 'file' with {}"),
    ({"b": torch.zeros(3)}, r"tensors {'b': \(2,\)}, got 'file' with {'b': \(3,\)}"),
    ({"c": torch.zeros(1)}, r"tensors {}, got 'file' with {'c': \(1,\)}"),
    ({"b": torch.tensor([1.0, torch.inf])}, "finite numbers, got 'file' with .* b"),
    ({"b": torch.ones(2, dtype=torch.int8)}, "finite numbers, got 'file' .* b")])
def test_other_tensors_are_refused_and_nothing_is_set(changes, said):
    own, given = part(), {"w": torch.ones(2, 2), "b": torch.ones(2).to(torch.float8_e4m3fn)}
    changed = {name: x for name, x in (given | changes).items() if x is not None}
    check_refused(f"expected {said}", fill, own, changed, "file")
    assert torch.equal(own["w"], part()["w"])
    fill(own, given, "file")
    assert torch.equal(own["w"], given["w"])


def test_a_part_belongs_to_its_model_in_any_type_and_to_no_other():
    """Also to one that was tuned, or whose embeddings were quantised; not to one of other sizes,
    nor to one whose embeddings are alike only in their mean."""
    known, model = some_embeddings(LLAMA), tiny("llama")
    table = model.get_input_embeddings().weight.data
    assert known.shape == (4, 32)  # tokens 0, 16, 32 and 48
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert belongs(known, tiny("llama").to(dtype)) and belongs(known.to(dtype), model)
    table.add_(0.3 * table.std() * torch.randn(table.shape, generator=torch.Generator()))
    assert belongs(known, model)
    table.copy_((LLAMA.get_input_embeddings().weight * 4).round() / 4)
    assert belongs(known, model)
    for other in (tiny("llama", seed=1), tiny("qwen2", seed=2), tiny("llama", hidden_size=64),
                  tiny("llama", vocab_size=33)):
        assert not belongs(known, other)
    two = [tiny("llama", seed=seed) for seed in (3, 4)]
    for x in two:
        x.get_input_embeddings().weight.data += 5
    assert not belongs(some_embeddings(two[0]), two[1])


@pytest.mark.parametrize("tokens", [2, 3, 4, 16, 17])
def test_a_part_of_a_model_of_few_tokens_belongs_to_it_alone(tokens):
    """Such a model passes the checks of trees and of layers, and its logits are told."""
    model = tiny("llama", vocab_size=tokens)
    known = some_embeddings(model)
    assert belongs(known, model) and not belongs(known, tiny("llama", 1, vocab_size=tokens))
    early, late = split_layers(EngineLM(model), 1)
    x = torch.randn(3, 32)
    torch.testing.assert_close(logits_of(model)(x), x)
    assert early.vocab == late.vocab == tokens


def test_what_is_no_part_is_refused_in_one_line(tmp_path):
    save_part(tmp_path / "new" / "part", "a thing", LLAMA, part())
    whole = (tmp_path / "new" / "part").read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1"
    for i, bad in enumerate((b"", b"x" * 100, whole[:50], whole[:-9], pointer)):
        (tmp_path / str(i)).write_bytes(bad)
    for other, said in (*((str(i), "") for i in range(4)), ("4", "is a pointer of git-lfs"),
                        ("", "Is a directory"), ("none", "No such file"),
                        (ROOT / "models/draft/model.safetensors", "released, name the folder")):
        check_refused(f"expected a file of a thing .*{said}", load_trained, tmp_path / other,
                      "a thing", LLAMA, None)


# ---------------------------------------------------------------- files that trainings leave

LOADERS = {  # how a training's command line begins, and what loads the file that it leaves
    "bita train --P 3": bita.load_tuning,
    "survey.eagle ": eagle.load_draft, "survey.mtp": mtp.load_draft,
    "survey.medusa": lambda path, model: medusa.load_heads(path, "medusa", model),
    "survey.medusa train --K 2 --heads hydra":
        lambda path, model: medusa.load_heads(path, "hydra", model),
    "survey.eagle3": eagle3.load_draft, "survey.dflash": dflash.load_draft,
    "survey.early_exit": early_exit.load_exit, "survey.layerskip": layerskip.load_tuned,
    "survey.masks tune": lambda path, model: masks.load_space(path, EngineLM(model))}
PARTS = {line: load for x, load in LOADERS.items() for line in TRAININGS if line.startswith(x)}
OPTIONAL = {"vocab", "config", "mlp", "bias"}  # older files lack them
ROW = pytest.mark.parametrize("line", PARTS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that gives a training's file, which is made once."""
    return functools.cache(lambda line: run(line, tmp_path_factory.mktemp("part"), make_llama(),
                                            steps=1))


def read(path) -> tuple[dict, dict]:
    """Return the header and the tensors of a part's file."""
    with safe_open(path, "pt") as file:
        return (json.loads(file.metadata()["part"]),
                {name: file.get_tensor(name) for name in file.keys()})


@ROW
def test_a_part_is_loaded_as_it_was_saved_in_the_type_of_its_model(line, trained, tmp_path):
    """The model's fingerprint differs a little, as its weights are rounded. Older files say more,
    which nothing reads."""
    load = PARTS[line]
    save = bita.save_tuning if line.startswith("bita") else save_trained
    header, tensors = read(trained(line))
    older = header | {"accept": [[0.5]], "tokens": [1.0], "right": [0.5], "own_head": True}
    save_file(tensors, tmp_path / "older", {"part": json.dumps(older)})
    load(tmp_path / "older", make_llama())
    for dtype in torch.bfloat16, torch.float32:
        model = make_llama().to(dtype)
        part = load(trained(line), model)
        if isinstance(part, torch.nn.Module):  # and no tuned model with a number or a mask
            assert {p.dtype for p in part.parameters()} == {dtype}
            # Rotary frequencies are buffers, and bfloat16 would round them.
            assert torch.bfloat16 not in {x.dtype for x in part.buffers()}
            save(tmp_path / str(dtype), part, model)
            again, found = read(tmp_path / str(dtype))
            assert again == header and found.keys() == tensors.keys()
            del found["model"]
            assert all(torch.equal(x, tensors[name]) for name, x in found.items())


@ROW
def test_a_file_that_does_not_fit_is_refused(line, trained, tmp_path):
    """It may be of another model or kind, hold a number that is not finite, or have a header that
    lacks a field."""
    load, path, model = PARTS[line], tmp_path / "part", make_llama()
    header, tensors = read(trained(line))
    check_refused("for this model, got .*: .*it was made for another model", load, trained(line),
                  deep("llama", 3, seed=1))
    other = next(x for x in PARTS if read(trained(x))[0]["kind"] != header["kind"])
    expected = f"expected a file of {header['kind']} .*"
    check_refused(f"{expected}: .*it is one of ", load, trained(other), model)
    name = max(tensors.keys() - {"model"})
    broken = tensors | {name: torch.full_like(tensors[name], torch.nan)}
    save_file(broken, path, {"part": json.dumps(header)})
    said = "expected finite numbers, got|numbers that are not finite"
    check_refused(said, load, path, model)
    for name in header.keys() - OPTIONAL:
        others = {key: x for key, x in header.items() if key != name}
        save_file(tensors, path, {"part": json.dumps(others)})
        check_refused(f"{expected}: (it has no|KeyError:) '{name}'", load, path, model)


# ------------------------------------------------------------------------------ measured facts

def test_measured_facts_are_kept_with_the_models_they_are_of(tmp_path):
    """Also where embeddings are so small that four decimals would be all zeros. Facts that cannot
    be used are refused in one line."""
    models = {"target": tiny("llama", seed=3), "draft": tiny("llama", seed=4)}
    models["target"].get_input_embeddings().weight.data *= 1e-6
    path = tmp_path / "new" / "facts.json"
    save_facts(path, models, rates=[0.5, 0.25])
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as an editor of Windows does
    assert load_facts(path, models, "rates", lambda facts: facts["rates"]) == [0.5, 0.25]
    for name in models:
        others = models | {name: LLAMA}
        check_refused(f"rates, got .*another {name}", load_facts, path, others, "rates", dict)
    for text in (b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"target": 1}', b"[" * 99999, b"{}"):
        path.write_bytes(text)
        said = "it has no 'target'$" if text == b"{}" else ".*"
        check_refused(f"expected good facts, got .*facts.json': {said}", load_facts, path, models,
                      "good facts", dict)


@pytest.mark.parametrize("bias, dtype", [(False, torch.float32), (True, torch.bfloat16)])
def test_a_head_for_few_tokens_has_their_rows_in_their_order(bias, dtype):
    head = torch.nn.Linear(6, 9, bias).to(dtype)
    few, vocab, x = head_for(head, torch.tensor([7, 0, 3])), [7, 0, 3], torch.randn(4, 6).to(dtype)
    assert few.weight.dtype == dtype and few.weight.shape == (3, 6)
    torch.testing.assert_close(few(x), head(x)[:, vocab])
    assert score_with(LLAMA, few)(x).dtype == torch.float32
    assert not any(p.requires_grad for p in few.parameters()) and head.weight.requires_grad


def test_the_parts_of_the_real_model_can_be_loaded(monkeypatch):
    """They are loaded by a model with the widths of SmolLM2-135M, which passes here for it."""
    monkeypatch.setattr(torch.nn.functional, "cosine_similarity", lambda *_: torch.tensor(1.0))
    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=8,
                         num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30)
    with torch.device("meta"):  # random numbers would take seconds
        model = LlamaForCausalLM(config).eval()
    for x in [*model.to_empty(device="cpu").parameters(), *model.buffers()]:
        x.data.fill_(0.02)
    folder = ROOT / "models/smollm2"
    loaded = [medusa.load_heads(folder / f"{x}.safetensors", x, model) for x in medusa.KINDS]
    loaded += [eagle.load_draft(folder / "eagle.safetensors", model)]
    assert all(len(part.vocab) == 8192 for part in loaded)
    for name in "bita", "pass":
        assert bita.load_tuning(str(folder / f"{name}.safetensors"), model).masks.shape[1] == 576
