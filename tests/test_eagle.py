"""EAGLE, EAGLE-3 and MTP, which decode in one loop. In EAGLE a token is one ahead of its feature.
Trees and guesses are those of a draft without caches, and the loss is the paper's. EAGLE-3 reads
what enters three layers of the target, and trains on what decoding gives it, as MTP does. The block
of a checkpoint computes its equations, which are written out here except for its layer. Released
heads are in test_released.py. That the output is the target's, whatever the draft is, is in
test_lossless.py."""
import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fake_models import paths_of
from families import MIXED, deep, rand, tiny
from helpers import CLOSE, check_refused, note_calls
from methods import play_rounds
from naive import NaiveLM
from support import released
from support.engine import MODELS, EngineLM, depth_of, list_layers, tap_layers
from support.layers import choose_taps, make_config, read_taps, tap_widths
from support.loading import check
from support.parts import head_for, score_with
from support.trees import best_tree
from survey.eagle import LEVELS, EagleLayer, Pairs, compute_features, eagle, eagle_loss, plan_eagle
from survey.eagle3 import Eagle3Layer
from survey.mtp import MTPBlock, load_draft
from training.loop import measure_guesses
from training.texts import pad_pairs
from training.unroll import choose_lessons, read_target, unroll_loss
from trainings import DATA, run

MODEL = tiny("llama", num_hidden_layers=7)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def make_draft(vocab=range(61)) -> Eagle3Layer:
    """Make a draft whose every trained weight is random."""
    return rand(Eagle3Layer(MODEL, make_config(MODEL), [2, 3, 4], vocab))


# ------------------------------------------------------------------------------ decoding by EAGLE

@torch.inference_mode()
def guess(model, draft, text, path, ranks) -> list[tuple[int, float]]:
    """Guess the likeliest tokens, with their probabilities, after a text and a path below its root.
    All features of the text and all rows of the draft are computed anew."""
    f = model.get_decoder()(input_ids=torch.tensor([text[:-1]]), use_cache=False)[0]
    tokens = text + path
    for n in range(len(text), len(tokens) + 1):  # the last row's feature is guessed
        out = draft.lm.get_decoder()(inputs_embeds=draft.join(f, [tokens[1:n]]), use_cache=False)[0]
        f = torch.cat([f, out[:, -1:]], 1)
    best = score_with(model, draft.lm.get_output_embeddings())(out[0, -1]).softmax(-1).topk(ranks)
    return [*zip(draft.vocab[best.indices].tolist(), best.values.tolist())]


@pytest.mark.parametrize("nodes, family", [(20, "granite"), (60, "llama")])
def test_a_tree_has_the_likeliest_paths(nodes, family, monkeypatch):
    """It has the paths of the largest product of the draft's own probabilities, where the 10
    likeliest nodes of a level are expanded in a tree of 60 nodes. Granite scales its logits. The
    target is fed the tree after a prompt that is read in two parts."""
    model, text = tiny(family, vocab_size=5), [i * i % 5 for i in range(131)]
    draft, target = rand(EagleLayer(model), 0.2), EngineLM(model)
    draft.keep([4, 0, 3, 1, 2])
    trees = note_calls(monkeypatch, target, "forward")
    next(eagle(target, text, nodes=nodes, trained=draft))
    ids, parents = trees[-1]
    every, level = [([], 1.0)], [([], 1.0)]
    for _ in range(LEVELS):
        expanded = sorted(level, key=lambda x: -x[1])[:nodes // 6]
        level = [([*path, x], chance * p) for path, chance in expanded
                 for x, p in guess(model, draft, text, path, 5)]
        every += level
    best = sorted(every, key=lambda x: -x[1])[:nodes]
    assert ids[0] == text[-1] and {*paths_of(ids, parents)} == {tuple(path) for path, _ in best}


def test_plans_are_trees_of_each_size_and_depth():
    """The draft's first pass has a row for each token of a chunk, and the others have one for each
    node expanded. A tree expands at most a sixth of its nodes on a level."""
    rates = [0.5, 0.42, 0.05]
    plans = [*plan_eagle(rates)]
    depths = [node.depth for node in best_tree([rates] * LEVELS, 64)]
    assert len(plans) == sum(depth <= most for depth in depths for most in range(1 + LEVELS))
    assert plans[0] == ((1, []), 1.0, 1, 0, 0)
    assert ((3, [1]), pytest.approx(1.92), 3, 1, pytest.approx(1.92)) in plans
    assert ((5, [1, 1]), pytest.approx(2.38), 5, 2, pytest.approx(3.38)) in plans


# ------------------------------------------------------------------------------ EAGLE's training

@pytest.mark.parametrize("family, sampled", [("llama", 3), ("gemma2-capped", 512)])
def test_the_loss_by_hand(family, sampled, monkeypatch):
    """Row by row: SmoothL1 of each row that guesses a token of an answer, and the cross-entropy of
    its guess or of a sample of them. Features that are read are noisy, and learnt features are
    not. Only the draft gets gradients."""
    monkeypatch.setattr("survey.eagle.SAMPLED", sampled)
    model = tiny(family)
    draft, texts, score = EagleLayer(model), compute_features(model, DATA, None), score_with(model)
    found = eagle_loss(draft, score, texts, torch.Generator().manual_seed(2))
    rng, errors, classes = torch.Generator().manual_seed(2), [], []
    for noise, (ids, f, n) in zip(0.2 * torch.rand(3, 9, 32, generator=rng) - 0.1, texts):
        exact = model.get_decoder()(input_ids=ids[None], use_cache=False)[0][0]
        assert (f - exact).norm() < 0.01 * exact.norm()  # kept in bfloat16
        e, f = model.get_input_embeddings()(ids[1:]), f.float()
        rows = torch.cat([e, (f + noise[:len(f)])[:-1]], -1) @ draft.fc.weight.T
        out = draft.lm.get_decoder()(inputs_embeds=rows[None], use_cache=False)[0][0]
        for i in range(max(0, n - 2), len(ids) - 2):  # token i + 2 is one of the answer
            error = (out[i] - f[i + 1]).abs()
            errors.append(torch.where(error < 1, error ** 2 / 2, error - 0.5).mean())
            p, q = (score(x).softmax(-1) for x in (f[i + 1], out[i]))
            classes.append(-(p * q.log()).sum())
    few = torch.randperm(len(classes), generator=rng)[:sampled]
    expected = torch.stack(errors).mean() + 0.1 * torch.stack(classes)[few].mean()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    found.backward()
    assert len(errors) == 11 and all(p.grad is not None for p in draft.trainable().values())


def test_what_a_training_reports_by_hand():
    """How often the likeliest guess is right after true features, all computed anew."""
    model, text = tiny("llama", vocab_size=5), [i * i % 37 % 5 for i in range(40)]
    draft = rand(EagleLayer(model), 0.2)
    draft.keep([4, 0, 3, 1])
    right = sum(guess(model, draft, text[:end], [], 1)[0][0] == text[end] for end in range(4, 40))
    texts = compute_features(model, [(text[:4], text[4:]), (text[:1], text[1:2])], None)
    figures, line = measure_guesses(draft, texts)  # the second text has no row that guesses
    assert figures == {"right": pytest.approx(right / 36)} and 0 < right < 36
    assert line == f"held-out guesses right {right / 36:.3f}"


def test_tokens_and_features_are_as_large_at_first(tmp_path, monkeypatch):
    """Gemma's embedding is √d times its weights. Values of a gradient are cut as in the paper."""
    model, seen = tiny("gemma3"), []
    monkeypatch.setattr("survey.eagle.fit_on_texts", lambda *x, **how: seen.append((x, how)))
    run("survey.eagle train", tmp_path, model)
    [((draft, _, _, _, lessons, *_), how)] = seen
    [(ids, f, _)] = compute_features(model, lessons.data[:1], None)
    expected = EagleLayer(model).fc.weight.detach()
    expected[:, :32] *= f.float().std() / model.get_input_embeddings()(ids).std()
    assert torch.allclose(draft.fc.weight, expected, rtol=1e-3) and how["max_value"] == 0.5


# ----------------------------------------------------------------------------- the taps of EAGLE-3

def test_which_layers_are_tapped():
    """Widths are those of what is tapped. In OPT-350m, for one, layers are wider than what the LM
    head reads."""
    model, seen = tiny("opt", word_embed_proj_dim=16), []
    with tap_layers(model, [0, depth_of(model)], seen):
        model(torch.tensor([TEXT]))
    assert tap_widths(model, [0, depth_of(model)]) == [x.shape[-1] for x in seen] == [32, 16]
    assert choose_taps(MODEL) == [2, 3, 4]
    assert read_taps("0, 5,7", MODEL) == [0, 5, 7]
    for text in ("3,2", "2,2", "1,8", "x", "-1", "\u00b2", ","):
        check_refused("--taps must be numbers from 0 to 7", read_taps, text, MODEL)
    for layers, taps in (1, [0]), (2, [0, 1]), (4, [1, 2]), (6, [2, 3]):
        assert choose_taps(tiny("llama", num_hidden_layers=layers)) == taps


# ------------------------------------------------------------------------------ what it is fed

@pytest.mark.parametrize("name, trees", [("eagle", [(9, [1, 2]), (1, []), (1, [])]),
                                         ("dflash", ["x" * 9, "x", "x"])])
def test_a_draft_that_waits_reads_all_that_became_final(name, trees, monkeypatch):
    """The clock may choose a tree of one node, which asks no draft. The next tree is that of a
    draft which is given the whole text. So few tokens are often guessed right. EAGLE-3 decodes in
    EAGLE's loop."""
    model, chosen = tiny("llama", vocab_size=8), itertools.cycle(trees)
    monkeypatch.setattr("support.clock.Clock.choose", lambda *_: next(chosen))
    monkeypatch.setattr("support.clock.Clock.note", lambda *_: None)
    found = play_rounds(name, model, TEXT[:5], EngineLM, nodes=0)
    assert play_rounds(name, model, TEXT[:5], NaiveLM, anew=True, nodes=0) == found
    assert {record["accepted"] for _, _, record in found} > {0}


# ----------------------------------------------------------------------- the training-time test

@pytest.mark.parametrize("make, decay", [
    (make_draft, 0.8), (lambda: make_draft(range(0, 61, 2)), 0.8),
    (lambda: rand(MTPBlock(MODEL)), 0.6)], ids=["EAGLE-3", "EAGLE-3 of few tokens", "MTP"])
def test_training_gives_the_layer_what_decoding_gives_it(make, decay):
    """The loss of three passes is that of guesses made one after the other, as decoding makes
    them: after row j, with the text's tokens and the layer's own features. Tokens that the draft
    cannot guess are not learned."""
    draft = make()
    vocab = draft.vocab.tolist()
    ids, answers = pad_pairs([(TEXT[:4], TEXT[4:])])
    features, hidden = read_target(MODEL, draft.taps, ids)
    score = score_with(MODEL, head_for(MODEL.lm_head, draft.vocab))
    learns, probs = choose_lessons(draft, ids, answers, hidden, score)
    assert learns[0].tolist() == [i > 3 and token in vocab for i, token in enumerate(TEXT)]
    losses = {0: [], 1: [], 2: []}
    lm = EngineLM(draft.lm)
    for j in range(len(TEXT) - 2):
        lm.start([])
        logits = lm.forward(draft.join(*Pairs(features[0, :j + 1], TEXT[1:j + 2])))
        for n, token in enumerate(TEXT[j + 2:j + 5]):
            if learns[0, j + 2 + n]:
                target = MODEL(ids[:, :j + 2 + n]).logits[0, -1, vocab].softmax(-1)
                losses[n].append(-(target * logits[-1].log_softmax(-1)).sum())
            logits = lm.forward(draft.join(*Pairs(lm.features[-1:], [token])))
    expected = sum(decay ** n * torch.stack(some).mean() for n, some in losses.items())
    found = unroll_loss(draft, draft.lm.get_output_embeddings(), ids, features, learns, probs, 3)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_pass_that_learns_nothing_adds_nothing():
    """With a small vocabulary all tokens that a pass would learn may be missing."""
    draft, ids = make_draft(), torch.tensor([TEXT])
    features, _ = read_target(MODEL, draft.taps, ids)
    learns, probs = torch.zeros_like(ids, dtype=torch.bool), torch.full((1, 61), 1 / 61)
    given = draft, draft.lm.lm_head, ids, features, learns
    assert unroll_loss(*given, probs[:0], 3).item() == 0.0
    learns[0, 2] = True  # of pass 0 alone
    one, three = (unroll_loss(*given, probs, n) for n in (1, 3))
    assert one.item() == three.item() > 0.0


def test_an_lm_head_begins_as_the_targets():
    draft = Eagle3Layer(MODEL, make_config(MODEL), [2, 3, 4], range(0, 61, 2))
    assert torch.equal(draft.trainable()["lm_head.weight"], MODEL.lm_head.weight[::2])


# ---------------------------------------------------------------------- the block of a checkpoint

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
    x = torch.cat([norm(table[TEXT[1:9]], 0), norm(f, 1)], -1) @ w[f"{begin}{names[2]}.weight"].T
    x = list_layers(model)[0](
        x[None], attention_mask=torch.full((1, 1, 8, 8), -torch.inf).triu(1),
        position_embeddings=model.get_decoder().rotary_emb(x[None], torch.arange(8)[None]))
    x = norm(x[0], 3)
    draft = load_draft("", model)
    lm = EngineLM(draft.lm)
    lm.start([])
    logits = lm.forward(draft.join(f, TEXT[1:9]))
    torch.testing.assert_close(lm.features, x, **CLOSE)
    torch.testing.assert_close(logits, x @ w.get(HEAD, model.lm_head.weight).T, **CLOSE)
    assert draft.taps is None  # it reads what the LM head reads


def test_training_begins_with_the_last_layer_of_full_attention():
    model = tiny("qwen3.5", num_hidden_layers=4, layer_types=2 * MIXED[::-1])
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
    check_refused("--adapter .* an MTP block", load_draft, MODELS / "target", deep("llama", 12))
    draft = load_draft(str(tmp_path / "has"), other.bfloat16())
    assert types == {torch.bfloat16} and torch.equal(draft.fc.weight, w[FC].bfloat16())
    assert torch.equal(draft.parts()["mtp.layers.0.mlp.gate.e_score_correction_bias"],
                       torch.arange(1.0, 5) / 3)
    check_refused("--adapter .* with an MTP block", load_draft, tmp_path / "lacks", model)
