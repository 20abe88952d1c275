"""Turns prompts into token ids, and runs chat templates."""
from common import InputError
from support.files import explain_errors


def encode_prompts(model, tokenizer, texts: list[str], chat: dict | None) -> list[list[int]]:
    """Turn prompts into token ids that a model has embeddings for.

    texts    the prompts
    chat     settings of the model's chat template, into which each is put. None: into no template
    returns  token ids, a list for each prompt. InputError for a prompt that cannot be used
    """
    rows = len(model.get_input_embeddings().weight)
    found = []
    for text in texts:
        text.encode()  # UnicodeError for halves of characters, which no tokenizer takes
        ids = tokenizer.encode(text)  # with the special tokens that the tokenizer adds
        if set(ids) <= set(tokenizer.all_special_ids):
            raise InputError(f"expected a prompt with some text, got {text[:300]!r}")
        if chat is not None:
            with explain_errors("a chat template that takes a prompt, as --chat needs one",
                                tokenizer.name_or_path):  # a program of somebody else's
                text = tokenizer.apply_chat_template([{"role": "user", "content": text}], **chat,
                                                     tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
        if max(ids) >= rows:
            token = tokenizer.convert_ids_to_tokens(max(ids))
            raise InputError(f"expected tokens that the model has embeddings for, {rows} of them, "
                             f"got {token!r} with id {max(ids)}")
        found.append(ids)
    return found
