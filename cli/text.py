"""Reads prompts, keeps messages short, and turns tokens into text while they come.

Text that comes in and goes out is UTF-8, whatever the locale of the machine says."""
import io
import os
import sys
from argparse import ArgumentParser
from contextlib import ExitStack, contextmanager
from typing import Iterator
from unittest.mock import patch

from support.files import shorten

HALF = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer says for bytes that are no character yet
KEPT = 64  # tokens that are decoded once more with every new one
MOST = 600  # characters of a message


# ------------------------------------------------------------------------------- the streams

@contextmanager
def prepare_streams() -> Iterator[None]:
    """Make stdout and stderr take every character inside a `with`: no print must end a run.

    A file or a pipe gets UTF-8. A terminal may read another encoding, so it keeps its own, and what
    this encoding lacks is printed as a question mark. A program without a console may have no
    streams at all. Then nothing is read, and what is printed is lost.
    """
    with ExitStack() as undo:
        nowhere = undo.enter_context(open(os.devnull, "r+"))
        for name in "stdin", "stdout", "stderr":
            undo.enter_context(patch.object(sys, name, getattr(sys, name) or nowhere))
        for stream in sys.stdout, sys.stderr:
            if isinstance(stream, io.TextIOWrapper):  # not what a notebook puts there
                undo.callback(stream.reconfigure, encoding=stream.encoding, errors=stream.errors)
                undo.callback(empty_stream, stream, nowhere)  # else reconfigure would, and may fail
                encoding = stream.encoding if stream.isatty() else "utf-8"
                stream.reconfigure(encoding=encoding, errors="replace")
        yield


def empty_stream(stream: io.TextIOWrapper, nowhere: io.TextIOWrapper) -> None:
    """Write what a stream still holds, or forget it if its pipe is closed or its disk is full.

    Else Python would try once more when it ends, and would complain.

    nowhere   a file that takes everything
    """
    try:
        stream.flush()
    except OSError:
        pipe = os.dup(stream.fileno())
        os.dup2(nowhere.fileno(), stream.fileno())
        stream.flush()
        os.dup2(pipe, stream.fileno())
        os.close(pipe)


def read_input() -> str:
    """Return the text on standard input, whose own settings stay.

    It is UTF-8, may begin with a byte order mark, and may have the line ends of any system.
    UnicodeError if it is not UTF-8.
    """
    if not isinstance(sys.stdin, io.TextIOWrapper):
        return sys.stdin.read()
    return io.TextIOWrapper(io.BytesIO(sys.stdin.buffer.read()), "utf-8-sig").read()


class Parser(ArgumentParser):
    """An argument parser whose messages are one short line, whatever they quote."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: error: {shorten(message, MOST)} (--help lists all options)\n")


# ------------------------------------------------------------------------------ tokens as text

class TokenTexts:
    """Splits the text of tokens that come one after another among these tokens.

    Tokens cannot be decoded one by one. A character may be two tokens, and a blank at the beginning
    of a text is left out. Here the pieces of all tokens, put together, are the decoding of all
    tokens. A piece is given away as soon as it is whole:

        add("a")                 "a"
        add(first byte of "é")   nothing, since half a character is no text
        add(second byte)         "é"

    If tokens are single bytes, wrong bytes may follow a character. Then a decoding of all of them
    has signs of an error in place of this character, too. Here it stays, since it has been given
    away.

    A tokenizer that is written in Python may change all of a text until its end. Then all of the
    text is the last piece.
    """

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip = skip_special_tokens
        self.ids = []  # the latest tokens, which are decoded together
        self.given = 0  # characters of their text that have been given away

    def decode(self, ids: list[int]) -> str:
        # Some tokenizers would take blanks back, as of "it ' s", when they have been printed.
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip,
                                     clean_up_tokenization_spaces=False)

    def add(self, token: int) -> str:
        """Take one more token, and return the text that it settles."""
        self.ids.append(token)
        if not self.tokenizer.is_fast:
            return ""
        text = self.decode(self.ids)
        piece = text.rstrip(HALF)[self.given:]
        self.given += len(piece)
        if len(self.ids) >= 2 * KEPT:  # a long answer must not become slower and slower
            rest = self.decode(self.ids[-KEPT:])
            gone = len(text) - len(rest)
            if text.endswith(rest) and gone <= self.given:
                self.ids = self.ids[-KEPT:]
                self.given -= gone
        return piece

    def finish(self) -> str:
        """Return what was held back, because the text is over."""
        return self.decode(self.ids)[self.given:]


def split_text(tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    """Return a piece of text for each token. Some are empty, and all together are the decoding.

    ids   one token or more
    """
    texts = TokenTexts(tokenizer, skip_special_tokens)
    pieces = [texts.add(token) for token in ids]
    pieces[-1] += texts.finish()
    return pieces


def stream(chunks: Iterator[list[int]], tokenizer, colour: bool, log: list) -> None:
    """Print the text of chunks as soon as it is settled, and the rest in the end.

    chunks     the chunks of a decoding
    tokenizer  turns tokens into text
    colour     whether guessed tokens, all of a chunk but the last, are printed in green
    log        unused: the method's records, which other viewers show
    """
    texts = TokenTexts(tokenizer)
    for chunk in chunks:
        for number, token in enumerate(chunk, 1):
            text = texts.add(token)
            if text and colour and number < len(chunk):
                text = f"\033[32m{text}\033[0m"
            print(text, end="", flush=True)
    print(texts.finish(), flush=True)
