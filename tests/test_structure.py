"""These tests hold what the files promise to their readers. Each method file can be copied out
beside common.py. Its functions are short and its lines narrow, no room grows, and --help explains
every option."""
import ast
import json
import os
import re
import runpy
import shlex
import sys

import pytest

from cli.commands import is_training
from cli.options import read_options
from families import near, tiny
from helpers import fork, forget_project, main, status_of
from mutants import list_written
from sources import (FILES, SIX, code_lines, copied_with, functions_of, list_files, name_of, needs,
                     path_of, read, written)
from training.settings import Settings

PACKAGES = {"torch", "transformers", "tqdm", "safetensors"}
PLAIN = {"steps", "seed", "lr", "max_new_tokens"}  # options of commands that need no words
LIMITS = {"root": 1130, "cli": 820, "models": 930, "results": 360, "tests": 7165,
          "hybrid support survey training": 4450}  # lines of code; prose has no limit
PROGRAMS = [name for name in written() if name.endswith(".py") and not name.startswith("tests")]


# ------------------------------------------------------------------------------ one file each

def imported(nodes: list) -> set[str]:
    """Return the modules that these statements import, also within functions."""
    return {getattr(x, "module", x.names[0].name) for node in nodes for x in ast.walk(node)
            if isinstance(x, (ast.Import, ast.ImportFrom))}


ROOMS = {  # what the files of each room import, where they do not run their command line
    "common": set(), "support": {"common", "support"},
    "training": {"common", "support", "training"}, "root": {"common"},
    "survey": {"common", "root", "support", "survey", "training"},
    "hybrid": {"common", "hybrid", "support", "survey", "training"},
    "cli": {"cli", "common", "support", "training"},
    "models": {"cli", "common", "models", "support", "training"}}


def room_of(module: str) -> str:
    """Return the folder of a module, or "common" for common.py itself."""
    folder, dot, _ = module.partition(".")
    return folder if dot else "common" if module == "common" else "root"


@pytest.mark.parametrize("name", [name_of(x) for x in PROGRAMS if not x.startswith("results")])
def test_imports_run_one_way(name):
    """A file may import only from the rooms that ROOMS lists for its own. A root file needs
    common.py only."""
    *body, last = ast.parse(path_of(name).read_text()).body
    modules = imported(body)
    own = {x for x in modules if path_of(x).exists()}
    assert {*map(room_of, own)} <= ROOMS[room_of(name)]
    if room_of(name) not in ("cli", "models"):
        packages = {x.split(".")[0] for x in modules - own}
        assert packages <= {*sys.stdlib_module_names} | PACKAGES | ROOMS.keys()
    if name != "models.tasks":  # which finds cli/ by itself
        functions = [x for node in body for x in ast.walk(node) if isinstance(x, ast.FunctionDef)]
        assert imported(functions) == set()
    if name in FILES:
        assert ast.unparse(last.test) == "__name__ == '__main__'"
        runs = {"root": "sys.exit(main(**COMMAND_LINE))"}
        assert ast.unparse(last.body) == runs.get(room_of(name), "run_as_program(__file__)")


def test_no_file_of_tests_imports_another():
    """Things that two of them need are in files of their own."""
    borrows = re.compile(r"^(from|import) test_", re.M)
    assert [file for file in list_files("tests") if borrows.search(read(file))] == []


def lines_of(name: str, text: str) -> list[list[str]]:
    """Return the command lines of a file's header, or else one that decodes, each with a prompt, a
    file of prompts and few steps."""
    doc = ast.get_docstring(ast.parse(path_of(name).read_text()))
    shown = re.findall(rf"^ *python {name}\.py (.*?)(?:  .*)?$", doc, re.M) or ['--prompt "..."']
    for line in shown:
        words = shlex.split(line.replace('"..."', shlex.quote(text)).replace("FILE", "prompts"))
        decodes = words[0].startswith("--")
        steps = ["--steps", "20", "--batch", "2"]
        few = {"train": steps, "profile": []}.get(words[0], ["--seed", "1"])
        limit = [] if words[0] == "train" and name == "cllm" else ["--max-new-tokens", "9"]
        yield [*words, *few, *limit, *["--compare"] * decodes]


def run_copy(folder, text: str, models: list[str]) -> int:
    """Run every line that the header of a file shows, as `python NAME.py ARGV` does, in a process
    without the project. The folder has the file's name."""
    forget_project()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    usual = ["--target", models[0]]
    if folder.name in ("speculative", "ouroboros", "mjsd"):
        usual += ["--draft", models[1]]
    for argv in lines_of(folder.name, text):
        sys.argv = [f"{folder.name}.py", *argv, *([] if "--target" in argv else usual)]
        assert not status_of(lambda: runpy.run_path(sys.argv[0], run_name="__main__") and 0)
    return 0


def test_each_of_the_six_decodes_trains_and_compares_beside_common_alone(tmp_path, embedded):
    """Each is in a folder with common.py, and with another program's cli/, which is not run."""
    tokenizer, text = embedded[2], "Tom has 3 apples and 4 pears."
    small = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=200)
    models = [str(tmp_path / x) for x in ("target", "draft")]
    for path, model in zip(models, (small, near(small, 0.1))):
        for part in model, tokenizer:
            part.save_pretrained(path)
    for name in SIX:
        (tmp_path / name / "cli").mkdir(parents=True)
        for file in "common", name:
            (tmp_path / name / f"{file}.py").write_text(read(f"{file}.py"))
        for file in "__init__", "main", "commands":
            (tmp_path / name / f"cli/{file}.py").write_text("print('another program')\nexit()")
        prompts = [text, json.dumps({"prompt": "How many are left?"}), "", "def f(x):"]
        (tmp_path / name / "prompts").write_text("\n".join(prompts))
        process, out, err = fork(run_copy, tmp_path / name, text, models)
        found, said = out.read(), err.read()
        process.join()
        assert process.exitcode == 0 and "another program" not in found, said
        expected = "may differ from" if name == "mjsd" else "equals"
        assert f"; output {expected} autoregressive output" in said, said


def test_a_decoding_imports_little():
    """Count what `python -m cli speculative` imports beyond common.py, with the reading of answers
    made elsewhere, which is in the one file that reads prompts. The hybrid is made of other
    methods, and imports seven files beside common.py."""
    assert len(needs("hybrid.hybrid")) <= 7
    files = copied_with("cli.main") | copied_with("cli.trajectory")
    assert sum(code_lines(path_of(name).read_text()) for name in files - {"common"}) <= 1700


# -------------------------------------------------------------------------------- short, narrow

def test_common_has_few_ideas_and_a_file_with_its_training_few_lines():
    """What is read first must be read whole, in one sitting."""
    source = read("common.py")
    assert code_lines(source) <= 316 and len(source.splitlines()) <= 670
    assert max(code_lines(read(f"{name}.py")) for name in ("bita", "cllm")) <= 216
    assert ast.parse(source).body[0].end_lineno <= 75


@pytest.mark.parametrize("rooms", LIMITS)
def test_rooms_do_not_grow(rooms):
    files = [name for name in written() if name.endswith(".py")]
    inside = [name for name in files if (os.path.dirname(name) or "root") in rooms.split()]
    code = sum(code_lines(read(name)) for name in inside)
    assert code <= LIMITS[rooms], (
        f"{rooms}: {code} lines of code, and the limit is {LIMITS[rooms]}. First delete what "
        "nobody needs. If a new method needs the room, raise LIMITS here and say why")


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Count how many blocks of statements are nested. An elif is beside its if, not inside it."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        block = isinstance(child, (ast.For, ast.While, ast.If, ast.With, ast.Try))
        beside = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (block and not beside)))
    return deepest


@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_are_short_and_shallow(name):
    source = read(name)
    functions = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef)]
    assert [x.name for x in functions if code_lines(source, x) > 45 or nesting(x) > 4] == []


@pytest.mark.parametrize("name", [name for name in written() if not name.endswith(".md")])
def test_lines_are_narrow(name):
    assert [line for line in read(name).splitlines() if len(line) > 100] == []


# --------------------------------------------------------------------------------------- --help

def explained(doc: str) -> set[str]:
    """The names that a docstring lists, as "name:" or "name, name:" at the beginning of a line
    before "Yields"."""
    lists = re.findall(r"^ *(\w+(?:, \w+)*): ", doc.split("Yields")[0], re.M)
    return {name for some in lists for name in some.split(", ")}


@pytest.mark.parametrize("name", FILES)
def test_docstrings_explain_every_option(name):
    """And nothing that is none. --help of a training explains those that most trainings have."""
    methods, commands = functions_of(name)
    for function in [*methods, *commands]:
        free = PLAIN if function in commands else set()
        if is_training(function):
            free = free | explained(Settings.__doc__)
        options, listed = {*read_options(function)}, explained(function.__doc__)
        assert options - listed <= free and listed <= options, function.__name__


@pytest.mark.parametrize("name", FILES)
def test_help_prints_every_docstring_whole(capsys, monkeypatch, name):
    """--help prints the docstrings of all methods, or that of one command. The file's first
    paragraph comes before the options, and the rest after them."""
    def strip_lines(text: str) -> str:
        return "\n".join(line.strip() for line in text.strip().splitlines())
    monkeypatch.setenv("COLUMNS", "40")  # no line of a docstring is filled again
    methods, commands = functions_of(name)
    for shown, argv in [(methods, []), *(([f], [f.__name__]) for f in commands)]:
        assert main(methods, None, [*argv, "--help"], commands=commands) == 0
        out = strip_lines(capsys.readouterr().out)
        first, _, rest = strip_lines(sys.modules[shown[0].__module__].__doc__).partition("\n\n")
        assert out.index(first) < out.index("\noptions:\n") < out.index(rest)
        for function in shown:
            assert strip_lines(function.__doc__) in out


# ------------------------------------------------------------------------------------- mutants

def test_every_mutant_can_be_made():
    """The text that a mutant replaces stands once in its file; none is run here."""
    mutants = list_written()
    assert len({x.source for x in mutants}) == len(mutants) >= 150
    assert all(x.source != read(x.file) for x in mutants)


def test_every_method_has_mutants():
    assert {*FILES} <= {name_of(x.file) for x in list_written()}
