"""Tokenizers of a few letters, a byte each, for drafts whose tokenizer is another one.

    letters(text)     a tokenizer in which token i is the i-th letter of a text
    TOKENIZERS        two of 61 letters: token i of one is token i ^ 1 of the other, and of every
                      three tokens one is unknown to the other
"""
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def letters(text: str, **special) -> PreTrainedTokenizerFast:
    """Make a tokenizer of single letters, in GPT-2's alphabet of bytes."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(text)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


OF_TARGET = "".join(chr(33 + i) for i in range(61))
OF_DRAFT = "".join(chr(33 + (i ^ 1)) if (i ^ 1) % 3 < 2 and (i ^ 1) < 61 else chr(0xC0 + i)
                   for i in range(61))
TOKENIZERS = [letters(OF_TARGET), letters(OF_DRAFT)]
