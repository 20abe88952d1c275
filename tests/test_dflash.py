"""A released block draft guesses what its formula says, in every layout. Packed blocks are what
decoding computes, the loss is that of the guesses one by one, and the tree has the likeliest of all
paths."""
import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from common import KVCache
from fake_models import path_to
from families import rand, tiny
from heads import check_refused, draw, norm, rotate, write
from helpers import note_calls, take, tokens_of
from support.engine import EngineLM, depth_of
from support.parts import score_with
from survey import dflash as module
from support.released import describe_dflash
from survey.dflash import (BlockDraft, block_loss, dflash, grow_block, guess_blocks, list_anchors,
                           plan_block, run_block, sample_roots)
from training.texts import Text, compute_features

MODEL = tiny("llama", num_hidden_layers=3)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def make_draft(model=MODEL, layers=2, B=5, scale=0.3) -> BlockDraft:
    """Make a draft whose every weight is random."""
    return rand(BlockDraft(model, describe_dflash(model, [0, 1], 60, layers, B, 8)), scale)


def texts_of(draft: BlockDraft, model=MODEL, pairs=((TEXT[:5], TEXT[5:]),)) -> list[Text]:
    return compute_features(model, [*pairs], [*draft.taps, depth_of(model)])


def z_by_decoding(draft: BlockDraft, text: Text, anchor: int, model=MODEL) -> torch.Tensor:
    """Compute a block's logits as decoding does, in a cache, with what was tapped before a root."""
    ids = text.ids
    hidden = model(ids[None], output_hidden_states=True).hidden_states
    tapped = torch.cat([hidden[i][0, :anchor] for i in draft.taps], -1)
    return run_block(draft, KVCache(), tapped.bfloat16(), ids[anchor].item())


# ---------------------------------------------------------------------------------- the network

FLAT = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 10,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "rope_theta": 5e4,
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
INSIDE = {"target_layer_ids": [1, 0], "mask_token_id": 60}
SCALES = {"input_embedding_scale": 0.7, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}
RELEASED = FLAT | SCALES | {"use_sliding_window": True, "block_size": 4, "dflash_config": INSIDE}
MARKOV = {"markov_rank": 8, "enable_confidence_head": True, "confidence_head_with_markov": True}
SPEC = FLAT | {
    "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "target_layer_ids": [-1, 1],
    "mask_token_id": 60, "block_size": 4, "num_target_layers": 3, "markov_rank": 0,
    "layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}
OTHERS = {"block_size": 4, "mask_token_id": 60, "aux_hidden_state_layer_ids": [1, 2],
          "speculators_model_type": "dspark", "architectures": ["DSparkDraftModel"],
          "transformer_layer_config": FLAT | {"use_sliding_window": True, "model_type": "qwen3"}}
ALL, BACK, NEAR = (-99, 99), (0, 99), (0, 3)  # how many places before its own a row sees
LAYOUTS = {  # a config.json, the hidden states that are read, what rows of both layers see, and
    # the first row that guesses
    "z-lab": (RELEASED, (2, 1), ALL, NEAR, 1),
    "no window": (RELEASED | {"use_sliding_window": None}, (2, 1), ALL, BACK, 1),
    "no kinds": (RELEASED | {"layer_types": None, "max_window_layers": 1}, (2, 1), ALL, NEAR, 1),
    "neither": (RELEASED | {"layer_types": None, "max_window_layers": 1, "sliding_window": None},
                (2, 1), ALL, ALL, 1),
    "causal": (RELEASED | {"dflash_config": INSIDE | {"causal": True}}, (2, 1), BACK, NEAR, 1),
    "not causal": (RELEASED | {"is_causal": False}, (2, 1), ALL, (-2, 3), 1),
    "anchor first": (RELEASED | {"sample_from_anchor": True}, (2, 1), ALL, NEAR, 0),
    "DeepSpec's DSpark": (SPEC | MARKOV, (0, 2), ALL, ALL, 0),
    "DeepSpec's DFlash": (SPEC, (0, 2), ALL, ALL, 0),
    "speculators' DFlash": (OTHERS | {"sliding_window_non_causal": True}, (1, 2), ALL, (-2, 3), 1),
    "speculators' DSpark": (OTHERS | MARKOV | {"sample_from_anchor": True}, (1, 2), ALL, NEAR, 0),
    "Llama's layers": (OTHERS | {"sliding_window": 3, "transformer_layer_config": FLAT | {
        "model_type": "llama", "sliding_window": None}}, (1, 2), ALL, NEAR, 1)}
LAYER = {"self_attn.q_proj": (40, 32), "self_attn.k_proj": (20, 32), "self_attn.v_proj": (20, 32),
         "self_attn.o_proj": (32, 40), "self_attn.q_norm": (10,), "self_attn.k_norm": (10,),
         "input_layernorm": (32,), "post_attention_layernorm": (32,), "mlp.gate_proj": (24, 32),
         "mlp.up_proj": (24, 32), "mlp.down_proj": (32, 24)}
SHAPES = {"fc": (32, 64), "hidden_norm": (32,), "norm": (32,)} | {
    f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}


def draw_tensors(config: dict = RELEASED, model=MODEL) -> dict[str, torch.Tensor]:
    """Draw exactly the tensors that a layout has. Larger ones would make attention so sharp that
    rounding moves the logits by 1e-4."""
    shapes = SHAPES
    rows = 20 * ("speculators_model_type" in config)
    if config.get("markov_rank"):
        shapes = shapes | {"confidence_head.proj": (1, 40), "markov_head.markov_w1": (61, 8),
                           "markov_head.markov_w2": (rows or 61, 8)}
    w = draw({f"{x}.weight": shape for x, shape in shapes.items()})
    if "confidence_head.proj.weight" in w:
        w["confidence_head.proj.bias"] = torch.ones(1)
    if "num_anchors" in config or rows:
        w["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
        w["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
    if rows:  # every second token has a row
        w |= {"lm_head.weight": w["lm_head.weight"][:2 * rows:2].clone(), "d2t": torch.arange(rows),
              "t2d": torch.arange(61) % 2 == 0, "verifier_norm.weight": torch.ones(32)}
    return w


def guess_by_formula(w: dict, text: list[int], config: dict, taps: tuple, *sees, first: int):
    """Compute the logits of a block after a text, by the released form's equations. The Markov
    head reads the last token in each row."""
    hidden = MODEL(torch.tensor([text]), output_hidden_states=True).hidden_states
    c = norm(torch.cat([hidden[i][0, :-1] for i in taps], -1) @ w["fc.weight"].T,
             w["hidden_norm.weight"])
    table = w.get("embed_tokens.weight", MODEL.get_input_embeddings().weight)
    x = config.get("input_embedding_scale", 1.0) * table[[text[-1], 60, 60, 60]]
    m = len(c)
    place = torch.arange(m + 4)
    for i, (low, high) in enumerate(sees):
        of = {name.removeprefix(f"layers.{i}."): y.T if y.ndim == 2 else y for name, y in w.items()}
        y = norm(x, of["input_layernorm.weight"])
        rows = torch.cat([c, y])

        def heads(z: torch.Tensor, kind: str) -> torch.Tensor:
            z = norm((z @ of[f"self_attn.{kind}_proj.weight"]).view(len(z), -1, 10),
                     of[f"self_attn.{kind}_norm.weight"])
            # `rotate` turns rows 0, 1, …, and these are the last ones.
            before = z.new_zeros(m + 4 - len(z), *z.shape[1:])
            return rotate(torch.cat([before, z]), 5e4, 1.0)[-len(z):]
        q, k = heads(y, "q"), heads(rows, "k").repeat_interleave(2, 1)
        v = (rows @ of["self_attn.v_proj.weight"]).view(m + 4, 2, 10).repeat_interleave(2, 1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) / 10 ** 0.5
        past = place[m:, None] - place
        scores[:, (past < low) | (past >= high)] = -torch.inf
        x = x + torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).reshape(4, 40) @ of[
            "self_attn.o_proj.weight"]
        y = norm(x, of["post_attention_layernorm.weight"])
        gate, up = (y @ of[f"mlp.{z}_proj.weight"] for z in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ of["mlp.down_proj.weight"]
    head = w.get("lm_head.weight", MODEL.get_output_embeddings().weight)
    z = norm(x, w["norm.weight"])[first:] @ head.T
    if "output_multiplier" in config:
        z = 2 * (0.5 * z / 2).tanh()
    if "markov_head.markov_w1.weight" in w:
        z = z + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][text[-1]]
    return z


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_released_draft_guesses_what_its_formula_says(tmp_path, monkeypatch, name):
    """The guesses are compared after each round of a text. The last 11 rows are no tokens. Only
    tables that are not the target's are kept."""
    config, *form, first = LAYOUTS[name]
    w, seen = draw_tensors(config), note_calls(monkeypatch, module, "grow_block")
    trained = name == "DeepSpec's DFlash"
    for table in ("embed_tokens", "lm_head") if trained else ():
        w[f"{table}.weight"] += 0.1 * torch.randn(61, 32)
    adapter, text = write(tmp_path, config, w), TEXT[:5]
    for chunk in take(dflash(EngineLM(MODEL, 50), text, adapter=adapter, nodes=4), 6):
        draft, z, root, nodes = seen.pop(0)
        z = draft.add_markov(z, torch.tensor([root]))
        expected = guess_by_formula(w, text, config, *form, first=first)[:, :50]
        torch.testing.assert_close(z, expected, atol=1e-4, rtol=1e-4)
        assert (root, nodes, draft.B) == (text[-1], 4, 5 - first)
        text = text + chunk
    assert (draft.embed is MODEL.get_input_embeddings()) == (not trained)
    assert (draft.head is MODEL.get_output_embeddings()) == (len(z[0]) == 50 and not trained)
    chunks = dflash(EngineLM(MODEL), [7], adapter=str(tmp_path), nodes=9)
    assert tokens_of(chunks, 4) == MODEL.generate(torch.tensor([[7]]), max_new_tokens=4,
                                                  do_sample=False)[0, 1:].tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_perfect_draft_is_accepted_whole(tmp_path, name):
    """The target's layers do nothing, and it goes round the tokens 2, 4, …, 12. The draft's first
    layer looks 6 places back from the token before the one that a row guesses."""
    config, *_, first = LAYOUTS[name]
    model = tiny("llama", num_hidden_layers=3)
    for x, p in model.named_parameters():
        p.data *= not any(part in x for part in ("o_proj", "down_proj", "embed", "lm_head"))
    E, H = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    E[range(61), [t // 2 for t in range(61)]] = 1.0
    E[:, 31] = 1.0
    H[[4, 6, 8, 10, 12, 2], range(1, 7)] = 9.0
    w = draw_tensors(config, model)
    for x in w.keys() - {"d2t", "t2d", "embed_tokens.weight", "lm_head.weight"}:
        w[x] = torch.full_like(w[x], 1.0 if "norm" in x else 0.0)
    angles = (6 + first) * 5e4 ** (-torch.arange(5) / 5)
    w["fc.weight"][:, :32] = torch.eye(32)
    of = {x: w[f"layers.0.self_attn.{x}.weight"] for x in ("q_proj", "k_proj", "v_proj", "o_proj")}
    of["q_proj"][:10, 31] = torch.cat([angles.cos() + angles.sin(), angles.cos() - angles.sin()])
    of["k_proj"][:10, 31] = 1.0
    of["v_proj"][range(10), range(10)] = 1.0
    of["o_proj"][range(10), range(10)] = 50.0
    w["layers.0.self_attn.q_norm.weight"] *= 100
    log, adapter = [], write(tmp_path, {x: y for x, y in config.items() if x not in SCALES}, w)
    text = [2, 4, 6, 8, 10, 12, 2, 4, 6]
    take(dflash(EngineLM(model), text, adapter=adapter, nodes=5 - first, log=log), 3)
    assert log == [{"guessed": 4 - first, "accepted": 4 - first}] * 3


@pytest.mark.parametrize("change, said", [
    ({"hidden_size": 64}, "hidden states of 64 numbers, as its own are, got"),
    ({"dflash_config": INSIDE | {"target_layer_ids": [1]}}, "expected tensors {'fc.we"),
    ({"dflash_config": INSIDE | {"target_layer_ids": [1, 3]}}, "different layers below 3, got"),
    ({"dflash_config": INSIDE | {"target_layer_ids": [1, 1]}}, "different layers below 3, got"),
    ({"aux_hidden_state_layer_ids": [1, 3]}, "different layers below 2, got"),
    ({"dflash_config": {"target_layer_ids": [1, 2]}}, "it has no 'mask_token_id'"),
    ({"dflash_config": INSIDE | {"mask_token_id": 61}}, "is a token below 61, got 61"),
    ({"dflash_config": INSIDE | {"mask_token_id": "<mask>"}}, "is a token below 61, got '<mask>'"),
    ({"block_size": 0}, "block_size above 1, got 0"), ({"block_size": 1}, "above 1, got 1"),
    ({"block_size": "8"}, "block_size above 1, got '8'"),
    ({"num_target_layers": 36}, "for a model of 3 layers, got 36"),
    ({"use_swa": True}, r"not known here, got \['use_swa'\]"),
    ({"d2t": torch.full((20,), 61)}, "a head for 61 tokens"),
    ({"embed_tokens.weight": torch.ones(60, 32)}, "expected tensors {'embed_tokens.weight': .61,"),
    ({"candidate_selector.hidden_projection.weight": torch.ones(2)}, "got .*, a DFlash 2 draft"),
    ({"prefix_gru.weight_ih_l0": torch.ones(2)}, "got .*, a Domino draft"),
    ({"markov_head.gate_proj.weight": torch.ones(2)}, "whose Markov head reads more than a token"),
    ({"fc.weight": torch.ones(32, 64, dtype=torch.int8)}, "finite floating-point numbers"),
    ({"fc.weight_scale": torch.ones(32)}, "with {'fc.weight_scale'"),
    ({"hidden_norm.weight": None}, "be a DFlash draft, got .*, an EAGLE head")])
def test_a_draft_that_would_be_misread_is_refused(tmp_path, change, said):
    kind = SimpleNamespace(config=RELEASED, tensors=draw_tensors, load=module.load_draft)
    check_refused(tmp_path, kind, MODEL, change, said)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_packed_blocks_are_what_decoding_computes(family):
    """Many anchors of two texts of different lengths are compared."""
    model = tiny(family)
    draft, cache = make_draft(model), KVCache()
    texts = texts_of(draft, model, [(TEXT[:5], TEXT[5:]), (TEXT[3:4], TEXT[4:11])])
    ids, features = (pad_sequence(x, batch_first=True) for x in [*zip(*texts)][:2])
    anchors = torch.tensor([[2, 4, 7, 14], [5, 1, 6, 3]])
    draft.read(features[..., :64], cache)
    found = draft.score(draft(ids.gather(1, anchors), anchors, cache))
    for text, places, blocks in zip(texts, anchors.tolist(), found):
        for anchor, z in zip(places, blocks):
            # texts are kept in bfloat16, and both sides read that
            assert torch.allclose(z, z_by_decoding(draft, text, anchor, model), atol=2e-3), anchor


def test_the_markov_head_by_hand():
    """At first it adds nothing. A seed makes all weights, whatever was drawn before."""
    draft, z, tokens = make_draft(), torch.randn(2, 50), torch.tensor([9, 11])
    for before, old, new in zip((9, 11), z, draft.add_markov(z, tokens)):
        assert torch.allclose(new, old + draft.W2.weight[:50] @ draft.W1.weight[before], atol=1e-5)
    fresh, same, other = (BlockDraft(MODEL, draft.config, seed) for seed in (0, 0, 1))
    assert torch.equal(fresh.add_markov(z, tokens), z)
    assert torch.equal(fresh.fc.weight, same.fc.weight)
    assert not torch.equal(fresh.fc.weight, other.fc.weight)


# ------------------------------------------------------------------------------------- the loss

def test_the_loss_by_hand():
    """Guess by guess, as decoding computes them, with the target's distribution before each token.
    The last token counts once."""
    draft = make_draft(scale=1.0)
    [text] = texts_of(draft)
    total = weights = 0.0
    for anchor in (4, 8, 13):
        z = z_by_decoding(draft, text, anchor)
        for k in range(min(4, len(TEXT) - 1 - anchor)):
            place = anchor + 1 + k
            q = draft.add_markov(z[k], torch.tensor(TEXT[place - 1])).softmax(-1)
            p = MODEL(torch.tensor([TEXT[:place]])).logits[0, -1].softmax(-1)
            weight = 2.718281828 ** (-k / 4)
            total, weights = total - weight * (p * q.log()).sum(), weights + weight
    found = block_loss(draft, score_with(MODEL), [text], [[4, 8, 13]])
    assert found.item() == pytest.approx((total / weights).item(), rel=2e-3)
    assert guess_blocks(draft, [text], [[4, 8, 13]])[1].tolist() == [
        TEXT[anchor + k] for anchor in (4, 8, 13) for k in range(1, 5) if anchor + k < len(TEXT)]


def test_anchors_are_those_of_the_answer():
    [text] = texts_of(make_draft())
    assert list_anchors(text) == range(4, 15)
    few, many = (sample_roots(text, n, random.Random(0)) for n in (11, 30))
    assert sorted(few) == [*range(4, 15)] != few and len(many) == 30
    assert {many.count(x) for x in range(4, 15)} == {2, 3}


# ------------------------------------------------------------------------------------- the tree

def test_a_tree_has_the_likeliest_of_all_paths():
    """Every path's chance is the product of what the block says along it. The tree's nodes are the
    likeliest n of all, in their order. Here no node has a likelier eleventh child."""
    draft = make_draft()
    z = 4 * torch.randn(4, 61, generator=torch.Generator().manual_seed(3))
    ids, parents = grow_block(draft, z, 7, 40)
    known = {(): 1.0}
    for k in range(4):
        for path in [path for path in known if len(path) == k and known[path] > 1e-4]:
            logits = draft.add_markov(z[k], torch.tensor([7, *path][-1]))
            for row, p in enumerate(logits.softmax(-1).tolist()):
                known[(*path, row)] = known[path] * p
    paths = [tuple(ids[x] for x in path_to(node, parents)[1:]) for node in range(40)]
    assert ids[0] == 7 and paths == sorted(known, key=lambda path: -known[path])[:40]
    for n in (2, 5, 17):
        assert grow_block(draft, z, 7, n) == (ids[:n], parents[:n])


def test_sizes_are_planned_by_rates():
    """No block is needed for a tree of one node."""
    plans = [*plan_block([0.8, 0.1], 2)]
    assert plans[:3] == [(1, 1.0, 1, 0, 1), (2, 1.8, 2, 1, 2),
                         (3, pytest.approx(2.44), 3, 1, 3)] and len(plans) == 7
