"""Files of trained parts: what is kept, whose they are, and an LM head of fewer rows."""
import json

import pytest
import torch
from safetensors import safe_open

from common import InputError
from families import tiny
from helpers import ROOT
from training import parts
from training.parts import (belongs, draft_for, fill, head_for, load_facts, load_part, logits_of,
                          save_facts, save_part, some_embeddings)

LLAMA = tiny("llama")


def part() -> dict[str, torch.nn.Parameter]:
    return {"w": torch.nn.Parameter(torch.tensor([[0.5, -2.0], [3.0, 0.25]])),
            "b": torch.nn.Parameter(torch.tensor([1.0, 0.0]))}


def test_what_is_saved_is_loaded(tmp_path):
    """Floating-point numbers in bfloat16, others as they are, and any header; in a new folder."""
    path = tmp_path / "new" / "part.safetensors"
    tokens = torch.tensor([0, 65535], dtype=torch.uint16)
    save_part(path, "a thing", LLAMA, part() | {"tokens": tokens}, size=3, accept=[[0.1, 0.2]])
    header, tensors = load_part(path, "a thing", LLAMA)
    assert header == {"size": 3, "accept": [[0.1, 0.2]]}
    assert tensors.keys() == {"w", "b", "tokens"}
    assert torch.equal(tensors["tokens"], tokens) and tensors["tokens"].dtype == torch.uint16
    assert tensors["w"].dtype == torch.bfloat16
    own = {name: torch.nn.Parameter(torch.zeros_like(p)) for name, p in part().items()}
    fill(own, {name: tensors[name] for name in own}, path)
    assert all(torch.equal(own[name], p) for name, p in part().items())
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["part"])["kind"] == "a thing"


@pytest.mark.parametrize("tensors, said", [
    ({"w": torch.zeros(2, 2)}, r"tensors .*'b': \(2,\).* with"),
    ({"w": torch.zeros(2, 2), "b": torch.zeros(3)}, r"tensors .*'b': \(2,\).* with"),
    ({"w": torch.zeros(2, 2), "b": torch.zeros(2), "c": torch.zeros(1)}, "tensors"),
    ({"w": torch.zeros(2, 2), "b": torch.tensor([1.0, torch.nan])}, "finite numbers"),
    ({"w": torch.zeros(2, 2), "b": torch.tensor([1.0, torch.inf])}, "finite numbers"),
    ({"w": torch.zeros(2, 2), "b": torch.ones(2, dtype=torch.int8)}, "floating.* b of torch.int8")])
def test_other_tensors_are_refused_and_nothing_is_set(tensors, said):
    own = part()
    with pytest.raises(InputError, match=f"expected {said}"):
        fill(own, tensors, "file")
    assert all(torch.equal(own[name], p) for name, p in part().items())


def test_tensors_of_eight_bits_are_taken():
    own = part()
    fill(own, {"w": torch.ones(2, 2), "b": torch.ones(2).to(torch.float8_e4m3fn)}, "file")
    assert torch.equal(own["b"], torch.ones(2))


def test_a_part_belongs_to_its_model_in_any_type_and_to_no_other(tmp_path):
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
    path = tmp_path / "part"
    save_part(path, "a thing", LLAMA, part())
    with pytest.raises(InputError, match="a file of a thing for this model, got .* another's"):
        load_part(path, "a thing", tiny("llama", seed=1))


def test_what_is_no_part_is_refused_in_one_line(tmp_path):
    path = tmp_path / "part"
    save_part(path, "a thing", LLAMA, part())
    with pytest.raises(InputError, match="expected a file of another, got .*, one of a thing"):
        load_part(path, "another", LLAMA)
    whole = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1"
    for i, bad in enumerate((b"", b"x" * 100, whole[:50], whole[:-9], pointer)):
        (tmp_path / str(i)).write_bytes(bad)
    for other, said in (*((str(i), "") for i in range(4)), ("4", "is a pointer of git-lfs"),
                        ("", "is a folder, not a file"), ("none", "No such file"),
                        (ROOT / "models/draft/model.safetensors", "released, name the folder")):
        with pytest.raises(InputError, match=f"expected a file of a thing, got .*{said}") as error:
            load_part(tmp_path / other, "a thing", LLAMA)
        assert "\n" not in str(error.value)


def test_measured_facts_are_kept_with_the_models_they_are_of(tmp_path):
    """Also where embeddings are so small that four decimals would be all zeros."""
    models = {"target": tiny("llama", seed=3), "draft": tiny("llama", seed=4)}
    models["target"].get_input_embeddings().weight.data *= 1e-6
    path = tmp_path / "new" / "facts.json"
    save_facts(path, models, rates=[0.5, 0.25])
    path.write_text(path.read_text(), encoding="utf-8-sig")  # as an editor of Windows does
    assert load_facts(path, models, "rates", lambda facts: facts["rates"]) == [0.5, 0.25]
    for name in models:
        others = models | {name: LLAMA}
        with pytest.raises(InputError, match=f"expected rates, got .*another {name}.s"):
            load_facts(path, others, "rates", lambda facts: facts["rates"])


@pytest.mark.parametrize("wrong", [KeyError("x"), TypeError("x"), ValueError("x"),
                                   AttributeError("x"), IndexError("x"), ZeroDivisionError("x")])
def test_facts_that_cannot_be_used_are_refused_in_one_line(tmp_path, wrong):
    path = tmp_path / "facts.json"
    save_facts(path, {"model": LLAMA})

    def parse(facts):
        raise wrong
    with pytest.raises(InputError, match="expected good facts, got '.*facts.json': .*x"):
        load_facts(path, {"model": LLAMA}, "good facts", parse)
    for text in (b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"model": [[1, 2]]}', b"[" * 99999):
        path.write_bytes(text)
        with pytest.raises(InputError, match="expected good facts, got") as error:
            load_facts(path, {"model": LLAMA}, "good facts", lambda facts: facts)
        assert "\n" not in str(error.value)
    path.write_text("{}")
    with pytest.raises(InputError, match="it has no 'model'$"):
        load_facts(path, {"model": LLAMA}, "good facts", lambda facts: facts)


@pytest.mark.parametrize("name", ["blocks", "hybrid", "sequoia", "smollm2/blocks",
                                  "smollm2/hybrid"])
def test_the_committed_facts_have_whole_fingerprints(name):
    facts = json.loads((ROOT / f"models/{name}.json").read_text())
    fingerprints = [facts[x] for x in ("model", "target", "draft") if x in facts]
    assert fingerprints and all(torch.tensor(x).shape == (16, 16) for x in fingerprints)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_for_few_tokens_has_their_rows_in_their_order(bias, dtype):
    head = torch.nn.Linear(6, 9, bias).to(dtype)
    few, vocab, x = head_for(head, torch.tensor([7, 0, 3])), [7, 0, 3], torch.randn(4, 6).to(dtype)
    assert few.weight.dtype == dtype and few.weight.shape == (3, 6)
    torch.testing.assert_close(few(x), head(x)[:, vocab])
    assert not any(p.requires_grad for p in few.parameters()) and head.weight.requires_grad


def test_logits_that_are_neither_scaled_nor_capped_are_refused():
    model = tiny("llama")

    def shifted(module, given, output):
        output.logits = output.logits + torch.arange(61)
        return output
    with model.register_forward_hook(shifted):
        with pytest.raises(InputError, match="logits that are scaled or capped, got Llama"):
            logits_of(model)


class Vocabulary:
    """A tokenizer of these words."""

    def __init__(self, *words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


def test_a_draft_has_the_tokenizer_of_its_target(monkeypatch):
    monkeypatch.setattr(parts, "load", lambda *given: (given, Vocabulary("a", "b")))
    assert draft_for(LLAMA, Vocabulary("a", "b"), "path") == ("path", "cpu", torch.float32)
    for other in Vocabulary("b", "a"), Vocabulary("a", "c"), Vocabulary("a"):
        with pytest.raises(InputError, match="the target's tokenizer, got another vocabulary"):
            draft_for(LLAMA, other, "path")
