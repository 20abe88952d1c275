"""What is printed while tokens come is the text of all tokens."""
import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cli.text import TokenTexts, split_text, stream
from cli.trace import collect_tokens, say_tokens


NAMES = bytes_to_unicode()  # how a byte-level tokenizer writes each byte
WORDS = ["it", "don", "n", "t", "s", "say", "x", ".", ",", "'", "'s", "n't"]
PIECES = {"wordpiece": [*WORDS, *("##" + word for word in WORDS)],
          "byte-level": [*NAMES.values(), "Ġit", "Ġ'", "Ġ."],
          "sentencepiece": [*(f"<0x{byte:02X}>" for byte in NAMES), "▁", "▁it", *WORDS, "漢"]}
DECODERS = {"wordpiece": decoders.WordPiece(), "byte-level": decoders.ByteLevel(),
            "sentencepiece": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                                decoders.Fuse(), decoders.Strip(" ", 1, 0)])}
KINDS = ["wordpiece", "wordpiece, clean", "byte-level", "byte-level, in Python"]


class Backwards(PreTrainedTokenizerFast):
    """This tokenizer claims to be written in Python. A token changes all of the text before it."""
    is_fast = False

    def decode(self, ids, **options):
        return super().decode(ids[::-1], **options)


def tokenizer_of(kind: str):
    """Make a small tokenizer of a kind; "clean" stands for one that says it takes blanks back."""
    name = kind.split(",")[0]
    vocabulary = {piece: i for i, piece in enumerate(["<s>", *PIECES[name]])}
    model = models.BPE(vocabulary, [], unk_token="x")
    if name == "wordpiece":
        model = models.WordPiece(vocabulary, unk_token="x")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = DECODERS[name]
    make = Backwards if "Python" in kind else PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, bos_token="<s>",
                clean_up_tokenization_spaces="clean" in kind)


def some_ids(tokenizer, n: int, rng: random.Random) -> list[int]:
    """Choose any tokens, and bytes of characters, some of them incomplete."""
    vocabulary = tokenizer.get_vocab()
    ids = []
    while len(ids) < n:
        data = "".join(rng.choices("a漢🙂é", k=3)).encode()[:rng.randint(1, 9)]
        names = [NAMES[x] for x in data]
        names.insert(rng.randint(0, len(names)), "<s>")  # which is left out of the text
        ids += [vocabulary[x] for x in names if x in vocabulary]
        ids += rng.choices([*vocabulary.values()], k=rng.randint(0, 4))
    return ids[:n]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_decoding(kind, capsys):
    """The printed text is a beginning of the decoding at all times, and in the end all of it,
    however tokens fall into chunks."""
    tokenizer, rng = tokenizer_of(kind), random.Random(kind)
    for n in [*range(1, 25), 300]:
        ids, printed = some_ids(tokenizer, n, rng), []
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

        def watched():
            ends = sorted(rng.choices(range(n), k=n // 3))
            for begin, end in zip([0, *ends], [*ends, n]):
                yield ids[begin:end]
                printed.append(capsys.readouterr().out)
                assert whole.startswith("".join(printed)), ids

        stream(watched(), tokenizer, False, [])
        assert "".join(printed) + capsys.readouterr().out == whole + "\n", ids


@pytest.mark.parametrize("kind", [*PIECES, "wordpiece, clean"])
def test_text_is_not_held_back(kind):
    """A word is printed at once, and tokens of long ago are forgotten."""
    tokenizer = tokenizer_of(kind)
    texts, vocabulary = TokenTexts(tokenizer), tokenizer.get_vocab()
    word = next(vocabulary[x] for x in ("▁it", "Ġit", "it") if x in vocabulary)
    assert {texts.add(word).strip() for _ in range(500)} == {"it"} and len(texts.ids) < 200


def test_a_character_of_byte_tokens_is_given_away_when_it_is_whole():
    """The first bytes of the next one make the whole run of bytes invalid for a while."""
    tokenizer = tokenizer_of("sentencepiece")
    names = ["▁it", *(f"<0x{x:02X}>" for x in "漢🙂".encode()), "s"]
    pieces = split_text(tokenizer, tokenizer.convert_tokens_to_ids(names))
    assert pieces == ["it", "", "", "漢", "", "", "", "🙂", "s"]


def test_tokens_of_a_trace():
    """In a tree a token is shown as in the middle of a text, with its blank.

    The tokens of a draft are its own, and not the target's.
    """
    tokenizer, said = tokenizer_of("sentencepiece"), [" it", "s", " ", "漢", "<s>"]
    ids = tokenizer.convert_tokens_to_ids(["▁it", "s", "▁", "漢", "<s>"])
    calls = [{"lm": 0, "ids": ids, "best": [-1]}, {"lm": 1, "ids": [98], "best": [99]}]
    runs = [{"prompt": ids[:1], "lms": ["2 layers", "draft"],
             "rounds": [{"calls": calls, "chunk": ids[:1]}]}]
    shown = collect_tokens(runs, ["target", "draft"])
    assert shown == {"target": {-1, *ids}, "draft": {98, 99}}
    assert say_tokens(shown["target"], tokenizer) == dict(zip(ids, said))
