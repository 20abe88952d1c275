"""Every link of the pages leads somewhere, every command exists, the tables of files are true."""
import argparse
import importlib
import re
import shlex

import pytest

from bench import METHODS
from cli.__main__ import list_files
from helpers import ROOT, run_small, script
from sources import (FILES, SIX, code_lines, copied_with, find_functions, name_of, path_of,
                     tables_of, written)

PAGES = [name for name in written() if name.endswith(".md")]


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
        found.append(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return {*found} | {f"{x}-{n}" for x in found for n in range(1, found.count(x))}


def links_of(text: str) -> list[str]:
    """Return the targets of a page's links and pictures that lead into the repository."""
    named = r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)$"
    targets = [a or b for a, b in re.findall(named, without_code(text), re.M)]
    return [x for x in targets if not x.startswith(("http:", "https:"))]


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    """It must lead to a file that exists, and to a heading of it."""
    page = ROOT / name
    for link in links_of(page.read_text()):
        file, _, anchor = link.partition("#")
        path = page.parent / file if file else page
        assert path.exists() and (not anchor or anchor in anchors_of(path.read_text())), link


# -------------------------------------------------------------------------------------- commands

def commands_of(text: str) -> list[list[str]]:
    """Return the commands of a page, each as its words.

    They stand in its fenced blocks of sh or without a language, and between backticks. A line that
    ends with a backslash goes on, and a comment ends a command. A block that begins with
    `git checkout` has commands of an older commit, which are left out.
    """
    blocks = re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.M | re.S)
    today = [block for block in blocks if not block.startswith("git checkout")]
    lines = "\n".join(today).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`((?:python|make)\s[^`]+)`", without_code(text))
    found = []
    for line in [*lines, *(" ".join(x.split()) for x in inline)]:
        for part in re.split(r"; do |; ?| \|\|? | && ", line):
            if re.match(r"(python|make) ", part) and not part.startswith("python -c"):
                found.append(shlex.split(part, comments=True))
    return found


def problem_of(command: list[str], capsys) -> str:
    """Return what is wrong with a command, by its script's own parser, which stops it then.

    FILE and $asked stand for what the reader has. Here that is a file of prompts. A command within
    a sentence may leave out an option that is required.
    """
    program, *words = command
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return " ".join(x for x in words if "=" not in x and x not in targets)
    if words in (["-m", "cli"], ["-m", "cli", "NAME"]):  # in a sentence
        return ""
    rich = words[0] == "-m"  # the command line of cli/, and else that of common.py
    if words[:2] == ["-m", "cli"]:
        words = ["-m", list_files().get(words[2], words[2]), *words[3:]]
    name = words[1].replace("hybrid", "hybrid.hybrid") if rich else name_of(words[0])
    if not path_of(name).is_file():
        return name
    words = [word for word in words[1 + rich:] if word != "$asked"]
    for i in [i for i, word in enumerate(words[:-1]) if word == "--prompts"]:
        words[i + 1] = str(ROOT / "models/examples.jsonl")
    rows = [words[i + 1].split()[0] for i, word in enumerate(words) if word == "--row"]
    if name in SIX and not rich:
        status = run_small(importlib.import_module(name), words)
    else:
        status = script(re.sub(r"^(models|results|tests)\.", "", name), *words)
    said = capsys.readouterr().err
    if status and "the following arguments are required" not in said:
        return said.splitlines()[-1]
    return " ".join(row for row in rows if row not in METHODS)


@pytest.mark.parametrize("name", PAGES)
def test_every_command_can_be_parsed(name, capsys, monkeypatch):
    """It is stopped then."""
    parse = argparse.ArgumentParser.parse_args

    def stop(*given) -> None:
        parse(*given)
        raise SystemExit(0)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    for command in commands_of((ROOT / name).read_text()):
        # models/tasks.py takes numbers and names of tasks, no options
        assert "models/tasks.py" in command or problem_of(command, capsys) == "", command


# --------------------------------------------------------------------------- the table of survey/

def test_the_table_of_survey_is_true():
    """Its files, their papers, which of them are exact, and what a copy of each needs."""
    table, *_ = tables_of((ROOT / "survey/README.md").read_text())
    rows = {re.search(r"\((\w+)\.py\)", cell)[1]: row for cell, row in table.items()}
    assert {f"survey.{x}" for x in rows} == {x for x in FILES if x.startswith("survey.")}
    for name, row in rows.items():
        file, exact = f"survey/{name}.py", row["exact?"]
        described = re.findall(r"arXiv\s+(\d+\.\d+)", (ROOT / file).read_text())
        assert {*re.findall(r"abs/(\d+\.\d+)", row["paper"])} <= {*described}, file
        methods, lossy = find_functions(file), find_functions(file, "lossy")
        assert ("yes" in exact) == ({*lossy} < {*methods}), file
        assert lossy == [] or "no" in exact or "tuned" in exact, file
        needed = {str(path_of(x).relative_to(ROOT)) for x in copied_with(f"survey.{name}")
                  if not x.startswith(("training", "support"))} - {file}
        assert {*re.findall(r"`([\w/]+\.py)`", row["other methods it needs"])} == needed, file


def test_readmes_figures_are_those_of_its_run():
    """README has the lines of code, tokens per call and speed-up of the six root files."""
    measured, *_ = tables_of((ROOT / "results/all_methods.md").read_text())
    rows, *_ = tables_of((ROOT / "README.md").read_text())
    others = {"speculative": "speculative --gamma 6"}
    for name in SIX:
        row, ours = rows[f"`{name}.py`"], measured[others.get(name, name)]
        assert row["tokens per call"] == ours["tokens per target call"], name
        assert row["x AR"] == ours["x AR"], name
        assert int(row["lines of code"]) == code_lines(path_of(name).read_text()), name
