"""The tasks stay what the embedded models learnt, and graders accept what is right."""
import hashlib

import pytest

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
