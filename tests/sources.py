"""The project's own files: their names, what each lists and needs, and how many lines of code it
has."""
import ast
import functools
import importlib
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def read(file: str) -> str:
    """Read a file of the project."""
    return (ROOT / file).read_text(encoding="utf-8")


@functools.cache
def list_files(*folders: str) -> list[str]:
    """Return the paths of the Python files of some folders."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in paths]


@functools.cache
def find_functions(file: str, keyword: str = "methods") -> list[str]:
    """Return the functions that a file lists in its COMMAND_LINE, by default its methods."""
    for node in ast.parse(read(file)).body:
        if ast.unparse(node).startswith("COMMAND_LINE = "):
            lists = {x.arg: getattr(x.value, "elts", []) for x in node.value.keywords}
            return [x.id for x in lists.get(keyword, []) if isinstance(x, ast.Name)]
    return []


def name_of(file: str) -> str:
    """Return the name of a file's module, as survey.rest."""
    return file.removesuffix(".py").replace("/", ".")


SIX = ["speculative", "jacobi", "ouroboros", "mjsd", "bita", "cllm"]
FILES = [name_of(file) for file in list_files(".", "survey", "hybrid") if find_functions(file)]


def functions_of(name: str) -> tuple[list, list]:
    """Return the methods and the commands that a file lists in its COMMAND_LINE."""
    table = importlib.import_module(name).COMMAND_LINE
    return table["methods"], table.get("commands", [])


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


def tables_of(text: str) -> list[dict[str, dict[str, str]]]:
    """Return the tables of a Markdown text. Each has the cells by the first cell of their row, and
    by their head."""
    tables = []
    for block in text.split("\n\n"):
        lines = [line.strip("|") for line in block.splitlines() if line.startswith("| ")]
        head, _, *rows = [[x.strip() for x in line.split("|")] for line in lines] or ([], [])
        tables.append({row[0]: dict(zip(head, row, strict=True)) for row in rows})
    return [table for table in tables if table]


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
