"""Graders accept what is right, held-out prompts are new, and files of prompts are read."""
import argparse
import json
import runpy
import sys

import pytest

from cli.files import read_pairs, read_prompts
import tasks
from helpers import said_in_one_line

WRONG = ("", "\n", "\n####", "\nSELECT", "\n    pass", "\n    return 'x'", "\nSELECT 1; SELECT 2;")


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
MATH = first("math", bool)
CODE = first("code", lambda x: " % 2 == 0" in x)


@pytest.mark.parametrize("example, wrong", [
    (SQL, SQL.answer.replace(" DESC", "")), (SQL, SQL.answer.replace("SELECT ", "SELECT id, ")),
    (MATH, MATH.answer + "1"), (MATH, MATH.answer.replace("####", "Answer:")),
    (MATH, MATH.answer.rpartition(" ")[2]), (CODE, CODE.answer.replace("2 == 0", "2 == 1")),
    (CODE, "\n    import sys; sys.exit(0)"), (CODE, "\n    return [1"),
    (CODE, "\n    while True: pass")])
def test_graders_see_small_mistakes(example, wrong):
    assert not tasks.grade(example, wrong)


def test_another_form_of_the_same_query_is_right():
    assert tasks.grade(SQL, SQL.answer.replace("SELECT", "select").replace(" FROM", "\nFROM"))


def test_a_runaway_query_ends():
    table = next(iter(SQL.check["schema"]))
    product = ", ".join(f"{table} AS t{i}" for i in range(6))
    assert not tasks.grade(SQL, f"SELECT count(*) FROM {product}")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_prompts_are_new(task):
    train, test = tasks.take(task, "train", 2000), tasks.take(task, "test", 200)
    assert not {e.template for e in train} & {e.template for e in test}
    assert not {e.prompt for e in train} & {e.prompt for e in test}
    assert len({e.template for e in test}) > 60 and len({e.prompt for e in test}) > 190
    again, others = tasks.take(task, "test", 5), tasks.take(task, "test", 5, seed=1)
    assert [e.prompt for e in again] == [e.prompt for e in test[:5]] != [e.prompt for e in others]


@pytest.mark.parametrize("tokens, loops", [
    ([5, 1, 2, 1, 2, 1, 2, 1, 2], True), ([9] * 8, True), (list(range(10)) * 4, True),
    ([1] + [9] * 7, False), ([1, 2, 1, 2, 1, 2, 1, 2, 3], False), ([], False)])
def test_loops(tokens, loops):
    assert tasks.loops(tokens) == loops


def test_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match="got 'poems'"):
        next(tasks.make_examples("poems", "test"))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_embedded_target_knows_its_tasks(task, embedded):
    """At a true accuracy of 80%, fewer than 4 of 10 are right with a probability of 9e-4."""
    from train import answer_prompts
    target, _, tokenizer = embedded
    held_out = tasks.take(task, "test", 10, seed=30)
    answers = answer_prompts(target, tokenizer, [e.prompt for e in held_out], temperature=0.0)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    assert sum(map(tasks.grade, held_out, texts)) >= 4
    assert not any(map(tasks.loops, answers))


# ------------------------------------------------------------------------- files of prompts

def rows(*rows: dict) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


MARK = b"\xef\xbb\xbf"  # the byte order mark, with which some editors begin a file


@pytest.mark.parametrize("data, texts", [
    (b"one\ntwo words\n", ["one", "two words"]),
    (b"\n  \none\n\n  two\n   \nthree", ["one", "  two", "three"]),  # without blank lines
    ("Café 🙂\u2028漢\n".encode(), ["Café 🙂\u2028漢"]),  # one line: only \n ends it
    (rows({"prompt": "a\nb {c}"}, {"prompt": "d", "category": "sql"}), ["a\nb {c}", "d"]),
    (rows({"prompt": "i", "question": "j", "turns": ["k"]}), ["i"]),
    (rows({"turns": ["l"]}, {"question": "m"}) + b"n\n[1, 2]\n" + rows({"prompt": "o"}),
     ["l", "m", "n", "[1, 2]", "o"]),
    (MARK + b"one\n" + MARK + b"two\n", ["one", "two"]),  # also of two files in one
    (b"\n \t" + rows({"prompt": "a"}) + "\u00a0{\"turns\": [\"b\"]} \r\n".encode(), ["a", "b"])])
def test_prompts_of_a_file(tmp_path, data, texts):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    assert read_prompts(file) == read_prompts(str(file)) == texts


@pytest.mark.parametrize("line", [b"x", b"[1, 2]", b'"a"', b'x {"prompt": "c"}', b"7", b"null"])
def test_all_lines_of_a_jsonl_file_are_json(line, tmp_path):
    file = tmp_path / "prompts.JSONL"
    file.write_bytes(MARK + b"\n  " + rows({"prompt": "a"}) + MARK + rows({"question": "b"}))
    assert read_prompts(file) == ["a", "b"]
    file.write_bytes(rows({"prompt": "a"}) + line)
    with pytest.raises(argparse.ArgumentTypeError, match="prompts.JSONL', line 2: "):
        read_prompts(file)


@pytest.mark.parametrize("data", [
    b"", b"caf\xe9\n", b'{"prompt": "x"\n', b'{"prompt": 5}\n', b'{"prompt": ""}\n',
    b'{"answer": "x"}\n', b'{"turns": 7}\n', b'{"turns": []}\n', b'{"turns": [""]}\n',
    b'x\n{"prompt": 1.5}\n', b'{"a": ' * 9999, b"\xff\xfea\0\n\0"])
def test_files_without_prompts_are_refused_in_one_short_line(tmp_path, data):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    with pytest.raises(argparse.ArgumentTypeError) as error:
        read_prompts(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(file))


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def test_pairs_of_a_file(tmp_path):
    """Texts, token ids and messages; blank lines are none. Each knows its file and line.

    Where several files are one, a byte order mark stands in the middle.
    """
    file = tmp_path / "pairs"
    rows = [{"prompt": "a", "answer": "é"}, {"prompt": [1, 2], "answer": [3]}, {"messages": TALK}]
    lines = [json.dumps(rows[0], ensure_ascii=False), "  ", json.dumps(rows[1]),
             "\ufeff" + json.dumps(rows[2])]
    file.write_bytes("\ufeff".encode() + "\n".join(lines).encode())
    assert read_pairs(file) == [row | {"where": f"{str(file)!r}, line {n}"}
                                for row, n in zip(rows, (1, 3, 4))]


@pytest.mark.parametrize("line, reason", [
    ("x", "Expecting value"), ("[]", "list"), ('{"prompt": "a"}', "no 'answer'"),
    ('{"answer": "a"}', "no 'prompt'"), ('{"prompt": "", "answer": "a"}', "one is empty"),
    ('{"prompt": [1], "answer": [1.5]}', "not both texts"),
    ('{"prompt": [1], "answer": "a"}', "not both texts"), ('{"messages": 3}', "int"),
    (json.dumps({"messages": TALK[1:]}), "two or more"),
    (json.dumps({"messages": TALK[::-1]}), "is the assistant's")])
def test_lines_that_are_no_pairs_are_refused_with_their_number(line, reason, tmp_path):
    file = tmp_path / "pairs"
    file.write_text(f'{{"prompt": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(argparse.ArgumentTypeError) as error:
        read_pairs(file)
    assert f"{str(file)!r}, line 2: " in str(error.value) and reason in str(error.value)


def test_the_command_prints_prompts_of_every_task_or_of_those_named(capsys, tmp_path):
    tasks.main(["2"])
    (tmp_path / "prompts").write_text(capsys.readouterr().out)
    some = [e.prompt for task in tasks.TASKS for e in tasks.take(task, "train", 2, -2)]
    assert read_prompts(tmp_path / "prompts") == some and any("\n" in x for x in some)
    tasks.main(["1", "-5", "math"])
    [row] = capsys.readouterr().out.splitlines()
    assert json.loads(row)["prompt"] == tasks.take("math", "train", 1, -5)[0].prompt


@pytest.mark.parametrize("argv", [["x"], ["2", "y"], ["-1"], ["2", "1", "poems"]])
def test_what_is_no_number_or_no_task_is_refused(argv, capfd):
    with pytest.raises(SystemExit) as end:
        tasks.main(argv)
    assert end.value.code == 2
    said_in_one_line(": error: ", capfd)


def test_ctrl_c_ends_the_script_as_all_scripts(monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(sys, "argv", ["tasks.py", "2"])
    monkeypatch.setattr(json, "dumps", stop)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(tasks.__file__, run_name="__main__")
    assert end.value.code == 130 and capsys.readouterr().err == "\ninterrupted\n"
