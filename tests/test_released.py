"""Heads in the forms that others have released. KINDS is the table. The passes of each kind are its
released formula, written out here, for the embedded target; what is exported is loaded bit for bit;
and a head that would be misread is refused."""
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Callable, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from cli.run import TimedLM
from common import InputError, load
from families import tiny
from helpers import ROOT, said_in_one_line, script, tokens_of
from survey import eagle, eagle3, layerskip, medusa
from survey.eagle import Pairs
from training.low_rank import add_low_rank
from training.parts import save_part
from training.released import (MEDUSA_TREE, load_accept, make_config, read_layer_config,
                               read_released)

TEXT = [31, 4, 159, 26, 535, 89, 793, 238, 46, 264, 33, 83]
WIDTH, V, D = 256, 1536, 512  # of the embedded target, and how many tokens some heads can guess
SHAPE = dict(hidden_size=WIDTH, intermediate_size=96, num_attention_heads=4, rms_norm_eps=1e-3,
             num_hidden_layers=1, vocab_size=V, max_position_embeddings=9, hidden_act="silu")
GROUPS = SHAPE | dict(num_key_value_heads=2)
MEDUSA = {"base_model_name_or_path": "x", "medusa_num_heads": 2, "medusa_num_layers": 1}


# --------------------------------------------------------------------------- the written formulas

def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()


def rotate(x: torch.Tensor, base: float, factor: float) -> torch.Tensor:
    """Turn [n, heads, d] by rotary positions 0, 1, …, which a linear scaling divides."""
    n, _, d = x.shape
    angles = torch.arange(n)[:, None] / factor * base ** (-torch.arange(0, d, 2) / d)
    cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1) * sin


def attend(w: dict, x: torch.Tensor, config: dict) -> torch.Tensor:
    """Compute causal attention of a chain of rows [n, ·] with 4 heads."""
    base = config.get("rope_theta") or 10000.0
    factor = (config.get("rope_scaling") or {"factor": 1.0})["factor"]
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
    return x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def layer_of(w: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): x for name, x in w.items()}


def eagle_step(w: dict, e: torch.Tensor, f: torch.Tensor, config: dict, head) -> tuple:
    """Compute EAGLE's features and logits: no input norm, no final norm, the target's LM head."""
    layer = layer_of(w, "layers.0.")
    x = torch.cat([e, f], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
    x = run_mlp(layer, x + attend(layer, x, config))
    return x, head(x)


def eagle3_step(w: dict, e: torch.Tensor, g: torch.Tensor, config: dict, _) -> tuple:
    """Compute what EAGLE-3's next level reads, and logits over the draft's own tokens."""
    layer = layer_of(w, "midlayer.")
    normed = norm(g, layer["hidden_norm.weight"])
    x = torch.cat([norm(e, layer["input_layernorm.weight"]), normed], -1)
    residual = normed if config.get("norm_before_residual") else g
    x = run_mlp(layer, residual + attend(layer, x, config))
    y = norm(x, w["norm.weight"])
    return (y if config.get("norm_output") else x), y @ w["lm_head.weight"].T


def fuse(w: dict, taps: torch.Tensor) -> torch.Tensor:
    """Compute EAGLE-3's g of the three tapped streams, each of which may have a norm."""
    each = [norm(x, w[f"fc_norm.{i}.weight"]) if f"fc_norm.{i}.weight" in w else x
            for i, x in enumerate(taps.chunk(3, -1))]
    return torch.cat(each, -1) @ w["fc.weight"].T


# --------------------------------------------------------------------------------- random heads

def draw(shapes: dict, seed: int = 0) -> dict:
    """Draw tensors: matrices that keep the size of what they read, and norms near 1."""
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) / shape[-1] ** 0.5 if len(shape) == 2 else
            (0.0 if name.endswith("bias") else 1.0) + 0.3 * torch.randn(shape, generator=rng)
            for name, shape in shapes.items()}


def layer_shapes(prefix: str, reads: int, kv: int = 2, biases: str = "") -> dict:
    """Return the shapes of a layer of 4 heads, whose queries, keys and values read so much."""
    rows = dict(q=WIDTH, k=kv * WIDTH // 4, v=kv * WIDTH // 4, o=WIDTH)
    names = {f"self_attn.{x}_proj.weight": (n, WIDTH if x == "o" else reads)
             for x, n in rows.items()}
    names |= {f"self_attn.{x}_proj.bias": (rows[x],) for x in biases}
    names |= {f"mlp.{x}_proj.weight": (96, WIDTH) for x in ("gate", "up")}
    names |= {"mlp.down_proj.weight": (WIDTH, 96), "post_attention_layernorm.weight": (WIDTH,)}
    return {prefix + name: shape for name, shape in names.items()}


def eagle_tensors(kv: int = 2, bias: bool = False, biases: str = "") -> dict:
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), **({"fc.bias": (WIDTH,)} if bias else {})}
    return draw(shapes | layer_shapes("layers.0.", WIDTH, kv, biases))


def eagle3_tensors(tokens: int = D, norms: bool = False) -> dict:
    shapes = {"fc.weight": (WIDTH, 3 * WIDTH), "midlayer.hidden_norm.weight": (WIDTH,),
              "midlayer.input_layernorm.weight": (WIDTH,), "norm.weight": (WIDTH,),
              "lm_head.weight": (tokens, WIDTH)}
    shapes |= {f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)} if norms else {}
    tensors = draw(shapes | layer_shapes("midlayer.", 2 * WIDTH))
    if tokens < V:
        tensors |= {"d2t": 2 * torch.arange(tokens), "t2d": torch.arange(V) % 3 == 0}
    return tensors


def medusa_tensors(K: int = 3, own: bool = True, h: int = WIDTH, prefix: str = "") -> dict:
    shapes = {}
    for k in range(K):
        shapes |= {f"{prefix}{k}.0.linear.weight": (h, h), f"{prefix}{k}.0.linear.bias": (h,)}
        shapes |= {f"{prefix}{k}.1.weight": (V, h)} if own else {}
    return draw(shapes)


class Kind(NamedTuple):
    module: ModuleType
    load: Callable
    save: Callable
    names: Callable  # its weights by the names of the released files
    config: dict
    tensors: Callable
    guesses: int  # in the released tree
    levels: int  # of the measured table
    step: Callable | None = None
    taps: tuple = ()  # what is read of transformers' own `output_hidden_states`


KINDS = {
    "eagle": Kind(eagle, eagle.load_draft, eagle.save_draft, eagle.name_released, GROUPS,
                  eagle_tensors, 59, 8, eagle_step, (12,)),
    "eagle3": Kind(eagle3, eagle3.load_draft, eagle3.save_draft, eagle3.Eagle3Layer.parts, GROUPS,
                   eagle3_tensors, 59, 8, eagle3_step, (2, 6, 9)),  # of L = 12: 2, L/2 and L - 3
    "medusa": Kind(medusa, lambda path, model: medusa.load_heads(path, "medusa", model),
                   medusa.save_heads, medusa.name_released, MEDUSA, medusa_tensors,
                   61, 3)}  # two of 63 guesses are of head 4


def write(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> str:
    """Write a head as others release it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")  # as Windows does
    if file.endswith("safetensors"):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)


# ------------------------------------------------------------------------- the passes of a head

ZEROS = torch.zeros(D, dtype=torch.int64)
HEADS = {  # kind, configuration, arguments of the tensors, changes of them; some file is pickled
    "Vicuna's": ("eagle", SHAPE | dict(num_hidden_layers=40), dict(kv=4, bias=True), {}),
    "LLaMA3's": ("eagle", GROUPS | dict(rope_theta=500000.0, bias=False), {}, {}),
    "Qwen2's": ("eagle", GROUPS | dict(qkv_bias=True), dict(bias=True, biases="qkv"), {}),
    "all biases": ("eagle", SHAPE | dict(attention_bias=True), dict(kv=4, biases="qkvo"), {}),
    "scaled": ("eagle", GROUPS | dict(rope_scaling={"type": "linear", "factor": 4.0}), {}, {}),
    "yuhuili's": ("eagle3", GROUPS | dict(draft_vocab_size=D, num_hidden_layers=40), {}, {}),
    "all tokens": ("eagle3", GROUPS | dict(rope_theta=500000.0), dict(tokens=V), {}),
    "speculators'": ("eagle3", {"transformer_layer_config": GROUPS}, {}, {}),
    "3.1": ("eagle3", GROUPS | dict(fc_norm=True, norm_output=True), dict(norms=True), {}),
    "t2d alone": ("eagle3", GROUPS, {}, {"d2t": None}), "d2t of zeros": (
        "eagle3", GROUPS, {}, {"d2t": ZEROS}), "d2t alone": ("eagle3", GROUPS, {}, {"t2d": None}),
    "t2d of zeros": ("eagle3", GROUPS, {}, {"t2d": torch.zeros(V)})}


def changed(tensors: dict, changes: dict) -> dict:
    return {name: x for name, x in (tensors | changes).items() if x is not None}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", HEADS)
def test_a_layer_computes_the_released_formula(tmp_path, embedded, name, file):
    """On a chain of rows, and on a drafted row, which reads what the chain made."""
    kind, config, how, changes = HEADS[name]
    model, w = embedded[0], KINDS[kind].tensors(**how)
    names = {x: x.replace("midlayer", "layers.0") if file[0] == "p" else x for x in w}  # as vLLM's
    given = changed({names[x]: y for x, y in w.items()}, changes)
    draft = KINDS[kind].load(write(tmp_path, config, given, file), model)
    hidden = model(torch.tensor([TEXT[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([hidden[i][0] for i in KINDS[kind].taps], -1)
    g = fuse(w, features) if kind == "eagle3" else features
    flat = config | config.get("transformer_layer_config", {})
    flat.setdefault("norm_before_residual", "transformer_layer_config" in config)

    def step(tokens, read):
        e = model.get_input_embeddings().weight[tokens]
        return KINDS[kind].step(w, e, read, flat, model.get_output_embeddings())
    a, expected = step(TEXT[1:], g)
    lm = TimedLM(draft.lm)
    lm.start([])
    close(lm.forward(draft.join(*Pairs(features, TEXT[1:]))), expected)
    close(lm.features, a)
    drafted = lm.forward(draft.join(*Pairs(lm.features[-1:], [7])))
    b, expected = step([*TEXT[1:], 7], torch.cat([g, a[-1:]]))
    close(drafted, expected[-1:])
    close(lm.features, b[-1:])
    few = kind == "eagle3" and len(draft.vocab) < V
    assert draft.vocab.tolist() == [*range(0, V, 3 if few else 1)]
    assert draft.config.max_position_embeddings == model.config.max_position_embeddings


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("own", [True, False], ids=["own LM heads", "the target's LM head"])
def test_medusa_heads_compute_the_released_formula(tmp_path, embedded, own, file):
    """Of a file with five heads, whose configuration says two, as the released ones do."""
    model, w = embedded[0], medusa_tensors(5, own)
    heads = KINDS["medusa"].load(write(tmp_path, MEDUSA, w, file), model).requires_grad_(False)
    target, guesses = TimedLM(model, 1500), []  # the last rows of the LM head stand for no token
    target.start(TEXT)
    f = target.features[-1:]
    for k in range(5):
        x = f + F.silu(f @ w[f"{k}.0.linear.weight"].T + w[f"{k}.0.linear.bias"])
        logits = x @ (w[f"{k}.1.weight"] if own else model.get_output_embeddings().weight).T
        close(heads.lm_head_of(k + 1)(heads(k + 1, f, None)), logits)
        guesses.append(logits[0, :1500].topk(10).indices.tolist())
    tree, words = medusa.plan_medusa_tree(heads, 0), [""]
    ids = medusa.fill_tree(heads, target, f, 9, tree)
    assert ids == [9] + [guesses[node.depth - 1][node.rank] for node in tree[1:]]
    for node in tree[1:]:
        words.append(words[node.parent] + str(node.rank))
        assert len(words[-1]) == node.depth
    assert words[1:] == MEDUSA_TREE and len({*words}) == 64 and heads.K == 5


def test_a_whole_model_of_medusa_2_is_the_target_and_has_the_heads(tmp_path, small_llama):
    model = load(small_llama, "cpu", "float32")[0]
    heads = medusa_tensors(2, False, 32, "medusa_head.")
    whole = {name: x.clone() for name, x in model.state_dict().items() if name != "lm_head.weight"}
    part = KINDS["medusa"].load(write(tmp_path, {}, whole | heads), model)
    assert torch.equal(part.W[1].weight, heads["medusa_head.1.0.linear.weight"])
    with pytest.raises(InputError, match="more.weight"):
        more = whole | heads | {"more.weight": torch.ones(3)}
        KINDS["medusa"].load(write(tmp_path, {}, more), model)


# -------------------------------------------------------------------------- decoding with a head

@pytest.mark.parametrize("name", KINDS)
def test_a_head_decodes_with_the_released_tree_until_it_is_measured(tmp_path, embedded, held_out,
                                                                    name):
    """Before that no clock runs. A table is that of one model and of one head."""
    kind, (model, _, tokenizer), log, file = KINDS[name], embedded, [], tmp_path / "a.json"
    method = vars(kind.module)[name]
    target, adapter = TimedLM(model), write(tmp_path / "head", kind.config, kind.tensors())
    for prompt, expected in held_out[:2]:
        chunks = method(target, prompt, adapter=adapter, log=log)
        assert tokens_of(chunks, len(expected[:12])) == expected[:12]
    assert {record["guessed"] for record in log} == {kind.guesses}
    assert not any("row costs" in str(key) for key in target.memo)
    next(method(target, TEXT, adapter=adapter, nodes=7, log=log))
    assert log[-1]["guessed"] == 6
    kind.module.measure(model, tokenizer, [TEXT, TEXT[::-1]], adapter=Path(adapter), out=file,
                 max_new_tokens=12)
    facts = json.loads(file.read_text())
    assert len(facts["accept"]) == kind.levels
    next(method(target, TEXT, adapter=adapter, accept=str(file), nodes=4))
    part = target.memo[name, adapter]
    assert target.memo[part, "accept", str(file)].accept == facts["accept"] and part.accept == []
    for change, said in (({"model": [[-x for x in row] for row in facts["model"]]}, "another mod"),
                         ({"head": facts["head"][:-1]}, "another head's"),
                         ({"head": [x * 1.1 for x in facts["head"]]}, "another head's"),
                         ({"head": [x * 1.01 for x in facts["head"]]}, "")):  # as of a half type
        file.write_text(json.dumps(facts | change))
        if not said:
            assert load_accept(str(file), model, part) == facts["accept"]
            continue
        with pytest.raises(InputError, match=f"what `measure` wrote for this .*: {said}"):
            load_accept(str(file), model, part)


# ---------------------------------------------------------------------------- there and back again

MODEL = tiny("llama", num_hidden_layers=7)
HALF = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}


def scaled_config():
    shape = make_config(MODEL).to_dict() | dict(rope_theta=50.0, rope_scaling=SCALING)
    return read_layer_config("x", shape | dict(rope_parameters=None), MODEL)


def make_eagle3(vocab=range(61), **form):
    return eagle3.Eagle3Layer(MODEL, make_config(MODEL, 24), [2, 3, 4], vocab, eagle3.Form(**form))


PARTS = {  # kind, part, options of the export, and what engines read besides the part's own weights
    "eagle": ("eagle", lambda: eagle.EagleLayer(MODEL, make_config(MODEL, 24)),
              {}, {"embed_tokens.weight": (61, 32)}),
    "eagle, SGLang": ("eagle", lambda: eagle.EagleLayer(MODEL), dict(engine="sglang"),
                      {"embed_tokens.weight": (61, 32), "fc.bias": (32,)}),
    "eagle, scaled": ("eagle", lambda: eagle.EagleLayer(MODEL, scaled_config()), {},
                      {"embed_tokens.weight": (61, 32)}),
    "eagle3": ("eagle3", lambda: make_eagle3(vocab=range(1, 61, 2)), {},
               {"d2t": (30,), "t2d": (61,)}),
    "eagle3, normed residual": ("eagle3", lambda: make_eagle3(norm_before_residual=True), {}, {}),
    "eagle3.1": ("eagle3", lambda: make_eagle3(fc_norm=True, norm_output=True), {}, {}),
    "medusa": ("medusa", lambda: medusa.Heads(MODEL, "medusa", 3), {}, {}),
    "medusa, own": ("medusa", lambda: medusa.Heads(MODEL, "medusa", 3, own=True), {}, {})}
TOLD = {  # of the configurations
    "eagle": dict(architectures=["LlamaForCausalLM"], bias=False, num_hidden_layers=1,
                  tie_word_embeddings=False, rope_theta=10000.0, vocab_size=61),
    "eagle, SGLang": dict(architectures=["LlamaForCausalLMEagle"]),
    "eagle, scaled": dict(rope_theta=50.0, rope_scaling=SCALING | {"type": "llama3"}),
    "eagle3": dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=30),
    "medusa": dict(medusa_num_heads=3, medusa_num_layers=1)}


def save(folder: Path, name: str) -> tuple[Kind, torch.nn.Module]:
    """Make a part of PARTS with random weights, and its file, or its folder if it has no file."""
    kind, part = KINDS[PARTS[name][0]], PARTS[name][1]()
    rng = torch.Generator().manual_seed(0)
    for p in kind.names(part).values():
        x = (p.ndim == 1) + 0.3 * torch.randn(p.shape, generator=rng)
        p.data = x.bfloat16().float()
    part.accept = [[0.5, 0.3, 0.1]] * 3
    if name == "medusa, own":
        write(folder / "part", MEDUSA, {x: p.detach() for x, p in kind.names(part).items()})
    else:
        kind.save(folder / "part", part, MODEL)
    return kind, part


@pytest.mark.parametrize("name", PARTS)
def test_what_is_exported_is_loaded_bit_for_bit(tmp_path, name):
    """And exported once more; with names, shapes and settings that engines read, and no numbers of
    layers, which engines count in different ways."""
    kind, part = save(tmp_path, name)
    _, _, options, more = PARTS[name]
    for source, made in ("part", "a"), ("a", "b"):
        kind.module.export(MODEL, None, adapter=tmp_path / source, out=tmp_path / made, **options)
        again = kind.load(tmp_path / made, MODEL)
        for x, p in kind.names(part).items():
            assert torch.equal(kind.names(again)[x], p), x
        for x in {"form", "vocab"} & {*vars(part)}:
            assert str(getattr(again, x)) == str(getattr(part, x))
        told = json.loads((tmp_path / made / "config.json").read_text())
        [file] = (tmp_path / made).glob("*.safetensors")
        assert {x: (*y.shape,) for x, y in load_file(file).items()} == more | {
            x: (*p.shape,) for x, p in kind.names(part).items()}
        assert told.items() >= TOLD.get(name, {}).items()
        assert not any("layer_id" in x or x == "eagle_config" for x in told)
    if name == "eagle, scaled":
        assert again.config.rope_parameters == part.config.rope_parameters
        assert load_file(file)["embed_tokens.weight"].equal(MODEL.get_input_embeddings().weight)


FEW = {"vocab": torch.arange(0, 61, 2)}
NOT_EXPORTED = [  # a part of PARTS, what it has instead, options, the message
    ("eagle", FEW, {}, "must guess all tokens"), ("medusa", FEW, {}, "must guess all tokens"),
    ("eagle", {}, dict(engine="x"), "--engine must be vllm or sglang"),
    ("eagle3", dict(taps=[1, 3, 4]), {}, "which engines assume"),
    ("eagle3", dict(form=eagle3.Form(mtp=True)), {}, "must be trained without --mtp")]


@pytest.mark.parametrize("name, changes, options, said", NOT_EXPORTED)
def test_what_no_engine_would_read_is_not_exported(tmp_path, monkeypatch, name, changes, options,
                                                   said):
    kind, part = save(tmp_path, name)
    vars(part).update({x: y for x, y in changes.items() if x != "vocab"})
    part.vocab = changes.get("vocab", part.vocab)
    monkeypatch.setattr(kind.module, "load_heads" if name == "medusa" else "load_draft",
                        lambda *_: part)
    with pytest.raises(InputError, match=said):
        kind.module.export(MODEL, None, adapter=tmp_path / "part", out=tmp_path / "a", **options)


@pytest.mark.parametrize("how, said", [
    (dict(bias=True), "--engine must be sglang for a head whose fc has a bias"),
    (dict(biases="qkv"), "must be a layer without biases")])
def test_biases_are_not_exported_for_vllm(tmp_path, embedded, how, said):
    head = write(tmp_path / "head", GROUPS, eagle_tensors(**how))
    with pytest.raises(InputError, match=said):
        eagle.export(embedded[0], None, adapter=head, out=tmp_path / "a")


def test_an_exported_tuning_is_a_model_of_its_own(tmp_path, small_llama, capsys):
    model, tokenizer = load(small_llama, "cpu", "float32")
    changes = add_low_rank(load(small_llama, "cpu", "float32")[0], 2)
    for i, p in enumerate(changes.values()):
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 9
    save_part(tmp_path / "part", "a LayerSkip tuning", model, changes, E=1, rank=2)
    layerskip.export(model, tokenizer, tuning=tmp_path / "part", out=tmp_path / "a")
    assert f"--target {tmp_path / 'a'} --tuning \"\" --E 1" in capsys.readouterr().out
    again, its_tokenizer = load(str(tmp_path / "a"), "cpu", "float32")
    tuned = layerskip.load_tuned(tmp_path / "part", model)[0]
    for name, x in again.state_dict().items():
        assert torch.equal(tuned.state_dict()[name], x), name
        assert "mlp" not in name or not torch.equal(model.state_dict()[name], x), name
    assert its_tokenizer.get_vocab() == tokenizer.get_vocab()


# -------------------------------------------------------------------------- what is not accepted

OTHER = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(5))
ONES, NINE = torch.ones(9), {"lm_head.weight": torch.zeros(9, WIDTH)}
REFUSED = [  # a kind, what its head has instead, in its tensors or its configuration, the message
    ("medusa", {"0.1.weight": torch.ones(99, WIDTH)}, "{'0.1.weight': .1536, 256.}"),
    ("medusa", {"1.1.weight": None}, "expected tensors {'1.1.weight'"),
    ("medusa", {"more": ONES}, "expected tensors {}, got .* {'more'"),
    ("eagle", {"layers.0.input_layernorm.weight": ONES}, "got .* with {'layers.0.input_layern"),
    ("eagle", {"layers.0.mlp.up_proj.weight": None}, "expected tensors {'layers"),
    ("eagle", {"fc.bias": torch.full((WIDTH,), torch.nan)}, "finite numbers"),
    ("eagle", {"hidden_size": 128}, "features of 128 numbers, as the layer has, got 256 and 256"),
    ("eagle", {"layers.1.mlp.up_proj.weight": ONES}, "one layer, .* with layers.0, layers.1$"),
    ("eagle", {"hidden_act": "gelu"}, "must be a head without hidden_act, got .* gelu"),
    ("eagle", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type default, linear, llama3"),
    ("eagle", {"rope_scaling": {"type": "linear"}}, "config.json describes a layer, .*factor"),
    ("eagle", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "of type .*full_att"),
    ("eagle", {"num_attention_heads": 0}, "num_attention_heads must be above 0, not 0"),
    ("eagle", {"num_attention_heads": 3}, "config.json describes a layer, got .*: .* multiple"),
    ("eagle", {"embed_tokens.weight": OTHER}, "another's"),
    ("eagle", {"embed_tokens.weight": OTHER.to(torch.int8)}, "of torch.int8"),
    ("eagle", {"embed_tokens.weight": OTHER[:99]}, "of 1536 tokens, each of 256 .* .99, 256"),
    ("eagle3", {"hidden_size": 64}, "each of 64 numbers, got .* with none"),
    ("eagle3", {"layers.1.mlp.up_proj.weight": ONES}, "one layer, .* with layers.1, midlayer$"),
    ("eagle3", {"attention_bias": True}, "must be a head without attention_bias"),
    ("eagle3", {"norm_before_fc": True}, "must be a head without norm_before_fc"),
    ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "layer_ids"),
    ("eagle3", {"eagle_config": 3, "eagle_aux_hidden_state_layer_ids": 5}, "layer_ids 5"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": ["a", 1]}, r"layer_ids \['a', 1\]"),
    ("eagle3", {"lm_head.weight": None}, "must have an LM head of its own"),
    ("eagle3", {"lm_head.weight": torch.tensor(1.0)}, "must have an LM head of its own"),
    ("eagle3", {"d2t": torch.full((D,), V), "t2d": None}, "must be a head for 1536 tokens"),
    ("eagle3", {"d2t": ZEROS[:3]}, r"d2t has 512 whole numbers, got .* \(3,\) of"),
    ("eagle3", {"d2t": torch.zeros(D)}, "d2t has 512 whole numbers, got .*float32"),
    ("eagle3", NINE | {"d2t": None, "t2d": None}, "name the same 9 tokens, .* with 0 and 0 tokens"),
    ("eagle3", NINE | {"d2t": torch.arange(9), "t2d": torch.arange(V) < 9}, "with 9 and 9 tokens"),
    ("eagle3", NINE | {"d2t": -torch.arange(9), "t2d": None}, "with 1 and 0 tokens")]


@pytest.mark.parametrize("name, changes, said", REFUSED, ids=[f"{x[0]}: {x[2]}" for x in REFUSED])
def test_a_head_that_would_be_misread_is_refused(tmp_path, embedded, name, changes, said):
    kind = KINDS[name]
    inside = {x for x, y in changes.items() if y is None or isinstance(y, torch.Tensor)}
    tensors = changed(kind.tensors(), {x: changes[x] for x in inside})
    config = kind.config | {x: y for x, y in changes.items() if x not in inside}
    with pytest.raises(InputError, match=said):
        kind.load(write(tmp_path, config, tensors), embedded[0])


def test_a_head_of_another_kind_is_refused(tmp_path, embedded):
    """In the words of each kind. What no kind knows has no head; Hydra's heads are not read."""
    words = {"eagle": "an EAGLE head", "eagle3": "an EAGLE-3 head", "medusa": "Medusa heads"}
    hydra = draw({"hydra_mlp.0.1.linear.weight": (8, 16), "hydra_lm_head.0.1.weight": (9, 8)})
    for name, said in (words | {"hydra": "a file without a head that is known here"}).items():
        head = write(tmp_path, GROUPS, KINDS[name].tensors() if name in KINDS else hydra)
        for other in {*KINDS} - {name}:
            with pytest.raises(InputError, match=f"be {words[other]}, got .*, {said}"):
                KINDS[other].load(head, embedded[0])
    with pytest.raises(InputError, match="--heads must be medusa for released heads, got hydra"):
        medusa.load_heads(write(tmp_path, {}, medusa_tensors()), "hydra", embedded[0])


@pytest.mark.parametrize("change", [0.0, 1e-3])
def test_the_targets_own_table_in_a_head_is_shared_and_a_tuned_one_is_kept(tmp_path, embedded,
                                                                           change):
    own = embedded[0].get_input_embeddings()
    tensors = eagle_tensors() | {"embed_tokens.weight": own.weight.detach() + change}
    draft = eagle.load_draft(write(tmp_path, GROUPS, tensors), embedded[0])
    table = draft.lm.get_input_embeddings()
    assert (table is own) == (change == 0)
    assert torch.equal(table.weight, tensors["embed_tokens.weight"])


def test_a_head_whose_files_are_incomplete_or_run_code(tmp_path, monkeypatch, capfd):
    """Each file that is missing is named. A head in parts is read whole, and a pickled one may hold
    tensors alone."""
    expected = "expected a trained file, or a directory or hub id with config.json and weights, got"
    part, index = tmp_path / "part.safetensors", tmp_path / "model.safetensors.index.json"

    def refuse(said: str, file: Path | None = None, text: str = "") -> None:
        if file:
            file.write_text(text)
        with pytest.raises(InputError, match=f"{expected} .*: {said}"):
            eagle3.load_draft(tmp_path, MODEL)
    refuse("there is no config.json$")
    argv = ["--adapter", str(tmp_path), "--prompt", "a", "--device", "cpu"]
    assert script("survey.eagle3", *argv, "--target", f"{ROOT}/models/target") == 2
    said_in_one_line(f"got '{tmp_path}': there is no config.json", capfd)
    config = tmp_path / "config.json"
    refuse("config.json does not hold a dictionary", config, "[]")
    refuse("unsupported operand", config, '{"transformer_layer_config": 3}')
    refuse("there is no model.safetensors, nor another file of weights", config, "{}")
    refuse("there is no part.safetensors$", index, '{"weight_map": {"x": "part.safetensors"}}')
    refuse("part.safetensors is a pointer of git-lf", part, "version https://git-lfs.github.com/")
    tensors, names = eagle3_tensors(), {}
    for i, half in enumerate(([*tensors][::2], [*tensors][1::2])):
        names |= dict.fromkeys(half, f"{i}.safetensors")
        save_file({x: tensors[x] for x in half}, tmp_path / f"{i}.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    assert read_released(str(tmp_path))[1].keys() == tensors.keys()
    index.unlink()
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    refuse("Weights only load failed")
    monkeypatch.setattr("training.released.cached_file", None)  # which asks the hub
    for kind in KINDS.values():
        with pytest.raises(InputError, match="No such file"):
            kind.load("gone.safetensors", MODEL)
