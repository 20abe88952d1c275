"""These tests hold what the files promise to their readers. Each method file can be copied out
beside common.py. Its functions are short and its lines narrow, no room grows, and --help explains
every option."""
import ast
import functools
import importlib
import os
import re
import runpy
import sys

import pytest

from cli.files import read_prompts
from cli.commands import is_training
from cli.options import read_options
from common import CachedLM, autoregressive
from helpers import ROOT, fork, forget_project, main, tokens_of
from mutants import find_functions, list_files, list_written, read
from support.settings import Settings

PACKAGES = {"torch", "transformers", "tqdm", "safetensors"}
PLAIN = {"steps", "seed", "lr", "max_new_tokens"}  # options of commands that need no words
LIMITS = {"root": 1200, "cli": 900, "models": 980, "results": 560, "tests": 7800,
          "hybrid support survey training": 4520}  # lines of code; prose has no limit



def name_of(file: str) -> str:
    """Return the name of a file's module, as survey.rest."""
    return file.removesuffix(".py").replace("/", ".")


SIX = ["speculative", "jacobi", "ouroboros", "mjsd", "bita", "cllm"]
FILES = [name_of(file) for file in list_files(".", "survey", "hybrid") if find_functions(file)]


def functions_of(name: str) -> tuple[list, list]:
    """Return the methods and the commands that the last block of a file gives to cli.main.main."""
    module, file = importlib.import_module(name), f"{name.replace('.', '/')}.py"
    return tuple([getattr(module, x) for x in find_functions(file, keyword)]
                 for keyword in ("", "commands"))


def path_of(name: str):
    return ROOT / f"{name.replace('.', '/')}.py"


@functools.cache
def needs(name: str) -> set[str]:
    """The files of the project that it imports when it is imported, besides common.py."""
    body = ast.parse(path_of(name).read_text()).body
    found = {x.module for x in body if isinstance(x, ast.ImportFrom)}
    return {x for x in found if path_of(x).exists()} - {"common"}


def copied_with(name: str) -> set[str]:
    """Return this name, with the names of all files that it needs, directly or through others."""
    return {name}.union(*(copied_with(x) for x in needs(name)))


def written() -> list[str]:
    """The project's own texts; a checkout may have no git, but environments and work beside it."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [x for x in folders if x[0] not in "._" and x != "work"]
        found += [os.path.relpath(os.path.join(folder, name), ROOT) for name in names
                  if name.endswith((".py", ".md")) or name == "Makefile"]
    return sorted(found)


PROGRAMS = [name for name in written() if name.endswith(".py") and not name.startswith("tests")]


# ------------------------------------------------------------------------------ one file each

def imported(nodes: list) -> set[str]:
    """Return the modules that these statements import, also within functions."""
    found = [x for node in nodes for x in ast.walk(node)]
    return {getattr(x, "module", x.names[0].name) for x in found
            if isinstance(x, (ast.Import, ast.ImportFrom))}


ROOMS = {  # what the files of each room import, where they do not run their command line
    "common": set(), "support": {"common", "support"},
    "training": {"common", "support", "training"}, "root": {"common", "support", "training"},
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
    common.py only, and imports what trains or loads a file in the function that does so."""
    *body, last = ast.parse(path_of(name).read_text()).body
    modules = imported(body)
    own = {x for x in modules if path_of(x).exists()}
    assert {*map(room_of, own)} <= ROOMS[room_of(name)]
    if room_of(name) not in ("cli", "models"):
        packages = {x.split(".")[0] for x in modules - own}
        assert packages <= {*sys.stdlib_module_names} | PACKAGES | ROOMS.keys()
    if room_of(name) == "root":
        assert needs(name) == set()
    elif name != "models.tasks":  # which finds cli/ by itself
        functions = [x for node in body for x in ast.walk(node) if isinstance(x, ast.FunctionDef)]
        assert imported(functions) == set()
    if name in FILES:  # Python prints the line of an import that fails, and with it the comment
        line = r"\n *from cli.(main|commands) import main  # the command line is in cli/, a folder "
        assert re.search(line, path_of(name).read_text())
        assert ast.unparse(last.test) == "__name__ == '__main__'"
        small = {"common"} if room_of(name) == "root" else set()  # where a file was copied
        assert {x.split(".")[0] for x in imported([last])} == {"cli"} | small


EXACT = dict(lookahead="jacobi", prompt_lookup="jacobi")  # the exact methods and their files
EXACT |= {name: name for name in SIX if name != "mjsd"}


def run_as_script(folder, name: str, argv: list[str]) -> None:
    """Run a file of a folder as `python NAME.py ARGV` does, in a process without the project."""
    for module in [x for x in sys.modules if x in {"common", *FILES} or x.split(".")[0] in ROOMS]:
        del sys.modules[module]
    sys.path, sys.argv = [str(folder), *[x for x in sys.path if "site-" in x or "lib" in x]], [
        f"{name}.py", *argv]
    try:
        runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        assert not end.code, (name, end.code)


def argv_of(name: str, text: str) -> list[str]:
    argv = ["--target", f"{ROOT}/models/target", "--prompt", text, "--max-new-tokens", "6"]
    if name in ("speculative", "ouroboros", "mjsd"):
        argv += ["--draft", f"{ROOT}/models/draft"]
    return argv + ["--adapter", f"{ROOT}/models/bita.safetensors"] * (name == "bita")


def run_copies(top, text: str) -> int:
    """Run each of the six as a script, and the exact ones from Python by their default arguments,
    in folders that hold the file and common.py only. Then run the six in a copy of the project."""
    forget_project()
    for name in SIX:
        print(f"\n{MARK}{name}", flush=True)
        run_as_script(top / name, name, argv_of(name, text))
        common, module = importlib.import_module("common"), importlib.import_module(name)
        assert module.__file__.startswith(str(top)) and common.__file__.startswith(str(top))
        names = ["target", "draft"] if name in ("speculative", "ouroboros") else ["target"]
        models = [common.load(f"{ROOT}/models/{x}", "cpu") for x in names]
        tokenizer = models[0][1]
        for method in [x for x, file in EXACT.items() if file == name]:
            function = getattr(module, method)
            lms = [function.__annotations__[x](lm) for x, (lm, _) in zip(names, models)]
            how = {"adapter": f"{ROOT}/models/bita.safetensors"} if name == "bita" else {}
            chunks = common.until(function(*lms, tokenizer.encode(text), **how), 6)
            ids = [token for chunk in chunks for token in chunk]
            print(f"\n{MARK}{method} from Python\n{tokenizer.decode(ids)}", flush=True)
    for name in SIX:
        print(f"\n{MARK}{name} by cli", flush=True)
        run_as_script(top, name, [*argv_of(name, text)[2:], "--show", "never"])
    return 0


MARK = "== "


def test_the_six_need_common_alone_and_their_command_line_no_other_method(tmp_path, embedded):
    """A copied pair writes AR's text, as a script, which prints a line of figures too, and from
    Python. So do the command lines without survey/, hybrid/, training/ and results/."""
    for name in SIX:
        for folder in tmp_path, tmp_path / name:
            folder.mkdir(exist_ok=True)
            for file in "common", name:
                (folder / f"{file}.py").write_text((ROOT / f"{file}.py").read_text())
    for folder in "cli", "support", "models":
        (tmp_path / folder).symlink_to(ROOT / folder)
    target, _, tokenizer = embedded
    text = read_prompts(ROOT / "models/examples.jsonl")[0]
    ids = tokens_of(autoregressive(CachedLM(target), tokenizer.encode(text)), 6)
    expected = tokenizer.decode(ids).strip()
    process, _, out, err = fork(run_copies, tmp_path, text)
    found, errors = out.read(), err.read()
    process.join()
    assert process.exitcode == 0, errors
    said = dict(x.split("\n", 1) for x in found.split(MARK)[1:])
    assert {*said} == {*SIX, *(f"{x} by cli" for x in SIX), *(f"{x} from Python" for x in EXACT)}
    assert {said[x].strip() for x in said if "mjsd" not in x} == {expected}
    assert all(said[x].strip() for x in said)
    assert len(re.findall(r"^6 tokens in \d+ calls of the target$", errors, re.M)) == len(SIX)
    assert len(re.findall("target calls", errors)) == len(SIX)


def test_a_decoding_imports_little():
    """Count what `python speculative.py` imports beyond common.py. The hybrid is made of other
    methods, and imports seven files beside common.py."""
    assert len(needs("hybrid.hybrid")) <= 7
    files = copied_with("cli.main") | copied_with("cli.trajectory")
    assert sum(code_lines(path_of(name).read_text()) for name in files - {"common"}) <= 1400


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
    rows = source.splitlines()
    last = node.end_lineno if node else len(rows)
    numbered = [(i, rows[i - 1].strip()) for i in range(node.lineno if node else 1, last + 1)]
    return sum(i not in words and row != "" and row[0] != "#" for i, row in numbered)


def test_common_has_few_ideas_and_a_file_with_its_training_few_lines():
    """What is read first must be read whole, in one sitting."""
    source = read("common.py")
    [command_line] = [x for x in ast.parse(source).body if getattr(x, "name", "") == "main"]
    assert code_lines(source) <= 225 and len(source.splitlines()) <= 470
    assert max(code_lines(read(f"{name}.py")) for name in ("bita", "cllm")) <= 240
    assert code_lines(source, command_line) <= 30 and ast.parse(source).body[0].end_lineno <= 75


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
