"""A draft with another tokenizer: its guesses are the tokens that both vocabularies have.

    python -m survey.another_tokenizer --target DIR --draft DIR --prompt "..."

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", arXiv 2502.05202, Algorithm 4 (token-level intersection, TLI)

A draft is of use to a target whose tokenizer is another one, if enough tokens stand for the same
text in both. The draft's distribution q is renormalised on these tokens. From there on everything
is speculative sampling (../speculative.py), with q = 0 for all tokens that the draft lacks:

    the target's text   "…"  " Paris"  " est"  " éblouissante"        ids of the target
                         │      │        │     ┌────┼───────┐
    the draft is fed    "…"  " Paris"  " est"  " é" "bloui" "ssante"  ids of the draft
    the draft's q       " et" 0.5    " !" 0.2    " magn" 0.3
    both have           " et" 0.7    " !" 0.3                         ids of the target

Any q is exact as long as the guess is drawn from it and the verification divides by it. A token
that q lacks is never guessed. It can still follow a rejected guess, since that token is drawn from
norm(max(0, p - q)), a distribution over all of the target's vocabulary.

Departures:
- Equal tokens. Paper: two tokens are equal if their strings in the vocabularies are. Here: if they
  stand for the same bytes. Why: one family writes a space as Ġ and another one as ▁.
- The end of an answer. Paper: a token like others. Here: the draft's stands for the target's. Why:
  families name it differently.
- A token that the draft lacks. Paper: the text is encoded anew. Here: the token's bytes are
  encoded, with the longest of the draft's tokens first. Why: ids that were fed must stay as they
  are, since their rows are cached.
- The first token of a text. Paper: not treated. Here: the draft's BOS, once, in place of the
  target's. Why: a draft guesses badly after two of them, or after one that it does not know.

Left out: the paper's other algorithms, which compare strings (SLEM) or sum over all ways to write
a string (SLRS).
"""
import codecs
import json
import re
from typing import Iterator

from common import InputError, Sampler, greedy
from speculative import report, speculative
from support.engine import EngineLM, run_as_program

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}


# ------------------------------------------------------------------------------ two vocabularies

def read_bytes(tokenizer, size: int, option: str = "--draft") -> dict[int, bytes | str]:
    """Find out what each token stands for.

    tokenizer   a tokenizer whose tokens are bytes in GPT-2's alphabet (Ġthe), or text with ▁ for a
                space and <0xE9> for a byte (SentencePiece)
    size        how many tokens the model knows
    option      the option that named the model, for the error
    returns     {id below `size`: the bytes of its token, or a special token's own name}. An id
                without a token is not in it. InputError for a tokenizer of another kind
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend else None
    described = json.dumps(decoder, ensure_ascii=False)  # so that "▁" stays as it is
    if "ByteLevel" in described:
        read = read_letters
    elif "ByteFallback" in described or "▁" in described:
        read = read_piece
    else:
        raise InputError(f"{option} must have a tokenizer of bytes, or of text with ▁, got "
                         f"{type(tokenizer).__name__} with decoder {described}")
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}
    return {number: token if token in special else read(token)
            for token, number in tokenizer.get_vocab().items() if number < size}


def read_letters(token: str) -> bytes:
    """Return the bytes of a token in GPT-2's alphabet, in which each letter is a byte."""
    letters = [BYTE_OF.get(letter) for letter in token]
    # An added token is plain text, so it may have letters that stand for no byte.
    return token.encode() if None in letters else bytes(letters)


def read_piece(token: str) -> bytes:
    """Return the bytes of a token of SentencePiece."""
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


class Translation:
    """Hold which of a draft's tokens stand for the tokens of a target.

    tokenizers   the target's tokenizer and the draft's
    of_target    {id of the target: the bytes or the special token that it stands for}. An id
                 without a token, which a model has logits for all the same, stands for no bytes
    number_of    {the bytes or the special token: id of the draft}
    both         ids of the target [n] and ids of the draft [n], for the tokens that both have
    pieces       {id of the target: the draft's ids that are fed for it}. It is a single id if both
                 have the token
    """

    def __init__(self, target: EngineLM, draft: EngineLM, tokenizers: tuple):
        self.tokenizers = tokenizers
        of_target = read_bytes(tokenizers[0], target.vocab, "--target")
        of_draft = read_bytes(tokenizers[1], draft.vocab)
        self.of_target = dict.fromkeys(range(target.vocab), b"") | of_target
        # Of two tokens with the same bytes the later id counts, in both vocabularies. In Llama 2
        # the earlier one is the byte's own, which is kept for texts that no other token can write.
        self.number_of = {text: number for number, text in sorted(of_draft.items())}
        ends = [tokenizer.eos_token_id for tokenizer in tokenizers]
        in_target = {text: number for number, text in sorted(of_target.items())}
        shared = {number: self.number_of[text] for text, number in in_target.items()
                  if text in self.number_of}
        # A tokenizer without a token that ends answers has None in its place. No vocabulary has it.
        if ends[0] in of_target and ends[1] in of_draft:
            shared[ends[0]] = ends[1]
        # Any guess is exact. A draft that shares no token with the target always guesses token 0.
        shared = shared or {0: 0}
        self.pieces = {number: [shared[number]] if number in shared else self.split(text)
                       for number, text in self.of_target.items()}
        self.both = [torch.tensor([*x], device=draft.weight.device)
                     for x in (shared, shared.values())]

    def split(self, text: bytes | str) -> list[int]:
        """Write a text in the draft's tokens, the longest possible one first.

        text     bytes, or the name of a special token
        returns  ids of the draft

        Bytes for which the draft has no token are left out. If nothing is left, token 0 is fed.
        """
        text = text.encode() if isinstance(text, str) else text
        ids = []
        while text:
            sizes = range(len(text), 0, -1)
            size = next((n for n in sizes if text[:n] in self.number_of), 1)
            if text[:size] in self.number_of:
                ids.append(self.number_of[text[:size]])
            text = text[size:]
        return ids or [0]

    def encode(self, ids: list[int]) -> list[int]:
        """Encode a text of the target's tokens with the draft's tokenizer.

        It begins with the draft's BOS if the draft's tokenizer puts one before a text.
        """
        of_target, of_draft = self.tokenizers
        bos = [number for number in of_draft.encode("") if number == of_draft.bos_token_id]
        # The target's BOS goes if the draft has its own, or does not know the target's.
        if ids[:1] == [of_target.bos_token_id] and (bos or
                                                    self.of_target[ids[0]] not in self.number_of):
            ids = ids[1:]
        parts = [self.of_target[number] for number in ids]
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        text = decoder.decode(b"".join(x.encode() if isinstance(x, str) else x for x in parts))
        # A text may end inside a character. Its rest comes with the next token.
        half, _ = decoder.getstate()
        end = self.split(half) if half else []
        return bos + of_draft.encode(text, add_special_tokens=False) + end


class TranslatedLM:
    """Let a draft read and guess the target's tokens, in the loop of speculative decoding.

    draft         the draft, with its own tokens
    cache         the draft's. A guess is a token of both, so it has one row
    translation   a Translation
    vocab         how many logits the target's calls give
    length        how many tokens of the target are cached
    ends          the draft's length after the prompt's context, and after each later token
    widths        for each pending token of the target, how many of the draft's tokens were fed
    places        the place in the target's text of the token that the last row predicts
    """

    def __init__(self, draft: EngineLM, translation: Translation, vocab: int):
        self.draft = draft
        self.cache = draft.cache
        self.translation = translation
        self.vocab = self.full_vocab = vocab
        self.places = []

    def start(self, ids: list[int]) -> None:
        """Cache a text of the target's tokens, encoded as the draft's own tokenizer does it."""
        self.draft.start(self.translation.encode(ids))
        self.length, self.ends, self.widths = len(ids), [self.draft.length], []

    def forward(self, ids: list[int] | torch.Tensor) -> torch.Tensor:
        """Feed a chain of the target's tokens.

        ids      n tokens, a list or a tensor
        returns  the logits [n, V] after each, over the target's vocabulary, with -inf for what the
                 draft lacks
        """
        numbers = torch.as_tensor(ids).tolist()
        parts = [self.translation.pieces[number] for number in numbers]
        logits = self.draft.forward([piece for part in parts for piece in part])
        self.widths += map(len, parts)
        self.places = [self.length + len(self.widths)]
        # The draft's guess after a token of the target is in the row of the token's last piece.
        ends = torch.tensor([*map(len, parts)]).cumsum(0) - 1
        of_target, of_draft = self.translation.both
        found = logits.new_full((len(ids), self.vocab), -torch.inf)
        found[:, of_target] = logits[ends.to(logits.device)][:, of_draft]
        return found

    def commit(self, path: range) -> None:
        """Keep the first pending tokens of the target, as many as the path has, and no others.

        path   the range of the tokens that are kept, from 0 on
        """
        self.draft.commit(range(sum(self.widths[:len(path)])))
        for width in self.widths[:len(path)]:
            self.ends.append(self.ends[-1] + width)
        self.length, self.widths = self.length + len(path), []

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the target, and no pending one."""
        del self.ends[len(self.ends) - (self.length - length):]
        self.draft.truncate(self.ends[-1])
        self.length, self.widths = length, []


# ------------------------------------------------------------------------------------ decoding

def another_tokenizer(target: EngineLM, draft: EngineLM, prompt: list[int], *, tokenizers: list,
                      gamma: int = 6, verification: str = "token", sample: Sampler = greedy,
                      log: list | None = None) -> Iterator[list[int]]:
    """Decode speculatively with a draft whose tokenizer is another one.

    gamma: tokens drafted a round, 1 or more
    verification: token or block, as in speculative.py

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted"} a round.

    `tokenizers` are the target's and the draft's.
    """
    if draft is target:
        raise InputError("--draft must be a CachedLM of its own, got the target's")
    translation = draft.once(Translation, target, draft, tuple(tokenizers))
    translated = TranslatedLM(draft, translation, target.vocab)
    return speculative(target, translated, prompt, gamma=gamma, verification=verification,
                       sample=sample, log=log)


COMMAND_LINE = dict(
    methods=[another_tokenizer], report=report, ranges={"gamma": (1, 2, 3, 4, 6, 8)})

if __name__ == "__main__":
    run_as_program(__file__)
