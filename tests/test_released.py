"""Heads in the forms that others have released. KINDS is the table. The passes of each kind are
its released formula, written out here, for the embedded target. The layouts of DFlash are those of
a small target. A head that would be misread is refused."""
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from families import tiny
from heads import attend, norm
from helpers import CLOSE, check_refused, note_calls, take
from support.engine import EngineLM
from support.released import read_files
from survey import dflash, eagle, eagle3, medusa

TEXT = [31, 4, 159, 26, 535, 89, 793, 238, 46, 264, 33, 83]
WIDTH, V, D = 256, 1536, 512  # of the embedded target, and how many tokens some heads can guess
SHAPE = dict(hidden_size=WIDTH, intermediate_size=96, num_attention_heads=4, rms_norm_eps=1e-3,
             num_hidden_layers=1, vocab_size=V, max_position_embeddings=9, hidden_act="silu")
GROUPS = SHAPE | dict(num_key_value_heads=2)
MEDUSA = {"base_model_name_or_path": "x", "medusa_num_heads": 2, "medusa_num_layers": 1}


# --------------------------------------------------------------------------- the written formulas

def run_layer(w: dict, layer: str, x: torch.Tensor, residual: torch.Tensor, config: dict,
              *more) -> torch.Tensor:
    """Compute a layer whose attention reads x and adds its output to `residual`.

    more   further arguments of `attend`
    """
    x = residual + attend(w, f"{layer}self_attn.", x, config, *more)
    y = norm(x, w[f"{layer}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    act = getattr(F, config.get("hidden_act", "silu"))
    return x + (act(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T


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

def draw(shapes: dict, seed: int = 0) -> dict:
    """Draw tensors: matrices that keep the size of what they read, and norms near 1."""
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) / shape[-1] ** 0.5 if len(shape) == 2 else
            (0.0 if name.endswith("bias") else 1.0) + 0.3 * torch.randn(shape, generator=rng)
            for name, shape in shapes.items()}


def write(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> str:
    """Write a head as others release it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")  # as Windows does
    if file.endswith("safetensors"):
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return str(folder)


def layer_shapes(prefix: str, reads: int, kv: int = 2, biases: str = "", width: int = WIDTH,
                 head: int = WIDTH // 4, mlp: int = 96) -> dict:
    """Return the shapes of a layer of 4 heads, whose queries, keys and values read so much."""
    rows = dict(q=4 * head, k=kv * head, v=kv * head, o=width)
    names = {f"self_attn.{x}_proj.weight": (n, 4 * head if x == "o" else reads)
             for x, n in rows.items()}
    names |= {f"self_attn.{x}_proj.bias": (rows[x],) for x in biases}
    names |= {f"mlp.{x}_proj.weight": (mlp, width) for x in ("gate", "up")}
    names |= {"mlp.down_proj.weight": (width, mlp), "post_attention_layernorm.weight": (width,)}
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
    "eagle": SimpleNamespace(load=eagle.load_draft, config=GROUPS, tensors=eagle_tensors,
                             step=eagle_step, taps=(12,)),
    "eagle3": SimpleNamespace(load=eagle3.load_draft, config=GROUPS, tensors=eagle3_tensors,
                              step=eagle3_step, taps=(2, 6, 9))}


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
    """On a chain of rows, and on a drafted row, which reads what the chain made. The head is told
    from other heads, even if a half type rounded its numbers."""
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
    has its heads in the files of a whole model. Heads of Hydra are not read."""
    model, w = embedded[0], medusa_tensors(5, own)
    given = w
    if whole:
        given = {name: x.clone() for name, x in model.state_dict().items()}
        given |= {f"medusa_head.{name}": x for name, x in w.items()}
    heads = medusa.load_heads(write(tmp_path, MEDUSA, given, file), "medusa", model)
    f = torch.randn(2, WIDTH)
    for k in range(5):
        x = f + F.silu(f @ w[f"{k}.0.linear.weight"].T + w[f"{k}.0.linear.bias"])
        logits = x @ (w[f"{k}.1.weight"] if own else model.get_output_embeddings().weight).T
        close((heads.lm_heads[k] if own else heads.lm_head)(heads(k + 1, f, None)), logits)
    assert heads.K == 5
    check_refused("--heads must be medusa for released heads, got hydra", medusa.load_heads,
                  tmp_path, "hydra", model)


# ------------------------------------------------------------------------- a block of DFlash

MODEL = tiny("llama", num_hidden_layers=3)
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
SHAPES = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
for layer in "layers.0.", "layers.1.":
    SHAPES |= layer_shapes(layer, 32, width=32, head=10, mlp=24)
    SHAPES |= {f"{layer}self_attn.{x}_norm.weight": (10,) for x in "qk"}
    SHAPES[f"{layer}input_layernorm.weight"] = (32,)


def draw_tensors(config: dict = RELEASED) -> dict[str, torch.Tensor]:
    """Draw exactly the tensors that a layout has. Larger ones would make attention so sharp that
    rounding moves the logits by 1e-4."""
    shapes, rows = SHAPES, 20 * ("speculators_model_type" in config)
    if config.get("markov_rank"):
        shapes = shapes | {
            "confidence_head.proj.weight": (1, 40), "confidence_head.proj.bias": (1,),
            "markov_head.markov_w1.weight": (61, 8),
            "markov_head.markov_w2.weight": (rows or 61, 8)}
    w = draw(shapes)
    if "num_anchors" in config or rows:
        w["embed_tokens.weight"] = MODEL.get_input_embeddings().weight.detach().clone()
        w["lm_head.weight"] = MODEL.get_output_embeddings().weight.detach().clone()
    if rows:  # every second token has a row
        w |= {"lm_head.weight": w["lm_head.weight"][:2 * rows:2].clone(), "d2t": torch.arange(rows),
              "t2d": torch.arange(61) % 2 == 0, "verifier_norm.weight": torch.ones(32)}
    return w


BLOCKS = SimpleNamespace(config=RELEASED, tensors=draw_tensors, load=dflash.load_draft)


def guess_by_formula(w: dict, text: list[int], config: dict, taps: tuple, *sees, first: int):
    """Compute the logits of a block after a text, by the released form's equations. The Markov
    head reads the last token in each row."""
    hidden = MODEL(torch.tensor([text]), output_hidden_states=True).hidden_states
    c = norm(torch.cat([hidden[i][0, :-1] for i in taps], -1) @ w["fc.weight"].T,
             w["hidden_norm.weight"])
    table = w.get("embed_tokens.weight", MODEL.get_input_embeddings().weight)
    x = config.get("input_embedding_scale", 1.0) * table[[text[-1], 60, 60, 60]]
    for i, span in enumerate(sees):
        y = norm(x, w[f"layers.{i}.input_layernorm.weight"])
        x = run_layer(w, f"layers.{i}.", y, x, FLAT, c, span)
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
    tables that are not the target's are kept. Rows stand for the tokens that d2t lists."""
    config, *form, first = LAYOUTS[name]
    w, seen = draw_tensors(config), note_calls(monkeypatch, dflash, "grow_block")
    trained = name == "DeepSpec's DFlash"
    for table in ("embed_tokens", "lm_head") if trained else ():
        w[f"{table}.weight"] += 0.1 * torch.randn(61, 32)
    adapter, text = write(tmp_path, config, w), [3, 1, 4, 1, 5]
    for chunk in take(dflash.dflash(EngineLM(MODEL, 50), text, adapter=adapter, nodes=4), 6):
        draft, z, root, nodes = seen.pop(0)
        z = draft.add_markov(z, torch.tensor([root]))
        expected = guess_by_formula(w, text, config, *form, first=first)[:, :50]
        torch.testing.assert_close(z, expected, **CLOSE)
        assert (root, nodes, draft.B) == (text[-1], 4, 5 - first)
        text = text + chunk
    assert (draft.embed is MODEL.get_input_embeddings()) == (not trained)
    assert (draft.head is MODEL.get_output_embeddings()) == (len(z[0]) == 50 and not trained)
    assert torch.equal(draft.vocab, w.get("d2t", torch.zeros(61, dtype=int))
                       + torch.arange(len(draft.vocab)))


# -------------------------------------------------------------------------- what is not accepted

OTHER = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(5))
REFUSED = {  # kind: what its head has instead, in tensors or configuration, and the message
    "eagle": [
        ({"fc.weight": None}, "be an EAGLE head, got .*, a file without a head that is known"),
        ({"0.0.linear.weight": OTHER}, "be an EAGLE head, got .*, Medusa heads"),
        ({"layers.0.input_layernorm.weight": OTHER}, "got .* with {'layers.0.input_layern"),
        ({"hidden_size": 128}, "features of 128 numbers, as the layer has, got 256 and 256"),
        ({"num_attention_heads": 3}, "config.json describes a layer, got .*: .* multiple"),
        ({"embed_tokens.weight": OTHER}, "which is for another")],
    "eagle3": [
        ({"midlayer.hidden_norm.weight": None}, "be an EAGLE-3 head, got .*, an EAGLE head"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "layer_ids"),
        ({"d2t": torch.full((D,), V)}, "must be a head for 1536 tokens")],
    "dflash": [
        ({"hidden_size": 64}, "hidden states of 64 numbers, as its own are, got"),
        ({"dflash_config": INSIDE | {"target_layer_ids": [1]}}, "expected tensors {'fc.we"),
        ({"dflash_config": INSIDE | {"target_layer_ids": [1, 3]}}, "different layers from 0 to 3"),
        ({"dflash_config": INSIDE | {"target_layer_ids": [1, 1]}}, "different layers from 0 to 3"),
        ({"aux_hidden_state_layer_ids": [1, 3]}, "different layers from 0 to 2, got"),
        ({"dflash_config": {"target_layer_ids": [1, 2]}}, "it has no 'mask_token_id'"),
        ({"dflash_config": INSIDE | {"mask_token_id": 61}}, "is a token below 61, got 61"),
        ({"dflash_config": INSIDE | {"mask_token_id": "<mask>"}}, "a token below 61, got '<mask>'"),
        ({"block_size": 1}, "above 1, got 1"), ({"block_size": "8"}, "block_size above 1, got '8'"),
        ({"num_target_layers": 36}, "for a model of 3 layers, got 36"),
        ({"use_swa": True}, r"not known here, got \['use_swa'\]"),
        ({"d2t": torch.full((20,), 61)}, "a head for 61 tokens"),
        ({"markov_head.gate_proj.weight": torch.ones(2)}, "with {'markov_head.gate_proj.weight'"),
        ({"hidden_norm.weight": None}, "be a DFlash draft, got .*, an EAGLE head")]}


@pytest.mark.parametrize("name, changes, said", [
    (name, *row) for name, rows in REFUSED.items() for row in rows])
def test_a_head_that_would_be_misread_is_refused(tmp_path, embedded, name, changes, said):
    kind, model = (BLOCKS, MODEL) if name == "dflash" else (KINDS[name], embedded[0])
    config, tensors = dict(kind.config), kind.tensors()
    for key, value in changes.items():
        (tensors if value is None or torch.is_tensor(value) else config)[key] = value
    tensors = {key: x for key, x in tensors.items() if x is not None}
    check_refused(said, kind.load, write(tmp_path, config, tensors), model)


def test_a_head_whose_files_are_incomplete_or_run_code(tmp_path, embedded, monkeypatch):
    """Each file that is missing is named. A head in parts is read whole, and a pickled one may hold
    tensors alone."""
    expected = "expected a trained file, or a directory or hub id with config.json and weights, got"
    config, index = (tmp_path / x for x in ("config.json", "model.safetensors.index.json"))

    def refuse(said: str) -> None:
        check_refused(f"{expected} .*: {said}", eagle3.load_draft, tmp_path, embedded[0])
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
    torch.save(tensors | {"epoch": 3}, tmp_path / "pytorch_model.bin")
    assert read_files(str(tmp_path))[1].keys() == tensors.keys()
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    refuse("Weights only load failed")
    monkeypatch.setattr("support.released.cached_file", None)  # which asks the hub
    check_refused("No such file", eagle3.load_draft, "gone.safetensors", embedded[0])
