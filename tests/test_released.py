"""Heads in the forms that others have released. KINDS is the table. The passes of each kind are its
released formula, written out here, for the embedded target; what is exported is loaded bit for bit;
and a head that would be misread is refused."""
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from cli.run import TimedLM
from common import InputError, load
from helpers import tokens_of
from survey import eagle, eagle3, layerskip, medusa
from training.low_rank import add_low_rank
from training.parts import save_part
from training.released import MEDUSA_TREE, is_head, read_released, some_weights

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


def attend(w: dict, layer: str, x: torch.Tensor, config: dict) -> torch.Tensor:
    """Compute causal attention of a chain of rows [n, ·] with 4 heads."""
    base = config.get("rope_theta") or 10000.0
    factor = (config.get("rope_scaling") or {"factor": 1.0})["factor"]
    q, k, v = ((x @ w[f"{layer}self_attn.{name}_proj.weight"].T
                + w.get(f"{layer}self_attn.{name}_proj.bias", 0)).view(len(x), -1, WIDTH // 4)
               for name in "qkv")
    k, v = (y.repeat_interleave(4 // k.shape[1], 1) for y in (rotate(k, base, factor), v))
    scores = torch.einsum("ihd,jhd->hij", rotate(q, base, factor), k) / math.sqrt(WIDTH // 4)
    scores = scores.masked_fill(~torch.ones(len(x), len(x)).tril().bool(), -torch.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(x), -1)
    bias = w.get(f"{layer}self_attn.o_proj.bias", 0)
    return out @ w[f"{layer}self_attn.o_proj.weight"].T + bias


def run_mlp(w: dict, layer: str, x: torch.Tensor) -> torch.Tensor:
    y = norm(x, w[f"{layer}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T


def eagle_step(w: dict, e: torch.Tensor, f: torch.Tensor, config: dict, head) -> tuple:
    """Compute EAGLE's features and logits: no input norm, no final norm, the target's LM head."""
    x = torch.cat([e, f], -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
    x = run_mlp(w, "layers.0.", x + attend(w, "layers.0.", x, config))
    return x, head(x)


def eagle3_step(w: dict, e: torch.Tensor, g: torch.Tensor, config: dict, _) -> tuple:
    """Compute what EAGLE-3's next level reads, and logits over the draft's own tokens."""
    normed = norm(g, w["midlayer.hidden_norm.weight"])
    x = torch.cat([norm(e, w["midlayer.input_layernorm.weight"]), normed], -1)
    residual = normed if config.get("norm_before_residual") else g
    x = run_mlp(w, "midlayer.", residual + attend(w, "midlayer.", x, config))
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


KINDS = {  # guesses: of the released tree. taps: what is read of transformers' own
    # `output_hidden_states`, which of L = 12 layers EAGLE-3 does at 2, L/2, L - 3
    "eagle": SimpleNamespace(module=eagle, load=eagle.load_draft, config=GROUPS, guesses=59,
                             tensors=eagle_tensors, step=eagle_step, taps=(12,)),
    "eagle3": SimpleNamespace(module=eagle3, load=eagle3.load_draft, config=GROUPS, guesses=59,
                              tensors=eagle3_tensors, step=eagle3_step, taps=(2, 6, 9)),
    "medusa": SimpleNamespace(module=medusa, config=MEDUSA, guesses=61,
                              load=lambda path, model: medusa.load_heads(path, "medusa", model),
                              tensors=medusa_tensors)}  # two of 63 guesses are of head 4


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


close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


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
    close(lm.forward(draft.join(*eagle.Pairs(features, TEXT[1:]))), expected)
    close(lm.features, a)
    drafted = lm.forward(draft.join(*eagle.Pairs(lm.features[-1:], [7])))
    b, expected = step([*TEXT[1:], 7], torch.cat([g, a[-1:]]))
    close(drafted, expected[-1:])
    close(lm.features, b[-1:])
    assert draft.vocab.tolist() == [*range(0, V, V // len(draft.vocab))]
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


# -------------------------------------------------------------------------- decoding with a head

@pytest.mark.parametrize("name", KINDS)
def test_a_head_decodes_with_the_released_tree(tmp_path, embedded, held_out, name):
    """And it is told from other heads, also if a half type rounded its numbers."""
    kind, (model, *_), log = KINDS[name], embedded, []
    method = vars(kind.module)[name]
    target, adapter = TimedLM(model), write(tmp_path / "head", kind.config, kind.tensors())
    for prompt, expected in held_out[:2]:
        chunks = method(target, prompt, adapter=adapter, log=log)
        assert tokens_of(chunks, len(expected[:12])) == expected[:12]
    assert {record["guessed"] for record in log} == {kind.guesses}
    next(method(target, TEXT, adapter=adapter, nodes=7, log=log))
    assert log[-1]["guessed"] == 6
    part = target.memo[name, adapter]
    for scale in (1.01, 1.1):
        assert is_head([x * scale for x in some_weights(part)], part) == (scale < 1.05)


# ---------------------------------------------------------------------------- there and back again

EXPORTED = {  # a head: options of the export, and what engines read in its configuration
    "Vicuna's": (dict(engine="sglang"), dict(architectures=["LlamaForCausalLMEagle"])),
    "LLaMA3's": ({}, dict(architectures=["LlamaForCausalLM"], bias=False, num_hidden_layers=1,
                          tie_word_embeddings=False, rope_theta=500000.0, vocab_size=V)),
    "scaled": (dict(engine="sglang"), dict(rope_theta=10000.0, rope_scaling={
        "type": "linear", "rope_type": "linear", "factor": 4.0})),
    "yuhuili's": ({}, dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=D)),
    "speculators'": ({}, dict(norm_before_residual=True)), "all tokens": ({}, {}),
    "3.1": ({}, dict(fc_norm=True, norm_output=True)),
    "Medusa's": ({}, dict(medusa_num_heads=3, medusa_num_layers=1))}


@pytest.mark.parametrize("name", EXPORTED)
def test_what_is_exported_is_the_head_bit_for_bit(tmp_path, embedded, name):
    """With the target's embeddings, which engines read, and for SGLang with a bias. No numbers of
    layers are said, which engines count in different ways."""
    kind, config, how, _ = HEADS.get(name, ("medusa", MEDUSA, {}, {}))
    options, expected = EXPORTED[name]
    adapter, w = tmp_path / "head", KINDS[kind].tensors(**how)
    write(adapter, config, w)
    KINDS[kind].module.export(embedded[0], None, adapter=adapter, out=tmp_path / "a", **options)
    [file] = (tmp_path / "a").glob("*.safetensors")
    table = embedded[0].get_input_embeddings().weight
    added = {"embed_tokens.weight": table, "fc.bias": torch.zeros(WIDTH)}
    found = load_file(file)
    assert w.keys() <= found.keys()
    assert all(torch.equal(tensor, (added | w)[x]) for x, tensor in found.items())
    told = json.loads((tmp_path / "a" / "config.json").read_text())
    assert told.items() >= expected.items()
    assert not any("layer_id" in x or x == "eagle_config" for x in told)
    KINDS[kind].load(tmp_path / "a", embedded[0])


NOT_EXPORTED = [  # a kind, arguments of the tensors, changes of the part, options, the message
    ("eagle", {}, dict(vocab=torch.arange(D)), {}, "must guess all tokens"),
    ("eagle", {}, {}, dict(engine="x"), "--engine must be vllm or sglang"),
    ("eagle", dict(bias=True), {}, {}, "--engine must be sglang for a head whose fc has a bias"),
    ("eagle", dict(biases="qkv"), {}, {}, "must be a layer without biases"),
    ("eagle3", {}, dict(taps=[1, 3, 4]), {}, "which engines assume"),
    ("eagle3", {}, dict(form=eagle3.Form(mtp=True)), {}, "must be trained without --mtp")]


@pytest.mark.parametrize("name, how, changes, options, said", NOT_EXPORTED)
def test_what_no_engine_would_read_is_not_exported(tmp_path, embedded, monkeypatch, name, how,
                                                   changes, options, said):
    kind = KINDS[name]
    part = kind.load(write(tmp_path / "head", kind.config, kind.tensors(**how)), embedded[0])
    for attribute, value in changes.items():
        setattr(part, attribute, value)
    monkeypatch.setattr(kind.module, "load_draft", lambda *_: part)
    with pytest.raises(InputError, match=said):
        kind.module.export(embedded[0], None, adapter="x", out=tmp_path / "a", **options)


def test_an_exported_tuning_is_a_model_of_its_own(tmp_path, small_llama):
    model, tokenizer = load(small_llama, "cpu", "float32")
    changes = add_low_rank(load(small_llama, "cpu", "float32")[0], 2)
    for i, p in enumerate(changes.values()):
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) / 9
    save_part(tmp_path / "part", "a LayerSkip tuning", model, changes, E=1, rank=2)
    layerskip.export(model, tokenizer, tuning=tmp_path / "part", out=tmp_path / "a")
    again = load(str(tmp_path / "a"), "cpu", "float32")[0]
    tuned = layerskip.load_tuned(tmp_path / "part", model)[0]
    assert all(torch.equal(tuned.state_dict()[name], x) for name, x in again.state_dict().items())


# -------------------------------------------------------------------------- what is not accepted

OTHER = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(5))
ONES = torch.ones(9)
REFUSED = [  # a kind, what its head has instead, in its tensors or its configuration, the message
    ("eagle", {"fc.weight": None}, "be an EAGLE head, got .*, a file without a head that is known"),
    ("eagle", {"0.0.linear.weight": ONES}, "be an EAGLE head, got .*, Medusa heads"),
    ("eagle3", {"midlayer.hidden_norm.weight": None}, "be an EAGLE-3 head, got .*, an EAGLE head"),
    ("eagle", {"layers.0.input_layernorm.weight": ONES}, "got .* with {'layers.0.input_layern"),
    ("eagle", {"hidden_size": 128}, "features of 128 numbers, as the layer has, got 256 and 256"),
    ("eagle", {"layers.1.mlp.up_proj.weight": ONES}, "one layer, .* with layers.0, layers.1$"),
    ("eagle", {"hidden_act": "gelu"}, "must be a head without hidden_act, got .* gelu"),
    ("eagle", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type default, linear, llama3"),
    ("eagle", {"num_attention_heads": 0}, "num_attention_heads must be above 0, not 0"),
    ("eagle", {"num_attention_heads": 3}, "config.json describes a layer, got .*: .* multiple"),
    ("eagle", {"embed_tokens.weight": OTHER}, "another's"),
    ("eagle", {"embed_tokens.weight": OTHER.to(torch.int8)}, "of torch.int8"),
    ("eagle3", {"hidden_size": 64}, "of 1536 tokens, each of 64 numbers, got .* with none"),
    ("eagle3", {"attention_bias": True}, "must be a head without attention_bias"),
    ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "layer_ids"),
    ("eagle3", {"lm_head.weight": None}, "must have an LM head of its own"),
    ("eagle3", {"d2t": torch.full((D,), V), "t2d": None}, "must be a head for 1536 tokens"),
    ("eagle3", {"d2t": ZEROS[:3]}, r"d2t has 512 whole numbers, got .* \(3,\) of"),
    ("eagle3", {"t2d": torch.arange(V) < D}, "with 512 and 512 tokens")]


@pytest.mark.parametrize("name, changes, said", REFUSED, ids=[f"{x[0]}: {x[2]}" for x in REFUSED])
def test_a_head_that_would_be_misread_is_refused(tmp_path, embedded, name, changes, said):
    kind = KINDS[name]
    inside = {x for x, y in changes.items() if y is None or isinstance(y, torch.Tensor)}
    tensors = changed(kind.tensors(), {x: changes[x] for x in inside})
    config = kind.config | {x: y for x, y in changes.items() if x not in inside}
    with pytest.raises(InputError, match=said):
        kind.load(write(tmp_path, config, tensors), embedded[0])


def test_heads_of_hydra_are_not_read(embedded):
    with pytest.raises(InputError, match="--heads must be medusa for released heads, got hydra"):
        medusa.load_heads("x", "hydra", embedded[0])


def test_the_targets_own_table_in_a_head_is_shared_and_a_tuned_one_is_kept(tmp_path, embedded):
    own = embedded[0].get_input_embeddings()
    for change in (0.0, 1e-3):
        tensors = eagle_tensors() | {"embed_tokens.weight": own.weight.detach() + change}
        draft = eagle.load_draft(write(tmp_path, GROUPS, tensors), embedded[0])
        table = draft.lm.get_input_embeddings()
        assert (table is own) == (change == 0)
        assert torch.equal(table.weight, tensors["embed_tokens.weight"])


def test_a_head_whose_files_are_incomplete_or_run_code(tmp_path, embedded, monkeypatch):
    """Each file that is missing is named. A head in parts is read whole, and a pickled one may hold
    tensors alone."""
    expected = "expected a trained file, or a directory or hub id with config.json and weights, got"
    index = tmp_path / "model.safetensors.index.json"

    def refuse(said: str, file: Path | None = None, text: str = "") -> None:
        if file:
            file.write_text(text)
        with pytest.raises(InputError, match=f"{expected} .*: {said}"):
            eagle3.load_draft(tmp_path, embedded[0])
    refuse("there is no config.json$")
    config = tmp_path / "config.json"
    refuse("config.json does not hold a dictionary", config, "[]")
    refuse("there is no model.safetensors, nor another file of weights", config, "{}")
    refuse("there is no part.safetensors$", index, '{"weight_map": {"x": "part.safetensors"}}')
    tensors = eagle3_tensors()
    for i in range(2):
        save_file(dict([*tensors.items()][i::2]), tmp_path / f"{i}.safetensors")
    index.write_text(json.dumps({"weight_map": {x: f"{x}.safetensors" for x in "01"}}))
    assert read_released(str(tmp_path))[1].keys() == tensors.keys()
    index.unlink()
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    refuse("Weights only load failed")
    monkeypatch.setattr("training.released.cached_file", None)  # which asks the hub
    with pytest.raises(InputError, match="No such file"):
        eagle3.load_draft("gone.safetensors", embedded[0])
