"""Heads in the forms that others have released: their passes are the released formulas, written out
here, for the embedded target; and what is exported is loaded bit for bit."""
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.run import TimedLM
from common import InputError, autoregressive, load
from families import tiny
from helpers import ROOT, said_in_one_line, script, tokens_of
from survey import eagle, eagle3, layerskip, medusa
from survey.eagle import Pairs
from survey.layerskip import load_tuned
from training.low_rank import add_low_rank
from training.parts import save_part
from training.released import MEDUSA_TREE, load_accept, make_config, read_layer_config

TEXT = [31, 4, 159, 26, 535, 89, 793, 238, 46, 264, 33, 83]
LEVELS = [[(7, -1)], [(8, 0), (9, 0)], [(10, 2)]]  # a tree of drafted rows: tokens, rows above
WIDTH, V = 256, 1536  # of the embedded target
SHAPE = dict(hidden_size=WIDTH, intermediate_size=96, num_attention_heads=4, rms_norm_eps=1e-3,
             num_hidden_layers=1, vocab_size=V, max_position_embeddings=9, hidden_act="silu")
WORDLESS = SimpleNamespace(eos_token_id=None)


# --------------------------------------------------------------------------- the written formulas

def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()


def rotate(x: torch.Tensor, base: float, factor: float) -> torch.Tensor:
    """Turn [n, heads, d] by rotary positions 0, 1, …, which a linear scaling divides."""
    n, _, d = x.shape
    angles = torch.arange(n)[:, None] / factor * base ** (-torch.arange(0, d, 2) / d)
    cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1) * sin


def attend(w: dict, x: torch.Tensor, base: float, factor: float = 1.0) -> torch.Tensor:
    """Compute causal attention of a chain of rows [n, ·] with 4 heads."""
    q, k, v = ((x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0))
               .view(len(x), -1, WIDTH // 4) for name in "qkv")
    k, v = (y.repeat_interleave(4 // k.shape[1], 1) for y in (rotate(k, base, factor), v))
    scores = torch.einsum("ihd,jhd->hij", rotate(q, base, factor), k) / math.sqrt(WIDTH // 4)
    scores = scores.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), -torch.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(x), -1)
    return out @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)


def run_mlp(w: dict, x: torch.Tensor) -> torch.Tensor:
    y = norm(x, w["post_attention_layernorm.weight"])
    gate, up = (y @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def layer_of(tensors: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): x for name, x in tensors.items()}


def eagle_step(w: dict, e: torch.Tensor, g: torch.Tensor, config: dict, head) -> tuple:
    """Compute EAGLE's features and logits: no input norm, no final norm, the target's LM head."""
    layer, rope = layer_of(w, "layers.0."), config.get("rope_scaling") or {"factor": 1.0}
    x = torch.cat([e, g], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
    x = x + attend(layer, x, config.get("rope_theta") or 10000.0, rope["factor"])
    x = x + run_mlp(layer, x)
    return x, head(x)


def eagle3_step(w: dict, e: torch.Tensor, g: torch.Tensor, config: dict, head) -> tuple:
    """Compute what EAGLE-3's next level reads, and logits over the draft's own tokens."""
    layer = layer_of(w, "midlayer.")
    normed = norm(g, layer["hidden_norm.weight"])
    x = torch.cat([norm(e, layer["input_layernorm.weight"]), normed], -1)
    attended = attend(layer, x, config.get("rope_theta") or 10000.0)
    x = (normed if config.get("norm_before_residual") else g) + attended
    x = x + run_mlp(layer, x)
    y = norm(x, w["norm.weight"])
    return y if config.get("norm_output") else x, y @ w["lm_head.weight"].T


def fuse(w: dict, taps: torch.Tensor) -> torch.Tensor:
    """Compute EAGLE-3's g of the three tapped streams, each of which may have a norm."""
    each = [norm(x, w[f"fc_norm.{i}.weight"]) if f"fc_norm.{i}.weight" in w else x
            for i, x in enumerate(taps.chunk(3, -1))]
    return torch.cat(each, -1) @ w["fc.weight"].T


# --------------------------------------------------------------------------------- random heads

def draw(shapes: dict, seed: int = 0) -> dict:
    """Draw tensors: matrices that keep the size of what they read, and norms near 1."""
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) / shape[-1] ** 0.5
            if len(shape) == 2 else
            (0.0 if name.endswith("bias") else 1.0) + 0.3 * torch.randn(shape, generator=rng)
            for name, shape in shapes.items()}


def layer_shapes(prefix: str, reads: int, kv: int, biases: str = "") -> dict:
    """Return the shapes of a layer of 4 heads, whose queries, keys and values read so much."""
    wide = kv * WIDTH // 4
    return {f"{prefix}self_attn.q_proj.weight": (WIDTH, reads),
            f"{prefix}self_attn.k_proj.weight": (wide, reads),
            f"{prefix}self_attn.v_proj.weight": (wide, reads),
            f"{prefix}self_attn.o_proj.weight": (WIDTH, WIDTH),
            **{f"{prefix}self_attn.{x}_proj.bias": (wide if x in "kv" else WIDTH,) for x in biases},
            **{f"{prefix}mlp.{x}_proj.weight": (96, WIDTH) for x in ("gate", "up")},
            f"{prefix}mlp.down_proj.weight": (WIDTH, 96),
            f"{prefix}post_attention_layernorm.weight": (WIDTH,)}


def eagle_tensors(kv: int, bias: bool, biases: str = "") -> dict:
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), **({"fc.bias": (WIDTH,)} if bias else {})}
    return draw(shapes | layer_shapes("layers.0.", WIDTH, kv, biases))


def eagle3_tensors(D: int, norms: bool = False) -> dict:
    shapes = {"fc.weight": (WIDTH, 3 * WIDTH), "midlayer.hidden_norm.weight": (WIDTH,),
              "midlayer.input_layernorm.weight": (WIDTH,), "norm.weight": (WIDTH,),
              "lm_head.weight": (D, WIDTH),
              **({f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)} if norms else {})}
    tensors = draw(shapes | layer_shapes("midlayer.", 2 * WIDTH, 2))
    if D < V:
        tensors |= {"d2t": 2 * torch.arange(D), "t2d": torch.arange(V) % 3 == 0}
    return tensors


def write(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> str:
    """Write a head as others release it."""
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith("safetensors"):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)


EAGLE_HEADS = {  # configurations and tensors; that of Vicuna's has neither a base nor groups
    "Vicuna's": (SHAPE | dict(num_hidden_layers=40), dict(kv=4, bias=True)),  # the target's
    "LLaMA3's": (SHAPE | dict(num_key_value_heads=2, rope_theta=500000.0, bias=False),
                 dict(kv=2, bias=False)),
    "Qwen2's": (SHAPE | dict(num_key_value_heads=2, qkv_bias=True),
                dict(kv=2, bias=True, biases="qkv")),
    "all biases": (SHAPE | dict(attention_bias=True), dict(kv=4, bias=False, biases="qkvo")),
    "scaled": (SHAPE | dict(rope_scaling={"type": "linear", "factor": 4.0}),
               dict(kv=4, bias=False))}
GROUPS = SHAPE | dict(num_key_value_heads=2)
EAGLE3_HEADS = {
    "yuhuili's": (GROUPS | dict(draft_vocab_size=512, num_hidden_layers=40), dict(D=512)),
    "all tokens": (GROUPS | dict(draft_vocab_size=V, rope_theta=500000.0), dict(D=V)),
    "speculators'": ({"transformer_layer_config": GROUPS, "draft_vocab_size": 512},
                     dict(D=512)),
    "3.1": (GROUPS | dict(fc_norm=True, norm_output=True), dict(D=512, norms=True))}


# ------------------------------------------------------------------------- the passes of a layer

def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())


def check_layer(draft, model, features: torch.Tensor, g: torch.Tensor, step) -> None:
    """Check a chain of rows, and a tree of drafted rows against its paths, by the formula.

    features  of the text's tokens but the last, as the draft reads them
    g         what the formula reads of them
    step      step(e, g): what a chain of rows gives the next level, and its logits
    """
    table, lm = model.get_input_embeddings().weight, TimedLM(draft.lm)
    e = table[TEXT[1:]]
    a, expected = step(e, g)
    lm.start([])
    found = lm.forward(draft.join(*Pairs(features, TEXT[1:])))
    close(found, expected)
    close(lm.features, a)
    lm.commit(range(len(e)))
    paths, feature_of = {-1: (e, g, a)}, {-1: lm.features[-1]}
    for level in LEVELS:
        tokens, above = zip(*level)
        read = torch.stack([feature_of[row] for row in above])
        found, first = lm.forward(draft.join(*Pairs(read, [*tokens])), above), len(paths)
        for i, (token, row) in enumerate(level):
            old_e, old_g, old_a = paths[row]
            chain = torch.cat([old_e, table[[token]]]), torch.cat([old_g, old_a[-1:]])
            made, expected = step(*chain)
            close(found[i], expected[-1])
            close(lm.features[i], made[-1])
            paths[first - 1 + i] = (*chain, made)
            feature_of[first - 1 + i] = lm.features[i]


@pytest.mark.parametrize("config, how", EAGLE_HEADS.values(), ids=EAGLE_HEADS)
def test_an_eagle_head_computes_the_released_formula(tmp_path, embedded, config, how):
    model, _, _ = embedded
    tensors = eagle_tensors(**how)
    draft = eagle.load_draft(write(tmp_path, config, tensors, "pytorch_model.bin"), model)
    lm = TimedLM(model)
    lm.start(TEXT[:-1])
    check_layer(draft, model, lm.features, lm.features,
                lambda e, g: eagle_step(tensors, e, g, config, model.get_output_embeddings()))


@pytest.mark.parametrize("config, how", EAGLE3_HEADS.values(), ids=EAGLE3_HEADS)
def test_an_eagle3_head_computes_the_released_formula(tmp_path, embedded, config, how):
    model, _, _ = embedded
    tensors = eagle3_tensors(**how)
    draft = eagle3.load_draft(write(tmp_path, config, tensors), model)
    hidden = model(torch.tensor([TEXT[:-1]]), output_hidden_states=True).hidden_states
    taps = torch.cat([hidden[i][0] for i in (2, 6, 9)], -1)  # L = 12: layers 2, L/2 and L - 3
    flat = config | config.get("transformer_layer_config", {})
    flat.setdefault("norm_before_residual", "transformer_layer_config" in config)
    check_layer(draft, model, taps, fuse(tensors, taps),
                lambda e, g: eagle3_step(tensors, e, g, flat, None))
    assert draft.vocab.tolist() == ([*range(0, V, 3)] if how["D"] < V else [*range(V)])


def medusa_tensors(K: int, own: bool) -> dict:
    shapes = {}
    for k in range(K):
        shapes |= {f"{k}.0.linear.weight": (WIDTH, WIDTH), f"{k}.0.linear.bias": (WIDTH,)}
        shapes |= {f"{k}.1.weight": (V, WIDTH)} if own else {}
    return draw(shapes)


MEDUSA_CONFIG = {"base_model_name_or_path": "x", "medusa_num_heads": 2, "medusa_num_layers": 1}


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("own", [True, False], ids=["own LM heads", "the target's LM head"])
def test_medusa_heads_compute_the_released_formula(tmp_path, embedded, own, file):
    """Of a file with five heads, whose configuration says two, as the released ones do."""
    model, _, _ = embedded
    tensors = medusa_tensors(5, own)
    heads = medusa.load_heads(write(tmp_path, MEDUSA_CONFIG, tensors, file), "medusa", model)
    heads.requires_grad_(False)
    target = TimedLM(model, 1500)  # the last rows of the LM head stand for no token
    target.start(TEXT)
    f, guesses = target.features[-1:], []
    for k in range(5):
        x = f + F.silu(f @ tensors[f"{k}.0.linear.weight"].T + tensors[f"{k}.0.linear.bias"])
        head = tensors[f"{k}.1.weight"] if own else model.get_output_embeddings().weight
        close(heads.lm_head_of(k + 1)(heads(k + 1, f, None)), x @ head.T)
        guesses.append((x @ head.T)[0, :1500].topk(10).indices.tolist())
    assert heads.K == 5
    tree = medusa.plan_medusa_tree(heads, 0)
    ids = medusa.fill_tree(heads, target, f, 9, tree)
    assert ids == [9] + [guesses[node.depth - 1][node.rank] for node in tree[1:]]


# -------------------------------------------------------------------------- decoding with a head

def released_heads(folder: Path) -> dict:
    """Write a head of each kind for the embedded target; return methods with their options."""
    found = {}
    for name, (config, tensors, file) in {
            "eagle": (*EAGLE_HEADS["LLaMA3's"], "model.safetensors"),
            "eagle3": (*EAGLE3_HEADS["yuhuili's"], "model.safetensors"),
            "medusa": (MEDUSA_CONFIG, None, "medusa_lm_head.pt")}.items():
        make = {"eagle": eagle_tensors, "eagle3": eagle3_tensors}.get(name)
        (folder / name).mkdir()
        found[name] = write(folder / name, config, make(**tensors) if make else
                            medusa_tensors(3, True), file)
    return found


METHODS = {"eagle": eagle.eagle, "eagle3": eagle3.eagle3, "medusa": medusa.medusa}


@pytest.mark.parametrize("name", METHODS)
def test_a_released_head_decodes_with_the_released_tree(tmp_path, embedded, held_out, name):
    """Nobody has measured it, so no clock runs. The text is the target's own."""
    target, log = TimedLM(embedded[0]), []
    adapter = released_heads(tmp_path)[name]
    for prompt, expected in held_out[:2]:
        chunks = METHODS[name](target, prompt, adapter=adapter, log=log)
        assert tokens_of(chunks, len(expected[:12])) == expected[:12]
    whole = {"eagle": 59, "eagle3": 59, "medusa": 61}[name]  # two of 63 are of head 4
    assert {record["guessed"] for record in log} == {whole}
    assert not any("row costs" in str(key) for key in target.memo)
    log.clear()
    next(METHODS[name](target, held_out[0][0], adapter=adapter, nodes=7, log=log))
    assert log[0]["guessed"] == 6


def test_the_tree_of_a_layer_that_nobody_has_measured():
    """As in the released code: ten nodes of each of seven levels below the root get ten children,
    and the likeliest 59 of all stay."""
    model = tiny("llama", vocab_size=200)
    draft = eagle.EagleLayer(model, config=make_config(model), bias=False)
    for p in draft.trainable().values():
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))) / 4
    target, lm = TimedLM(model), TimedLM(draft.lm)
    target.start(TEXT[1:2] * 3)
    pairs = Pairs(target.features, [4, 4, 9])
    rows = []
    forward = lm.forward
    lm.forward = lambda ids, *args, **how: rows.append(len(ids)) or forward(ids, *args, **how)
    lm.start([])
    n, levels, dynamic = eagle.plan_eagle_tree(draft, 0, False)
    ids, parents = eagle.grow_eagle(draft, lm, [pairs], 9, n, levels, dynamic)
    assert dynamic and rows == [3] + [10] * 7 and len(ids) == len(parents) == 60

    def expand(path: list[int], chance: float, hidden: list) -> list[tuple]:
        """Guess the ten likeliest children of a node by a draft that is fed its whole path."""
        lm = TimedLM(draft.lm)
        lm.start([])
        lm.forward(draft.join(*pairs))
        for token in path:
            lm.forward(draft.join(*Pairs(lm.features[-1:], [token])))
        logits = draft.lm.get_output_embeddings()(lm.features[-1])
        values, tokens = logits.softmax(-1).topk(10)
        return [(chance * p, path + [x]) for p, x in zip(values.tolist(), tokens.tolist())]
    nodes = newest = expand([], 1.0, [])
    for _ in range(7):
        best = sorted(newest, key=lambda node: -node[0])[:10]
        newest = [child for chance, path in best for child in expand(path, chance, [])]
        nodes = nodes + newest
    expected = sorted(nodes, key=lambda node: -node[0])[:59]
    paths = {0: []}
    for i in range(1, 60):
        paths[i] = paths[parents[i]] + [ids[i]]
    assert {*map(tuple, paths.values())} - {()} == {tuple(path) for _, path in expected}


def test_the_tree_of_heads_that_nobody_has_measured(embedded):
    heads = medusa.Heads(embedded[0], "medusa", 5)

    def words(nodes: list) -> list[str]:
        found = [""]
        for node in nodes[1:]:
            found.append(found[node.parent] + str(node.rank))
            assert len(found[-1]) == node.depth
        return found[1:]
    assert words(medusa.plan_medusa_tree(heads, 0)) == MEDUSA_TREE
    assert len({*MEDUSA_TREE}) == 63
    assert words(medusa.plan_medusa_tree(heads, 5)) == ["0", "00", "1", "01"]
    heads.K = 2
    expected = [x for x in MEDUSA_TREE if len(x) < 3]
    assert words(medusa.plan_medusa_tree(heads, 0)) == expected


@pytest.mark.parametrize("name", METHODS)
def test_what_is_measured_plans_the_tree(tmp_path, embedded, name):
    model, _, tokenizer = embedded
    adapter = released_heads(tmp_path)[name]
    module = {"eagle": eagle, "eagle3": eagle3, "medusa": medusa}[name]
    module.measure(model, tokenizer, [TEXT, TEXT[::-1]], adapter=Path(adapter),
                   out=tmp_path / "a.json", max_new_tokens=12)
    table = json.loads((tmp_path / "a.json").read_text())["accept"]
    assert len(table) == {"eagle": 8, "eagle3": 8, "medusa": 3}[name]
    target, file = TimedLM(model), str(tmp_path / "a.json")
    next(METHODS[name](target, TEXT, adapter=adapter, accept=file, nodes=4))
    part = target.memo[name, adapter]
    assert target.memo[part, "accept", file].accept == table and part.accept == []
    facts = json.loads((tmp_path / "a.json").read_text())
    head = facts["head"]
    turned = [[-x for x in row] for row in facts["model"]]
    for change, said in (({"model": turned}, "another model's"),
                         ({"head": head[:-1]}, "another head's"),
                         ({"head": [x * 1.1 for x in head]}, "another head's")):
        (tmp_path / "b.json").write_text(json.dumps(facts | change))
        with pytest.raises(InputError, match=f"what `measure` wrote for this .*: {said}"):
            load_accept(tmp_path / "b.json", model, part)
    del facts["head"]
    (tmp_path / "b.json").write_text(json.dumps(facts))
    for other, said in (str(tmp_path / "b.json"), "it has no 'head'"), (adapter, "is a folder"):
        with pytest.raises(InputError, match=f"wrote for this model and this head, .*{said}"):
            next(METHODS[name](target, TEXT, adapter=adapter, accept=other))


def test_a_whole_model_of_medusa_2_is_the_target_and_has_the_heads(tmp_path, small_llama):
    model = load(small_llama, "cpu", "float32")[0]
    tensors = {f"medusa_head.{name}": x[:32, :32] if x.ndim == 2 else x[:32]
               for name, x in medusa_tensors(2, False).items()}
    whole = {name: x.clone() for name, x in model.state_dict().items()
             if name != "lm_head.weight"}
    folder = write(tmp_path, {}, whole | tensors)
    heads = medusa.load_heads(folder, "medusa", model)
    assert torch.equal(heads.W[1].weight, tensors["medusa_head.1.0.linear.weight"])
    write(tmp_path, {}, whole | tensors | {"more.weight": torch.ones(3)})
    with pytest.raises(InputError, match="more.weight"):
        medusa.load_heads(folder, "medusa", model)


# ---------------------------------------------------------------------------- there and back again

MODEL = tiny("llama", num_hidden_layers=3)
HALF = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def fill_randomly(part: torch.nn.Module, names: dict) -> None:
    rng = torch.Generator().manual_seed(0)
    for p in names.values():
        x = torch.randn(p.shape, generator=rng)
        p.data = (1 + 0.3 * x if p.ndim == 1 else 0.3 * x).bfloat16().float()
    part.accept = [[0.5, 0.3, 0.1]] * 2


def guess_with(draft) -> torch.Tensor:
    target, lm = TimedLM(MODEL), TimedLM(draft.lm)
    target.start(HALF[:-1])
    lm.start([])
    return lm.forward(draft.join(*Pairs(target.features, HALF[1:])))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_exported_eagle_layer_is_loaded_bit_for_bit(tmp_path, engine):
    draft = eagle.EagleLayer(MODEL, config=make_config(MODEL, 24), bias=False)
    fill_randomly(draft, draft.trainable())
    eagle.save_draft(tmp_path / "part", draft, MODEL)
    assert torch.equal(guess_with(eagle.load_draft(tmp_path / "part", MODEL)), guess_with(draft))
    eagle.export(MODEL, None, adapter=tmp_path / "part", out=tmp_path / "a", engine=engine)
    again = eagle.load_draft(tmp_path / "a", MODEL)
    assert torch.equal(guess_with(again), guess_with(draft))
    assert tokens_of(eagle.eagle(TimedLM(MODEL), HALF, nodes=9, trained=again), 20) == \
        tokens_of(autoregressive(TimedLM(MODEL), HALF), 20)
    eagle.export(MODEL, None, adapter=tmp_path / "a", out=tmp_path / "b", engine="sglang")
    assert torch.equal(guess_with(eagle.load_draft(tmp_path / "b", MODEL)), guess_with(draft))


def test_an_exported_eagle_layer_is_what_engines_read(tmp_path):
    draft = eagle.EagleLayer(MODEL, config=make_config(MODEL, 24), bias=False)
    fill_randomly(draft, draft.trainable())
    eagle.save_draft(tmp_path / "part", draft, MODEL)
    names = {"embed_tokens.weight", "fc.weight", "layers.0.post_attention_layernorm.weight",
             *(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
             *(f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))}
    for engine, architecture, more in (("vllm", "LlamaForCausalLM", set()),
                                       ("sglang", "LlamaForCausalLMEagle", {"fc.bias"})):
        eagle.export(MODEL, None, adapter=tmp_path / "part", out=tmp_path / engine, engine=engine)
        tensors = load_file(tmp_path / engine / "model.safetensors")
        config = json.loads((tmp_path / engine / "config.json").read_text())
        assert {*tensors} == names | more and config["architectures"] == [architecture]
        assert config["bias"] is False and config["tie_word_embeddings"] is False
        assert config["num_hidden_layers"] == 1 and config["rope_theta"] == 10000.0
        assert not tensors.get("fc.bias", torch.zeros(1)).any()
        assert tensors["fc.weight"].shape == (32, 64)


def test_what_no_engine_would_read_is_not_exported(tmp_path):
    """A layer with an input norm, a bias that vLLM drops, biases of queries, few tokens."""
    def refuse(draft, said: str, engine: str = "vllm") -> None:
        fill_randomly(draft, draft.trainable())
        eagle.save_draft(tmp_path / "part", draft, MODEL)
        with pytest.raises(InputError, match=said):
            eagle.export(MODEL, None, adapter=tmp_path / "part", out=tmp_path / "a", engine=engine)
    plain, config = eagle.EagleLayer(MODEL), make_config(MODEL)
    refuse(plain, "must be a layer trained with --released")
    refuse(eagle.EagleLayer(MODEL, config=config), "--engine must be sglang for a head whose fc")
    few = eagle.EagleLayer(MODEL, config=config, bias=False)
    refuse(few, "--engine must be vllm or sglang", "x")
    few.keep([*range(0, 61, 2)])
    refuse(few, "must guess all tokens")
    biased = read_layer_config("x", config.to_dict(), MODEL)
    biased.attention_bias = True
    refuse(eagle.EagleLayer(MODEL, config=biased, bias=False),
           "must be a layer trained with --released")
    heads = medusa.Heads(MODEL, "medusa", 2)
    heads.keep([*range(9)])
    heads.accept = [[0.5]] * 2
    medusa.save_heads(tmp_path / "heads", heads, MODEL)
    with pytest.raises(InputError, match="must guess all tokens"):
        medusa.export(MODEL, None, adapter=tmp_path / "heads", out=tmp_path / "b")


def test_the_released_form_begins_at_random():
    with pytest.raises(InputError, match="--begin must be random with --released, got last"):
        eagle.EagleLayer(MODEL, "last", config=make_config(MODEL))


def test_a_scaled_head_is_exported_with_its_scaling(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    shape = make_config(MODEL).to_dict() | dict(rope_theta=50.0, rope_scaling=scaling)
    config = read_layer_config("x", shape | dict(rope_parameters=None), MODEL)
    draft = eagle.EagleLayer(MODEL, config=config, bias=False)
    fill_randomly(draft, draft.trainable())
    eagle.save_draft(tmp_path / "part", draft, MODEL)
    eagle.export(MODEL, None, adapter=tmp_path / "part", out=tmp_path / "a")
    again = eagle.load_draft(tmp_path / "a", MODEL)
    plain = 50.0 ** (-torch.arange(0, 8, 2) / 8)
    for one in (draft, again):
        assert not torch.allclose(one.lm.model.rotary_emb.inv_freq, plain)
    assert torch.equal(guess_with(draft), guess_with(again))
    told = json.loads((tmp_path / "a" / "config.json").read_text())
    assert told["rope_theta"] == 50.0 and told["rope_scaling"].items() >= scaling.items()


@pytest.mark.parametrize("own", [False, True], ids=["the target's LM head", "own LM heads"])
def test_exported_medusa_heads_are_loaded_bit_for_bit(tmp_path, own):
    heads = medusa.Heads(MODEL, "medusa", 3, own=own)
    fill_randomly(heads, heads.trainable())
    shapes = {"0.0.linear.weight": (32, 32), "2.0.linear.bias": (32,)}
    if own:
        source = tmp_path / "source"
        source.mkdir()
        write(source, {}, medusa.name_released(heads))
        shapes |= {"2.1.weight": (61, 32)}
    else:
        source = tmp_path / "part"
        medusa.save_heads(source, heads, MODEL)
    medusa.export(MODEL, None, adapter=source, out=tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "medusa_lm_head.safetensors")
    assert shapes.items() <= {name: (*x.shape,) for name, x in tensors.items()}.items()
    assert len(tensors) == 9 if own else 6
    told = json.loads((tmp_path / "a" / "config.json").read_text())
    assert told["medusa_num_heads"] == 3 and told["medusa_num_layers"] == 1
    again, target = medusa.load_heads(tmp_path / "a", "medusa", MODEL), TimedLM(MODEL)
    heads.requires_grad_(False)
    again.requires_grad_(False)
    target.start(HALF)
    tree = medusa.plan_medusa_tree(heads, 12)
    f = target.features[-1:]
    for k in (1, 2, 3):
        assert torch.equal(*(x.lm_head_of(k)(x(k, f, None)) for x in (heads, again)))
    ids = medusa.fill_tree(heads, target, f, 5, tree)
    assert ids == medusa.fill_tree(again, target, f, 5, tree)


def test_an_exported_tuning_is_a_model_of_its_own(tmp_path, small_llama, capsys):
    model, tokenizer = load(small_llama, "cpu", "float32")
    changes = add_low_rank(load(small_llama, "cpu", "float32")[0], 2)
    for i, p in enumerate(changes.values()):
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 9
    save_part(tmp_path / "part", "a LayerSkip tuning", model, changes, E=1, rank=2)
    layerskip.export(model, tokenizer, tuning=tmp_path / "part", out=tmp_path / "a")
    assert f"--target {tmp_path / 'a'} --tuning \"\" --E 1" in capsys.readouterr().out
    again, tuned = load(str(tmp_path / "a"), "cpu", "float32")[0], load_tuned(
        tmp_path / "part", model)[0]
    for name, x in tuned.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name
    assert not torch.equal(again.model.layers[0].mlp.up_proj.weight,
                           model.model.layers[0].mlp.up_proj.weight)
    texts = [tokens_of(layerskip.layerskip(TimedLM(lm), HALF, tuning=file, E=1), 20)
             for lm, file in ((again, ""), (model, str(tmp_path / "part")))]
    assert texts[0] == texts[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "a").get_vocab() == tokenizer.get_vocab()
    told = (tmp_path / "a" / "config.json").read_text()
    assert "grouped" not in told and AutoModelForCausalLM.from_pretrained(tmp_path / "a")


# -------------------------------------------------------------------------- what is not accepted

def hydra_tensors() -> dict:
    return draw({"hydra_mlp.0.1.linear.weight": (8, 16), "hydra_lm_head.0.1.weight": (9, 8),
                 "prefix_embeding_layer.norm.weight": (8,)})


def other_table() -> torch.Tensor:
    return torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(5))


KINDS = {"eagle": lambda: eagle_tensors(2, True), "eagle3": lambda: eagle3_tensors(512),
         "medusa": lambda: medusa_tensors(2, True)}
REFUSED = [  # a file of survey/, the kind of head that it gets, changes of its tensors, the message
    ("medusa", hydra_tensors, {}, "must be Medusa heads, got .*, a file without a head"),
    ("eagle", KINDS["eagle3"], {}, "must be an EAGLE head, got .*, an EAGLE-3 head"),
    ("eagle", KINDS["medusa"], {}, "must be an EAGLE head, got .*, Medusa heads"),
    ("eagle3", KINDS["eagle"], {}, "must be an EAGLE-3 head, got .*, an EAGLE head"),
    ("medusa", KINDS["eagle"], {}, "must be Medusa heads, got .*, an EAGLE head"),
    ("eagle", lambda: draw(layer_shapes("model.layers.0.", 8, 2)), {}, "a file without a head"),
    ("eagle", KINDS["eagle"], {"layers.0.input_layernorm.weight": torch.ones(WIDTH)},
     "expected tensors {}, got .* with {'layers.0.input_layernorm.weight'"),
    ("eagle", KINDS["eagle"], {"layers.0.mlp.up_proj.weight": None}, "expected tensors {'layers"),
    ("eagle", KINDS["eagle"], {"fc.weight": torch.ones(WIDTH, WIDTH)}, "expected tensors {'fc.wei"),
    ("eagle", KINDS["eagle"], {"fc.bias": torch.full((WIDTH,), torch.nan)}, "finite numbers"),
    ("eagle", KINDS["eagle"], {"hidden_size": 128}, "for features of width 256, got .* for 128"),
    ("eagle", KINDS["eagle"], {"layers.1.mlp.up_proj.weight": torch.ones(9)},
     "a head of one layer, got .* with layers.0, layers.1$"),
    ("eagle3", KINDS["eagle3"], {"layers.1.mlp.up_proj.weight": torch.ones(9)},
     "a head of one layer, got .* with layers.1, midlayer$"),
    ("eagle", KINDS["eagle"], {"hidden_act": "gelu"}, "a head without hidden_act, got .* gelu"),
    ("eagle", KINDS["eagle"], {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "of type def"),
    ("eagle", KINDS["eagle"], {"embed_tokens.weight": other_table()}, "another's"),
    ("eagle", KINDS["eagle"], {"embed_tokens.weight": other_table().to(torch.int8)}, "of torch.in"),
    ("eagle", KINDS["eagle"], {"embed_tokens.weight": other_table()[:99]}, "gs of 1536 tok"),
    ("eagle3", KINDS["eagle3"], {"embed_tokens.weight": other_table()}, "another's"),
    ("medusa", KINDS["medusa"], {"0.1.weight": torch.ones(99, WIDTH)}, "{'0.1.weight': .1536, 2"),
    ("medusa", KINDS["medusa"], {"1.1.weight": None}, "expected tensors {'1.1.weight'"),
    ("medusa", KINDS["medusa"], {"0.1.linear.weight": torch.ones(9, 9)}, "expected tensors {}"),
    ("medusa", KINDS["medusa"], {"more": torch.ones(9)}, "expected tensors {}, got .* {'more'"),
]
LOADERS = {"eagle": eagle.load_draft, "eagle3": eagle3.load_draft,
           "medusa": lambda path, model: medusa.load_heads(path, "medusa", model)}


@pytest.mark.parametrize("name, make, changes, said", REFUSED)
def test_a_head_that_would_be_misread_is_refused(tmp_path, embedded, name, make, changes, said):
    tensors, config = make(), GROUPS | {}
    for key, value in changes.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif key in tensors:
            del tensors[key]
        else:
            config[key] = value
    with pytest.raises(InputError, match=said):
        LOADERS[name](write(tmp_path, config, tensors), embedded[0])


def test_the_targets_own_table_in_a_head_is_shared_and_a_tuned_one_is_kept(tmp_path, embedded):
    model = embedded[0]
    own = model.get_input_embeddings()
    for change, shared in ((0.0, True), (1e-3, False)):
        tensors = eagle_tensors(2, True) | {"embed_tokens.weight": own.weight.detach() + change}
        draft = eagle.load_draft(write(tmp_path, GROUPS, tensors), model)
        assert (draft.lm.get_input_embeddings() is own) == shared
        row = draft.lm.get_input_embeddings().weight[7]
        assert torch.equal(row, tensors["embed_tokens.weight"][7])


def test_released_heads_of_hydra_are_refused(tmp_path, embedded):
    with pytest.raises(InputError, match="--heads must be medusa for released heads, got hydra"):
        medusa.load_heads(write(tmp_path, {}, medusa_tensors(2, True)), "hydra", embedded[0])


def test_the_command_line_says_in_one_line_what_it_refuses(tmp_path, capfd):
    shutil.copy(ROOT / "models/target/config.json", tmp_path)
    torch.save(hydra_tensors(), tmp_path / "medusa_lm_head.pt")
    assert script("survey.medusa", "--adapter", str(tmp_path), "--prompt", "a", "--device",
                  "cpu") == 2
    said_in_one_line("a file without a head that is known here", capfd)
    (tmp_path / "config.json").unlink()
    assert script("survey.eagle3", "--adapter", str(tmp_path), "--prompt", "a", "--device",
                  "cpu") == 2
    said_in_one_line(f"got '{tmp_path}': there is no config.json", capfd)


def test_a_file_that_is_missing_is_not_looked_for_on_the_hub(monkeypatch):
    monkeypatch.setattr("training.released.cached_file", None)
    for load_part in LOADERS.values():
        with pytest.raises(InputError, match="No such file"):
            load_part("gone.safetensors", MODEL)
