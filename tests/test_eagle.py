"""In EAGLE a token is one ahead of its feature. Trees and guesses are those of a draft without
caches, and the loss is the paper's. The output is checked in test_lossless.py, whatever the draft
is."""
import pytest
import torch

from fake_models import path_to
from families import rand, tiny
from helpers import note_calls
from support.engine import EngineLM
from support.parts import score_with
from support.trees import best_tree
from survey.eagle import LEVELS, EagleLayer, compute_features, eagle, eagle_loss, plan_eagle
from training.texts import evaluate
from trainings import DATA, run


# ---------------------------------------------------------------------------------- decoding

@torch.inference_mode()
def guess(model, draft, text, path, ranks) -> list[tuple[int, float]]:
    """Guess the likeliest tokens, with their probabilities, after a text and a path below its root.
    All features of the text and all rows of the draft are computed anew."""
    f = model.get_decoder()(input_ids=torch.tensor([text[:-1]]), use_cache=False)[0]
    tokens = text + path
    for n in range(len(text), len(tokens) + 1):  # the last row's feature is guessed
        out = draft.lm.get_decoder()(inputs_embeds=draft.join(f, [tokens[1:n]]), use_cache=False)[0]
        f = torch.cat([f, out[:, -1:]], 1)
    best = draft.lm.get_output_embeddings()(out[0, -1]).softmax(-1).topk(ranks)
    return [*zip(draft.vocab[best.indices].tolist(), best.values.tolist())]


def grow_by_hand(model, draft, text, n) -> set[tuple]:
    """The n paths of the largest product of the draft's own probabilities. The 10 likeliest nodes
    of a level are expanded in a tree of 60 nodes."""
    every, level = [([], 1.0)], [([], 1.0)]
    for _ in range(LEVELS):
        expanded = sorted(level, key=lambda x: -x[1])[:max(1, n // 6)]
        level = [([*path, x], chance * p) for path, chance in expanded
                 for x, p in guess(model, draft, text, path, len(draft.vocab))]
        every += level
    return {(text[-1], *path) for path, _ in sorted(every, key=lambda x: -x[1])[:n]}


@pytest.mark.parametrize("nodes", [20, 60])
def test_a_tree_has_the_likeliest_paths(nodes, monkeypatch):
    """The target is fed the tree after a prompt that is read in two parts."""
    model, text = tiny("llama", vocab_size=5), [i * i % 5 for i in range(131)]
    draft, target = rand(EagleLayer(model), 0.2), EngineLM(model)
    draft.keep([4, 0, 3, 1, 2])
    trees = note_calls(monkeypatch, target, "forward")
    next(eagle(target, text, nodes=nodes, trained=draft))
    ids, parents = trees[-1]
    found = {tuple(ids[x] for x in path_to(i, parents)) for i in range(len(ids))}
    assert found == grow_by_hand(model, draft, text, nodes)


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


# ------------------------------------------------------------------------------------ training

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
    figures, line = evaluate(draft, texts)  # the second text has no row that guesses
    assert figures == {"right": pytest.approx(right / 36)} and 0 < right < 36
    assert line == f"held-out guesses right {right / 36:.3f}"


def test_tokens_and_features_are_as_large_at_first(tmp_path, monkeypatch):
    """Gemma's embedding is √d times its weights. Values of a gradient are cut as in the paper."""
    model, seen = tiny("gemma3"), []
    monkeypatch.setattr("survey.eagle.fit_part", lambda *given, **how: seen.append((given, how)))
    run("survey.eagle train", tmp_path, model)
    [((draft, _, _, data, *_), how)] = seen
    [(ids, f, _)] = compute_features(model, data[:1], None)
    expected = EagleLayer(model).fc.weight.detach()
    expected[:, :32] *= f.float().std() / model.get_input_embeddings()(ids).std()
    assert torch.allclose(draft.fc.weight, expected, rtol=1e-3) and how["max_value"] == 0.5
