"""MTP: the block of a checkpoint makes the guesses of its equations, which are written out here
except for its layer, and what does not fit is refused. Its loss is in test_eagle3.py."""
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from families import tiny
from helpers import CLOSE, check_refused
from support import released
from support.engine import EngineLM, list_layers
from support.loading import check
from survey.mtp import MTPBlock, load_draft

TEXT = [31, 4, 15, 26, 53, 8, 9, 7, 3]
FORMS = {  # family: what names begin with, names of four tensors, of the layer, the 1 of 1 + w
    "qwen3.5": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
                "layers.0.", 1.0),
    "deepseek-v3": ("model.layers.2.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "", 0.0)}
TABLE, HEAD, FC = (f"model.layers.2.{x}.weight"
                   for x in ("embed_tokens", "shared_head.head", "eh_proj"))
GATE = "model.layers.2.mlp.gate.e_score_correction_bias"


def write(folder, family: str, changes: dict | None = {}):
    """Write a checkpoint with a block, which has the layer of the target's first layer. Return the
    target, as it is loaded, and the block. If `changes` is None, there is no block."""
    folder.mkdir(exist_ok=True)
    begin, names, layer, _ = FORMS[family]
    kinds = dict(layer_types=["full_attention", "linear_attention"]) if layer else {}
    model, file = tiny(family, first_k_dense_replace=0, **kinds), folder / "model.safetensors"
    model.get_decoder().norm.weight.data.normal_()
    model.save_pretrained(folder)
    own = load_file(file)
    block = {f"{begin}{name}.weight": torch.randn(shape) / 2
             for name, shape in zip(names, [(32,), (32,), (32, 64), (32,)])}
    block |= {name.replace("model.layers.0.", begin + layer): x.clone() for name, x in own.items()
              if ".layers.0." in name}
    if family == "qwen3.5":  # in two files, with a list of them
        file.rename(folder / "a.safetensors")
        save_file(block, folder / "b.safetensors")
        file_of = dict.fromkeys(own, "a.safetensors") | dict.fromkeys(block, "b.safetensors")
        listed = json.dumps({"metadata": {}, "weight_map": file_of})
        (folder / "model.safetensors.index.json").write_text(listed)
    elif changes is not None:  # with embeddings and an LM head that are not the target's
        block[TABLE] = own["model.embed_tokens.weight"] + 0.1 * torch.randn(61, 32)
        block[HEAD] = torch.randn(61, 32)
        save_file(own | block | changes, file, {"format": "pt"})
    return check(AutoModelForCausalLM.from_pretrained(folder)), block


@pytest.mark.parametrize("family", FORMS)
@torch.inference_mode()
def test_a_block_computes_the_equations(tmp_path, family):
    """Rows of a chain are compared, which read any features. That decoding gives it the target's
    features and its own, and grows trees of its guesses, is EAGLE's (test_eagle.py)."""
    model, w = write(tmp_path, family)
    begin, names, _, one = FORMS[family]
    f, table = torch.randn(8, 32), w.get(TABLE, model.get_input_embeddings().weight)

    def norm(x: torch.Tensor, i: int) -> torch.Tensor:
        return F.rms_norm(x, (32,), one + w[f"{begin}{names[i]}.weight"], 1e-6)
    x = torch.cat([norm(table[TEXT[1:]], 0), norm(f, 1)], -1) @ w[f"{begin}{names[2]}.weight"].T
    x = list_layers(model)[0](
        x[None], attention_mask=torch.full((1, 1, 8, 8), -torch.inf).triu(1),
        position_embeddings=model.get_decoder().rotary_emb(x[None], torch.arange(8)[None]))
    x = norm(x[0], 3)
    draft = load_draft("", model)
    lm = EngineLM(draft.lm)
    lm.start([])
    logits = lm.forward(draft.join(f, TEXT[1:]))
    torch.testing.assert_close(lm.features, x, **CLOSE)
    torch.testing.assert_close(logits, x @ w.get(HEAD, model.lm_head.weight).T, **CLOSE)
    assert draft.taps is None  # it reads what the LM head reads


def test_training_begins_with_the_last_layer_of_full_attention():
    model = tiny("qwen3.5", num_hidden_layers=4,
                 layer_types=["full_attention", "linear_attention"] * 2)
    own, last = (x.parameters() for x in (*list_layers(MTPBlock(model).lm), list_layers(model)[2]))
    assert all(torch.equal(*both) for both in zip(own, last, strict=True))


REFUSED = {  # what is refused: tensors that differ. None: there is no block
    "with an MTP block .*survey.mtp train": None,
    "one MTP block, got several": {"model.layers.3.eh_proj.weight": torch.eye(32)},
    "not quantised, got .*mtp.fc": {FC: torch.ones(32, 64, dtype=torch.int8)},
    "not quantised, got .*_scale": {f"{FC}_scale": torch.eye(32)},
    "expected tensors .*fc.weight': .32, 64": {FC: torch.eye(32)}}


@pytest.mark.parametrize("said", REFUSED)
def test_what_does_not_fit_is_refused(tmp_path, said):
    model, _ = write(tmp_path, "deepseek-v3", REFUSED[said])
    check_refused(said, load_draft, "", model)


@pytest.mark.parametrize("change", [{"model_type": "exaone_moe"},
                                    {"mtp_layer_types": ["sliding_attention"]}])
def test_a_block_of_another_attention_is_refused(tmp_path, change):
    model, _ = write(tmp_path, "qwen3.5")
    vars(model.config).update(change)
    check_refused("known to have full attention, got .* of the family", load_draft, "", model)
    vars(model.config)["mtp_layer_types"] = ["full_attention"]
    load_draft("", model)


def test_another_checkpoint_s_block_is_read_in_its_own_type(tmp_path, monkeypatch):
    """Its weights are never in float32, except for what chooses experts."""
    model, w = write(tmp_path / "has", "deepseek-v3", {GATE: torch.arange(1.0, 5) / 3})
    other, types, fill = write(tmp_path / "lacks", "deepseek-v3", None)[0], set(), released.fill

    def note_types(parameters: dict, *given) -> None:
        types.update(x.dtype for name, x in parameters.items() if "bias" not in name)
        fill(parameters, *given)
    monkeypatch.setattr(released, "fill", note_types)
    draft = load_draft(str(tmp_path / "has"), other.bfloat16())
    assert types == {torch.bfloat16} and torch.equal(draft.fc.weight, w[FC].bfloat16())
    assert torch.equal(draft.parts()["mtp.layers.0.mlp.gate.e_score_correction_bias"],
                       torch.arange(1.0, 5) / 3)
    check_refused("--adapter must be a checkpoint with an MTP block", load_draft,
                  tmp_path / "lacks", model)
