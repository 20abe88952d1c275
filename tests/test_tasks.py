"""The generated tasks: what the graders accept, and that held-out prompts are new. Files of
prompts."""
import argparse
import json
import subprocess
import sys

import pytest

import tasks
from helpers import ROOT

WRONG = ("", "\n", "\n####", "\nSELECT", "\n    pass", "\n    return 'x'", "\nSELECT 1; SELECT 2;")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_right_answers_pass_and_other_answers_fail(task):
    some = tasks.take(task, "test", 10, seed=3)
    assert all(tasks.grade(e, e.answer) for e in some)
    others = [tasks.grade(e, other.answer) for e, other in zip(some, some[1:])]
    assert sum(others) <= 1  # two examples may happen to agree
    assert not any(tasks.grade(e, wrong) for e in some for wrong in WRONG)


def test_graders_see_small_mistakes():
    sql = next(e for e in tasks.make_examples("sql", "train", 1) if "ORDER BY" in e.answer
               and "DESC" in e.answer and "LIMIT" not in e.answer)
    for old, new in (" DESC", ""), ("SELECT ", "SELECT id, "):
        assert not tasks.grade(sql, sql.answer.replace(old, new))
    same = sql.answer.replace("SELECT", "select").replace(" FROM", "\nFROM")
    assert tasks.grade(sql, same)  # another form of the same query
    math = next(tasks.make_examples("math", "train", 1))
    for wrong in math.answer + "1", math.answer.replace("####", "Answer:"):
        assert not tasks.grade(math, wrong)
    code = next(e for e in tasks.make_examples("code", "train", 1) if " % 2 == 0" in e.answer)
    for wrong in (code.answer.replace(" % 2 == 0", " % 2 == 1"), "\n    import sys; sys.exit(0)",
                  "\n    return [1", "\n    while True: pass"):
        assert not tasks.grade(code, wrong)


def test_a_runaway_query_ends():
    example = next(e for e in tasks.make_examples("sql", "train", 1) if len(e.check["schema"]) == 2)
    table = next(iter(example.check["schema"]))
    product = ", ".join(f"{table} AS t{i}" for i in range(6))
    assert not tasks.grade(example, f"SELECT count(*) FROM {product}")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_prompts_are_new(task):
    train, test = tasks.take(task, "train", 5000), tasks.take(task, "test", 500)
    assert not {e.template for e in train} & {e.template for e in test}
    assert not {e.prompt for e in train} & {e.prompt for e in test}
    assert len({e.template for e in test}) > 100 and len({e.prompt for e in test}) > 480
    again, others = tasks.take(task, "test", 5), tasks.take(task, "test", 5, seed=1)
    assert [e.prompt for e in again] == [e.prompt for e in test[:5]] != [e.prompt for e in others]


def test_loops():
    for tokens in [5, 1, 2, 1, 2, 1, 2, 1, 2], [9] * 8, list(range(10)) * 4:
        assert tasks.loops(tokens)
    for tokens in [9] * 7, list(range(40)), [1, 2, 1, 2, 1, 2, 1, 2, 3], []:
        assert not tasks.loops(tokens)
    for task in tasks.TASKS:
        assert not any(tasks.loops(e.answer.split()) for e in tasks.take(task, "train", 200))


def test_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match="got 'poems'"):
        next(tasks.make_examples("poems", "test"))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_embedded_target_knows_its_tasks(task, embedded):
    """15 held-out prompts in batches; at a true accuracy of 80% fewer than 6 right ones have a
    probability of 1.1e-4."""
    from train import answer_prompts
    target, _, tokenizer = embedded
    held_out = tasks.take(task, "test", 15, seed=30)
    answers = answer_prompts(target, tokenizer, [e.prompt for e in held_out], temperature=0.0)
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    assert sum(map(tasks.grade, held_out, texts)) >= 6
    assert not any(map(tasks.loops, answers))


# ------------------------------------------------------------------------- files of prompts

def rows(*rows: dict) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


MARK = b"\xef\xbb\xbf"  # the byte order mark, with which some editors begin a file


@pytest.mark.parametrize("data, texts", [
    (b"one\ntwo words\n", ["one", "two words"]),
    (b"\n  \none\n\n  two\n   \nthree", ["one", "  two", "three"]),  # without blank lines
    (b"one\r\ntwo\r\n", ["one", "two"]),
    ("Café 🙂\u2028漢\n".encode(), ["Café 🙂\u2028漢"]),  # one line: only \n ends it
    (rows({"prompt": "a\nb {c}"}, {"prompt": "d", "category": "sql"}), ["a\nb {c}", "d"]),
    (rows({"question": "e", "answer": "f"}), ["e"]),
    (rows({"turns": ["g", "h"], "question_id": 81}), ["g"]),
    (rows({"prompt": "i", "question": "j", "turns": ["k"]}), ["i"]),
    (rows({"turns": ["l"]}, {"question": "m"}) + b"n\n[1, 2]\n" + rows({"prompt": "o"}),
     ["l", "m", "n", "[1, 2]", "o"]),
    (MARK + b"one\n" + MARK + b"two\n", ["one", "two"]),  # also of two files in one
    (MARK + rows({"prompt": "a"}, {"prompt": "b"}), ["a", "b"]),
    (b"\n \t" + rows({"prompt": "a"}) + "\u00a0{\"turns\": [\"b\"]} \r\n".encode(), ["a", "b"])])
def test_prompts_of_a_file(tmp_path, data, texts):
    """Plain lines, JSON lines of three kinds, and both in one file."""
    file = tmp_path / "prompts"
    file.write_bytes(data)
    assert tasks.read_prompts(file) == tasks.read_prompts(str(file)) == texts


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.JSONL"])
def test_a_file_of_json_lines_by_its_name(tmp_path, name):
    """A line in it that is no JSON is a mistake, not a prompt, whatever its first character."""
    file = tmp_path / name
    file.write_bytes(MARK + b"\n  " + rows({"prompt": "a"}) + MARK + rows({"question": "b"}))
    assert tasks.read_prompts(file) == ["a", "b"]
    for line in b"x", b"[1, 2]", b'"a"', b'x {"prompt": "c"}', b"7", b"null":
        file.write_bytes(rows({"prompt": "a"}) + line)
        with pytest.raises(argparse.ArgumentTypeError, match=r"prompts.(?i:jsonl)': line 2: no "):
            tasks.read_prompts(file)


def test_what_tasks_prints_can_be_read_back(tmp_path):
    printed = subprocess.run([sys.executable, ROOT / "models/tasks.py", "3"], capture_output=True,
                             check=True).stdout
    (tmp_path / "prompts").write_bytes(printed)
    some = [e.prompt for task in tasks.TASKS for e in tasks.take(task, "train", 3, -2)]
    assert tasks.read_prompts(tmp_path / "prompts") == some and any("\n" in x for x in some)
    assert len(tasks.read_prompts(ROOT / "models/examples.jsonl")) == 3


@pytest.mark.parametrize("data", [
    b"", b"\n \n", b"caf\xe9\n", b'{"prompt": "x"\n', b'{"prompt": 5}\n', b'{"prompt": ""}\n',
    b'{"prompt": ["x"]}\n', b'{"question": null}\n', b'{"answer": "x"}\n', b'{"turns": [7]}\n',
    b'{"turns": 7}\n', b'{"turns": []}\n', b'{"turns": [""]}\n', b'{}\n', b'x\n{"prompt": 1.5}\n',
    b'{"a": ' * 9999, b'{"prompt": "x"} {\n', b"caf\xe9 \n" * 100_000, b"\xff\xfea\0\n\0"])
def test_files_without_prompts_are_refused(tmp_path, data):
    """By one line that names the file: argparse prints it."""
    file = tmp_path / "prompts"
    file.write_bytes(data)
    with pytest.raises(argparse.ArgumentTypeError) as error:
        tasks.read_prompts(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 300 + len(str(file))  # and it does not say the whole file


def test_what_is_no_file_is_refused(tmp_path):
    for path in tmp_path, tmp_path / "none", tmp_path / "a\nb", "x\0y":
        with pytest.raises(argparse.ArgumentTypeError) as error:
            tasks.read_prompts(path)
        assert repr(str(path)) in str(error.value) and "\n" not in str(error.value)


def test_the_command_prints_prompts(capsys):
    """Of every task or of those named; what is no number or no task is refused in a line."""
    tasks.main(["2"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["category"] for row in rows] == [task for task in tasks.TASKS for _ in range(2)]
    tasks.main(["1", "-5", "math"])
    [row] = capsys.readouterr().out.splitlines()
    assert json.loads(row)["prompt"] == tasks.take("math", "train", 1, -5)[0].prompt
    for argv in ["x"], ["2", "y"], ["2", "1", "poems"]:
        with pytest.raises(SystemExit) as end:
            tasks.main(argv)
        assert end.value.code == 2
