"""Tokens are written as characters, so that a text of tokens is a string of Python.

Methods that look texts up compare, slice and search them many times a round. Python does that with
strings in C, and with lists of numbers one by one. A string is also the key of a dictionary.

    tokens     [96, 98, 97]      token t becomes the character of number t + 1,
    as_text    "acb"             since number 0 is BOUNDARY
"""
from typing import Iterable

BOUNDARY = "\0"  # comes after each text where several texts are one string


def as_text(tokens: Iterable[int]) -> str:
    """Write tokens as a string, one character for each token."""
    return "".join(chr(token + 1) for token in tokens)


def as_tokens(text: Iterable[str]) -> list[int]:
    """Return the tokens of the characters of a text, which has no BOUNDARY."""
    return [ord(x) - 1 for x in text]
