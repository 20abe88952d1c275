"""This file writes results without losing a file of the user, and tells what is wrong with a file.

    check_result   refuses a place before any work, where a result could not go or would do harm
    sign_folder    names the command that made a folder, so that the command may make it again
    write_whole    writes a file or a folder beside its place, and moves it there once it is whole
    write_text     does the same with a text
    save_model     does the same with a model and its tokenizer
    check_file     refuses what stands for a file and is none
    shorten        puts an error or a message on one short line; `explain` does so with a reader's
    read_json      reads a JSON file
    read_kept      reads the lines of JSON that a stopped run has kept
    cut_stream     takes away the answers that a stream has to give again
"""
import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Callable, Iterable

from common import InputError

MADE_BY = "made_by.txt"  # the file of a folder that names the command which made the folder
PREFIX = ".new-"  # how the folders begin in which results are written
# How the files of each command begin, once backslashes are taken out. [^"]* stands for numbers.
# Pages, pictures and figures have no command. PaSS's tokens are a tuning without prompt tokens. So
# `bita train` replaces no such tuning, not even its own.
PART = '.{8}{"__metadata__":{"part":"{"kind": "'
MASKS = f'{PART}prompt and mask tokens", "P": '
BEGINS = {
    "": '<!doctype html>|<svg |{\n "', "train prompts": r'{"prompt": "[^\n]*"}\n',
    "bita train": f"{MASKS}[1-9]", "masks train": f"{MASKS}0",
    "medusa train": f'{PART}(medusa|hydra) heads"', "masks tune": f'{PART}a SPACE tuning"',
    "eagle train": f'{PART}an EAGLE layer"', "eagle3 train": f'{PART}an EAGLE-3 layer"',
    "dflash train": f'{PART}a DFlash draft"', "early_exit train": f'{PART}an early exit"',
    "layerskip tune": f'{PART}a LayerSkip tuning"', "rest build": f'{PART}a REST datastore"',
    "hybrid fit": '{"model": [^"]*"trust": ',
    "draft_verify search": '{"model": [^"]*"attention": ',
    "sequoia calibrate": r'{"target": \[', "cllm collect": '{"model": "[^"]*", "n": ',
    "online serve": '{"prompt": [^"]*"answer": [^"]*"drafted": '}


# ------------------------------------------------------------------------ before any work

def check_result(option: str, path: Path, reads: Iterable = (), made_by: str = "",
                 folder: bool = False) -> None:
    """Raise an error for a wrong place of a result, before any work is done.

    option   the option that gave the place, as its keyword argument is written
    path     the place
    reads    paths and names of all that the same command reads. None is skipped
    made_by  the command, which may replace what it made before. Empty: a page or figures
    folder   whether it makes a folder, and not a file
    raises   InputError for something that is read, for a file or folder of another origin, and for
             a place where nothing can be written
    """
    wanted = "folder" if folder else "file"
    expected = f"--{option} must be a {wanted} that can be written, got {str(path)!r}"
    try:
        for read in reads:
            if read is not None and os.path.realpath(path) == os.path.realpath(read):
                raise InputError(f"--{option} must be no {wanted} that the command itself reads or "
                                 f"works in, got {str(path)!r}")
        if path.exists():
            check_replaceable(path, expected, made_by, folder)
        above = next(x for x in Path(os.path.realpath(path)).parents if x.exists())
        if not (above.is_dir() and os.access(above, os.W_OK)):
            raise InputError(f"{expected}: nothing can be written into {str(above)!r}")
    except OSError as error:
        raise InputError(f"{expected}: {error.strerror}") from error


def check_replaceable(path: Path, expected: str, made_by: str, folder: bool) -> None:
    """Refuse what exists, unless the same command has made it.

    path, made_by, folder  as `check_result` takes them
    expected               how the message begins
    """
    if not (path.is_dir() if folder else path.is_file()):
        raise InputError(f"{expected}: it is none")
    if not os.access(path, os.W_OK):
        raise InputError(f"{expected}: Permission denied")
    if folder:
        mark = path / MADE_BY
        owner = mark.read_text(encoding="utf-8").strip() if mark.exists() else ""
        ours = owner == made_by or not any(path.iterdir())
    else:
        with open(path, encoding="latin-1", newline="") as file:
            begins = file.read(1 << 20).replace("\\", "")
        ours = not begins or re.match(BEGINS[made_by], begins, re.DOTALL)
    if not ours:
        raise InputError(f"{expected}: it was not made by {made_by or 'this program'}, and would "
                         "be lost")


def sign_folder(folder: Path, made_by: str) -> None:
    """Name in a folder the command that made it, which may make the folder again."""
    write_text(folder / MADE_BY, f"{made_by}\n")


# ----------------------------------------------------------------------------- the writing

def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or a folder beside its place, and move it there once it is whole.

    A writer that fails or is interrupted, as by a full disk, leaves what was there before.

    path   the file or folder to make. The folders above it are made. In a folder that is there,
           files of the same names are replaced
    write  a function that makes the file or the folder at the path that it is given
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=PREFIX, dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        write(fresh)
        if fresh.is_dir() and path.is_dir():
            replace_files(fresh, path)
        else:
            os.replace(fresh, path)


def replace_files(fresh: Path, folder: Path) -> None:
    """Move all files of a fresh folder into an older one, whose own weights go.

    transformers would load weights of the older model where the fresh one has other files.
    """
    names = {file.name for file in fresh.iterdir()}
    for file in folder.glob("*.safetensors*"):
        if file.name not in names:
            file.unlink()
    for name in sorted(names):
        os.replace(fresh / name, folder / name)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, as `write_whole` does."""
    write_whole(path, lambda fresh: fresh.write_text(text, encoding="utf-8"))


def save_model(folder: Path, model, tokenizer) -> None:
    """Write a model with its tokenizer as a folder, as `write_whole` does."""
    def write(fresh: Path) -> None:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    write_whole(folder, write)


# ---------------------------------------------------------------- why a file cannot be read

def check_file(path: str | Path) -> None:
    """Raise a ValueError for a folder, and for a pointer of git-lfs that stands for a file.

    Readers of tensors only say "No such device" and "header too large" of them.

    path   the file
    """
    if Path(path).is_dir():
        raise ValueError(f"{Path(path).name} is a folder, not a file")
    with open(path, "rb") as file:
        if file.read(30).startswith(b"version https://git-lfs"):
            raise ValueError(f"{Path(path).name} is a pointer of git-lfs, not the file itself: git "
                             "lfs pull")


def shorten(said, most: int = 300) -> str:
    """Put an exception or a text on one line, without its middle if it is long.

    A message may quote what it refuses, and that may be a whole file. Its end often has the reason.

    said   the exception or the text
    most   about how many characters the line has at most
    """
    line = " ".join(str(said).split())
    if len(line) <= most:
        return line
    return f"{line[:most * 2 // 3]} … {line[-most // 3:]}"


def explain(error: Exception) -> str:
    """Put an error of a reader on one line. A KeyError by itself says no more than the key."""
    return f"it has no {error}" if isinstance(error, KeyError) else shorten(error)


def read_json(path: str | Path):
    """Return what a JSON file holds. Windows may have put a byte order mark before its text."""
    return json.loads(Path(path).read_text(encoding="utf-8-sig"))


# ------------------------------------------------------------------- what a stopped run has kept

def read_kept(file) -> list:
    """Read the lines of JSON that earlier runs kept, and cut off a last line that is not whole.

    file     opened with "a+b": bytes, since a truncated file is measured in bytes, and since a last
             line that was cut off may end within a character
    returns  what each line holds
    raises   InputError for a line that holds something else
    """
    file.seek(0)
    lines = [line for line in file if line.endswith(b"\n")]
    file.truncate(sum(map(len, lines)))
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise InputError("expected what an earlier run kept, got a damaged line "
                             f"{len(rows) + 1} in {file.name}; without the file it is made "
                             "anew") from error
    return rows


def cut_stream(file, prompts: list[list[int]], requests: int, every: int) -> None:
    """Cut a file of answers after the last answer that the draft has learnt from.

    file      a file of JSON lines, opened with "a+b"
    prompts   all prompts of the stream, in their order
    requests  how many of the first prompts the draft has learnt from
    every     how many prompts are served before each step. So an earlier run may have answered as
              many prompts more, of which the draft has not learnt yet
    raises    InputError unless the file has the answers to the first prompts, to at least
              `requests` and at most `requests` + `every` of them, and nothing else
    """
    answered = [row["prompt"] for row in read_kept(file)]
    few = requests <= len(answered) <= requests + every
    if not few or answered != prompts[:len(answered)]:
        raise InputError(f"--out must hold the answers to the first {requests} prompts, of which "
                         f"the draft has learnt, or be a new file, got {file.name}")
    file.seek(0)
    for _ in range(requests):
        file.readline()
    file.truncate()
