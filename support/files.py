"""This file writes results without losing a file of the user, and tells what is wrong with a file.

    check_result   refuses a place before any work, where something is or nothing can be written
    write_whole    writes a file or a folder beside its place, and moves it there once it is whole
    write_text     does the same with a text
    save_model     does the same with a model and its tokenizer
    check_file     refuses a pointer of git-lfs that lies in the place of the file itself
    ask_hub        refuses a hub id whose files are not here, if the hub cannot be reached
    shorten        puts an error or a message on one short line
    explain_errors  names the file in one line, in place of any error in reading or writing it
    read_json      reads a JSON file
    read_kept      reads the lines of JSON that a stopped run has kept
"""
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Sequence

from transformers.utils import hub

from common import InputError

# A page of --trace. Another one has another title, and cli/trace.html itself has no data.
PAGE = r'<!doctype html>(?s:.*)<title>Decoding, call by call</title>(?s:.*) id="data">{"runs": \['


# ----------------------------------------------------------------------------- the writing

def check_result(option: str, path: Path, begins: str = PAGE) -> None:
    """Raise an InputError for a wrong place of a result, before any work is done.

    A result never takes the place of something else. A training may have taken days, and its file
    is quickly lost by an option that is taken from an older command line.

    option   the option that gave the place, as its keyword argument is written
    path     the place of a file or a folder
    begins   a pattern of how a file begins that may be there already, because it is made again in
             seconds or because a stopped run goes on with it. Empty: there is no such file
    """
    above = next(x for x in Path(os.path.realpath(path)).parents if x.exists())
    with explain_errors(f"a new place for --{option}", path):
        if not (above.is_dir() and os.access(above, os.W_OK)):
            raise ValueError(f"nothing can be written into {str(above)!r}")
        if path.exists():
            with open(path, "r+", encoding="latin-1") as file:  # an error if it cannot be written
                if begins == "" or not re.match(begins, file.read(1 << 20)):
                    raise ValueError("it is there already")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or a folder beside its place, and move it there once it is whole.

    A writer that fails or is interrupted, as by a full disk, leaves what was there before. What a
    killed one has begun is no part of what is written later. A file that is replaced keeps its
    mode. A new one gets that of any new file, since some writers let nobody else read theirs.

    path    the file or folder to make. The folders above it are made
    write   a function that makes the file or the folder at the path that it is given
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".new-{path.name}")
    if fresh.is_dir() and not fresh.is_symlink():
        shutil.rmtree(fresh)
    fresh.unlink(missing_ok=True)
    write(fresh)
    usual = os.umask(0)  # which can only be read by setting it
    os.umask(usual)
    for file in filter(Path.is_file, [fresh, *fresh.rglob("*")]):
        file.chmod(path.stat().st_mode if path.is_file() else 0o666 & ~usual)
    os.replace(fresh, path)


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
    """Raise a ValueError for a pointer of git-lfs in the place of a file, an OSError for a folder.

    Readers of tensors would only say "header too large" of the one and "No such device" of the
    other.

    path   the file
    """
    with open(path, "rb") as file:
        if file.read(30).startswith(b"version https://git-lfs"):
            raise ValueError(f"{Path(path).name} is a pointer of git-lfs, not the file itself: git "
                             "lfs pull")


def ask_hub(path: str, names: Sequence[str]) -> None:
    """Raise an InputError if a hub id's files are not here, and the hub cannot be reached.

    transformers would try to reach it for a minute, or would say that it has no such files.

    path    a directory or hub id
    names   files of it. One of them in the cache is enough
    """
    with explain_errors("a hub id that can be reached, as there is no such directory", path):
        if not (Path(path).exists() or any(hub.try_to_load_from_cache(path, x) for x in names)):
            hub.get_session().head(hub.constants.ENDPOINT, timeout=9)


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


@contextmanager
def explain_errors(expected: str, path: str | Path):
    """Turn any error in reading or writing a file into an InputError, which names the file.

    Readers of the file formats raise all kinds, and so does what is made of a wrong header.

    expected  how the message describes a good file
    path      the file
    """
    try:
        yield
    except Exception as error:  # the text of a KeyError is only the missing key
        said = f"it has no {error}" if isinstance(error, KeyError) else shorten(error)
        raise InputError(f"expected {expected}, got {str(path)!r}: {said}") from error


def read_json(path: str | Path):
    """Return what a JSON file holds. Windows may have put a byte order mark before its text."""
    return json.loads(Path(path).read_text(encoding="utf-8-sig"))


# ------------------------------------------------------------------- what a stopped run has kept

def read_kept(file, parse: Callable) -> list:
    """Read the lines of JSON that earlier runs kept, and cut off a last line that is not whole.

    file     opened with "a+b": bytes, since a truncated file is measured in bytes, and since a last
             line that was cut off may end within a character
    parse    a function from what a line holds to what the caller needs of it. It raises any error
             for a line of another kind
    returns  what `parse` returned for each line
    raises   InputError for a line that is no JSON or of another kind
    """
    file.seek(0)
    lines = [line for line in file if line.endswith(b"\n")]
    file.truncate(sum(map(len, lines)))
    rows = []
    for number, line in enumerate(lines, 1):
        with explain_errors(f"JSON that an earlier run kept in line {number}; without the file all "
                            "is made anew", file.name):
            rows.append(parse(json.loads(line)))
    return rows
