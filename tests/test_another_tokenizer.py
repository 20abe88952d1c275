"""A draft with another tokenizer: what its tokens stand for, and what it is fed. That the text is
the target's is in test_lossless.py."""
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from common import autoregressive
from families import CONTEXT, tiny
from helpers import check_refused, tokens_of
from support.engine import EngineLM
from survey.another_tokenizer import TranslatedLM, Translation, another_tokenizer, read_bytes
from toy_tokenizers import letters


def sentencepiece(words: list[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer in the manner of Llama 2: ▁ for a space, <0xE9> for a byte, </s> last."""
    vocab = {word: i for i, word in enumerate([*words, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=words[0]))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def translation_of(*tokenizers) -> Translation:
    lms = [EngineLM(tiny("llama"), len(tokenizer)) for tokenizer in tokenizers]
    return Translation(*lms, tokenizers)


def test_what_tokens_stand_for():
    """Spaces and bytes are read in two alphabets, and a special token stands for itself. Ids that
    the model has no logits for are left out."""
    of_bytes = letters("aĠÃ©", eos_token="<end>")
    assert read_bytes(of_bytes, 9) == {0: b"a", 1: b" ", 2: b"\xc3", 3: b"\xa9", 4: "<end>"}
    of_text = sentencepiece(["a", "▁the", "<0xC3>", "é"])
    assert read_bytes(of_text, 9) == {0: b"a", 1: b" the", 2: b"\xc3", 3: "é".encode(), 4: "</s>"}
    assert read_bytes(of_text, 2) == {0: b"a", 1: b" the"}


def test_tokens_of_both_and_pieces_of_others():
    """"é" of one tokenizer is two bytes of the other, and the ends of an answer are one another."""
    of_bytes = letters("aĠÃ©b", eos_token="<end>")
    translation = translation_of(sentencepiece(["b", "▁", "a", "é", "ab▁", "x"]), of_bytes)
    assert dict(zip(*(ids.tolist() for ids in translation.both))) == {0: 4, 1: 1, 2: 0, 6: 5}
    assert translation.pieces == {0: [4], 1: [1], 2: [0], 3: [2, 3], 4: [0, 4, 1], 5: [0], 6: [5]}
    assert translation.encode([2, 3, 1]) == [0, 2, 3, 1]


def test_the_longest_token_of_the_draft_comes_first():
    of_text = sentencepiece(["a", "aa", "b", "aab"])
    assert translation_of(letters("ab"), of_text).split(b"aaabaa") == [1, 0, 2, 1]


def test_text_with_a_sign_for_spaces_needs_no_tokens_of_bytes():
    tokenizer = Tokenizer(models.BPE({"▁a": 0}, []))
    tokenizer.decoder = decoders.Metaspace()
    assert read_bytes(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 9) == {0: b" a"}


def test_a_byte_that_is_also_a_letter_is_one_guess():
    """As in Llama 2, whose tokens <0x61> and a are the same text. A target writes the latter."""
    tokenizer = sentencepiece(["<0x61>", "▁", "a"])
    translation = translation_of(tokenizer, tokenizer)
    assert [ids.tolist() for ids in translation.both] == [[2, 1, 3], [2, 1, 3]]
    assert translation.pieces[0] == [2]


def with_bos(text: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of letters that puts <s>, its last token, before a text."""
    tokenizer = letters(text, bos_token="<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", len(text))])
    return tokenizer


def test_a_text_begins_with_the_bos_of_the_draft():
    """The draft's BOS is there once. The target's is left out even if the draft knows none."""
    one, other, neither = with_bos("ab"), with_bos("bac"), letters("ab")
    assert translation_of(one, other).encode([2, 0, 1]) == [3, 1, 0]
    assert translation_of(neither, other).encode([0, 1]) == [3, 1, 0]
    assert translation_of(one, neither).encode([2, 0, 1]) == [0, 1]
    neither.add_special_tokens({"bos_token": "<s>"})  # known, but not put there
    assert translation_of(one, neither).encode([2, 0, 1]) == [2, 0, 1]


def test_half_a_character_at_the_end_of_a_text_is_fed():
    translation = translation_of(letters("aÃ©"), letters("Ã©a"))
    assert translation.encode([0, 1]) == [2, 0] and translation.encode([1, 0]) == [2]


def test_ids_without_tokens_are_text_of_no_bytes():
    """A model has logits beyond its tokenizer, and says such tokens."""
    lm, tokenizers = EngineLM(tiny("llama")), (letters("abcdefgh"), letters("hgfedcba"))
    translation = Translation(lm, lm, tokenizers)
    assert translation.pieces[7] == [0] == translation.pieces[60]
    assert translation.encode([2, 60, 7]) == [5, 0]


def test_drafts_that_cannot_be_used_are_refused():
    """One has no room for the prompt, and one has a tokenizer of neither kind. One that shares no
    token with the target only guesses wrong."""
    lms = [EngineLM(tiny("llama", max_position_embeddings=n)) for n in (CONTEXT, 8)]
    chunks = another_tokenizer(*lms, [0, 1] * 5, tokenizers=[letters("ab"), letters("ba")])
    check_refused("expected a context below 8, got 9 tokens", next, chunks)
    chunks = another_tokenizer(*lms, [0], tokenizers=[letters("ab"), letters("cd")])
    assert tokens_of(chunks, 5) == tokens_of(autoregressive(EngineLM(lms[0].model), [0]), 5)
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    check_refused("--draft must have a tokenizer of bytes", read_bytes,
                  PreTrainedTokenizerFast(tokenizer_object=tokenizer), 9)


def test_a_draft_is_fed_its_own_tokens():
    """The logits are those of the draft after its own ids, in the places of the target's; -inf for
    what the draft lacks. A token of several pieces is kept whole, and the guess after it is in the
    row of its last piece. A new prompt forgets what the last one had pending. After a commit the
    next call goes on behind what was kept."""
    model = tiny("llama")
    translation = translation_of(sentencepiece(["ab", "a", "b", "c"]), letters("dbXYa"))
    assert translation.pieces == {0: [4, 1], 1: [4], 2: [1], 3: [0], 4: [0]}
    draft = TranslatedLM(EngineLM(model, 5), translation, 5)
    draft.start([2])
    draft.forward([0, 2])  # pending, and never committed
    draft.start([1])
    draft.forward([2, 1])
    draft.commit(range(1))
    found = draft.forward([0, 3, 2])  # ab in two pieces, token 0 in place of the unknown c, then b
    logits = model(input_ids=torch.tensor([[4, 1, 4, 1, 0, 1]])).logits[0, 3:]
    expected = torch.full((3, 5), -torch.inf)
    expected[:, [1, 2]] = logits[:, [4, 1]]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    draft.commit(range(1))
    assert draft.draft.length == 4  # a and b, and then a and b
