"""The generated tasks: what the graders accept, and that held-out prompts are new."""
import pytest

import tasks


@pytest.mark.parametrize("task", tasks.TASKS)
def test_right_answers_pass_and_other_answers_fail(task):
    some = tasks.take(task, "test", 40, seed=3)
    assert all(tasks.grade(e, e.answer) for e in some)
    assert sum(tasks.grade(e, other.answer) for e, other in zip(some, some[1:])) <= 2  # two examples may happen to agree
    assert not any(tasks.grade(e, wrong) for e in some for wrong in ("", "\n", "\n####", "\nSELECT", "\n    pass", "\n    return 'x'", "\nSELECT 1; SELECT 2;"))


def test_graders_see_small_mistakes():
    sql = next(e for e in tasks.examples("sql", "train", 1) if "ORDER BY" in e.answer and "DESC" in e.answer and "LIMIT" not in e.answer)
    assert not tasks.grade(sql, sql.answer.replace(" DESC", "")) and not tasks.grade(sql, sql.answer.replace("SELECT ", "SELECT id, "))
    assert tasks.grade(sql, sql.answer.replace("SELECT", "select").replace(" FROM", "\nFROM"))  # another form of the same query
    math = next(tasks.examples("math", "train", 1))
    assert not tasks.grade(math, math.answer + "1") and not tasks.grade(math, math.answer.replace("####", "Answer:"))
    code = next(e for e in tasks.examples("code", "train", 1) if " % 2 == 0" in e.answer)
    assert not tasks.grade(code, code.answer.replace(" % 2 == 0", " % 2 == 1"))
    assert not tasks.grade(code, "\n    import sys; sys.exit(0)") and not tasks.grade(code, "\n    return [1") and not tasks.grade(code, "\n    while True: pass")


def test_a_runaway_query_ends():
    example = next(e for e in tasks.examples("sql", "train", 1) if len(e.check["schema"]) == 2)
    table = next(iter(example.check["schema"]))
    assert not tasks.grade(example, f"SELECT count(*) FROM {', '.join(f'{table} AS t{i}' for i in range(6))}")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_prompts_are_new(task):
    train, test = tasks.take(task, "train", 5000), tasks.take(task, "test", 500)
    assert not {e.template for e in train} & {e.template for e in test} and not {e.prompt for e in train} & {e.prompt for e in test}
    assert len({e.template for e in test}) > 100 and len({e.prompt for e in test}) > 480
    assert [e.prompt for e in tasks.take(task, "test", 5)] == [e.prompt for e in test[:5]] != [e.prompt for e in tasks.take(task, "test", 5, seed=1)]


def test_loops():
    assert tasks.loops([5, 1, 2, 1, 2, 1, 2, 1, 2]) and tasks.loops([9] * 8) and tasks.loops(list(range(10)) * 4)
    assert not tasks.loops([9] * 7) and not tasks.loops(list(range(40))) and not tasks.loops([1, 2, 1, 2, 1, 2, 1, 2, 3]) and not tasks.loops([])
    assert not any(tasks.loops(e.answer.split()) for task in tasks.TASKS for e in tasks.take(task, "train", 200))


def test_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match="got 'poems'"):
        next(tasks.examples("poems", "test"))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_the_embedded_target_knows_its_tasks(task, embedded):
    """30 held-out prompts in batches; at a true accuracy of 80% fewer than 16 right ones have a probability of 2.3e-4."""
    from train import answer
    target, _, tokenizer = embedded
    held_out = tasks.take(task, "test", 30, seed=30)
    answers = answer(target, tokenizer, [e.prompt for e in held_out], temperature=0.0)
    assert sum(map(tasks.grade, held_out, tokenizer.batch_decode(answers, skip_special_tokens=True))) >= 16
    assert not any(map(tasks.loops, answers))
