"""Reads prompts, keeps messages short, and turns tokens into text while they come.

Text that comes in and goes out is UTF-8, whatever the locale of the machine says."""
import io
import os
import re
import sys
from argparse import ArgumentParser
from typing import Iterable, Iterator

from common import InputError
from training.files import shorten

HALF = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer says for bytes that are no character yet
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # the name of a token that is one byte
KEPT = 64  # tokens that are decoded once more with every new one
MOST = 600  # characters of a message


# ------------------------------------------------------------------------------- the streams

def set_encodings() -> None:
    """Make stdout and stderr take every character: what is printed must not end a run.

    A file or a pipe gets UTF-8. A terminal, or a program that set PYTHONIOENCODING, reads another
    encoding, so it keeps this encoding, and what the encoding lacks is printed as a question mark.
    """
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper):  # not None, or what a notebook puts there
            asked = stream.isatty() or "PYTHONIOENCODING" in os.environ
            stream.reconfigure(encoding=stream.encoding if asked else "utf-8", errors="replace")


def read_stdin() -> str:
    """Read standard input, which is UTF-8 with or without a byte order mark."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt - must be UTF-8 text, got byte {error.object[error.start]:#x} "
                         f"at position {error.start}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_argument(text: str) -> str:
    """Return an argument of the command line as UTF-8 text.

    Where the locale is another one, Python hides the bytes of the argument in surrogates, which no
    tokenizer takes.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise InputError(f"--prompt must be UTF-8 text, got {text!r}") from error


def read_texts(given: list[str]) -> list[str]:
    """Return the texts of --prompt, among which "-" stands for standard input."""
    return [read_stdin() if text == "-" else read_argument(text) for text in given]


class Parser(ArgumentParser):
    """An argument parser whose messages are short, whatever the argument that they quote."""

    def error(self, message: str) -> None:
        """Refuse the command line; what is not known may be a word that --help explains."""
        hint = " (--help lists all options)" if message.startswith("unrecognized") else ""
        self.exit(2, f"{self.prog}: error: {shorten(message, MOST)}{hint}")

    def exit(self, status: int = 0, message: str | None = None) -> None:
        """End the process and print a message. All messages of argparse pass through here."""
        super().exit(status, f"{shorten(message, MOST)}\n" if message else None)


# ------------------------------------------------------------------------------ tokens as text

# The end of a text that a tokenizer's clean-up of blanks may still change: it makes "do n't" of
# "do n ' t" and "it's" of "it ' s". A cut before this end has no pattern of the clean-up across it,
# whatever follows. Each pattern begins with a blank, and these are the words that begin one.
UNSETTLED = re.compile(r"(?: (?:n'?|'?[vr]|')?)+\Z")


class TokenTexts:
    """Splits the text of tokens that come one after another among these tokens.

    Tokens cannot be decoded one by one. A character may be two tokens, a blank at the beginning of
    a text is left out, and some tokenizers take blanks back. Here the pieces of all tokens, put
    together, are the decoding of all tokens. A piece is given away when no later token can change
    it. This is an example of a tokenizer that cleans up blanks:

        add("it")   "it"
        add("'")    nothing, since the text is now "it '", and what comes decides about the blank
        add("s")    "'s" as the piece of "s", for the text has become "it's"
    """

    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip = skip_special_tokens
        self.number = 0  # of the next token
        self.ids = []  # the latest tokens, which are decoded together
        self.text = ""  # their text
        self.given = 0  # characters of their text that have been given away
        self.waiting = []  # (number of a token, where its piece ends in the text), not given away
        self.in_bytes = False

    def decode(self, ids: list[int], **how) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip, **how)

    def add(self, token: int) -> list[tuple[int, str]]:
        """Take one more token.

        returns  (number of a token, text) for each piece of text that is settled now
        """
        self.ids.append(token)
        self.watch_bytes(token)
        if self.tokenizer.is_fast:
            self.follow(self.decode(self.ids))
        self.waiting.append((self.number, len(self.text.rstrip(HALF))))
        self.number += 1
        pieces = self.give(self.settled())
        self.forget()
        return pieces

    def follow(self, text: str) -> None:
        """Go on with a new text; what a token has taken back belongs to this token."""
        if not text.startswith(self.text.rstrip(HALF)):
            same = len(os.path.commonprefix([self.text, text]))
            self.waiting = [(number, min(stop, same)) for number, stop in self.waiting]
        self.text = text

    def finish(self) -> list[tuple[int, str]]:
        """Return what was held back: the text is over, and nothing can change it."""
        self.follow(self.decode(self.ids))
        self.waiting.append((self.number - 1, len(self.text)))
        return self.give(len(self.text))

    def give(self, end: int) -> list[tuple[int, str]]:
        """Give away the text up to `end`, split by the tokens that wait."""
        pieces = []
        while self.waiting and self.given < end:
            number, stop = self.waiting[0]
            piece = self.text[self.given:min(stop, end)]
            if piece:
                pieces.append((number, piece))
                self.given += len(piece)
            if stop > end:
                break
            del self.waiting[0]
        return pieces

    def watch_bytes(self, token: int) -> None:
        """Find out whether the text ends with tokens that are single bytes.

        Such tokens are decoded all together, up to the next other token. If they are no UTF-8 as a
        whole, even those that were a character before become signs of an error.
        """
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is not None and BYTE.fullmatch(name):
            self.in_bytes = True
        elif self.decode([token]):  # a special token, which is left out, does not end the bytes
            self.in_bytes = False

    def settled(self) -> int:
        """Return how many characters of the text no later token can change."""
        if self.in_bytes or not self.tokenizer.is_fast:
            return self.given  # a tokenizer that is written in Python may change everything
        if not self.tokenizer.clean_up_tokenization_spaces:
            return len(self.text.rstrip(HALF))
        raw = self.decode(self.ids, clean_up_tokenization_spaces=False)
        settled = UNSETTLED.sub("", raw.rstrip(HALF))
        if self.text != raw:  # some tokenizers do not clean up although they say so
            settled = self.tokenizer.clean_up_tokenization(settled)
        return len(settled)

    def forget(self) -> None:
        """Drop old tokens, so that a long answer does not become slower and slower.

        The tokens that stay must have the end of the same text, and must include all that wait.
        """
        old = len(self.ids) - KEPT
        done = len(self.ids) - len(self.waiting)
        if old < KEPT or old > done:
            return
        rest = self.decode(self.ids[old:])
        gone = len(self.text) - len(rest)
        if self.text.endswith(rest) and gone <= self.given:
            self.ids, self.text = self.ids[old:], rest
            self.given -= gone
            self.waiting = [(number, stop - gone) for number, stop in self.waiting]


def split_text(tokenizer, ids: Iterable[int], skip_special_tokens: bool = True) -> list[str]:
    """Return a piece of text for each token. Some are empty, and all together are the decoding."""
    texts = TokenTexts(tokenizer, skip_special_tokens)
    pieces = [piece for token in ids for piece in texts.add(token)]
    if texts.number:
        pieces += texts.finish()
    split = [""] * texts.number
    for number, text in pieces:
        split[number] += text
    return split


def stream(chunks: Iterator[list[int]], tokenizer, colour: bool, log: list) -> None:
    """Print the text of chunks as soon as it is settled, and the rest in the end.

    chunks     the chunks of a decoding
    tokenizer  turns tokens into text
    colour     whether guessed tokens, all of a chunk but the last, are printed in green
    log        unused: the method's records, which other viewers show
    """
    texts, guessed = TokenTexts(tokenizer), []

    def show(pieces: list[tuple[int, str]]) -> None:
        for number, text in pieces:
            green = colour and guessed[number]
            print(f"\033[32m{text}\033[0m" if green else text, end="")
        sys.stdout.flush()

    for chunk in chunks:
        for i, token in enumerate(chunk):
            guessed.append(i < len(chunk) - 1)
            show(texts.add(token))
    if guessed:
        show(texts.finish())
    print(flush=True)
