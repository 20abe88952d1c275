"""The pages say nothing that a reader cannot follow: each link leads somewhere, and each command
names a script, a command and options that exist."""
import re
import runpy
import shlex
import sys

import pytest

from helpers import ROOT
from test_structure import written

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

def commands_of(text: str) -> list[list[str]]:
    """Return the commands of a page, each as its words.

    They stand in its fenced blocks of sh or without a language, and between backticks. A line that
    ends with a backslash goes on, and a comment ends a command.
    """
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`((?:python|make)\s[^`]+)`", without_code(text))
    found = []
    for line in [*lines, *(" ".join(x.split()) for x in inline)]:
        for part in re.split(r"; do |; ?| \|\|? | && ", line):
            if re.match(r"(python|make) ", part) and not part.startswith("python -c"):
                found.append(shlex.split(part, comments=True))
    return found


def print_help(script: str, command: list[str]) -> None:
    """Run a script of the repository, or a command of it, with --help."""
    before = sys.argv, [*sys.path]
    sys.argv = [script, *command, "--help"]
    sys.path.insert(0, str((ROOT / script).parent))  # as Python itself does it
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit:
        pass
    finally:
        sys.argv, sys.path[:] = before


def problems_of(command: list[str], capsys) -> list[str]:
    """Return what a command names that does not exist: its script, a command of it, or options."""
    program, *words = command
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
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
    print_help(script, first)
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


def test_the_command_in_python_runs(capsys):
    """What a call of more rows costs: the one command of the pages that is Python itself."""
    page = (ROOT / "results/real_model.md").read_text()
    [command] = re.findall(r'^python -c "(.*?)"$', page, re.M | re.S)
    exec(command.replace("DIR", str(ROOT / "models/target")), {})
    assert capsys.readouterr().out.startswith("{1: ")


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
