"""These tests show which checkpoints can be used, and what is said of others. No code of a
checkpoint runs, and no weight stays random."""
import io
import json
import logging
import re
import runpy
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import common
from common import InputError
from families import tiny
from helpers import ROOT, check_refused, script
from support.engine import vocab_size
from support.loading import list_lost, load, load_checked


@pytest.fixture
def folder(tmp_path, models):
    """Make a directory with a small Llama of two layers and the embedded tokenizer."""
    return shutil.copytree(models[1], tmp_path, dirs_exist_ok=True)


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
def test_code_of_a_checkpoint_never_runs_whatever_is_on_stdin(folder, which, monkeypatch, capsys):
    """The answer is one line, and there is no mark."""
    bring_code(folder, which)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nmore text"))
    assert script("jacobi", "--target", str(folder), "--prompt", "-") == 2
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1 and "code of its own, which is never" in line
    assert marks_of(folder) == []


# ------------------------------------------------------------------------------ its weights

def change_weights(folder, change) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_weights_that_a_model_may_have_besides_are_ignored(folder):
    """These are rotary buffers of old checkpoints, and heads of other methods."""
    expected = load(str(folder), "cpu", "float32")[0].state_dict()
    more = "model.layers.0.self_attn.rotary_emb.inv_freq", "medusa_head.0.weight"
    change_weights(folder, lambda tensors: tensors | {name: torch.ones(4) for name in more})
    for read in load, common.load:
        model, _ = read(str(folder), "cpu", "float32")
        assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())


def cut_off(folder) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])


NAME = "model.layers.0.mlp.up_proj.weight"
TABLE = "model.embed_tokens.weight"
UNFIT = "quantised, missing, without a place or of another size"
WEIGHTS = [  # what the weights become
    (lambda w: {n: w[n] for n in w if "layers.1." not in n}, f"9 {UNFIT}: model.layers.1.input_"),
    (lambda w: w | {TABLE: w[TABLE][:-3]}, f"1 {UNFIT}: {TABLE}"),
    (lambda w: w | {NAME: w[NAME].to(torch.int8), NAME.replace("weight", "SCB"): torch.ones(48)},
     "1 quantised, .*: model.layers.0.mlp.up_proj.SCB$"),
    (lambda w: w | {f"{NAME}_scale": torch.ones(1)}, f"1 {UNFIT}: {NAME}_scale$")]
WRONG = [  # as trainings, clones, broken downloads and other programs leave a directory
    *((lambda x, change=change: change_weights(x, change), said) for change, said in WEIGHTS),
    (cut_off, "not cut off or damaged, got .*model.safetensors"),
    (lambda x: (x / "adapter_config.json").write_text("{}"),
     "adapter_config.json: a LoRA adapter must be merged"),
    (lambda x: (x / "tokenizer.json").unlink(), "Couldn't instantiate the backend tokenizer")]


@pytest.mark.parametrize("damage, said", WRONG, ids=[said[:24] for _, said in WRONG])
def test_what_is_wrong_with_a_directory_is_said(folder, damage, said):
    """transformers leaves weights that are missing random, with a warning that a command line does
    not show."""
    damage(folder)
    check_refused(said, load_checked, str(folder), "cpu", "float32")
    if said[0].isdigit():
        check_refused(said, load, str(folder), "cpu", "float32")
    with pytest.raises(InputError, match="^expected a (whole Llama|model directory)"):
        common.load(str(folder), "cpu", "float32")


def stem_of(weights: dict) -> str:
    """Return the name of a linear map in the first layer, without `.weight`."""
    linear = r"(.*(layers|h)\.0\..*\.\w*(proj|attn|dense))\.weight"
    return next(filter(None, (re.fullmatch(linear, name) for name in weights)))[1]


# What is beside the weights of a linear map {stem} of an inner module {place}
LOST = ["{stem}.lora_A.weight", "{stem}.lora_B.default.weight", "{stem}.weight_scale",
        "base_model.model.{stem}.lora_A.weight", "{place}.another_norm.weight", "lm_head.bias",
        "{place}.experts.0.up_proj.weight_scale"]
HARMLESS = ["{place}.rotary_emb.inv_freq", "{place}.masked_bias", "mtp.layers.0.self_attn.q.weight",
            "{after}.weight", "v_head.summary.weight", "logit_scale", "model.visual.std_scale",
            "model.visual.blocks.0.attn.qkv.bias"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "neox", "gemma3", "deepseek-v3", "lfm2",
                                    "qwen3.5", "gptj", "falcon", "bamba"])
def test_tensors_without_a_place_are_refused_if_a_layer_would_need_them(family, tmp_path):
    """Each is refused by itself, with the prefix of the model inside and without. Those that other
    programs and older versions leave are harmless."""
    model = tiny(family)
    weights = model.state_dict()
    stem = stem_of(weights)
    names = dict(stem=stem, place=stem.rpartition(".")[0], after=re.sub(r"\.0\.", ".61.", stem, 1))
    lost = [name.format(**names) for name in LOST] + [f"{stem}.bias"]
    lost = [name for name in lost if name not in weights]
    harmless = [name.format(**names) for name in HARMLESS]
    prefix = f"{model.base_model_prefix}."
    assert sorted(list_lost(model, {*lost, *harmless})) == sorted(lost)
    lost = [name.removeprefix(prefix) for name in lost]
    harmless = [name.removeprefix(prefix) for name in harmless]
    assert sorted(list_lost(model, {*lost, *harmless})) == sorted(lost)


@pytest.mark.parametrize("name", ["transformer.h.0.attn.bias", "h.0.attn.bias",
                                  "transformer.h.1.attn.masked_bias"])
def test_causal_masks_of_old_checkpoints_are_no_bias(name):
    assert list_lost(tiny("gptj"), {name}) == list_lost(tiny("gpt2"), {name}) == []


# ----------------------------------------------------------------------------- its tokenizer

def test_a_tokenizer_that_transformers_warns_of_is_told(folder, monkeypatch):
    """It is one of more than 100,000 tokens. All else that is logged is not shown."""
    change_json(folder / "config.json", model_type="mistral", architectures=["MistralForCausalLM"],
                transformers_version="4.50.0")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"] |= {f"more{i}": i for i in range(len(model["vocab"]), 100_001)}
    change_json(folder / "tokenizer.json", model=model)
    change_weights(folder, lambda tensors: tensors | {"medusa_head.0.weight": torch.ones(4, 4)})
    handler = Mock(level=logging.WARNING)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    line = ["--target", str(folder), "--prompt", "Tom", "--max-new-tokens", "2"]
    assert script("jacobi", *line) == 0
    [[(record,), _]] = handler.handle.call_args_list
    assert "incorrect regex pattern" in record.getMessage()



def test_ids_with_gaps_lose_no_token():
    """A tokenizer of 40 entries whose largest id is 49, for models of 61 rows and of 45."""
    tokenizer = SimpleNamespace(get_vocab=lambda: {f"t{i}": i for i in [*range(39), 49]})
    assert vocab_size(tiny("llama"), tokenizer) == 50
    assert vocab_size(tiny("llama", vocab_size=45), tokenizer) == 45


# ----------------------------------------------------------------------------- its transformers

@pytest.mark.parametrize("version, fits", [
    ("5.4.0", False), ("5.16.9", False), ("5.17.0", True), ("5.100.0.dev0", True), ("6.0", True)])
def test_another_transformers_is_refused_when_support_is_imported(version, fits, monkeypatch):
    """The line names both. Every command imports support/ before what other versions lack."""
    monkeypatch.setattr("transformers.__version__", version)
    if fits:
        runpy.run_path(str(ROOT / "support/__init__.py"))
        return
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(ROOT / "support/__init__.py"))
    needed = re.search("transformers==(.*)", (ROOT / "requirements.txt").read_text())[1]
    assert re.search(f"{needed}.* 5.17 at least, got transformers {version}", str(refused.value))
    assert "\n" not in str(refused.value)
