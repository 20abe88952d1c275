"""What the files promise to their readers: each method file can be copied out beside common.py, its
functions are short and its lines narrow, and --help explains every option."""
import ast
import copy
import functools
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from cli.options import is_training, read_options
from common import CachedLM, autoregressive, encode, eos_ids
from helpers import ROOT, fork, forget_project, main, tokens_of
from cli.files import read_prompts
from mutants import commands_of, list_generated, list_written, make_slips, read, walk
from training.loop import Settings
from training.low_rank import add_low_rank
from training.parts import save_part

FILES = ("speculative", "jacobi", "ouroboros", "mjsd", "bita", "cllm",
         "survey.several_drafts", "survey.lossy", "survey.medusa", "survey.eagle",
         "survey.eagle3", "survey.dflash",
         "survey.sequoia", "survey.rest", "survey.layerskip", "survey.early_exit",
         "survey.draft_verify", "survey.masks", "survey.cascade", "survey.triforce",
         "survey.online", "survey.hybrid", "survey.recycling", "survey.another_tokenizer")
PACKAGES = {"torch", "transformers", "tqdm", "safetensors"}
PLAIN = {"steps", "seed", "lr", "max_new_tokens"}  # options of commands that need no words


def functions_of(name: str) -> tuple[list, list]:
    """(methods, commands) that the last block of a file gives to cli.main.main."""
    module = importlib.import_module(name)
    block = ast.parse(inspect.getsource(module)).body[-1]
    calls = [x for x in ast.walk(block) if isinstance(x, ast.Call)]
    [call] = [x for x in calls if ast.unparse(x.func) == "main"]
    commands = [x.value.elts for x in call.keywords if x.arg == "commands"]
    return tuple([getattr(module, x.id) for x in some]
                 for some in (call.args[0].elts, commands[0] if commands else []))


def path_of(name: str):
    return ROOT / f"{name.replace('.', '/')}.py"


@functools.cache
def needs(name: str) -> set[str]:
    """The files of the project that it imports when it is imported, besides common.py."""
    body = ast.parse(path_of(name).read_text()).body
    found = {x.module for x in body if isinstance(x, ast.ImportFrom)}
    return {x for x in found if path_of(x).exists()} - {"common"}


def copied_with(name: str) -> set[str]:
    """It, what it needs, what that needs."""
    return {name}.union(*(copied_with(x) for x in needs(name)))


def written() -> list[str]:
    """The project's own texts; a checkout may have no git, but environments and work beside it."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [x for x in folders if x[0] not in "._" and x != "work"]
        found += [os.path.relpath(os.path.join(folder, name), ROOT) for name in names
                  if name.endswith((".py", ".md")) or name == "Makefile"]
    return sorted(found)


PRODUCT = [name for name in written() if not name.startswith("tests")]


METHODS = [(name, method.__name__) for name in FILES for method in functions_of(name)[0]]


# ------------------------------------------------------------------------------ one file each

def imported(nodes: list) -> set[str]:
    """The packages that these statements import, also within functions."""
    found = [x for node in nodes for x in ast.walk(node)]
    return {(x.module if isinstance(x, ast.ImportFrom) else alias.name).split(".")[0]
            for x in found if isinstance(x, (ast.Import, ast.ImportFrom)) for alias in x.names}


ROOMS = {  # what the files of each room import, where they do not run their command line
    "common": set(), "root": {"common", "training"}, "training": {"common", "training"},
    "survey": {"common", "root", "survey", "training"},
    "cli": {"cli", "common", "survey", "training"},
    "models": {"cli", "common", "models", "training"}}


def room_of(module: str) -> str:
    """The folder of a module; "common" for common.py itself."""
    folder, dot, _ = module.partition(".")
    return folder if dot else "common" if module == "common" else "root"


@pytest.mark.parametrize("name", [name[:-3].replace("/", ".") for name in PRODUCT
                                  if name.endswith(".py") and not name.startswith("results")])
def test_imports_run_one_way(name):
    """common.py, then methods, then survey/; training/ beside them; then cli/. A root file is
    imported with common.py alone: what trains or loads a file is imported where it is done."""
    if name == "survey.common":  # it makes way for the real one
        return
    *body, last = ast.parse(path_of(name).read_text()).body
    inner = [x for x in ast.walk(ast.Module(body, [])) if isinstance(x, ast.ImportFrom)]
    found = {room_of(x.module) for x in inner if path_of(x.module).exists()}
    clock = {"survey"} if name == "bita" else set()  # of its best tree
    assert found <= ROOMS[room_of(name)] | clock
    if room_of(name) in ("common", "root", "survey", "training"):
        own = {"common", "speculative", "bita", "survey", "training"}
        assert imported(body) <= {*sys.stdlib_module_names} | PACKAGES | own
    if room_of(name) == "root":
        assert needs(name) == set()
    if name in FILES:
        assert ast.unparse(last.test) == "__name__ == '__main__'" and imported([last]) == {"cli"}


EXACT = {  # options with which a method's greedy text is the target's; {} is the folder models/
    "bild": {"fallback": 2.0, "rollback": 0.0}, "mjsd": {"tau": 1.0}, "mjgd": {"K": 1},
    "specdec": {"beta": 1}, "bita": {"tree": "efficient"},
    "medusa": {"adapter": "{}/medusa.safetensors", "nodes": 4},
    "eagle": {"adapter": "{}/eagle.safetensors", "nodes": 8},
    "eagle3": {"adapter": "{}/eagle3.safetensors", "nodes": 8},
    "dflash": {"adapter": "{}/dflash.safetensors", "nodes": 8},
    "sequoia": {"rates": "{}/sequoia.json", "nodes": 8, "depth": 4},
    "rest": {"datastore": "{}/rest.safetensors", "nodes": 4},
    "early_exit": {"exit": "{}/exit.safetensors"}, "layerskip": {"tuning": "", "E": 3},
    "cascade": {"grams": "{}/rest.safetensors"},
    "hybrid": {"datastore": "{}/rest.safetensors", "trust": "{}/hybrid.json",
               "adapter": "{}/eagle.safetensors", "nodes": 8},
    "pass_sampling": {"tokens": "{}/pass.safetensors"},
    "draft_verify": {"skipped": {"attention": [5], "mlp": [6]}}}


def decode_alone(top, text: str, space: str) -> int:
    """Decode by every method, each in its file's folder, and print the tokens: in a process that
    forgets where the project is. Returns the exit status.

    top    the folder of the folders
    space  a tuning for SPACE
    """
    forget_project()
    packages = [*sys.path]
    own, loaded = {"common", *FILES}, {}
    for name, method in METHODS:
        sys.path = [str(top / name), *packages]
        for module in [x for x in sys.modules if x in own or x.split(".")[0] == "survey"]:
            del sys.modules[module]
        module, common = importlib.import_module(name), importlib.import_module("common")
        assert module.__file__.startswith(str(top / name)) and module.Sampler is common.Sampler
        function = getattr(module, method)
        names = [x for x in ("target", "draft") if x in function.__annotations__]
        for x in names:
            loaded[x] = loaded.get(x) or common.load(f"{ROOT}/models/{x}", "cpu", "float32")
        models, tokenizers = zip(*(loaded[x] for x in names))
        tokenizer = tokenizers[0]
        own_options = {"space": {"tuning": space},
                       "another_tokenizer": {"tokenizers": tokenizers}}
        options = own_options.get(method, EXACT.get(method, {}))
        options = {name: value.replace("{}", f"{ROOT}/models") if isinstance(value, str) else value
                   for name, value in options.items()}
        if name == "bita":
            options["tuning"] = module.Tuning(models[0])  # its file is read by training/parts.py
        prompt = common.encode(tokenizer, text)
        lms = [function.__annotations__[x](model) for x, model in zip(names, models)]
        chunks = function(*lms, prompt, **options)
        chunks = common.until(chunks, 24, common.eos_ids(models[0], tokenizer))
        print(json.dumps([method, [token for chunk in chunks for token in chunk]]))
    files = [getattr(x, "__file__", None) or "" for x in sys.modules.values()]
    return int(any(os.path.dirname(x) in (str(ROOT), f"{ROOT}/models") for x in files))


def test_a_method_file_runs_in_a_folder_with_common_alone(tmp_path, embedded):
    """A folder for each file: there all of its methods decode as autoregressive decoding does, the
    lossy ones at their lossless ends. In survey/ what the file needs lies beside it."""
    for name in FILES:
        folder = tmp_path / name
        (folder / "survey").mkdir(parents=True)
        (folder / "training").mkdir()
        for file in {"common", *copied_with(name)}:
            (folder / path_of(file).relative_to(ROOT)).write_text(path_of(file).read_text())
    text = read_prompts(ROOT / "models/examples.jsonl")[0]
    target, _, tokenizer = embedded
    own = add_low_rank(copy.deepcopy(target), 1)
    own["mask"] = target.get_input_embeddings().weight[:1]
    none = {name: torch.zeros_like(p) for name, p in own.items()}
    save_part(tmp_path / "none", "a SPACE tuning", target, none, rank=1, right=[0.5])
    process, _, out, err = fork(decode_alone, tmp_path, text, str(tmp_path / "none"))
    found, errors = dict(map(json.loads, out)), err.read()
    process.join()
    assert process.exitcode == 0, errors
    eos = eos_ids(target, tokenizer)
    expected = tokens_of(autoregressive(CachedLM(target), encode(tokenizer, text)), 24, eos)
    assert found == {method: expected for _, method in METHODS}


def run_alone(folder: str) -> None:
    """Run a method file as a script, in a process that forgets where the project is."""
    forget_project()
    sys.path.insert(0, folder)
    runpy.run_path(f"{folder}/jacobi.py", run_name="__main__")


def test_a_copied_file_says_where_the_command_line_is(tmp_path):
    """Python prints the line of the import that fails, and with it the comment there."""
    line = "from cli.main import main  # the command line is in cli/, a folder of this project"
    for name in FILES:
        assert f"\n    {line}\n" in path_of(name).read_text(), name
    for name in "common", "jacobi":
        shutil.copy(path_of(name), tmp_path)
    process, _, _, err = fork(run_alone, str(tmp_path))
    errors = [row.strip() for row in err if "^" not in row]
    process.join()
    assert process.exitcode == 1
    assert errors[-2:] == [line, "ModuleNotFoundError: No module named 'cli'"]


# -------------------------------------------------------------------------------- short, narrow

@functools.cache
def find_prose(source: str) -> set[int]:
    """Return the numbers of all lines that belong to a docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    tree = ast.parse(source)
    owners = [x for x in ast.walk(tree) if isinstance(x, kinds) and ast.get_docstring(x)]
    return {line for owner in owners
            for line in range(owner.body[0].lineno, owner.body[0].end_lineno + 1)}


def code_lines(source: str, node: ast.AST | None = None) -> int:
    """Count the lines of code of a file, or of one node in it.

    A line of a docstring, a comment or a blank line is prose: prose has no limit.
    """
    words = find_prose(source)
    first = node.lineno if node else 1
    rows = source.splitlines()
    last = node.end_lineno if node else len(rows)
    numbered = [(i, rows[i - 1].strip()) for i in range(first, last + 1)]
    return sum(i not in words and row != "" and row[0] != "#" for i, row in numbered)


def test_common_has_few_ideas():
    """A limit on lines of code, never on words: what is read first must be read whole."""
    assert code_lines((ROOT / "common.py").read_text()) <= 240


def nesting(node: ast.AST, depth: int = 0) -> int:
    """How many blocks of statements stand in one another; an elif stands beside its if."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        block = isinstance(child, (ast.For, ast.While, ast.If, ast.With, ast.Try))
        beside = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (block and not beside)))
    return deepest


@pytest.mark.parametrize("name", [name for name in PRODUCT if name.endswith(".py")])
def test_functions_are_short_and_shallow(name):
    source = (ROOT / name).read_text()
    functions = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef)]
    assert [x.name for x in functions if code_lines(source, x) > 45 or nesting(x) > 4] == []


def wide(path) -> list[str]:
    """Lines of more than 100 columns; in Markdown those of tables and of what programs print,
    fenced blocks without a language, aside."""
    found, fence = [], None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if path.suffix == ".md" and line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
        free = path.suffix == ".md" and (line.startswith("|") or fence in ("", "text", "console"))
        if len(line) > 100 and not free:
            found.append(f"{path.name}:{number}: {len(line)} columns")
    return found


@pytest.mark.parametrize("name", written())
def test_lines_are_narrow(name):
    assert wide(ROOT / name) == []


def test_which_lines_count(tmp_path):
    """The checks above see what they are to see."""
    long, file = "x" * 101, tmp_path / "a.md"
    file.write_text(f"{long}\n| {long} |\n```\n{long}\n```\n{long}\n```python\n{long}\n```\n{long}")
    assert wide(file) == [f"a.md:{n}: 101 columns" for n in (1, 6, 8, 10)]
    (tmp_path / "Makefile").write_text(f"{'é' * 100}\n| {long}\n")
    assert wide(tmp_path / "Makefile") == ["Makefile:2: 103 columns"]
    assert {"common.py", "cli/main.py", "cli/graphs.py", "training/loop.py", "README.md",
            "Makefile", "models/README.md", "models/tasks.py", "tests/conftest.py",
            *(f"{x.replace('.', '/')}.py" for x in FILES)} <= {*written()}
    assert not any("site-packages" in name for name in written())
    assert imported(ast.parse("import a.b, c\ndef f():\n    from d.e import g").body) == {*"acd"}
    [function] = ast.parse(BLOCKS).body
    assert (code_lines(BLOCKS, function), nesting(function)) == (10, 3)


BLOCKS = """
def f():
    '''Two
    lines.'''

    # A comment.
    if 1:
        for x in y:
            pass
    elif 2:
        with z:
            try:
                pass
            finally:
                pass
"""


TRAINED = [os.path.relpath(path, ROOT) for path in sorted((ROOT / "models").rglob("*.safetensors"))
           if path.stem not in ("model", "rest")
           and path.parent.name in ("models", "smollm2")]


@pytest.mark.parametrize("name", TRAINED)
def test_trained_parts_are_small_and_of_few_bits(name):
    assert len(TRAINED) == 16 and (ROOT / name).stat().st_size < 8e6
    stored = {x.dtype for x in load_file(ROOT / name).values()}
    assert torch.bfloat16 in stored <= {torch.bfloat16, torch.float8_e4m3fn}


# --------------------------------------------------------------------------------------- --help

def explained(doc: str, others: dict[str, str]) -> set[str]:
    """The names that a docstring lists, as "name:" or "name, name:" at the beginning of a line
    before "Yields"; with "Options …: as NAME" also those of that function."""
    lists = re.findall(r"^ *(\w+(?:, \w+)*): ", doc.split("Yields")[0], re.M)
    names = {name for some in lists for name in some.split(", ")}
    if other := re.search(r"Options.*: as (\w+)", doc):
        names |= explained(others[other[1]], others)
    return names


@pytest.mark.parametrize("name", FILES)
def test_docstrings_explain_every_option(name):
    """And nothing that is none. --help of a training explains those that most trainings have."""
    methods, commands = functions_of(name)
    docs = {f.__name__: f.__doc__ for f in [*methods, *commands]}
    for function in [*methods, *commands]:
        free = PLAIN if function in commands else set()
        if is_training(function):
            free = free | explained(Settings.__doc__, {})
        options, listed = {*read_options(function)}, explained(function.__doc__, docs)
        assert options - listed <= free and listed <= options, function.__name__


@pytest.mark.parametrize("name", FILES)
def test_help_prints_every_docstring_whole(capsys, monkeypatch, name):
    """Of all methods, or of one command; and every option, with its default."""
    monkeypatch.setenv("COLUMNS", "40")  # no line of a docstring is filled again
    methods, commands = functions_of(name)
    for shown, argv in [(methods, []), *(([f], [f.__name__]) for f in commands)]:
        assert main(methods, None, [*argv, "--help"], commands=commands) == 0
        out = [line.strip() for line in capsys.readouterr().out.splitlines()]
        for doc in [sys.modules[shown[0].__module__].__doc__, *(f.__doc__ for f in shown)]:
            lines = [line.strip() for line in doc.strip().splitlines()]
            assert any(out[i:i + len(lines)] == lines for i in range(len(out))), doc
        for function in shown:
            [title] = [line for line in out if line.startswith(f"{function.__name__}(")]
            for option, (_, default) in read_options(function).items():
                text = "\n".join(out)
                assert re.search(rf"^--(no-)?{option.replace('_', '-')}\b", text, re.M), option
                assert f"{option}={default!r}" in title or default is inspect.Parameter.empty
            assert "inspect._empty" not in title


# ------------------------------------------------------------------------------------- mutants

def test_every_mutant_can_be_made():
    """The text that a mutant replaces stands once in its file; none is run here."""
    mutants = list_written()
    assert len({x.source for x in mutants}) == len(mutants) >= 150
    assert all(x.source != read(x.file) and x.mistake for x in mutants)


def test_every_method_has_mutants_and_every_file_with_mutants_has_tests():
    files = {x.file for x in list_written()}
    assert {f"{name.replace('.', '/')}.py" for name in FILES} <= files
    assert all(commands_of(file) for file in files)


def test_slips_are_made_at_places_that_the_seed_chooses():
    """Each of the eight operators makes some; the places of a seed are always the same."""
    slips = list_generated("survey/medusa.py", 16, seed=0)
    assert slips == list_generated("survey/medusa.py", 16, seed=0) and len(slips) == 16
    assert slips != list_generated("survey/medusa.py", 16, seed=1)
    ast.parse(slips[0].source)
    code = ast.parse("if a < 1 and b:\n    c[0] = min(d, 2.0)\n    f(x, y)")
    made = [(kind, ast.unparse(new)) for node in walk(code) for kind, _, new in make_slips(node)]
    assert sorted(made) == [
        ("and, or", "a < 1 or b"), ("arguments", "f(y, x)"), ("comparison", "a <= 1"),
        ("constant", "4.0"), ("min, max", "max"), ("negation", "not (a < 1 and b)"),
        ("one more", "-1"), ("one more", "0"), ("one more", "1"), ("one more", "2"),
        ("statement", "pass"), ("statement", "pass")]
