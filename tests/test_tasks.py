"""The tasks stay what the embedded models learnt, graders accept what is right, and files of
prompts are read."""
import argparse
import hashlib
import json

import pytest

from cli.commands import read_pairs
from cli.files import read_prompts
import tasks

WRONG = ("", "\n", "\n####", "\nSELECT", "\n    pass", "\n    return 'x'", "\nSELECT 1; SELECT 2;")


@pytest.mark.parametrize("task, expected", [
    ("sql", "b3b81fdade00c652"), ("math", "8884156155b420b6"), ("code", "06c7a42d58d56651")])
def test_the_examples_never_change(task, expected):
    """The embedded models learnt those of one split, and figures are of the other."""
    digest = hashlib.sha256()
    for split in "train", "test":
        for example in tasks.take(task, split, 200, seed=1):
            digest.update(f"{example.prompt}{example.answer}".encode())
    assert digest.hexdigest()[:16] == expected


@pytest.mark.parametrize("task", tasks.TASKS)
def test_right_answers_pass_and_other_answers_fail(task):
    some = tasks.take(task, "test", 5, seed=3)
    assert all(tasks.grade(e, e.answer) for e in some)
    others = [tasks.grade(e, other.answer) for e, other in zip(some, some[1:])]
    assert sum(others) <= 1  # two examples may happen to agree
    assert not any(tasks.grade(some[0], wrong) for wrong in WRONG)


def first(task: str, fits) -> tasks.Example:
    return next(e for e in tasks.make_examples(task, "train", 1) if fits(e.answer))


SQL = first("sql", lambda x: "ORDER BY" in x and "DESC" in x and "LIMIT" not in x)
CODE = first("code", lambda x: " % 2 == 0" in x)


@pytest.mark.parametrize("example, wrong", [
    (SQL, SQL.answer.replace(" DESC", "")), (SQL, SQL.answer.replace("SELECT ", "SELECT id, ")),
    (CODE, CODE.answer.replace("2 == 0", "2 == 1")), (CODE, "\n    while True: pass")])
def test_graders_see_small_mistakes(example, wrong, monkeypatch):
    run = tasks.subprocess.run
    monkeypatch.setattr(tasks.subprocess, "run", lambda *a, **b: run(*a, **b | {"timeout": 0.5}))
    assert not tasks.grade(example, wrong)


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_embedded_target_knows_its_tasks(task, embedded):
    """At a true accuracy of 80%, none of 4 is right with a probability of 2e-3."""
    from train import answer_prompts
    target, _, tokenizer = embedded
    held_out = tasks.take(task, "test", 4, seed=30)
    pairs = answer_prompts(target, tokenizer, [e.prompt for e in held_out], temperature=0.0)
    texts = tokenizer.batch_decode([answer for _, answer in pairs], skip_special_tokens=True)
    assert any(map(tasks.grade, held_out, texts))
    assert not any(tasks.loops(answer) for _, answer in pairs)


# ------------------------------------------------------------------------- files of prompts

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def rows(*rows: dict) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("data, texts", [
    (b"one\ntwo words\n", ["one", "two words"]),
    (b"\n  \none\n\n  two\n   \nthree", ["one", "  two", "three"]),  # without blank lines
    ("Café 🙂\u2028漢\n".encode(), ["Café 🙂\u2028漢"]),  # one line: only \n ends it
    (rows({"prompt": "a\nb {c}"}, {"prompt": "d", "category": "sql"}), ["a\nb {c}", "d"]),
    (rows({"turns": ["l"]}, {"question": "m"}) + b"n\n[1, 2]\n" + rows({"prompt": "o"}),
     ["l", "m", "n", "[1, 2]", "o"]),
    (b"\n \t" + rows({"prompt": "a"}) + "\u00a0{\"turns\": [\"b\"]} \r\n".encode(), ["a", "b"])])
def test_prompts_of_a_file(tmp_path, data, texts):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    assert read_prompts(file) == texts


NO_TEXT = 'no text under "prompt", "question" or first in "turns", only '


@pytest.mark.parametrize("data, said", [
    (b"", "nothing is in it"), (b"caf\xe9\n", "codec"), (b'{"prompt": "x"\n', "delimiter"),
    (b'{"a": ' * 9999, ""), (b'{"prompt": 5}\n', NO_TEXT + "['prompt']"),
    *((rows({name: x}), f"{NO_TEXT}['{name}']") for name, x in [
        ("prompt", ""), ("turns", []), ("turns", "ab"), ("turns", [{"role": "user"}]),
        ("turns", ["", "b"]), ("messages", TALK), ("conversations", []), ("text", "a"),
        ("instruction", "a")]),
    (b'[{"prompt": "a"}]\n', "'list' object is not a mapping"),
    (b'[\n{"prompt": "a"}\n]', "line 1")])
def test_files_without_prompts_are_refused_in_one_short_line(tmp_path, data, said):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    with pytest.raises(argparse.ArgumentTypeError) as error:
        read_prompts(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert said in str(error.value) and len(str(error.value)) < 300 + len(str(file))


@pytest.mark.parametrize("read", [read_prompts, read_pairs])
def test_a_table_is_refused(tmp_path, read):
    """Its header would be a prompt."""
    for name in "prompts.csv", "prompts.TSV":
        (tmp_path / name).write_text('prompt,answer\n"a","b"\n')
        with pytest.raises(argparse.ArgumentTypeError, match=f"{name}': a table, which has a head"):
            read(tmp_path / name)


def test_pairs_of_a_file(tmp_path):
    """Texts, token ids and messages; blank lines are none. Each knows its file and line."""
    file = tmp_path / "pairs"
    rows = [{"prompt": "a", "answer": "é"}, {"prompt": [1, 2], "answer": [3]}, {"messages": TALK}]
    lines = [json.dumps(rows[0], ensure_ascii=False), "  ", json.dumps(rows[1]),
             json.dumps(rows[2])]
    file.write_text("\n".join(lines), encoding="utf-8-sig")  # as some editors do
    assert read_pairs(file) == [row | {"where": f"{file}, line {n}"}
                                for row, n in zip(rows, (1, 3, 4))]


@pytest.mark.parametrize("line, reason", [
    ("x", "Expecting value"), ("[]", "not a mapping")])
def test_lines_that_are_no_pairs_are_refused_with_their_number(line, reason, tmp_path):
    file = tmp_path / "pairs"
    file.write_text(f'{{"prompt": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(argparse.ArgumentTypeError) as error:
        read_pairs(file)
    assert f"got '{file}, line 2': " in str(error.value) and reason in str(error.value)
