"""Prompts are read from standard input and from files, with and without answers. They are put into
a chat template and into token ids."""
import argparse
import copy
import io
import json
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from cli.prompts import (encode_data, encode_pair, encode_prompts, read_pairs,
                         read_prompts, read_texts, split_texts)
from common import CachedLM, InputError
from helpers import ROOT, check_refused, file_of, main, run_small

TALK = [{"role": "user", "content": "Tom has 3"}, {"role": "assistant", "content": " apples"}]
ASKED, SAID = TALK


# -------------------------------------------------------------------------------------- reading

@pytest.mark.parametrize("data", ["é\n漢\n", "\ufeffé\r\n漢\r\n", "é\r漢\r"])
def test_standard_input_is_utf_8(monkeypatch, data):
    """With or without a byte order mark, and with the line ends of any system."""
    # Python opens standard input with this newline, except on Windows.
    stdin = io.TextIOWrapper(io.BytesIO(data.encode()), encoding="ascii", newline="\n")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read_texts(["a", "-"], ["b"]) == ["a", "é\n漢\n"]  # --prompt in place of the file


def test_prompts_of_a_file_or_the_examples(monkeypatch):
    """The examples may be gone if there are other prompts."""
    assert read_texts([], None) == read_prompts(ROOT / "models/examples.jsonl")
    monkeypatch.setattr(read_prompts, "__defaults__", ("gone",))
    assert read_texts([], ["b"]) == ["b"] and read_texts(["a"], None) == ["a"]
    with pytest.raises(argparse.ArgumentTypeError, match="gone"):
        read_texts([], None)


def rows(*rows: dict) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("data, texts", [
    (b"\n  \none\n\n  two\n   \nthree", ["one", "  two", "three"]),  # without blank lines
    ("Café 🙂\u2028漢\n".encode("utf-8-sig"), ["Café 🙂\u2028漢"]),  # one line: only \n ends it
    (rows({"prompt": "a\nb {c}"}, {"prompt": "d", "category": "sql"}), ["a\nb {c}", "d"]),
    (rows({"turns": ["l"]}, {"question": "m"}) + b"n\n[1, 2]\n", ["l", "m", "n", "[1, 2]"]),
    (b"\n \t" + rows({"prompt": "a"}) + "\u00a0{\"turns\": [\"b\"]} \r\n".encode(), ["a", "b"])])
def test_prompts_of_a_file(tmp_path, data, texts):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    assert read_prompts(file) == texts


def test_pairs_of_a_file(tmp_path):
    """Each has its file and line."""
    file = tmp_path / "pairs"
    file.write_bytes(rows({"prompt": "a", "answer": "é"}) + b"  \n" + rows({"messages": TALK}))
    assert read_pairs(file) == [{"prompt": "a", "answer": "é", "where": f"{file}, line 1"},
                                {"messages": TALK, "where": f"{file}, line 3"}]


NO_TEXT = 'no text under "prompt", "question" or first in "turns", only '


@pytest.mark.parametrize("read, data, said", [
    (read_prompts, b"", "': nothing is in it"), (read_prompts, b"caf\xe9\n", "codec"),
    (read_prompts, b'{"a": ' * 9999, ""), (read_prompts, b'[\n{"prompt": "a"}\n]', "line 1"),
    (read_prompts, b'ok\n[{"prompt": "a"}]\n', "line 2': 'list' object is not a mapping"),
    *((read_prompts, rows({name: x}), f"{NO_TEXT}['{name}']") for name, x in [
        ("prompt", 5), ("prompt", ""), ("turns", []), ("turns", "ab"), ("turns", [ASKED]),
        ("messages", TALK)]),
    (read_pairs, b'{"prompt": "a", "answer": "b"}\nx\n', "line 2': Expecting value"),
    (read_pairs, b"[]\n", "line 1': 'list' object is not a mapping")])
def test_files_that_cannot_be_read_are_refused_in_one_short_line(tmp_path, read, data, said):
    """A table is refused whatever it holds, since its header would be a prompt."""
    for name, reason in ("file", said), ("file.csv", "a table, which"), ("file.TSV", "a table,"):
        file = tmp_path / name
        file.write_bytes(data)
        with pytest.raises(argparse.ArgumentTypeError) as error:
            read(file)
        line = str(error.value)
        assert str(file) in line and reason in line and "\n" not in line
        assert len(line) < 300 + len(str(file))


# ----------------------------------------------------------------------------------- token ids

@pytest.fixture
def chat():
    """Make the embedded tokenizer, to which a test gives a chat template."""
    return AutoTokenizer.from_pretrained(ROOT / "models/target")


def test_tokens_without_embeddings_are_refused(embedded, chat):
    chat.add_tokens(["<new>"])
    with pytest.raises(InputError, match="1536 of them, got '<new>' with id 1536"):
        encode_prompts(embedded[0], chat, ["Mia has 3 <new> apples."], None)
    [ids] = encode_prompts(embedded[0], chat, ["Mia has 3 apples."], None)
    assert ids == chat.encode("Mia has 3 apples.")


@pytest.mark.parametrize("template, said", [
    (None, "chat_template is not set"), ("{{ raise_exception('only\nwith tools') }}", "only with"),
    ("{% for m in messages %}{{ m.content", "that takes a prompt, as --chat .*: unexpected")])
def test_templates_that_do_not_take_a_prompt(template, said, embedded, chat):
    chat.chat_template = template
    with pytest.raises(InputError, match=said) as refused:
        encode_prompts(embedded[0], chat, ["Mia has 3 apples."], {})
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 450
    check_refused("some text, got ''$", encode_prompts, embedded[0], chat, [""], {})


def test_a_template_that_takes_a_prompt(embedded, chat):
    """A date in what is learnt stays the same, so that a training that goes on after a while has
    the prompts that it had."""
    chat.chat_template = "{% for m in messages %}Q{{ mark }} {{ m.content | trim }}{% endfor %}"
    for mark in ":", "?":
        expected = chat.encode(f"Q{mark} Mia", add_special_tokens=False)
        assert encode_prompts(embedded[0], chat, ["Mia"], {"mark": mark}) == [expected]
    chat.chat_template = "{{ strftime_now('%Y %S.%f'), messages }}"
    args = argparse.Namespace(prompts=["Mia"], chat={})
    first, second = (encode_data(embedded[0], chat, args)[0] for _ in range(2))
    assert first == second and "2024" in chat.decode(first[0])


# ------------------------------------------------------------------- answers made elsewhere

TEMPLATE = ("{{ tools or '' }}{% for m in messages %}<{{ m.role }}>"
            "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
            "{{ m.content | replace('\n\n', '\n') }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")
# This one has the calls of tools, as JSON.
CALLS = TEMPLATE.replace("{{ m.content", "{% for call in m.tool_calls or [] %}[{{ call.function."
                         "name }} {{ call.function.arguments | tojson }}]{% endfor %}{{ m.content")
CALL = {"id": "call_1", "type": "function",
        "function": {"name": "find", "arguments": {"what": 'a "red"\napple'}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
# This one opens a thought, and leaves the thoughts of answers out.
OPENS = TEMPLATE.replace("<assistant>", "<assistant><think>").replace(
    "m.content", "m.content.split('</think>')[-1]")


@pytest.mark.parametrize("row, in_chat, prompt, answer", [
    ({"prompt": "Tom has 3", "answer": " apples"}, None, "<s>Tom has 3", " apples</s>"),
    ({"prompt": "Tom has 3", "answer": " apples</s> and"}, None, "<s>Tom has 3", " apples</s>"),
    ({"prompt": "Tom has 3", "answer": " apples"}, {}, "<user>Tom has 3<assistant>", " apples</s>"),
    ({"prompt": "Tom has 3", "answer": "4\n\n5", "template": OPENS}, {},
     "<user>Tom has 3<assistant>", "4\n5</s>"),
    ({"messages": None, "prompt": [5, 6], "answer": [8, 9]}, {}, [5, 6], [8, 9]),
    ({"messages": [ASKED, SAID | {"reasoning_content": "2 + 1"}], "tools": [{"f": {}}]}, None,
     "[{'f': {}}]<user>Tom has 3<assistant>", "(2 + 1) apples</s>"),
    ({"messages": [ASKED, CALLING, {"role": "tool", "content": "4"}, SAID], "template": CALLS},
     None, r'<user>Tom has 3<assistant>[find {"what": "a \"red\"\napple"}]<tool>4<assistant>',
     " apples</s>")])
def test_answers_made_elsewhere_become_tokens(row, in_chat, prompt, answer, embedded, chat):
    chat.chat_template = row.get("template", TEMPLATE)
    expected = tuple(x if isinstance(x, list) else chat.encode(x, add_special_tokens=False)
                     for x in (prompt, answer))
    assert encode_pair(embedded[0], chat, row | {"where": "line 1"}, in_chat) == expected


def test_an_answer_is_taken_out_of_the_whole_text():
    """Some tokenizers put a blank before a text. If a token is of both, the answer stands alone."""
    blank, pairs = (SimpleNamespace(encode=lambda text, form=form, **_: re.findall(*form(text)))
                    for form in (lambda text: (".", f"_{text}"), lambda text: ("..?", text)))
    assert split_texts(blank, "ab", "c", True) == (["_", "a", "b"], ["c"])
    assert split_texts(pairs, "abc", "de", True) == (["ab", "c"], ["de"])


@pytest.mark.parametrize("row, said", [
    ({"prompt": [5], "answer": [1536]}, "the model has tokens from 0 to 1535, and not 1536"),
    ({"prompt": [5], "answer": []}, "its prompt or its answer is empty"),
    ({"prompt": "a"}, "it has no 'answer'"), ({"messages": 3}, "int"),
    ({"prompt": [1], "answer": "a"}, "and not 'a'"),
    ({"messages": [SAID]}, "not two or more"), ({"messages": [SAID, ASKED]}, "not two or more"),
    ({"messages": TALK, "template": None}, "chat_template is not set"),
    ({"prompt": "3 +", "answer": " 4", "eos": None}, "and not None"),
    ({"messages": [ASKED, SAID | {"thoughts": "2"}]}, "the chat template leaves out 'thoughts'"),
    ({"messages": [ASKED, SAID | {"content": "2</think> apples"}], "template": OPENS},
     "the chat template leaves out 'content'"),
    ({"messages": [ASKED, CALLING, {"role": "tool", "content": "4"}, SAID]},
     "the chat template leaves out 'tool_calls'"),
    ({"messages": [ASKED, CALLING], "template": CALLS.replace("call.function.arguments", "'…'")},
     "the chat template leaves out 'tool_calls'"),
    ({"messages": [ASKED, SAID | {"content": [{"type": "text", "text": "2"}]}],
      "template": CALLS.replace("m.content", "m.role")}, "the chat template leaves out 'content'"),
    ({"messages": TALK, "template": TEMPLATE.replace("<assistant>", "<model>")},
     "the chat template begins answers with 'model>', but not this one")])
def test_answers_that_cannot_be_learnt_from_are_refused(row, said, embedded, chat):
    chat.chat_template = row.get("template", TEMPLATE)
    chat.eos_token = row.get("eos", "</s>")
    with pytest.raises(InputError, match=f"^expected .* --data .*, got 'line 1': .*{said}"):
        encode_pair(embedded[0], chat, row | {"where": "line 1"}, None)


# --------------------------------------------------------------------------------- a conversation

@pytest.mark.parametrize("end", ["", EOFError()])
@pytest.mark.parametrize("place, act, argv, keeps", [
    ("common", lambda say, argv: run_small(file_of(say), argv), [], None),
    ("support.loading", lambda say, argv: main([say], lambda run: "", argv), ["--no-pack"], True)])
def test_a_conversation_goes_on_with_all_that_was_said(place, act, argv, keeps, end, embedded,
                                                       monkeypatch, capsys):
    """An empty line or Ctrl-D ends it. In cli/ a second turn reads only what is new."""
    tokenizer = copy.deepcopy(embedded[2])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}"
    monkeypatch.setattr(f"{place}.load", lambda *_: (embedded[0], tokenizer))
    monkeypatch.setattr("builtins.input", Mock(side_effect=["Tom", "and Mia", end]))
    asked, yes = [], tokenizer.encode("yes")

    def say(target: CachedLM, prompt, *, sample=None, log=None):
        asked.append((tokenizer.decode(prompt), vars(target).get("keeps")))
        target.start(prompt[:-1])
        target.forward(prompt[-1:])
        yield yes
    assert act(say, ["--chat", "--max-new-tokens", str(len(yes)), *argv]) == 0
    assert asked == [("uTom|", keeps), ("uTom|ayes|uand Mia|", keeps)]
    assert capsys.readouterr().out.split() in (["yesyes"], ["yes", "yes"])
