"""Keeps the messages of a command line short, and turns tokens into text while they come."""
from argparse import ArgumentParser
from typing import Iterator

from support.files import shorten

HALF = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer says for bytes that are no character yet
KEPT = 64  # tokens that are decoded once more with every new one
MOST = 600  # characters of a message


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
    has signs of an error in place of this character, too. Here a character that was given away
    stays.

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
