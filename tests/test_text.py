"""Text that comes in and goes out: its encoding, and what is printed while tokens come."""
import ast
import io
import json
import random
import re
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CTRLTokenizer, PreTrainedTokenizerFast

from cli.text import KEPT, TokenTexts, read_texts, set_encodings, split_text, stream
from cli.trace import collect_tokens, say_tokens
from common import InputError
from helpers import main
from mutants import read
from speculative import report, speculative
from training.files import shorten
from test_structure import PROGRAMS


# ------------------------------------------------------------------------------------ encodings

def test_text_is_utf_8_on_every_machine():
    """A call that opens text names its encoding: the one of the machine may be another."""
    opens = r"(^|\.)(open|fdopen|TextIOWrapper)$|\.(read|write)_text$"
    for name in PROGRAMS:
        for call in ast.walk(ast.parse(read(name))):
            if isinstance(call, ast.Call) and re.search(opens, ast.unparse(call.func)):
                said = ast.unparse(call)
                assert "encoding=" in said or re.search(r"'\w?\+?b\+?'", said), (name, said)


# ------------------------------------------------------------------------- the streams, messages

class Bytes(io.TextIOWrapper):
    """A stream of these bytes, in a locale of another encoding."""

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data), encoding="ascii")


@pytest.mark.parametrize("data", ["é\n漢", "\ufeffé\n漢", "\ufeffé\r\n漢", "é\r漢"])
def test_standard_input_is_utf_8(monkeypatch, data):
    """With or without a byte order mark, and with the line ends of any system."""
    monkeypatch.setattr(sys, "stdin", Bytes(data.encode()))
    assert read_texts(["-"]) == ["é\n漢"]


def test_arguments_in_another_locale():
    """Python hides the bytes that the locale does not know; other bytes are no text at all."""
    assert read_texts(["é漢", "é漢".encode().decode("ascii", "surrogateescape")]) == ["é漢", "é漢"]
    for wrong in b"caf\xe9".decode("ascii", "surrogateescape"), "\ud800":
        with pytest.raises(InputError, match="--prompt must be UTF-8 text, got '"):
            read_texts([wrong])


@pytest.mark.parametrize("terminal, asked, printed", [
    (False, None, "é漢".encode()), (False, "ascii", b"??"), (True, None, b"??")])
def test_encodings_of_the_output(monkeypatch, terminal, asked, printed):
    """A pipe gets UTF-8. A terminal and a program that asks for it keep an encoding, and what this
    encoding lacks is a question mark."""
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if asked:
        monkeypatch.setenv("PYTHONIOENCODING", asked)
    for name in ("stdout", "stderr"):
        stream = Bytes(b"")
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, name, stream)
    set_encodings()
    for stream in sys.stdout, sys.stderr:
        print("é漢", end="", file=stream, flush=True)
        assert stream.buffer.getvalue() == printed


@pytest.mark.parametrize("argv", [
    ["--prompts", "{top}/line.jsonl"], ["--target", "{long}"], ["--{long}"], ["{long}"],
    ["--max-new-tokens", "{long}"], ["--prompt", "{bytes}"]])
def test_no_message_carries_a_whole_file(tmp_path, capsys, argv):
    """Whatever is refused, on the command line, in a file or by argparse: one short line. Its end
    stays, which often has the reason."""
    assert shorten("begin " + "x y\n" * 900 + " end").endswith("x y end")
    (tmp_path / "line.jsonl").write_text('{"prompt": ["' + "x" * 10 ** 6 + '"]}')
    names = {"top": tmp_path, "long": "x" * 100_000, "bytes": "caf\udce9" * 50_000}
    assert main([speculative], report, [x.format(**names) for x in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err) < 700, err[:2000]


# ----------------------------------------------------------------------- tokens as text

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["it", "don", "n", "t", "s", "v", "r", "ve", "m", "say", "x", ".", ",", "!", "?", "'", "'s",
         "n't", "do", "not"]
SPACED = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                            decoders.Strip(" ", 1, 0)])


def byte_level_names() -> list[str]:
    """Return how a byte-level tokenizer writes each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


BYTE_LEVEL = byte_level_names()


def tokenizer_of(kind: str):
    """Make a small tokenizer of a kind; "clean" stands for one that takes blanks back."""
    clean = "clean" in kind
    if "wordpiece" in kind:
        pieces = ["<s>", "</s>", *WORDS, *("##" + word for word in WORDS)]
        tokenizer = Tokenizer(models.WordPiece({x: i for i, x in enumerate(pieces)}, unk_token="x"))
        tokenizer.decoder = decoders.WordPiece(cleanup="own" in kind)
    elif "byte-level" in kind:
        pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġit", "Ġ'", "Ġ."]
        tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(pieces)}, []))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        pieces = ["<s>", "</s>", *BYTES, "▁", *("▁" + word for word in WORDS), *WORDS, "漢"]
        tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(pieces)}, [], unk_token="x",
                                         byte_fallback=True))
        tokenizer.decoder = SPACED
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                   clean_up_tokenization_spaces=clean)


KINDS = ["wordpiece", "wordpiece, clean", "wordpiece, own", "wordpiece, own, clean", "byte-level",
         "byte-level, clean", "sentencepiece", "sentencepiece, clean"]


def some_ids(tokenizer, n: int, rng: random.Random) -> list[int]:
    """Choose tokens: any, signs, and bytes of characters, of which some are incomplete."""
    vocabulary = tokenizer.get_vocab()
    signs = [x for x in vocabulary if x.strip("▁Ġ#") in (*"',.nsvr", "n't", "'s", "ve", "")]
    words = [x for x in vocabulary if x not in BYTES]
    named = BYTES if BYTES[0] in vocabulary else BYTE_LEVEL
    ids = []
    while len(ids) < n:
        data = "".join(rng.choices("a漢🙂é", k=3)).encode()[:rng.randint(1, 9)]
        names = rng.choice([rng.choices([*vocabulary], k=1), rng.choices(words, k=4),
                            rng.choices(signs, k=rng.randint(1, 5)), [named[x] for x in data]])
        ids += [vocabulary[x] for x in names if x in vocabulary]
    return ids[:n]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_decoding(kind, capsys):
    """At all times a beginning of it, and in the end the whole, however tokens fall into chunks."""
    tokenizer, rng = tokenizer_of(kind), random.Random(kind)
    for n in [*range(1, 25), 300]:
        ids, printed = some_ids(tokenizer, n, rng), []
        whole = tokenizer.decode(ids, skip_special_tokens=True)

        def watched():
            ends = sorted(rng.choices(range(n), k=n // 3))
            for begin, end in zip([0, *ends], [*ends, n]):
                yield ids[begin:end]
                printed.append(capsys.readouterr().out)
                assert whole.startswith("".join(printed)), ids

        stream(watched(), tokenizer, False, [])
        assert "".join(printed) + capsys.readouterr().out == whole + "\n", ids
        assert "".join(split_text(tokenizer, ids)) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_not_held_back_for_long(kind):
    """Three words after one that may be taken back it is printed: a stream is no stream else."""
    tokenizer = tokenizer_of(kind)
    texts, vocabulary = TokenTexts(tokenizer), tokenizer.get_vocab()
    word = next(vocabulary[x] for x in ("▁it", "Ġit", "it") if x in vocabulary)
    for _ in range(500):
        before = "".join(text for _, text in texts.add(word))
    assert before.strip() == "it" and len(texts.ids) < 200  # and old tokens are forgotten


def test_a_blank_that_waits_is_not_forgotten():
    """Bytes wait for the next word. A text cannot begin with the blank that is the first of them,
    so it stays when old tokens are dropped."""
    tokenizer = tokenizer_of("sentencepiece")
    names = ["▁it"] * KEPT + ["<0x20>"] + ["<0x61>"] * 80 + ["▁it"]
    ids = tokenizer.convert_tokens_to_ids(names)
    assert "".join(split_text(tokenizer, ids)) == tokenizer.decode(ids)


def test_each_token_has_its_piece():
    """Of a text whose blanks are taken back, and of characters of several tokens."""
    tokenizer = tokenizer_of("wordpiece, clean")
    ids = tokenizer.convert_tokens_to_ids(["it", "'", "s", "do", "n", "'", "t", ".", "x"])
    assert split_text(tokenizer, ids) == ["it", "", "'s", " do", "", "", "n't", ".", " x"]
    tokenizer = tokenizer_of("byte-level")
    ids = [tokenizer.get_vocab()[BYTE_LEVEL[x]] for x in "aé漢".encode()]
    assert split_text(tokenizer, ids) == ["a", "", "é", "", "", "漢"]
    assert split_text(tokenizer, ids[:-1]) == ["a", "", "é", "", "\N{REPLACEMENT CHARACTER}"]
    assert split_text(tokenizer, []) == []


@pytest.mark.parametrize("kind, names, said", [
    ("sentencepiece", ["▁it", "s", "▁", "漢", "</s>"], [" it", "s", " ", "漢", "</s>"]),
    ("wordpiece, clean", ["it", "##s", ",", "</s>"], [" it", "s", ",", " </s>"]),
    ("byte-level", ["Ġit", BYTE_LEVEL[0xe6], "'"], [" it", "\N{REPLACEMENT CHARACTER}", "'"])])
def test_tokens_of_a_trace(kind, names, said):
    """In a tree a token is shown as in the middle of a text, with its blank.

    The tokens of a draft are its own, and not the target's.
    """
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.convert_tokens_to_ids(names)
    calls = [{"lm": 0, "ids": ids, "best": [-1]}, {"lm": 1, "ids": [98], "best": [99]},
             {"lm": 2, "ids": ids, "best": []}]
    runs = [{"prompt": ids[:1], "lms": ["target", "draft", "2 layers"],
             "rounds": [{"calls": calls, "chunk": ids[:1]}]}]
    shown = collect_tokens(runs, ["target", "draft"])
    assert shown == {"target": {-1, *ids}, "draft": {98, 99}}
    assert say_tokens(shown["target"], tokenizer) == dict(zip(ids, said))


def test_guessed_tokens_are_green(capsys):
    """Each piece has the colour of its token, also where it is printed later."""
    tokenizer = tokenizer_of("wordpiece, clean")
    ids = tokenizer.convert_tokens_to_ids(["say", "it", "n", ".", "x"])
    stream(iter([ids[:3], ids[3:4], ids[4:]]), tokenizer, True, [])
    green = "\033[32m{}\033[0m".format
    assert capsys.readouterr().out == f"{green('say')}{green(' it')} n. x\n"


def test_a_tokenizer_in_python_may_take_back_anything(tmp_path, capsys):
    """Its text comes in the end. CTRL's words go on after "@@"."""
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "hel@@": 1, "lo": 2, "you": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    stream(iter([[1], [2, 3], [1]]), tokenizer, False, [])
    assert capsys.readouterr().out == tokenizer.decode([1, 2, 3, 1]) + "\n" == "hello you hel@@\n"
