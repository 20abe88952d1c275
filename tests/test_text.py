"""Text that comes in and goes out: its encoding, and what is printed while tokens come."""
import ast

import pytest

from helpers import ROOT
from models.training import read_whole_lines
from test_structure import written



# ------------------------------------------------------------------------------------ encodings

def unnamed_encodings(source: str) -> list[int]:
    """Return the lines of a program that open text in the encoding of whatever machine runs them.

    A call that opens text is one of `open`, `read_text`, `write_text`, … without an encoding and
    without a binary mode, or a subprocess whose output is asked for as text.
    """
    lines = []
    for call in (x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        options = {x.arg: x.value for x in call.keywords}
        modes = [x.value for x in (*call.args, *options.values()) if isinstance(x, ast.Constant)]
        binary = any(isinstance(x, str) and len(x) <= 3 and "b" in x for x in modes)
        opens = name in ("open", "fdopen", "TextIOWrapper") and not binary
        reads = name in ("read_text", "write_text") and isinstance(call.func, ast.Attribute)
        hears = options.keys() & {"text", "universal_newlines"}
        if (opens or reads or hears) and "encoding" not in options:
            lines.append(call.lineno)
    return lines


def test_which_calls_name_no_encoding():
    """The check below sees what it is to see, and nothing else."""
    bad = ["open(x)", "open(x, 'a+')", "path.open('w')", "path.read_text()", "path.write_text(x)",
           "os.fdopen(3)", "subprocess.run(x, text=True)", "io.TextIOWrapper(x)"]
    good = ["open(x, 'rb')", "open(x, mode='a+b')", "path.read_text(encoding='utf-8')",
            "path.open('w', encoding='utf-8')", "safe_open(x, 'pt')", "path.read_bytes()",
            "subprocess.run(x, text=True, encoding='utf-8')", "subprocess.run(x)"]
    assert unnamed_encodings("\n".join(bad)) == [*range(1, len(bad) + 1)]
    assert unnamed_encodings("\n".join(good)) == []


@pytest.mark.parametrize("name", [x for x in written()
                                  if x.endswith(".py") and not x.startswith("tests/")])
def test_text_is_utf_8_on_every_machine(name):
    assert unnamed_encodings((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("cut", [b"", b'{"b": "', '{"b": "é'.encode()[:-1]])
def test_whole_lines_are_cut_off_by_bytes(tmp_path, cut):
    """Characters of several bytes stand in the lines that stay, and one is cut within."""
    file, lines = tmp_path / "kept", ['{"é": "漢字 🙂"}\n'.encode(), b'{"a": "\xc3\xa9"}\r\n']
    file.write_bytes(b"".join(lines) + cut)
    with open(file, "a+b") as kept:
        assert read_whole_lines(kept) == lines
        kept.write(b"more\n")
    assert file.read_bytes() == b"".join(lines) + b"more\n"
