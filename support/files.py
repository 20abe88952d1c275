"""This file writes results without losing a file of the user, and tells what is wrong with a file.

    check_result   refuses a place before any work, where something is or nothing can be written
    write_whole    writes a file or a folder beside its place, and moves it there once it is whole
    write_text     does the same with a text
    save_model     does the same with a model and its tokenizer
    check_file     refuses a pointer of git-lfs that lies in the place of the file itself
    shorten        puts an error or a message on one short line
    explain        does the same with an error that a reader of a file has raised
    explain_errors  names the file in one line, in place of any error in reading or writing it
    read_json      reads a JSON file
    read_kept      reads the lines of JSON that a stopped run has kept
"""
import json
import os
import re
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Callable

from common import InputError

FIGURES = r'<!doctype html>|<svg |{\n "'  # how pages, pictures and figures begin


# ------------------------------------------------------------------------ before any work

def check_result(option: str, path: Path, begins: str = FIGURES, folder: bool = False) -> None:
    """Raise an error for a wrong place of a result, before any work is done.

    A result never takes the place of something else. A training may have taken days, and its file
    is quickly lost by an option that is taken from an older command line.

    option   the option that gave the place, as its keyword argument is written
    path     the place
    begins   a pattern of how a file begins that may be there already, because it is made again in
             seconds or because a stopped run goes on with it. Empty: there is no such file
    folder   whether the result is a folder, and not a file
    raises   InputError if something else is there, and if nothing can be written there
    """
    with explain_errors(f"a new {'folder' if folder else 'file'} for --{option}", path):
        if path.exists() and not is_replaceable(path, begins, folder):
            raise ValueError("it is there already")
        above = next(x for x in Path(os.path.realpath(path)).parents if x.exists())
        if not (above.is_dir() and os.access(above, os.W_OK)):
            raise ValueError(f"nothing can be written into {str(above)!r}")


def is_replaceable(path: Path, begins: str, folder: bool) -> bool:
    """Tell whether nothing is lost if a result takes the place of what is there.

    The arguments are those of `check_result`.
    """
    if folder:
        return path.is_dir() and not any(path.iterdir())
    if not path.is_file():
        return False
    with open(path, "r+", encoding="latin-1") as file:  # an error if it cannot be written
        start = file.read(1 << 20)
    return not start or (begins != "" and re.match(begins, start) is not None)


# ----------------------------------------------------------------------------- the writing

def claim(place: Path, begins: str | None, folder: bool) -> bool:
    """Take a name for a result, and tell whether nothing is lost if the result is moved there.

    Of two programs that end at once only one can make the name.

    place   the name
    begins  as for `write_whole`
    folder  whether the result is a folder
    """
    try:
        place.mkdir() if folder else place.touch(exist_ok=False)
    except FileExistsError:
        return begins is None or (os.access(place, os.W_OK)
                                  and is_replaceable(place, begins, folder))
    return True


def write_whole(path: Path, write: Callable[[Path], object], begins: str | None = "") -> None:
    """Write a file or a folder beside its place, and move it there once it is whole.

    A writer that fails or is interrupted, as by a full disk, leaves what was there before.

    path    the file or folder to make. The folders above it are made
    write   a function that makes the file or the folder at the path that it is given
    begins  a pattern of how a file begins that may be replaced, as for `check_result`. None:
            whatever is there is replaced
    raises  InputError if something else is there, which may have appeared since the place was
            checked. The result then gets a name beside it: PATH.1, or the next number that is free
    """
    path = Path(os.path.realpath(path))  # a link stays a link
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".new-", dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        write(fresh)
        place, number = path, 0
        while not claim(place, begins, fresh.is_dir()):
            number += 1
            place = path.with_name(f"{path.name}.{number}")
        if place.is_dir():  # the older folder goes with the temporary one
            os.replace(place, Path(folder) / f"{path.name}.old")
        os.replace(fresh, place)
    if place != path:
        raise InputError(f"expected nothing at {str(path)!r}, got something that has appeared "
                         f"there meanwhile; the result is {str(place)!r}")


def write_text(path: Path, text: str, begins: str | None = FIGURES) -> None:
    """Write a text as UTF-8, as `write_whole` does. Pages, pictures and figures are replaced."""
    write_whole(path, lambda fresh: fresh.write_text(text, encoding="utf-8"), begins)


def save_model(folder: Path, model, tokenizer, begins: str | None = "") -> None:
    """Write a model with its tokenizer as a folder, as `write_whole` does."""
    def write(fresh: Path) -> None:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    write_whole(folder, write, begins)


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
    """Put an error of a reader on one line. The text of a KeyError is only the missing key."""
    return f"it has no {error}" if isinstance(error, KeyError) else shorten(error)


@contextmanager
def explain_errors(expected: str, path: str | Path):
    """Turn any error in reading or writing a file into an InputError, which names the file.

    Readers of the file formats raise all kinds, and so does what is made of a wrong header.

    expected  how the message describes a good file
    path      the file
    """
    try:
        yield
    except Exception as error:
        raise InputError(f"expected {expected}, got {str(path)!r}: {explain(error)}") from error


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
