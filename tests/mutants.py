"""Make one plausible mistake at a time in the code, and see whether a test notices.

    python tests/mutants.py                         # all mistakes that are written here
    python tests/mutants.py survey/rest.py          # those in a file
    python tests/mutants.py 3 17 jacobi.py          # those of these numbers, and those in a file
    make mutants ONLY=survey/rest.py                # with any of these words
    python tests/mutants.py --plant "a node does not see itself"    # here, for an exercise

A mutant is the code with one mistake. mutants.toml lists for each file what the mistakes are, the
texts that they replace, and what they put there.

Each mutant is made in a copy of the project, where the tests of its file run (`commands_of`). A
mutant is killed if a test fails. A mutant that survives shows that no test guards this line:
strengthen a test. A test that kills a mutant is run once more without the mistake.

A mutant takes seconds if a test of its file kills it, and minutes if all tests must run. The exit
status is 1 if any mutant survives. Ctrl-C ends it, and removes the copy.
"""
import argparse
import ast
import importlib
import os
import shutil
import sys
import tempfile
import tomllib
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

from sources import ROOT, find_functions, name_of, needs, read

LEFT_OUT = (".git", ".venv", "__pycache__", ".pytest_cache", "work")  # of the copy
LIMIT = 3600  # seconds for the tests of a mutant: one that never ends is killed too

with open(ROOT / "tests/mutants.toml", "rb") as written:
    MUTANTS = tomllib.load(written)


class Mutant(NamedTuple):
    """Holds a mistake in a file, and the whole text of the file with it."""
    number: int
    file: str
    mistake: str
    source: str


def list_written() -> list[Mutant]:
    """Return the mutants of MUTANTS. Raises ValueError if a file does not have a text once."""
    found = []
    for file, entries in MUTANTS.items():
        source = read(file)
        for mistake, (old, new) in entries.items():
            if source.count(old) != 1:
                raise ValueError(f"expected {old!r} once in {file}, got {source.count(old)}")
            found.append(Mutant(len(found), file, mistake, source.replace(old, new)))
    return found


# ------------------------------------------------------------------------------ tests that guard

ROWS = {  # lines of the table of all methods, besides those that a file's methods name
    "survey/medusa.py": ["hydra"], "survey/masks.py": ["pass"], "survey/rest.py": ["suffix"],
    "hybrid/guessers.py": ["hybrid"], "hybrid/ngrams.py": ["hybrid"],
    "support/engine.py": ["without_caches"]}


def commands_of(file: str) -> list[list[str]]:
    """Return the arguments of pytest that guard a file, as one list for each run of tests.

    The tests that have the name of the file, of its folder or of another method that it needs come
    first. Its lines of the table of all methods are next, and then come all tests.
    """
    path = Path(file)
    others = [x.removeprefix("survey.") for x in sorted(needs(name_of(file)))]
    names = dict.fromkeys((path.stem, path.parent.name, *others))
    own = [f"tests/test_{name}.py" for name in names if "." not in name]
    rows = find_functions(file) + ROWS.get(file, [])
    lines = [["tests/test_lossless.py", "-k", " or ".join(rows)]] if rows else []
    # The tests of the structure know the code's own texts, which every mistake changes.
    rest = ["tests", "--ignore=tests/test_structure.py"]
    return [[x] for x in own if (ROOT / x).exists()] + lines + [rest]


# -------------------------------------------------------------------------------------- the trial

def import_packages() -> None:
    """Import what the tests import, and forget what is the project's own.

    Every process of tests is a fork of this one. It has the packages, which take seconds to import,
    and takes the project from its copy.
    """
    own = sys.modules["__main__"]
    sys.path[:0] = [str(ROOT / folder) for folder in ("", "models", "results")]
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        importlib.import_module(file.stem)
    importlib.import_module("helpers").forget_project()
    sys.modules["__main__"] = own


def run_tests(folder: Path, arguments: list[str], output: Path) -> None:
    """Be a process that runs tests in a copy of the project, and ends with pytest's status."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with open(output, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])))


def find_killer(folder: Path, commands: list[list[str]]) -> str:
    """Run tests in a copy of the project.

    commands  the arguments of pytest, one list after the other
    returns   the first test that failed, or how else the tests ended; an empty text if all passed
    """
    output = folder / "output.txt"
    statuses = []
    for arguments in commands:
        tests = get_context("fork").Process(target=run_tests, args=(folder, arguments, output))
        tests.start()
        try:
            tests.join(LIMIT)
        finally:  # also after Ctrl-C
            tests.kill()
            tests.join()
        statuses.append(tests.exitcode)
        if tests.exitcode not in (0, 5):  # 5: a table has no line of this file
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            failed = [line.partition(" - ")[0].partition(" ")[2] for line in lines
                      if line.startswith(("FAILED", "ERROR"))]
            return failed[0] if failed else f"the end of {arguments[0]}, or {LIMIT} s"
    if 0 not in statuses:
        raise ValueError(f"expected tests, got none: {commands}")
    return ""


def try_mutant(mutant: Mutant, clean: Path) -> str:
    """Make a mutant in a copy of the project; return what killed it, or an empty text.

    The test that killed it runs once more without the mistake. It runs in another copy, `clean`,
    since a mistake may make a test write over files. Raises ValueError if it fails there, too.
    """
    ast.parse(mutant.source)  # a mistake of spelling would be killed by every test
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "project"
        shutil.copytree(clean, folder)
        (folder / mutant.file).write_text(mutant.source, encoding="utf-8")
        killer = find_killer(folder, commands_of(mutant.file))
    again = find_killer(clean, [[killer]]) if killer.startswith("tests/") else ""
    if again and not again.startswith("not found"):  # only the mistake made this line of a table
        raise ValueError(f"expected tests that pass without a mistake, but {killer} fails")
    return killer


def choose(words: list[str]) -> list[Mutant]:
    """List the mutants that a command line names by numbers and files; all of them by default."""
    for word in words:
        if word not in MUTANTS and not word.isdigit():
            sys.exit(f"mutants.py: expected numbers, and files of mutants.toml, got {word!r}")
    return [x for x in list_written() if not words or x.file in words or str(x.number) in words]


def main() -> int:
    """Try the mutants that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="numbers, and files")
    parser.add_argument("--plant", metavar="MISTAKE", help="make this one here (tests/README.md)")
    args = parser.parse_args()
    if args.plant:
        found = {x.mistake: x for x in list_written()}
        if args.plant not in found:
            parser.error(f"expected a mistake of mutants.toml, got {args.plant!r}")
        mutant = found[args.plant]
        (ROOT / mutant.file).write_text(mutant.source, encoding="utf-8")
        print(f"{mutant.file} has it now. This takes it back: git checkout {mutant.file}")
        return 0
    survived = 0
    chosen = choose(args.words)
    import_packages()
    with tempfile.TemporaryDirectory() as parent:
        clean = Path(parent) / "project"
        shutil.copytree(ROOT, clean, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for mutant in chosen:
            killer = try_mutant(mutant, clean)
            survived += killer == ""
            end = f"killed by {killer}" if killer else "SURVIVED"
            print(f"{mutant.number:3} {mutant.file}: {mutant.mistake}: {end}", flush=True)
    print(f"{survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    sys.dont_write_bytecode = True
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
