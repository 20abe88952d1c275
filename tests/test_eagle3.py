"""EAGLE-3's layer computes the released formula, trains on what decoding gives it, and reads what
enters three layers of the target."""
import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from common import InputError, autoregressive
from families import tiny
from helpers import tokens_of
from survey.eagle import Pairs
from survey.eagle3 import (Eagle3Layer, Form, choose_lessons, eagle3, export, load_draft,
                           make_config, measure, read_target, save_draft, unroll_loss)
from training.layers import (FeatureLM, choose_taps, depth_of, read_taps, tap_layers, tap_target,
                             tap_widths)
from training.loop import pad_pairs
from training.parts import head_for
from training.released import load_accept, read_released

MODEL = tiny("llama", num_hidden_layers=7)
WORDLESS = SimpleNamespace(eos_token_id=None)  # a tokenizer, as far as needed
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def make_draft(taps=(2, 3, 4), vocab=range(61), form=Form(), mlp=0, own_head=True) -> Eagle3Layer:
    """Make a draft whose every trained weight is random."""
    draft = Eagle3Layer(MODEL, make_config(MODEL, mlp), [*taps], vocab, form, own_head=own_head)
    rng = torch.Generator().manual_seed(1)
    for p in draft.trainable().values():
        p.data = 1 + 0.3 * torch.randn(p.shape, generator=rng) if p.ndim == 1 else \
            0.2 * torch.randn(p.shape, generator=rng)
    draft.accept = [[0.5, 0.3, 0.1]] * 4
    return draft.requires_grad_(False)


def tapped(draft: Eagle3Layer, text: list[int]) -> torch.Tensor:
    """Return what the draft reads of a text [T, taps * h]."""
    lm = FeatureLM(MODEL)
    with tap_target(lm, draft.taps):
        lm.start(text)
    return lm.features.clone()  # which autograd takes


# ----------------------------------------------------------------------------------------- taps

def test_taps_are_what_enters_the_layers():
    """As transformers' own `output_hidden_states` has it, whose number i enters layer i."""
    ids = torch.tensor([TEXT])
    hidden = MODEL(ids, output_hidden_states=True, use_cache=False).hidden_states
    for taps in ([2, 3, 4], [0, 6], [7]):  # 7, all layers: what the LM head reads
        found = tapped(make_draft(taps=taps), TEXT)
        assert torch.allclose(found, torch.cat([hidden[i] for i in taps], -1)[0], atol=1e-5)


def test_widths_of_taps_are_those_of_what_is_tapped():
    """In OPT-350m, for one, layers are wider than what the LM head reads."""
    model = tiny("opt", word_embed_proj_dim=16)
    taps, seen = [0, depth_of(model)], []
    with tap_layers(model, taps, seen):
        model(torch.tensor([TEXT]))
    assert tap_widths(model, taps) == [x.shape[-1] for x in seen] == [32, 16]


def test_a_text_in_parts_has_the_taps_of_the_whole_text():
    long = [i * i % 61 for i in range(140)]
    whole = MODEL(torch.tensor([long]), output_hidden_states=True, use_cache=False).hidden_states
    assert torch.allclose(tapped(make_draft(taps=[3]), long), whole[3][0], atol=1e-4)


def test_no_hook_is_left_behind():
    chunks = eagle3(FeatureLM(MODEL), TEXT, nodes=4, trained=make_draft())
    next(chunks)
    chunks.close()
    assert not any(layer._forward_pre_hooks for layer in MODEL.model.layers)


def test_which_layers_are_tapped():
    assert choose_taps(MODEL) == [2, 3, 4]
    assert read_taps("0, 5,7", MODEL) == [0, 5, 7]
    for text in ("3,2", "2,2", "1,8", "x", "-1", "\u00b2", ","):
        with pytest.raises(InputError, match="--taps must be numbers from 0 to 7"):
            read_taps(text, MODEL)
    for layers in (2, 3, 6):
        with pytest.raises(InputError, match=f"7 layers or more, .* got {layers} layers"):
            choose_taps(tiny("llama", num_hidden_layers=layers))


# ------------------------------------------------------------------------------ what it is fed

@pytest.mark.parametrize("nodes", [40, 0], ids=["40 nodes", "by the clock"])
def test_the_draft_reads_the_final_text(monkeypatch, nodes):
    """After some rounds its cache is that of a draft which is fed the whole text at once."""
    def choose(lm, *_):
        lm.forward([3, 4], counts=False)  # as if a call were timed
        lm.truncate(lm.length)
        return 40, [1, 19], False
    monkeypatch.setattr("survey.eagle.fastest", choose)
    draft, target, log = make_draft(), FeatureLM(MODEL), []
    draft.accept = [[0.05] * 20] * 2  # so many guesses that some are accepted
    chunks = eagle3(target, TEXT, nodes=nodes, trained=draft, log=log)
    text = TEXT + [token for _ in range(12) for token in next(chunks)]
    lm, fresh = target.once((draft, "cached"), None), FeatureLM(draft.lm)
    fresh.start([])
    fresh.forward(draft.join(*Pairs(tapped(draft, text)[:-1], text[1:])))
    assert len(TEXT) <= lm.length <= len(text) and sum(x["accepted"] for x in log) > 0
    for mine, theirs in zip(lm.cache.layers[0], fresh.cache.layers[0]):
        assert torch.allclose(mine[:, :, :lm.length], theirs[:, :, :lm.length], atol=1e-3)


# ----------------------------------------------------------------------------------- the formula

def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Turn [n, heads, d] by rotary positions 0, 1, …, base 10,000."""
    n, _, d = x.shape
    angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1) * sin


def fuse(w: dict, features: torch.Tensor, form: Form) -> torch.Tensor:
    """Compute g of tapped features."""
    if form.fc_norm:
        each = features.chunk(3, -1)
        features = torch.cat([rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(each)], -1)
    return features @ w["fc.weight"].T


def written_out(w: dict, e: torch.Tensor, g: torch.Tensor, form: Form) -> tuple:
    """Compute what a chain of rows gives the next level, and logits, as the released code does.

    e, g   [n, h]
    """
    normed = rms(g, w["midlayer.hidden_norm.weight"])
    x = torch.cat([rms(e, w["midlayer.input_layernorm.weight"]), normed], -1)
    q, k, v = ((x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(e), -1, 8)
               for name in "qkv")
    k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (rotate(k), v))
    scores = torch.einsum("ihd,jhd->hij", rotate(q), k) / 8 ** 0.5
    scores = scores.masked_fill(~torch.ones(len(e), len(e)).tril().bool(), -torch.inf)
    attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(e), -1)
    residual = normed if form.norm_before_residual else g
    x = residual + attended @ w["midlayer.self_attn.o_proj.weight"].T
    y = rms(x, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    y = rms(x, w["norm.weight"])
    return y if form.norm_output else x, y @ w["lm_head.weight"].T


FORMS = {"released": Form(), "norm_before_residual": Form(norm_before_residual=True),
         "3.1": Form(fc_norm=True, norm_output=True)}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_layer_computes_the_released_formula(form):
    """On a chain, and on drafted rows that read what the chain gave."""
    draft = make_draft(vocab=range(0, 61, 3), form=form)
    w, features, n = draft.parts(), tapped(draft, TEXT), len(TEXT) - 1
    table = MODEL.get_input_embeddings().weight
    e, g = table[TEXT[1:]], fuse(w, features[:n], form)
    a, logits = written_out(w, e, g, form)
    lm = FeatureLM(draft.lm)
    lm.start([])
    found = lm.forward(draft.join(*Pairs(features[:n], TEXT[1:])))
    assert torch.allclose(found, logits, atol=1e-4) and found.shape == (n, 21)
    assert torch.allclose(lm.features, a, atol=1e-4)
    drafted = lm.forward(draft.join(*Pairs(lm.features[-1:], [7])))
    _, expected = written_out(w, torch.cat([e, table[[7]]]), torch.cat([g, a[-1:]]), form)
    assert torch.allclose(drafted, expected[-1:], atol=1e-4)


def test_a_tree_of_guesses_equals_its_paths():
    draft = make_draft()
    features, lm = tapped(draft, TEXT), FeatureLM(draft.lm)

    def guess(pairs: list, parents: list) -> torch.Tensor:
        lm.start([])
        lm.forward(draft.join(*Pairs(features[:4], TEXT[1:5])))
        lm.commit(range(4))
        ids, rows = zip(*pairs)
        return lm.forward(draft.join(*Pairs(features[list(rows), :32], [*ids])), parents)
    tree = guess([(7, 5), (8, 6), (9, 7), (2, 8)], [-1, 0, 0, 2])
    assert torch.allclose(tree[1], guess([(7, 5), (8, 6)], [-1, 0])[-1], atol=1e-4)
    assert torch.allclose(tree[3], guess([(7, 5), (9, 7), (2, 8)], [-1, 0, 1])[-1], atol=1e-4)


@pytest.mark.parametrize("mtp, taps, decay", [(False, (2, 3, 4), 0.8), (True, (7,), 0.6)],
                         ids=["EAGLE-3", "MTP"])
def test_training_gives_the_layer_what_decoding_gives_it(mtp, taps, decay):
    """The loss of three passes is that of guesses made one after the other, as decoding makes
    them: after row j, with the text's tokens and the layer's own features."""
    draft = make_draft(taps, form=Form(mtp=mtp))
    ids, answers = pad_pairs([(TEXT[:4], TEXT[4:])])
    features, hidden = read_target(MODEL, draft.taps, ids)
    learns, probs = choose_lessons(draft, ids, answers, hidden, MODEL.lm_head)
    assert learns[0].tolist() == [False] * 4 + [True] * 8 and probs.shape == (8, 61)
    losses = {0: [], 1: [], 2: []}
    lm = FeatureLM(draft.lm)
    for j in range(len(TEXT) - 2):
        lm.start([])
        logits = lm.forward(draft.join(*Pairs(features[0, :j + 1], TEXT[1:j + 2])))
        for n in range(3):
            if 4 <= j + 2 + n < len(TEXT):
                target = MODEL(ids[:, :j + 2 + n]).logits[0, -1].softmax(-1)
                losses[n].append(-(target * logits[-1].log_softmax(-1)).sum())
            if n < 2 and j + 2 + n < len(TEXT):
                step = Pairs(lm.features[-1:], [TEXT[j + 2 + n]])
                logits = lm.forward(draft.join(*step))
    expected = sum(decay ** n * torch.stack(some).mean() for n, some in losses.items())
    found = unroll_loss(draft, ids, features, learns, probs, 3)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_pass_that_learns_nothing_adds_nothing():
    """With a small vocabulary all tokens that a pass would learn may be missing."""
    draft = make_draft()
    ids, _ = pad_pairs([(TEXT[:4], TEXT[4:])])
    features, _ = read_target(MODEL, draft.taps, ids)
    learns = torch.zeros_like(ids, dtype=torch.bool)
    assert unroll_loss(draft, ids, features, learns, torch.zeros(0, 61), 3).item() == 0.0
    learns[0, 2], probs = True, torch.full((1, 61), 1 / 61)  # of pass 0 alone
    one, three = (unroll_loss(draft, ids, features, learns, probs, n) for n in (1, 3))
    assert one.item() == three.item() > 0.0


def test_tokens_that_the_draft_cannot_guess_are_not_learned():
    draft = make_draft(vocab=range(0, 61, 2))
    ids, answers = pad_pairs([(TEXT[:4], TEXT[4:]), (TEXT[:7], TEXT[7:9])])
    _, hidden = read_target(MODEL, draft.taps, ids)
    head = head_for(MODEL.lm_head, draft.vocab)
    learns, probs = choose_lessons(draft, ids, answers, hidden, head)
    assert learns.tolist() == [[i > 3 and t % 2 == 0 for i, t in enumerate(TEXT)],
                               [i in (7, 8) and t % 2 == 0 for i, t in enumerate(TEXT)]]
    logits = MODEL(ids).logits[:, :-1][learns[:, 1:]]
    assert torch.allclose(probs, logits[:, ::2].softmax(-1), atol=1e-5)


@pytest.mark.parametrize("form", [Form(), Form(norm_output=True), Form(mtp=True)])
def test_one_tapped_layer_is_read_as_it_is(form):
    draft = make_draft([7], form=form)
    features = tapped(draft, TEXT)
    assert torch.equal(draft.join(*Pairs(features, TEXT))[:, 32:], features)
    assert "fc.weight" not in draft.parts()


def test_the_layer_of_mtp_is_a_plain_one_over_a_projection():
    """DeepSeek-V3, Eq. 21: M [norm(h); norm(e)], then a block as the target's own."""
    draft = make_draft([7], form=Form(mtp=True))
    w, h, e = draft.parts(), torch.randn(1, 9, 32), torch.randn(1, 9, 32)
    x = torch.cat([rms(h, w["midlayer.hnorm.weight"]), rms(e, w["midlayer.enorm.weight"])], -1)
    block = LlamaDecoderLayer(draft.lm.config, 0)
    block.load_state_dict({name: p for name, p in draft.lm.model.layers[0].state_dict().items()
                           if "proj" in name.replace("eh_proj", "") or "layernorm" in name})
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    how = dict(attention_mask=mask,
               position_embeddings=draft.lm.model.rotary_emb(x, torch.arange(9)[None]))
    expected = block(x @ w["midlayer.eh_proj.weight"].T, **how)
    found = draft.lm.model.layers[0](torch.cat([e, h], -1), **how)
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_head_of_the_target_is_neither_trained_nor_kept(tmp_path):
    draft = make_draft(vocab=range(0, 61, 2), own_head=False)
    assert torch.equal(draft.parts()["lm_head.weight"], MODEL.lm_head.weight[::2])
    assert "lm_head.weight" not in draft.trainable()
    fresh = Eagle3Layer(MODEL, make_config(MODEL), [2, 3, 4], range(61), own_head=False)
    assert {x for x in fresh.parts() if not fresh.parts()[x].requires_grad} == {"lm_head.weight"}
    save_draft(tmp_path / "x", draft, MODEL)
    assert "lm_head.weight" not in load_file(tmp_path / "x")
    again = load_draft(tmp_path / "x", MODEL)
    assert torch.equal(again.parts()["lm_head.weight"], MODEL.lm_head.weight[::2])
    export(MODEL, None, adapter=tmp_path / "x", out=tmp_path / "head")
    head = load_file(tmp_path / "head/model.safetensors")["lm_head.weight"]
    assert torch.equal(head, MODEL.lm_head.weight[::2])


def test_a_file_gives_the_same_draft(tmp_path):
    draft = make_draft(vocab=range(0, 61, 2), mlp=24)
    for p in draft.parts().values():
        p.data = p.bfloat16().float()
    save_draft(tmp_path / "x", draft, MODEL)
    again = load_draft(tmp_path / "x", MODEL)
    for name, p in draft.parts().items():
        assert torch.equal(p, again.parts()[name]), name
    assert again.vocab.tolist() == draft.vocab.tolist() and again.accept == draft.accept
    half = load_draft(tmp_path / "x", copy.deepcopy(MODEL).bfloat16())
    assert {p.dtype for p in half.parts().values()} == {torch.bfloat16}
    same = [x.lm.model.rotary_emb.inv_freq for x in (half, draft)]
    assert torch.equal(*same)  # bfloat16 has too few digits for positions
    with pytest.raises(InputError, match="another's"):
        load_draft(tmp_path / "x", tiny("llama", seed=5))


# ------------------------------------------------------------------------------- released heads

def write_head(folder, draft: Eagle3Layer, changes: dict = {}, drop: tuple = (), **config) -> str:
    """Export a draft, then change its tensors and its configuration."""
    save_draft(folder / "part", draft, MODEL)
    export(MODEL, None, adapter=folder / "part", out=folder / "head")
    tensors = load_file(folder / "head/model.safetensors") | changes
    save_file({name: x for name, x in tensors.items() if name not in drop},
              folder / "head/model.safetensors")
    told = json.loads((folder / "head/config.json").read_text()) | config
    (folder / "head/config.json").write_text(json.dumps(told))
    return str(folder / "head")


SOME = range(1, 61, 2)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("vocab, how", [
    (range(61), {}), (SOME, {}), (SOME, {"drop": ("d2t",)}), (SOME, {"drop": ("t2d",)}),
    (SOME, {"changes": {"d2t": torch.zeros(30, dtype=torch.int64)}}),
    (SOME, {"changes": {"t2d": torch.zeros(61, dtype=torch.bool)}}),
    (range(61), {"changes": {"d2t": torch.zeros(61, dtype=torch.int64), "t2d": torch.zeros(61)}})])
def test_an_exported_head_is_loaded_bit_for_bit(tmp_path, form, vocab, how):
    """Also if only one of d2t and t2d says which tokens it guesses. Zeros say nothing."""
    draft = make_draft(vocab=vocab, form=form, mlp=24)
    for p in draft.parts().values():
        p.data = p.bfloat16().float()
    again = load_draft(write_head(tmp_path, draft, **how), MODEL)
    pairs = Pairs(tapped(draft, TEXT)[:-1], TEXT[1:])
    guesses = []
    for one in (draft, again):
        lm = FeatureLM(one.lm)
        lm.start([])
        guesses.append(one.vocab[lm.forward(one.join(*pairs)).topk(3).indices])
    assert torch.equal(*guesses) and again.form == form
    assert tokens_of(eagle3(FeatureLM(MODEL), TEXT, nodes=9, trained=again), 20) == \
        tokens_of(autoregressive(FeatureLM(MODEL), TEXT), 20)


def test_an_exported_directory_is_what_engines_read(tmp_path):
    """The names, shapes and types of the released files, and no numbers of layers, which engines
    count in different ways."""
    folder = write_head(tmp_path, make_draft(vocab=range(0, 61, 3)))
    shapes = {name: (*x.shape,) for name, x in load_file(f"{folder}/model.safetensors").items()}
    h, mlp = 32, MODEL.config.intermediate_size
    kv = MODEL.config.num_key_value_heads * 8
    layer = {"hidden_norm": (h,), "input_layernorm": (h,), "post_attention_layernorm": (h,),
             "self_attn.q_proj": (h, 2 * h), "self_attn.k_proj": (kv, 2 * h),
             "self_attn.v_proj": (kv, 2 * h), "self_attn.o_proj": (h, h),
             "mlp.gate_proj": (mlp, h), "mlp.up_proj": (mlp, h), "mlp.down_proj": (h, mlp)}
    assert shapes == {"fc.weight": (h, 3 * h), "norm.weight": (h,), "lm_head.weight": (21, h),
                      "d2t": (21,), "t2d": (61,),
                      **{f"midlayer.{name}.weight": shape for name, shape in layer.items()}}
    tensors = load_file(f"{folder}/model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (torch.arange(21) + tensors["d2t"]).tolist() == [*range(0, 61, 3)]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [*range(0, 61, 3)]
    config = json.loads(Path(folder, "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 21 and config["vocab_size"] == 61
    assert not any("layer_id" in name or name == "eagle_config" for name in config)


def test_a_released_head_may_be_pickled_and_have_other_names(tmp_path):
    """EAGLE's own files are pickled, and vLLM's call the layer layers.0. An editor of Windows puts
    a mark before the configuration."""
    draft = make_draft()
    folder = Path(write_head(tmp_path, draft))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    told = (folder / "config.json").read_text()
    (folder / "config.json").write_text(told, encoding="utf-8-sig")
    torch.save({name.replace("midlayer", "layers.0"): x for name, x in tensors.items()},
               folder / "pytorch_model.bin")
    for name, p in load_draft(folder, MODEL).parts().items():
        assert torch.equal(p, tensors[name].float()), name


def test_a_released_head_turns_keys_by_its_own_base(tmp_path):
    head = load_draft(write_head(tmp_path, make_draft(), rope_theta=500000.0), MODEL)
    lm = head.lm.model
    assert lm.rotary_emb.inv_freq[1].item() == pytest.approx(500000.0 ** -0.25)
    (tmp_path / "b").mkdir()
    lm = load_draft(write_head(tmp_path / "b", make_draft(), rope_theta=None), MODEL).lm.model
    assert lm.rotary_emb.inv_freq[1].item() == pytest.approx(10000.0 ** -0.25)
    assert head.config.max_position_embeddings == MODEL.config.max_position_embeddings


def test_a_head_in_parts_is_read_whole(tmp_path):
    folder = Path(write_head(tmp_path, make_draft()))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for part in {*names.values()}:
        save_file({name: x for name, x in tensors.items() if names[name] == part}, folder / part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert read_released(str(folder))[1].keys() == tensors.keys()


def test_a_pickled_head_cannot_run_code(tmp_path):
    folder = Path(write_head(tmp_path, make_draft()))
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="Weights only load failed"):
        load_draft(folder, MODEL)


def test_a_head_of_speculators_is_loaded(tmp_path):
    """Its configuration is nested, and says by silence that the residual stream is normed."""
    draft = make_draft(form=Form(norm_before_residual=True))
    folder = write_head(tmp_path, draft)
    inner = json.loads(Path(folder, "config.json").read_text())
    del inner["norm_before_residual"]
    Path(folder, "config.json").write_text(json.dumps(
        {"transformer_layer_config": inner, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]}))
    assert load_draft(folder, MODEL).form == draft.form


def test_a_measured_table_plans_the_tree(tmp_path):
    folder = write_head(tmp_path, make_draft())
    prompts = [[i, i + 1, i + 2] for i in range(3, 9)]
    measure(MODEL, WORDLESS, prompts, adapter=folder, out=tmp_path / "a.json", max_new_tokens=12)
    table = json.loads((tmp_path / "a.json").read_text())["accept"]
    assert len(table) == 8 and all(0 <= p <= 1 for ranks in table for p in ranks)
    rounded = load_draft(folder, MODEL)
    for p in rounded.parts().values():
        p.data = p.data.bfloat16()  # as on a GPU
    assert load_accept(tmp_path / "a.json", MODEL, rounded) == table


NINE = {"lm_head.weight": torch.zeros(9, 32)}
REFUSED = [
    (dict(attention_bias=True), "must be a head without attention_bias"),
    (dict(norm_before_fc=True), "must be a head without norm_before_fc"),
    (dict(hidden_act="gelu"), "must be a head without hidden_act"),
    (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "type default, linear, llama3"),
    (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}), "layer_ids"),
    (dict(changes={"lm_head.weight": torch.zeros(99, 32)}), "must be a head for 61 tokens"),
    (dict(changes={"d2t": torch.full((61,), 7)}), "must be a head for 61 tokens"),
    (dict(changes={"d2t": torch.zeros(3, dtype=torch.int64)}), r"d2t has 61 .* got .* \(3,\) of"),
    (dict(changes={"d2t": torch.zeros(61)}), "d2t has 61 whole numbers, got .*float32"),
    (dict(changes=NINE), "name the same 9 tokens, got .* with 0 and 0 tokens"),
    (dict(changes=NINE | {"t2d": torch.ones(61)}), "same 9 tokens, got .* with 61 and 61 tokens"),
    (dict(changes=NINE | {"d2t": torch.arange(9), "t2d": torch.arange(61) < 9}), "with 9 and 9 to"),
    (dict(changes=NINE | {"d2t": -torch.arange(9)}), "with 1 and 0 tokens"),
    (dict(rope_parameters={"full_attention": {"rope_theta": 5e5}}), "of type .*full_attention"),
    (dict(changes={"lm_head.weight": torch.tensor(1.0)}), "must have an LM head of its own"),
    (dict(drop=("lm_head.weight",)), "must have an LM head of its own"),
    (dict(changes={"embed_tokens.weight": torch.zeros(61, 64)}), r"61 tokens, each of 32 .*64\)"),
    (dict(changes={"embed_tokens.weight": torch.zeros(61)}), r"each of 32 numbers, .* \(61,\)"),
    (dict(eagle_config=3, eagle_aux_hidden_state_layer_ids=5), "layer_ids 5"),
    (dict(eagle_aux_hidden_state_layer_ids=["a", 1]), r"layer_ids \['a', 1\]"),
    (dict(num_attention_heads=0), "num_attention_heads must be above 0, not 0"),
    (dict(num_attention_heads=3), "whose config.json describes a layer, got .*: .* multiple"),
    (dict(rope_scaling={"type": "linear"}), "whose config.json describes a layer, .*factor"),
    (dict(changes={"midlayer.more.weight": torch.zeros(3)}), "expected tensors"),
    (dict(drop=("norm.weight",)), "expected tensors"),
    (dict(drop=("midlayer.hidden_norm.weight",)), "must be an EAGLE-3 head"),
    (dict(hidden_size=64), "each of 64 numbers, got .* with none"),
]


@pytest.mark.parametrize("changes, said", REFUSED, ids=[said for _, said in REFUSED])
def test_a_head_that_would_be_misread_is_refused(tmp_path, changes, said):
    folder = write_head(tmp_path, make_draft(), **changes)
    with pytest.raises(InputError, match=said):
        load_draft(folder, MODEL)


def test_what_is_no_head_is_refused(tmp_path):
    expected = "expected a trained file, or a directory or hub id with config.json and weights, got"
    with pytest.raises(InputError, match=f"{expected} .*: there is no config.json$"):
        load_draft(tmp_path, MODEL)
    for told, said in (("[]", "config.json does not hold a dictionary"),
                       ('{"transformer_layer_config": 3}', "unsupported operand"),
                       ("{}", "there is no model.safetensors, nor another file of weights")):
        (tmp_path / "config.json").write_text(told)
        with pytest.raises(InputError, match=f"{expected} .*: {said}"):
            load_draft(tmp_path, MODEL)
    listed = json.dumps({"weight_map": {"fc.weight": "part.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(listed)
    with pytest.raises(InputError, match=f"{expected} .*: there is no part.safetensors$"):
        load_draft(tmp_path, MODEL)
    (tmp_path / "part.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(InputError, match=f"{expected} .*: part.safetensors is a pointer of git-lf"):
        load_draft(tmp_path, MODEL)
    with pytest.raises(InputError, match="which engines assume"):
        write_head(tmp_path, make_draft(taps=(1, 3, 4)))
    with pytest.raises(InputError, match="must be trained without --mtp"):
        write_head(tmp_path, make_draft((7,), form=Form(mtp=True)))
