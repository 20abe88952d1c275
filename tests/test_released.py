"""Heads in the forms that others have released. KINDS is the table. The passes of each kind are its
released formula, written out here, for the embedded target; and a head that would be misread is
refused."""
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from cli.run import doubt_head
from common import InputError, autoregressive
from heads import attend, check_refused, draw, norm, write
from helpers import tokens_of
from support.engine import EngineLM
from support.released import is_head, read_files, some_weights
from support.trees import best_tree
from survey import eagle, eagle3, medusa

TEXT = [31, 4, 159, 26, 535, 89, 793, 238, 46, 264, 33, 83]
WIDTH, V, D = 256, 1536, 512  # of the embedded target, and how many tokens some heads can guess
SHAPE = dict(hidden_size=WIDTH, intermediate_size=96, num_attention_heads=4, rms_norm_eps=1e-3,
             num_hidden_layers=1, vocab_size=V, max_position_embeddings=9, hidden_act="silu")
GROUPS = SHAPE | dict(num_key_value_heads=2)
MEDUSA = {"base_model_name_or_path": "x", "medusa_num_heads": 2, "medusa_num_layers": 1}


# --------------------------------------------------------------------------- the written formulas

def run_layer(w: dict, layer: str, x: torch.Tensor, residual: torch.Tensor, config: dict):
    """Compute a layer whose attention reads x and adds its output to `residual`."""
    x = residual + attend(w, f"{layer}self_attn.", x, config)
    y = norm(x, w[f"{layer}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (getattr(F, config["hidden_act"])(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T


def eagle_step(w: dict, e: torch.Tensor, f: torch.Tensor, config: dict, head) -> tuple:
    """Compute EAGLE's features and logits: no input norm, no final norm, the target's LM head."""
    x = torch.cat([e, f], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
    x = run_layer(w, "layers.0.", x, x, config)
    return x, head(x)


def eagle3_step(w: dict, e: torch.Tensor, g: torch.Tensor, config: dict, _) -> tuple:
    """Compute what EAGLE-3's next level reads, and logits over the draft's own tokens."""
    normed = norm(g, w["midlayer.hidden_norm.weight"])
    x = torch.cat([norm(e, w["midlayer.input_layernorm.weight"]), normed], -1)
    x = run_layer(w, "midlayer.", x, normed if config.get("norm_before_residual") else g, config)
    y = norm(x, w["norm.weight"])
    return (y if config.get("norm_output") else x), y @ w["lm_head.weight"].T


def fuse(w: dict, taps: torch.Tensor) -> torch.Tensor:
    """Compute EAGLE-3's g of the three tapped streams. Each stream may have a norm."""
    each = [norm(x, w[f"fc_norm.{i}.weight"]) if f"fc_norm.{i}.weight" in w else x
            for i, x in enumerate(taps.chunk(3, -1))]
    return torch.cat(each, -1) @ w["fc.weight"].T


# --------------------------------------------------------------------------------- random heads

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


def medusa_tensors(K: int = 3, own: bool = True) -> dict:
    shapes = {}
    for k in range(K):
        shapes |= {f"{k}.0.linear.weight": (WIDTH, WIDTH), f"{k}.0.linear.bias": (WIDTH,)}
        shapes |= {f"{k}.1.weight": (V, WIDTH)} if own else {}
    return draw(shapes)


KINDS = {  # `taps` are the places that are read in transformers' `output_hidden_states`. EAGLE-3
    # reads 2, L/2 and L - 3 of L = 12 layers.
    "eagle": SimpleNamespace(module=eagle, load=eagle.load_draft, config=GROUPS,
                             tensors=eagle_tensors, step=eagle_step, taps=(12,)),
    "eagle3": SimpleNamespace(module=eagle3, load=eagle3.load_draft, config=GROUPS,
                              tensors=eagle3_tensors, step=eagle3_step, taps=(2, 6, 9)),
    "medusa": SimpleNamespace(module=medusa, config=MEDUSA, tensors=medusa_tensors,
                              load=lambda path, model: medusa.load_heads(path, "medusa", model))}


# ------------------------------------------------------------------------- the passes of a head

SCALED = {"type": "linear", "rope_type": "linear", "factor": 4.0}
HEADS = {  # kind, configuration, arguments of the tensors
    "Vicuna's": ("eagle", SHAPE | dict(num_hidden_layers=40), dict(kv=4, bias=True)),
    "LLaMA3's": ("eagle", GROUPS | dict(rope_theta=500000.0, bias=False), {}),
    "Qwen2's": ("eagle", GROUPS | dict(qkv_bias=True), dict(bias=True, biases="qkv")),
    "all biases": ("eagle", SHAPE | dict(attention_bias=True), dict(kv=4, biases="qkvo")),
    "scaled": ("eagle", GROUPS | dict(rope_scaling=SCALED, hidden_act="gelu"), {}),
    "yuhuili's": ("eagle3", GROUPS | dict(draft_vocab_size=D, num_hidden_layers=40,
                                          norm_output=False), {}),
    "speculators'": ("eagle3", {"transformer_layer_config": GROUPS}, dict(tokens=V)),
    "3.1": ("eagle3", GROUPS | dict(fc_norm=True, norm_output=True, eagle_config={
        "eagle_aux_hidden_state_layer_ids": [1, 5, 8]}), dict(norms=True))}  # outputs of layers
close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_a_layer_computes_the_released_formula(tmp_path, embedded, name):
    """On a chain of rows, and on a drafted row, which reads what the chain made."""
    kind, config, how = HEADS[name]
    model, w = embedded[0], KINDS[kind].tensors(**how)
    file = "pytorch_model.bin" if name in ("Vicuna's", "yuhuili's") else "model.safetensors"
    inside = name == "speculators'"
    given = {x.replace("midlayer", "layers.0") if inside else x: y for x, y in w.items()}
    draft = KINDS[kind].load(write(tmp_path, config, given, file), model)
    hidden = model(torch.tensor([TEXT[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([hidden[i][0] for i in KINDS[kind].taps], -1)
    g = fuse(w, features) if kind == "eagle3" else features
    flat = {"norm_before_residual": inside} | config | config.get("transformer_layer_config", {})

    def step(tokens, read):
        e = model.get_input_embeddings().weight[tokens]
        return KINDS[kind].step(w, e, read, flat, model.get_output_embeddings())
    a, expected = step(TEXT[1:], g)
    lm = EngineLM(draft.lm)
    lm.start([])
    close(lm.forward(draft.join(*eagle.Pairs(features, TEXT[1:]))), expected)
    close(lm.features, a)
    b, expected = step([*TEXT[1:], 7], torch.cat([g, a[-1:]]))
    close(lm.forward(draft.join(*eagle.Pairs(lm.features[-1:], [7]))), expected[-1:])
    close(lm.features, b[-1:])
    assert draft.vocab.tolist() == [*range(0, V, V // len(draft.vocab))]
    assert draft.config.max_position_embeddings == model.config.max_position_embeddings


@pytest.mark.parametrize("file, own, whole", [
    ("medusa_lm_head.safetensors", True, False), ("medusa_lm_head.pt", False, False),
    ("model.safetensors", True, True)], ids=["Medusa-1", "version 2", "Medusa-2"])
def test_medusa_heads_compute_the_released_formula(tmp_path, embedded, file, own, whole):
    """Of a file with five heads, whose configuration says two, as the released ones do. Medusa-2
    has its heads in the files of a whole model."""
    model, w = embedded[0], medusa_tensors(5, own)
    given = w
    if whole:
        given = {name: x.clone() for name, x in model.state_dict().items()}
        given |= {f"medusa_head.{name}": x for name, x in w.items()}
    heads = KINDS["medusa"].load(write(tmp_path, MEDUSA, given, file), model).requires_grad_(False)
    target, guesses = EngineLM(model, 1500), []  # the last rows of the LM head stand for no token
    target.start(TEXT)
    f = target.features[-1:]
    for k in range(5):
        x = f + F.silu(f @ w[f"{k}.0.linear.weight"].T + w[f"{k}.0.linear.bias"])
        logits = x @ (w[f"{k}.1.weight"] if own else model.get_output_embeddings().weight).T
        close(heads.lm_head_of(k + 1)(heads(k + 1, f, None)), logits)
        guesses.append(logits[0, :1500].topk(10).indices.tolist())
    tree = best_tree([[0.5, 0.3, 0.1]] * 5, 64)
    ids = medusa.fill_tree(heads, target, f, 9, tree)
    assert ids == [9] + [guesses[node.depth - 1][node.rank] for node in tree[1:]] and heads.K == 5


# -------------------------------------------------------------------------- decoding with a head

@pytest.mark.parametrize("name", KINDS)
def test_a_head_decodes(tmp_path, embedded, name):
    """It begins with few guesses. It is also told from other heads, even if a half type rounded its
    numbers."""
    kind, (model, *_), log = KINDS[name], embedded, []
    method = vars(kind.module)[name]
    target, adapter = EngineLM(model), write(tmp_path / "head", kind.config, kind.tensors())
    expected = tokens_of(autoregressive(target, TEXT), 16)
    assert tokens_of(method(target, TEXT, adapter=adapter, log=log), 16) == expected
    assert 0 < log[0]["guessed"] < 20
    next(method(target, TEXT, adapter=adapter, nodes=7, log=log))
    assert log[-1]["guessed"] == 6
    [part] = [x for key, x in target.memo.items() if adapter in key[1]]
    for scale in (1.01, 1.1):
        assert is_head([x * scale for x in some_weights(part)], part) == (scale < 1.05)


# -------------------------------------------------------------------------- what is not accepted

OTHER = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(5))
REFUSED = [  # a kind, what its head has instead, in its tensors or its configuration, the message
    ("eagle", {"fc.weight": None}, "be an EAGLE head, got .*, a file without a head that is known"),
    ("eagle", {"0.0.linear.weight": OTHER}, "be an EAGLE head, got .*, Medusa heads"),
    ("eagle3", {"midlayer.hidden_norm.weight": None}, "be an EAGLE-3 head, got .*, an EAGLE head"),
    ("eagle", {"layers.0.input_layernorm.weight": OTHER}, "got .* with {'layers.0.input_layern"),
    ("eagle", {"hidden_size": 128}, "features of 128 numbers, as the layer has, got 256 and 256"),
    ("eagle", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type default, linear, llama3"),
    ("eagle", {"num_attention_heads": 3}, "config.json describes a layer, got .*: .* multiple"),
    ("eagle", {"embed_tokens.weight": OTHER}, "which is for another"),
    ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "layer_ids"),
    ("eagle3", {"d2t": torch.full((D,), V)}, "must be a head for 1536 tokens")]


@pytest.mark.parametrize("name, changes, said", REFUSED, ids=[f"{x[0]}: {x[2]}" for x in REFUSED])
def test_a_head_that_would_be_misread_is_refused(tmp_path, embedded, name, changes, said):
    check_refused(tmp_path, KINDS[name], embedded[0], changes, said)


def test_a_head_is_doubted_by_a_text_that_varies():
    """Every third round has all its guesses right. A text of one token says nothing."""
    log = [{"guessed": 2, "accepted": n} for n in (0, 0, 2)] * 6
    assert "badly: 40% of its guesses are right, and 60%" in doubt_head([5, 5, 5, 6, 7] * 6, log)
    assert doubt_head([5] * 30, log) == doubt_head([5, 6, 7] * 10, log) == ""


def test_heads_of_hydra_are_not_read(embedded):
    with pytest.raises(InputError, match="--heads must be medusa for released heads, got hydra"):
        medusa.load_heads("x", "hydra", embedded[0])


def test_a_head_whose_files_are_incomplete_or_run_code(tmp_path, embedded, monkeypatch):
    """Each file that is missing is named. A head in parts is read whole, and a pickled one may hold
    tensors alone."""
    expected = "expected a trained file, or a directory or hub id with config.json and weights, got"
    config, index = (tmp_path / x for x in ("config.json", "model.safetensors.index.json"))

    def refuse(said: str) -> None:
        with pytest.raises(InputError, match=f"{expected} .*: {said}"):
            eagle3.load_draft(tmp_path, embedded[0])
    refuse("there is no config.json$")
    config.write_text("{}")
    refuse("there is no model.safetensors or .* or medusa_lm_head.pt$")
    index.write_text('{"weight_map": {"x": "part.safetensors"}}')
    refuse("there is no part.safetensors$")
    tensors = eagle3_tensors()
    for i in range(2):
        save_file(dict([*tensors.items()][i::2]), tmp_path / f"{i}.safetensors")
    index.write_text(json.dumps({"weight_map": {x: f"{x}.safetensors" for x in "01"}}))
    assert read_files(str(tmp_path))[1].keys() == tensors.keys()
    index.unlink()
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    refuse("Weights only load failed")
    monkeypatch.setattr("support.released.cached_file", None)  # which asks the hub
    with pytest.raises(InputError, match="No such file"):
        eagle3.load_draft("gone.safetensors", embedded[0])
