"""What a checkpoint may look like, and what is said of one that cannot be used: no code of its own
runs, no weight stays random, no key of a config counts that the model ignores."""
import inspect
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig,
                          PreTrainedTokenizerFast)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cli.loading import check_passes, encode_chat, encode_prompts, load_checked
from common import CachedLM, InputError, encode, load, vocab_size
from families import SHAPE, tiny
from helpers import ROOT, fork, script
from training.layers import context_length

EMBEDDED = ROOT / "models/target"


@pytest.fixture
def folder(tmp_path, request):
    """A directory with a small Llama of two layers and the embedded tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def change_json(file, **keys) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


# --------------------------------------------------------------------- code of a checkpoint

MARK = """
import pathlib
pathlib.Path(__file__).with_name("MARK").write_text("it ran")
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
from transformers import PreTrainedTokenizerFast as Tokens
"""


def bring_code(folder, which: str) -> None:
    """Give a checkpoint code of its own, in its config or its tokenizer, that leaves a mark."""
    (folder / "own.py").write_text(MARK)
    if which == "model":
        change_json(folder / "config.json", model_type="of-its-own", auto_map={
            "AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    if which == "tokenizer":
        change_json(folder / "tokenizer_config.json", tokenizer_class="OfItsOwn",
                    auto_map={"AutoTokenizer": [None, "own.Tokens"]})


def marks_of(folder) -> list:
    """Where the code left a mark: beside itself, or in the cache that transformers copies it to."""
    from transformers.utils import HF_MODULES_CACHE
    return [*folder.rglob("MARK"), *(ROOT.__class__(HF_MODULES_CACHE).rglob("MARK"))]


@pytest.mark.parametrize("which", ["model", "tokenizer"])
def test_code_of_a_checkpoint_never_runs(folder, monkeypatch, which):
    bring_code(folder, which)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(InputError, match="brings code of its own, which is never run"):
        load_checked(str(folder), "cpu", "float32")
    with pytest.raises(InputError):
        load(str(folder), "cpu", "float32")
    assert marks_of(folder) == []


@pytest.mark.parametrize("said", ["y\nmore text", None], ids=["yes", "silence"])
def test_code_of_a_checkpoint_never_runs_whatever_stands_on_stdin(folder, said):
    """A terminal that says nothing stays open. The answer is one line, and there is no mark."""
    bring_code(folder, "model")
    process, stdin, out, err = fork(script, "jacobi", "--target", str(folder), "--prompt", "-")
    if said is not None:
        stdin.write(said)
        stdin.close()
    assert out.read() == "" and err.read().count("\n") == 1
    process.join()
    stdin.close()
    assert process.exitcode == 2 and marks_of(folder) == []


# ------------------------------------------------------------------------------ its weights

FIRST = "model.layers.0.self_attn.q_proj"  # the name of a weight in the middle of a model


def split_lora(tensors: dict) -> dict:
    """Give weights the names of a LoRA that was saved without being merged."""
    x = tensors.pop(f"{FIRST}.weight")
    return tensors | {f"{FIRST}.base_layer.weight": x, f"{FIRST}.lora_A.default.weight": x[:2] + 1}


def drop(part: str):
    return lambda tensors: {name: x for name, x in tensors.items() if part not in name}


def cut_embeddings(tensors: dict) -> dict:
    return tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:-3]}


def change_weights(folder, change) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_weights_that_a_model_may_have_besides_are_ignored(folder):
    """Rotary buffers of old checkpoints, and heads of other methods."""
    expected = load(str(folder), "cpu", "float32")[0].state_dict()
    change_weights(folder, lambda tensors: tensors | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "medusa_head.0.weight": torch.ones(4, 4)})
    model, _ = load(str(folder), "cpu", "float32")
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


def cut_off(folder) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])


def lose_shard(folder) -> None:
    names = {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def quantise(folder) -> None:
    """Store a weight as MLX does."""
    change_weights(folder, lambda tensors: tensors | {
        f"{FIRST}.weight": torch.ones(32, 4, dtype=torch.int32),
        f"{FIRST}.scales": torch.ones(32, 1), f"{FIRST}.biases": torch.ones(32, 1)})
    change_json(folder / "config.json", quantization={"group_size": 32, "bits": 4})


def write_pointer(name: str):
    return lambda folder: (folder / name).write_text("version https://git-lfs.github.com/spec/v1")


def of(change):
    return lambda folder: change_weights(folder, change)


WRONG = [  # as trainings, clones, broken downloads and other programs leave a directory
    (of(split_lora), "LoRA adapter, which must be merged into its base model first"),
    (of(drop("layers.1.")), "9 are missing or of another size: model.layers.1.input_lay"),
    (of(drop("model.norm")), "1 are missing or of another size: model.norm.weight"),
    (of(cut_embeddings), "1 are missing or of another size: model.embed_tokens.weight"),
    (write_pointer("model.safetensors"), "model.safetensors is a pointer of git-lfs"),
    (cut_off, "model.safetensors is cut off or damaged"),
    (lose_shard, "1 of its 2 files are missing, as model-2.safetensors"),
    (quantise, "its weights are quantised"),
    (lambda x: change_json(x / "config.json", quantization_config={"quant_method": "gptq"}),
     "its weights are quantised"),
    (lambda x: (x / "adapter_config.json").write_text("{}"),
     "adapter_config.json: it holds a LoRA adapter")]


@pytest.mark.parametrize("damage, said", WRONG, ids=[said[:24] for _, said in WRONG])
def test_what_is_wrong_with_a_directory_is_said(folder, damage, said):
    """transformers leaves weights that are missing random, with a warning that a command line does
    not show."""
    damage(folder)
    with pytest.raises(InputError, match=said):
        load_checked(str(folder), "cpu", "float32")
    if "missing or" in said:
        with pytest.raises(InputError, match=said):
            load(str(folder), "cpu", "float32")


# ------------------------------------------------------------------------------- its config

SIZES = SHAPE | dict(head_dim=8, moe_intermediate_size=16, num_experts_per_tok=2, num_experts=4,
                     num_local_experts=4, n_routed_experts=4, n_group=1, topk_group=1,
                     q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
                     v_head_dim=8, n_embd=32, n_layer=2, n_head=4, n_positions=160, ffn_dim=48,
                     word_embed_proj_dim=32, first_k_dense_replace=1)


def make_tiny(model_type: str, **keys):
    """Make a random model of a family that these sizes make small; None for other families."""
    try:
        config = CONFIG_MAPPING[model_type](**SIZES, **keys)
        with torch.device("meta"):
            sizes = [p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()]
        if sum(sizes) > 1e6:
            return None
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    except Exception:  # sizes of its own: not for this test
        return None
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 0.1 if "gemma" in model_type and "embed" in name else 0.3)
    return model.eval()


@torch.inference_mode()
def agrees(model) -> bool | None:
    """Say whether a prepared model computes what its own pass does, beyond a window of 9. None: it
    is refused."""
    try:
        lm = CachedLM(check_passes(model))
    except InputError:
        return None
    text = torch.randint(5, 60, (28,), generator=torch.Generator().manual_seed(1)).tolist()
    lm.start(text[:20])
    expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, 20:]
    return torch.allclose(lm.forward(text[20:]), expected, atol=1e-3 * expected.abs().max())


def test_a_window_counts_where_the_family_uses_it():
    """For all families of transformers that can be made tiny and whose config has a window, used or
    switched off; and for every fourth of the others, where the key is a stray one."""
    used, known = 0, 0
    for i, model_type in enumerate(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        if i % 4 and "sliding_window" not in inspect.getsource(CONFIG_MAPPING[model_type]):
            continue
        model = make_tiny(model_type, sliding_window=9)
        said = agrees(model) if model is not None else None
        assert said is not False, model_type
        known += said is True
        used += said is True and 9 in CachedLM(model).windows.values()
    assert known >= 35 and used >= 15


def test_a_stray_window_is_forgotten_where_a_directory_is_loaded(folder):
    change_json(folder / "config.json", sliding_window=9)
    assert load_checked(str(folder), "cpu", "float32")[0].config.sliding_window is None


def test_longrope_nested_by_kind_of_layer():
    """The shortest original length is the context."""
    factors = dict(short_factor=[1.0] * 4, long_factor=[3.0] * 4, factor=4.0, rope_theta=10000.0,
                   rope_type="longrope")
    nested = {"full_attention": factors | {"original_max_position_embeddings": 90},
              "sliding_attention": factors | {"original_max_position_embeddings": 40}}
    config = Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=9, rope_parameters=nested,
                              layer_types=["sliding_attention", "full_attention"])
    model = check_passes(AutoModelForCausalLM.from_config(config).eval())
    assert context_length(model) == 40


@pytest.mark.parametrize("keys", [{"output_router_logits": True}, {"return_dict": False},
                                  {"output_hidden_states": True}])
def test_settings_of_outputs_do_not_count(keys, folder):
    make_tiny("mixtral").save_pretrained(folder)
    change_json(folder / "config.json", **keys)
    assert agrees(load_checked(str(folder), "cpu", "float32")[0]) is True


# ----------------------------------------------------------------------------- its tokenizer

def test_ids_with_gaps_lose_no_token():
    """A tokenizer of 40 entries whose largest id is 49, for models of 61 rows and of 45."""
    vocabulary = {f"t{i}": i for i in [*range(39), 49]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(
        vocabulary, unk_token="t0")))
    assert len(tokenizer) == 40 and vocab_size(tiny("llama"), tokenizer) == 50
    assert vocab_size(tiny("llama", vocab_size=45), tokenizer) == 45


def test_tokens_without_embeddings_are_refused(embedded):
    model, draft, tokenizer = embedded
    added = AutoTokenizer.from_pretrained(EMBEDDED)
    added.add_tokens(["<new>"])
    with pytest.raises(InputError, match="1536 of them, got '<new>' with id 1536"):
        encode_prompts([model, draft], added, ["Mia has 3 <new> apples."], False)
    few = tiny("llama", vocab_size=50)
    with pytest.raises(InputError, match="50 of them"):  # of all models that read the prompt
        encode_prompts([model, few], tokenizer, ["Mia has 3 apples."], False)
    [ids] = encode_prompts([model, draft], tokenizer, ["Mia has 3 apples."], False)
    assert ids == tokenizer.encode("Mia has 3 apples.")
    with pytest.raises(InputError, match="some text, got ''$"):
        encode(tokenizer, "")


TEMPLATES = [
    ("{{ raise_exception('only with tools') }}", "says: only with tools"),
    ("{% for m in messages %}{{ m.content", "says: "),
    ("{{ messages[0].nothing.more }}", "says: .*nothing"),
    ({"one": "{{ messages }}", "two": "{{ messages }}"}, "says: "),
    ("{{ strftime_later('%d') }}", "says: 'strftime_later' is undefined"),
    ("Hello!", "leaves it out")]


@pytest.mark.parametrize("template, said", TEMPLATES)
def test_templates_that_do_not_take_a_prompt(template, said):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=said) as refused:
        encode_chat(tokenizer, "Mia has 3 apples.")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    with pytest.raises(InputError, match="some text, got ''$"):
        encode_chat(tokenizer, "")


def test_a_template_that_takes_a_prompt():
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m.content | trim }}{% endfor %}"
    expected = tokenizer.encode("Q: Mia", add_special_tokens=False)
    assert encode_chat(tokenizer, "Mia") == expected
