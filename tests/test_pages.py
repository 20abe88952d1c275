"""Every link of the pages leads somewhere, every command exists, the tables of files are true."""
import argparse
import ast
import re
import runpy
import shlex
import sys

import pytest

from bench import METHODS
from helpers import ROOT
from test_structure import FILES, copied_with, functions_of, path_of, written

PAGES = [name for name in written() if name.endswith(".md")]
WITHOUT_HELP = {"models/tasks.py"}  # it takes numbers and names of tasks, no options


# ----------------------------------------------------------------------------------------- links

def without_code(text: str) -> str:
    """Return a page's text without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors_of(text: str) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings.

    A heading's words in lower case are joined by hyphens; a second heading of the same words gets
    a number.
    """
    found = []
    for heading in re.findall(r"^#+ (.*)$", without_code(text), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        before = found.count(anchor)
        found.append(anchor)
        if before:
            found.append(f"{anchor}-{before}")
    return {*found}


def links_of(text: str) -> list[str]:
    """Return the targets of a page's links and pictures that lead into the repository."""
    named = r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)$"
    targets = [a or b for a, b in re.findall(named, without_code(text), re.M)]
    return [x for x in targets if not x.startswith(("http:", "https:"))]


def broken_links(page) -> list[str]:
    """Return the links of a page whose file or heading does not exist."""
    broken = []
    for link in links_of(page.read_text()):
        name, _, anchor = link.partition("#")
        path = page.parent / name if name else page
        if not path.exists():
            broken.append(link)
        elif anchor and anchor not in anchors_of(path.read_text()):
            broken.append(link)
    return broken


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    assert broken_links(ROOT / name) == []


# -------------------------------------------------------------------------------------- commands

def commands_of(text: str, whole: bool = False) -> list[list[str]]:
    """Return the commands of a page, each as its words; `whole`: those of fenced blocks alone.

    They stand in its fenced blocks of sh or without a language, and between backticks. A line that
    ends with a backslash goes on, and a comment ends a command. A block that begins with
    `git checkout` has commands of an older commit, which are left out.
    """
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.M | re.S)
    today = [block for block in blocks if not block.startswith("git checkout")]
    lines = "\n".join(today).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`((?:python|make)\s[^`]+)`", without_code(text))
    found = []
    for line in [*lines, *(" ".join(x.split()) for x in inline if not whole)]:
        for part in re.split(r"; do |; ?| \|\|? | && ", line):
            if re.match(r"(python|make) ", part) and not part.startswith("python -c"):
                found.append(shlex.split(part, comments=True))
    return found


def run(script: str, words: list[str]) -> int | str | None:
    """Run a script of the repository with these words; return its exit status."""
    before = sys.argv, [*sys.path]
    sys.argv = [script, *words]
    sys.path.insert(0, str((ROOT / script).parent))  # as Python itself does it
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        return end.code
    finally:
        sys.argv, sys.path[:] = before


def problems_of(command: list[str], capsys) -> list[str]:
    """Return what a command names that does not exist: its script, a command of it, or options."""
    program, *words = command
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return [x for x in words if "=" not in x and x not in targets]
    module = words[0] == "-m"
    script = words[1].replace(".", "/") + ".py" if module else words[0]
    if not (ROOT / script).is_file():
        return [script]
    if script in WITHOUT_HELP:
        return []
    rest = words[2 if module else 1:]
    first = rest[:1] if rest and re.fullmatch(r"[a-z]+", rest[0]) else []
    capsys.readouterr()
    run(script, [*first, "--help"])
    text = capsys.readouterr().out
    options = [x.partition("=")[0] for x in rest if re.match(r"--?[a-zA-Z]", x)]
    wrong = [x for x in options if not re.search(rf"(?<![\w-]){re.escape(x)}(?![\w-])", text)]
    if "--table" in rest:
        table = rest[rest.index("--table") + 1]
        choices = re.search(r"--table \{([^}]*)\}", re.sub(r"\s+", " ", text))
        wrong += [] if table in choices[1].replace(" ", "").split(",") else [f"--table {table}"]
    return wrong if text else [" ".join(command)]


@pytest.mark.parametrize("name", PAGES)
def test_every_command_exists(name, capsys, monkeypatch):
    """The commands are not run: --help of each script must know the options that they use."""
    monkeypatch.setenv("COLUMNS", "100")
    for command in commands_of((ROOT / name).read_text()):
        assert problems_of(command, capsys) == [], " ".join(command)


@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_a_block_can_be_parsed(name, monkeypatch):
    """By its script's own parser, which then stops it, and the files that it names are there.

    FILE and $asked stand for what the reader has. Here that is a file of prompts.
    """
    parse = argparse.ArgumentParser.parse_args

    def stop(*given) -> None:
        parse(*given)
        raise SystemExit(0)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    prompts = str(ROOT / "models/examples.jsonl")
    for program, *words in commands_of((ROOT / name).read_text(), whole=True):
        script = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
        if program != "python" or script in WITHOUT_HELP or "--help" in words:
            continue
        words = words[2 if words[0] == "-m" else 1:]
        for i in [i for i, word in enumerate(words) if word == "--prompts"]:
            words[i + 1] = prompts
        given = ["--prompts", prompts] if {"$asked", "$short"} & {*words} else []
        words = [word for word in words if word not in ("$asked", "$short")] + given
        assert run(script, words) == 0, words
        read = [word for word in words if word.startswith("models/") and "--out" not in words]
        assert all((ROOT / path).exists() for path in read), read
        rows = [words[i + 1] for i, word in enumerate(words) if word == "--row"]
        assert all(row.split()[0] in METHODS for row in rows), rows


# --------------------------------------------------------------------------- the table of survey/

def rows_of(path) -> dict[str, list[str]]:
    """Return the cells of the rows of a page's first table, by the file that a row links to."""
    text = path.read_text()
    found = {}
    for line in text[text.index("| file |"):].split("\n\n")[0].splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        found[re.search(r"\((\w+\.py)\)", name)[1]] = cells
    return found


def lossy_of(name: str) -> list[str]:
    """Return the methods that the last block of a file calls lossy."""
    block = ast.parse(path_of(name).read_text()).body[-1]
    given = [x.value for x in ast.walk(block) if isinstance(x, ast.keyword) and x.arg == "lossy"]
    return [x.id for some in given for x in some.elts]


def test_the_table_of_survey_is_true():
    """Its files, their papers, which of them are exact, and what a copy of each needs."""
    rows = rows_of(ROOT / "survey/README.md")
    names = {f"{x.removeprefix('survey.')}.py": x for x in FILES if x.startswith("survey.")}
    assert rows.keys() == names.keys()
    for file, (_, papers, exact, copies) in rows.items():
        name = names[file]
        described = re.findall(r"arXiv\s+(\d+\.\d+)", path_of(name).read_text())
        assert {*re.findall(r"abs/(\d+\.\d+)", papers)} <= {*described}, file
        methods = [method.__name__ for method in functions_of(name)[0]]
        lossy = lossy_of(name)
        assert ("yes" in exact) == ({*lossy} < {*methods}), file
        assert lossy == [] or "no" in exact or "tuned" in exact, file
        needed = {str(path_of(x).relative_to(ROOT)) for x in copied_with(name) - {name}
                  if not x.startswith("training") and x != "survey.clock"}
        assert {*re.findall(r"`([\w/]+\.py)`", copies)} == needed, file


def test_readmes_figures_are_those_of_its_run():
    """README has the lines, the tokens per call and the speed-up of the six root files."""
    run = (ROOT / "results/all_methods.md").read_text()
    measured = {row[0]: (row[1], row[6]) for row in (
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in run.splitlines()
        if line.startswith("| ")) if len(row) > 7}
    methods = {"speculative.py": "speculative --gamma 6", "jacobi.py": "lookahead",
               "ouroboros.py": "ouroboros", "bita.py": "bita", "cllm.py": "cllm",
               "mjsd.py": "mjsd"}
    readme = (ROOT / "README.md").read_text()
    for file, method in methods.items():
        [row] = [line for line in readme.splitlines() if line.startswith(f"| `{file}` |")]
        cells = [cell.strip(" |") for cell in row.split(" | ")]
        assert (cells[-2], cells[-1]) == measured[method], file
        assert int(cells[1]) == len((ROOT / file).read_text().splitlines()), file


# ------------------------------------------------------------------ the checks see what they must

PAGE = """# A page
[here](#a-page) [there](gone.md) [no](#nowhere) [out](https://x.org/#y)
## Tables 4 & 6: n, *w* ([f](g))
`make tset` and `python
gone.py --x`
```sh
python jacobi.py --W 0 --Z 1  # --nothing
python -m survey.rest build --prompts FILE \\
    --outt FILE
```
"""


def test_a_broken_page_is_seen(tmp_path, capsys):
    (tmp_path / "page.md").write_text(PAGE)
    assert broken_links(tmp_path / "page.md") == ["gone.md", "#nowhere", "g"]
    assert anchors_of(PAGE) == {"a-page", "tables-4--6-n-w-f"}
    problems = [problems_of(x, capsys) for x in commands_of(PAGE)]
    assert problems == [["--Z"], ["--outt"], ["tset"], ["gone.py"]]
