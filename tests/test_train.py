"""What models/train.py makes for any target: a draft of some of its layers, prompts of its own."""
import copy
import sys

import pytest
import torch

from conftest import ROOT, interrupting, tiny

sys.path.append(str(ROOT / "models"))
import train as recipe  # noqa: E402  (the path is set above)
from common import InputError, load  # noqa: E402
from tasks import read_prompts  # noqa: E402

PROMPTS = ["Tom has 3 apples.", "Ann has 4 cakes.", "He buys 7 pens.", "SELECT name"]


@pytest.mark.parametrize("family", ["llama", "qwen2-window", "gemma3"])
def test_some_layers_are_the_targets(family):
    """All layers are the target itself; of a few each is the one that was asked for."""
    model, ids = tiny(family, num_hidden_layers=2), torch.tensor([[5, 9, 30, 2]])
    whole = recipe.some_layers(model, [0, 1]).eval()
    torch.testing.assert_close(whole(ids).logits, model(ids).logits)
    last, state = recipe.some_layers(model, [1]).state_dict(), model.state_dict()
    for name, x in last.items():
        assert torch.equal(x, state[name.replace(".layers.0.", ".layers.1.")])


def test_logits_are_those_before_tokens_that_have_a_weight():
    model, ids = tiny("llama"), torch.tensor([[5, 9, 30, 2], [8, 7, 1, 1]])
    weights = torch.tensor([[0.0, 0, 1, 1], [1, 1, 0, 0]])
    expected = model(ids).logits[[0, 0, 1], [1, 2, 0]]
    torch.testing.assert_close(recipe.logits_before(model, ids, weights).float(), expected,
                               atol=0.2, rtol=0.1)  # bfloat16


def test_distil_makes_a_draft_that_guesses_better_than_the_bare_layers(tmp_path, embedded, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    argv = ["--target", str(ROOT / "models/target"), "--layers", "0", "11", "--prompts", str(file),
            "--max-new-tokens", "12", "--work", str(tmp_path / "work"), "--device", "cpu"]
    shares = []
    for tokens in "1", "2000":
        recipe.distil_layers([*argv, "--tokens", tokens, "--out", str(tmp_path / tokens)])
        shares.append(float(capsys.readouterr().out.split("1 - TVD ")[1]))
    assert shares[1] > shares[0] + 0.1
    draft, _ = load(str(tmp_path / "2000"), "cpu", "float32")
    assert draft.config.num_hidden_layers == 2
    assert torch.equal(draft.get_input_embeddings().weight,
                       embedded[0].get_input_embeddings().weight)
    with pytest.raises(InputError, match="expected 2 prompts or more of at most 2 tokens, got 0"):
        recipe.distil_layers([*argv, "--max-new-tokens", "2046", "--out", str(tmp_path / "none")])
    with pytest.raises(InputError, match="expected layers below 12, got "):
        recipe.distil_layers([*argv, "--layers", "12", "--out", str(tmp_path / "none")])


@pytest.mark.parametrize("place", ["loss", "step"])
def test_a_stopped_training_goes_on_and_no_update_is_half_made(place, tmp_path, monkeypatch):
    data = [(torch.tensor([[n, 9, 30, 2]]), torch.tensor([[0.0, 1, 1, 1]])) for n in range(1, 7)]

    def fitted(folder):
        folder.mkdir(exist_ok=True)
        model = tiny("llama")
        recipe.fit("x", model, lambda *batch: recipe.next_token_loss(model, *batch),
                   lambda step: data[step:], 1e-2, 24, folder)
        return model.state_dict()
    whole = fitted(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        owner, name = ((recipe, "next_token_loss") if place == "loss" else
                       (torch.optim.AdamW, "step"))
        patch.setattr(owner, name, interrupting(getattr(owner, name), 3, after=place == "step"))
        fitted(tmp_path / "cut")
    if place == "loss":
        assert torch.load(tmp_path / "cut/x.pt")["step"] == 2
    else:
        assert not (tmp_path / "cut/x.pt").exists()
    again = fitted(tmp_path / "cut")
    assert all(torch.equal(x, again[name]) for name, x in whole.items())


def test_a_model_writes_prompts_in_the_users_place(tmp_path, embedded, monkeypatch):
    """It goes on from where the template has the user speak, here the text's beginning."""
    target, _, tokenizer = embedded
    asked, seen = ["--target", str(tmp_path / "chat"), "--device", "cpu"], []
    with pytest.raises(InputError, match="expected a model with a chat template"):
        recipe.own_prompts(["--target", str(ROOT / "models/target"), "--out", str(tmp_path / "x")])
    target.save_pretrained(tmp_path / "chat")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "<s>def {% for m in messages %}{{ m.content }}</s>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    generate = type(target).generate

    def spy(model, ids, **options):
        seen.append((ids, generate(model, ids, **options)))
        return seen[-1][1]
    monkeypatch.setattr(type(target), "generate", spy)
    for name, count, seed in (("one", 5, 0), ("again", 2, 0), ("other", 2, 1)):
        recipe.own_prompts([*asked, "--out", str(tmp_path / name), "--max-new-tokens", "64",
                            "--batch", "4", "--count", str(count), "--seed", str(seed)])
    one, again, other = (read_prompts(tmp_path / name) for name in ("one", "again", "other"))
    assert one[:2] == again != other and len(other) == 2 and len(set(one)) == len(one) == 5
    before, eos = tokenizer.encode("def "), tokenizer.eos_token_id
    assert all(row == before for ids, _ in seen for row in ids.tolist())
    written = [tokenizer.decode(row[len(before):], skip_special_tokens=True).strip()
               for _, rows in seen for row in rows.tolist() if eos in row]
    assert {*one, *other} <= {*written} and not any("</s>" in text for text in one)
