"""This program makes three kinds of task with checkable answers, the narrow world of the embedded
models.

    sql    a schema and a question in English      ->  one SQL query
           graded by running it in sqlite3 (cf. Spider)
    math   a word problem in two to five steps     ->  the steps, "#### answer"
           graded by the answer (cf. GSM8K)
    code   a signature and a docstring             ->  the body of a Python function
           graded by running it on inputs (cf. MBPP)

An example is put together from wordings, names and numbers that are drawn at random:

    template   story 1, lose 0, double 2, count 0
    prompt     At first Zoe has 170 flowers.                   the beginning, wording 1
               She gives 53 flowers to Hugo.                   "lose", wording 0
               Then the number of her flowers doubles.         "double", wording 2
               How many flowers does Zoe have now?             "count", wording 0
    answer     Zoe has 170 - 53 = 117 flowers left.
               Zoe now has 117 * 2 = 234 flowers.
               #### 234

The *template* is the wording and the structure without names and numbers. One template in ten is
held out: split "train" never shows it, and split "test" shows nothing else.

    python models/tasks.py                          # some held-out examples to read
    python models/tasks.py N [SEED [TASK …]]        # N training prompts of each task, JSON lines
"""
import itertools
import json
import random
import re
import sqlite3
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

TASKS = ("sql", "math", "code")


@dataclass
class Example:
    """An example has a prompt, its right answer, and what the task's grader needs."""
    task: str
    prompt: str
    answer: str  # begins with a newline: the prompt ends at a token boundary
    template: str
    check: dict  # what the grader needs


def make_examples(task: str, split: str, seed: int = 0):
    """Make examples of a task without end.

    task    sql, math or code
    split   train or test
    seed    another seed gives other examples
    yields  an Example
    """
    rng = random.Random(f"{task} {split} {seed}")
    while True:
        example = {"sql": make_sql, "math": make_math, "code": make_code}[task](rng)
        # A template holds the placeholders of its wordings, such as {k}. If one of them had another
        # name, other examples would be held out.
        held_out = zlib.crc32(example.template.encode()) % 10 == 0
        if held_out == (split == "test"):
            yield example


def take(task: str, split: str, n: int, seed: int = 0) -> list[Example]:
    """Take the first n examples of a task, a split and a seed."""
    return list(itertools.islice(make_examples(task, split, seed), n))


def grade(example: Example, answer: str) -> bool:
    """Say whether an answer is right; SQL and Python answers are run.

    answer  the text after the prompt, without EOS
    """
    return {"sql": grade_sql, "math": grade_math, "code": grade_code}[example.task](example, answer)


def loops(tokens: list[int], longest: int = 16, times: int = 4) -> bool:
    """Find out whether a text ends in a loop, the same few tokens again and again.

    Figures leave a prompt out if its answer ends in a loop, since every guess is then accepted.

    tokens   the text
    longest  the most tokens that are repeated
    times    how often they must stand in a row, as 8 tokens or more in all
    """
    for period in range(1, longest + 1):
        tail = tokens[-max(8, period * times):]
        if len(tail) == max(8, period * times) and all(a == b for a, b in zip(tail, tail[period:])):
            return True
    return False


# ---------------------------------------------------------------- math

HE = ("Tom Ben Sam Max Leo Adam Paul Omar Ivan Noah Luis Karl Hugo Finn Raj Ali Juan Ken Theo Eli "
      "Dan Jack Will Oscar").split()
SHE = ("Mia Ana Eva Zoe Lily Emma Nora Ruth Sara Lucy Kate Rosa Ines Maya Lena Jane Amy Tara Gia "
       "Vera Iris Alma Dora Nina").split()
ITEMS = ("apples pears plums lemons eggs cookies cakes pies muffins candies marbles stamps coins "
         "cards books pens pencils stickers balls shells stones flowers roses seeds beads buttons "
         "toys dolls kites cups plates candles tickets photos ribbons badges nuts dates figs "
         "melons").split()
PACKS = "boxes bags packs baskets jars crates trays bundles".split()
GOODS = ("pen book cup hat pie toy ball kite cake lamp plate ticket shirt plant map doll card "
         "candle").split()
MAKERS = [("A machine", "makes"), ("A baker", "bakes"), ("A farm", "packs"),
          ("A factory", "builds"), ("A printer", "prints"), ("A robot", "paints")]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def make_math(rng: random.Random) -> Example:
    """Make a word problem of two to five steps."""
    while True:
        question, steps, result, template = rng.choice(
            (story, story, story, shop, rate, compare))(rng)
        if 2 <= len(steps) <= 5:
            return Example("math", question, "\n" + "\n".join(steps) + f"\n#### {result}",
                           f"math {template}", {"result": result})


def grade_math(example: Example, answer: str) -> bool:
    """Check whether the result follows the last "####"."""
    return answer.rpartition("####")[2].strip() == str(example.check["result"]) and "####" in answer


def choose_person(rng):
    """Choose a person: a name, and the pronouns of the subject, the object and the owner."""
    return ((rng.choice(HE), "he", "him", "his") if rng.random() < 0.5
            else (rng.choice(SHE), "she", "her", "her"))


# What can happen to the things of a story: three wordings, and the steps of the solution. There are
# n things before the event, and m after it.
EVENTS = {
    "gain": (("{He} buys {k} more {items}.", "{friend} gives {him} {k} {items}.",
              "Then {he} finds {k} more."),
             ["{name} now has {n} + {k} = {m} {items}."]),
    "lose": (("{He} gives {k} {items} to {friend}.", "Then {he} loses {k} of them.",
              "{He} sells {k} of {his} {items}."),
             ["{name} has {n} - {k} = {m} {items} left."]),
    "pack": (("{He} buys {k} {boxes} of {p} {items} each.",
              "{friend} brings {him} {k} {boxes} with {p} {items} in each.",
              "Then {he} gets {k} {boxes}, each with {p} {items}."),
             ["The {k} {boxes} hold {k} * {p} = {packed} {items}.",
              "{name} now has {n} + {packed} = {m} {items}."]),
    "double": (("{friend} {doubles} {his} {items}.", "A week later {he} has {twice} as many.",
                "Then the number of {his} {items} {doubles}."),
               ["{name} now has {n} * {k} = {m} {items}."]),
    "half": (("{He} gives half of them to {friend}.",
              "Then {he} eats or breaks half of {his} {items}.",
              "{He} sells half of {his} {items}."),
             ["{name} has {n} / 2 = {m} {items} left."])}
# What can be asked about the n things at the end of a story: two wordings, and for each of them the
# steps of the solution. The answer is m.
ENDS = {
    "count": (("How many {items} does {name} have now?",
               "How many {items} does {he} have in the end?"), ([], [])),
    "share": (("{He} shares all {items} equally among {k} friends. How many does each friend get?",
               "{He} puts them into {k} equal groups. How many {items} are in each group?"),
              (["Each friend gets {n} / {k} = {m} {items}."],
               ["Each group has {n} / {k} = {m} {items}."])),
    "sell": (("{He} sells all of them for {k} dollars each. How many dollars does {he} get?",
              "Each one is worth {k} dollars. How many dollars are they worth?"),
             (["{name} gets {n} * {k} = {m} dollars."],
              ["They are worth {n} * {k} = {m} dollars."]))}


def draw_event(rng, kind, n):
    """Draw what happens to n things, or what is asked about them.

    kind     a key of EVENTS or ENDS
    returns  values for its wordings and steps
    """
    if kind == "gain":
        k = rng.randint(2, rng.choice((20, 150)))
        return {"k": k, "m": n + k}
    if kind == "lose":
        k = rng.randint(2, n - 2)
        return {"k": k, "m": n - k}
    if kind == "pack":
        boxes, k, p = rng.choice(PACKS), rng.randint(2, 9), rng.randint(2, 12)
        return {"boxes": boxes, "k": k, "p": p, "packed": k * p, "m": n + k * p}
    if kind == "double":
        if n > 80 or rng.random() < 0.5:
            return {"k": 2, "doubles": "doubles", "twice": "twice", "m": n * 2}
        return {"k": 3, "doubles": "triples", "twice": "three times", "m": n * 3}
    if kind == "half":
        return {"m": n // 2}
    if kind == "share":
        k = rng.choice(find_shares(n))
        return {"k": k, "m": n // k}
    if kind == "sell":
        k = rng.randint(2, 9)
        return {"k": k, "m": n * k}
    return {"m": n}


def find_shares(n: int) -> list[int]:
    """Find the numbers from 2 to 10 that divide n things into equal shares of 2 or more."""
    return [k for k in range(2, 11) if n % k == 0 and n // k >= 2]


# What a word problem is about. Each function returns the question, the steps of the solution, the
# answer, and the template.

def story(rng):
    """Tell how one person's things become more and fewer, one event after another."""
    name, he, him, his = choose_person(rng)
    items, n = rng.choice(ITEMS), rng.randint(5, rng.choice((30, 200)))
    friend = rng.choice([x for x in HE + SHE if x != name])
    words = {"name": name, "he": he, "He": he.capitalize(), "him": him, "his": his, "items": items,
             "friend": friend}
    first = rng.randrange(2)
    text = [(f"{name} has {n} {items}.", f"At first {name} has {n} {items}.")[first]]
    steps, template = [], [f"story {first}"]
    for _ in range(rng.randint(1, 4)):
        kinds = (["gain", "pack"] * (n <= 300) + ["lose"] * (n >= 5) + ["double"] * (n <= 150)
                 + ["half"] * (n % 2 == 0 and n >= 8))
        kind, way = rng.choice(kinds), rng.randrange(3)
        wordings, solved = EVENTS[kind]
        values = {**words, "n": n, **draw_event(rng, kind, n)}
        text.append(wordings[way].format(**values))
        steps += [step.format(**values) for step in solved]
        template.append(f"{kind} {way}")
        n = values["m"]
    end = rng.choice(["count", "count"] + ["share"] * bool(find_shares(n)) + ["sell"] * (n <= 60))
    way = rng.randrange(2)
    wordings, solved = ENDS[end]
    values = {**words, "n": n, **draw_event(rng, end, n)}
    text.append(wordings[way].format(**values))
    steps += [step.format(**values) for step in solved[way]]
    template.append(f"{end} {way}")
    return " ".join(text), steps, values["m"], ", ".join(template)


def shop(rng):
    """Ask what a purchase costs, or how much money is left after it."""
    name, he, *_ = choose_person(rng)
    goods = rng.sample(GOODS, rng.randint(2, 3))
    prices, amounts = [rng.randint(2, 25) for _ in goods], [rng.randint(2, 9) for _ in goods]
    way, end = rng.randrange(2), rng.randrange(2 if len(goods) == 3 else 4)
    costs = [f"a {one} costs {p} dollars" for one, p in zip(goods, prices)]
    bought = [f"{a} {one}s" for one, a in zip(goods, amounts)]
    costs, bought = (", ".join(x[:-1]) + " and " + x[-1] for x in (costs, bought))
    text = costs.capitalize() + (f". {name} buys {bought}.", f". {name} needs {bought}.")[way]
    steps = [f"The {one}s cost {a} * {p} = {a * p} dollars."
             for one, p, a in zip(goods, prices, amounts)]
    total = prices[0] * amounts[0]
    for p, a in zip(prices[1:], amounts[1:]):
        steps.append(f"That makes {total} + {p * a} = {total + p * a} dollars.")
        total += p * a
    paid = next(x for x in (50, 100, 200, 500, 1000) if x > total)
    He = he.capitalize()
    text += (f" How many dollars does {he} pay?", " How much is that in dollars?",
             f" {He} pays with {paid} dollars. How many dollars does {he} get back?",
             f" {He} has {paid} dollars. How many dollars are left?")[end]
    if end > 1:
        steps.append(f"{name} has {paid} - {total} = {paid - total} dollars left.")
        total = paid - total
    return text, steps, total, f"shop {len(goods)} {way} {end}"


def rate(rng):
    """Ask how much is made on two days by somebody who makes so much an hour."""
    (maker, makes), items = rng.choice(MAKERS), rng.choice(ITEMS)
    k, days = rng.randint(3, 30), rng.sample(DAYS, 2)
    hours = [rng.randint(2, 9) for _ in days]
    way, end = rng.randrange(3), rng.randrange(3)
    text = (f"{maker} {makes} {k} {items} an hour.", f"{maker} {makes} {k} {items} every hour.",
            f"In one hour {maker.lower()} {makes} {k} {items}.")[way]
    text += f" It works {hours[0]} hours on {days[0]} and {hours[1]} hours on {days[1]}."
    total, first = k * sum(hours), rng.randrange(2)
    if first:
        steps = [f"It works {hours[0]} + {hours[1]} = {sum(hours)} hours.",
                 f"It {makes} {k} * {sum(hours)} = {total} {items}."]
        text += " In all,"
    else:
        steps = [f"On {d} it {makes} {k} * {h} = {k * h} {items}." for d, h in zip(days, hours)]
        steps.append(f"Together that is {k * hours[0]} + {k * hours[1]} = {total} {items}.")
        text += " Day by day,"
    bad = rng.randint(2, total - 2) if end > 0 else 0
    text += (f" how many {items} is that?", f" how many {items} are good if {bad} are broken?",
             f" how many {items} are left if {bad} are sold?")[end]
    if end == 1:
        steps.append(f"There are {total} - {bad} = {total - bad} good {items}.")
    if end == 2:
        steps.append(f"There are {total} - {bad} = {total - bad} {items} left.")
    return text, steps, total - bad, f"rate {way} {first} {end}"


def compare(rng):
    """Compare two or three people, each with the one before, and ask for the sum."""
    names, items = rng.sample(HE + SHE, 3), rng.choice(ITEMS)
    counts, steps, template = [rng.randint(3, 80)], [], ["compare"]
    text = [f"{names[0]} has {counts[0]} {items}."]
    for before, name in zip(names, names[1:rng.randint(2, 3)]):
        n, way = counts[-1], rng.randrange(4)
        template.append(str(way))
        k = rng.randint(2, 4) if way > 1 else rng.randint(1, max(1, n - 2))
        text.append((f"{name} has {k} more than {before}.", f"{name} has {k} fewer than {before}.",
                     f"{name} has {k} times as many as {before}.",
                     f"{name} has {k} times the number that {before} has.")[way])
        counts.append((n + k, n - k, n * k, n * k)[way])
        steps.append(f"{name} has {n} {'+-**'[way]} {k} = {counts[-1]} {items}.")
    way, total = rng.randrange(2), counts[0]
    template.append(f"all {way}")
    text.append((f"How many {items} do they have together?",
                 f"How many {items} is that in all?")[way])
    for n in counts[1:]:
        steps.append(f"Together that is {total} + {n} = {total + n} {items}.")
        total += n
    return (" ".join(text), steps, total, " ".join(template)) if total <= 500 else compare(rng)


# ---------------------------------------------------------------- sql

PEOPLE = " ".join(HE + SHE)
CITIES = "Paris London Rome Madrid Berlin Tokyo Lima Cairo Oslo Delhi Boston Sydney"
COUNTRIES = "France Spain Italy Japan Peru Egypt Norway India Canada Brazil Chile Kenya"
COLORS = "red blue green black white yellow brown silver"
TITLES = "Dawn Rivers Winter Garden Silence Home"
# For each table its columns: the words of a column of text, or the largest number of another one.
TABLES = {
    "singer": dict(name=PEOPLE, country=COUNTRIES, style="pop rock jazz folk opera blues",
                   age=90, albums=30, fans=500),
    "student": dict(name=PEOPLE, city=CITIES, major="math history biology law art physics",
                    age=40, grade=20, credits=200),
    "teacher": dict(name=PEOPLE, country=COUNTRIES,
                    subject="math history biology music art physics",
                    age=70, salary=900, hours=40),
    "car": dict(brand="Ford Fiat Audi Seat Volvo Honda", color=COLORS,
                fuel="gas diesel electric hybrid", price=900, doors=5, speed=250),
    "book": dict(title=TITLES, author=PEOPLE, genre="crime poetry drama fantasy travel history",
                 pages=900, price=80, copies=60),
    "hotel": dict(name="Plaza Grand Royal Astoria Central Palace", city=CITIES,
                  level="low medium high basic gold top", rooms=400, stars=5, price=500),
    "dog": dict(name="Rex Bella Rocky Luna Buddy Daisy",
                breed="poodle beagle boxer husky collie terrier", color=COLORS,
                age=18, weight=60, prizes=9),
    "flight": dict(origin=CITIES, airline="Delta Iberia Qantas Lufthansa Finnair",
                   status="late early cancelled boarding", distance=900, seats=400, price=800),
    "employee": dict(name=PEOPLE, job="clerk driver nurse cook engineer manager", city=CITIES,
                     age=70, salary=900, bonus=90),
    "player": dict(name=PEOPLE, country=COUNTRIES,
                   position="goalkeeper defender striker captain", age=45, goals=99, height=220),
    "film": dict(title=TITLES, director=PEOPLE, genre="crime comedy drama fantasy horror action",
                 year=99, length=240, rating=10),
    "product": dict(name="chair table lamp sofa desk shelf", color=COLORS,
                    material="wood steel glass plastic leather", price=900, stock=99, weight=80),
    "shop": dict(name="Corner Market Bazaar Depot Outlet Store", city=CITIES, owner=PEOPLE,
                 size=900, sales=800, staff=50),
    "team": dict(name="Tigers Lions Eagles Sharks Wolves Bears", city=CITIES,
                 league="north south east west", wins=60, losses=60, points=180),
    "museum": dict(name="National Modern Science Maritime Folk", city=CITIES,
                   topic="art war nature space trains", rooms=90, visitors=900, price=40),
    "plant": dict(name="fern cactus ivy orchid tulip palm", color=COLORS,
                  climate="dry wet cold mild", height=300, price=90, age=50)}
COMPARISONS = [("above {n}", ">"), ("below {n}", "<"), ("over {n}", ">"), ("under {n}", "<"),
               ("of at least {n}", ">="), ("of at most {n}", "<="), ("equal to {n}", "=")]
AGGREGATES = [("average", "avg"), ("maximum", "max"), ("minimum", "min"), ("total", "sum"),
              ("highest", "max"), ("lowest", "min")]


def make_sql(rng: random.Random) -> Example:
    """Make a schema of one or two tables, and a question about it."""
    tables = rng.sample(sorted(TABLES), rng.choice((1, 2, 2)))
    schema = {}  # like TABLES, but with some of the columns
    for table in tables:
        texts, numbers = (sorted(find_columns(TABLES[table], kind)) for kind in (str, int))
        columns = (rng.sample(texts, rng.randint(2, len(texts)))
                   + rng.sample(numbers, rng.randint(1, len(numbers))))
        schema[table] = {c: TABLES[table][c] for c in rng.sample(columns, len(columns))}
    if len(tables) == 2:  # rows of the second table belong to rows of the first
        schema[tables[1]][f"{tables[0]}_id"] = 12
    question, query, template = (
        ask_two_tables if len(tables) == 2 and rng.random() < 0.5 else ask_one_table)(rng, schema)
    described = "; ".join(f"{t}({', '.join(['id', *columns])})" for t, columns in schema.items())
    return Example("sql", f"{described}\n{question}", f"\n{query};", f"sql {template}",
                   {"query": query, "schema": schema})


def find_columns(columns, kind=(str, int)):
    """Find the names of the columns of text (str), of numbers (int) or of both.

    A column that names rows of another table is none of them.
    """
    return [c for c in columns if isinstance(columns[c], kind) and not c.endswith("_id")]


# Conditions on rows. Each function returns a condition in English and in SQL, and its part of the
# template.

def make_condition(rng, columns, prefix=""):
    """Make a condition on one of these columns.

    columns  the columns of a table, as in TABLES
    prefix   what stands before the column in SQL, such as "p."
    """
    column = rng.choice(find_columns(columns))
    values = columns[column]
    if isinstance(values, int):
        (words, op), n = rng.choice(COMPARISONS), rng.randint(2, max(2, values - 1))
        return f"with {column} {words.format(n=n)}", f"{prefix}{column} {op} {n}", words
    value, (words, op) = rng.choice(values.split()), rng.choice([
        ("whose {c} is {v}", "="), ("with {c} {v}", "="), ("whose {c} is not {v}", "!=")])
    return words.format(c=column, v=value), f"{prefix}{column} {op} '{value}'", words


def make_nested_condition(rng, table, schema):
    """Make a condition on a table that holds a query of its own."""
    number = rng.choice(find_columns(schema[table], int))
    children = [t for t in schema if f"{table}_id" in schema[t]]
    if not children or rng.random() < 0.4:
        if rng.random() < 0.3:
            best, function = rng.choice([("highest", "max"), ("lowest", "min")])
            return (f"with the {best} {number}",
                    f"{number} = (SELECT {function}({number}) FROM {table})", f"nested {best}")
        words, op = rng.choice([("above", ">"), ("below", "<")])
        return (f"with {number} {words} the average",
                f"{number} {op} (SELECT avg({number}) FROM {table})", f"nested {words}")
    child, key, n = children[0], f"{table}_id", rng.randint(2, 6)
    words, query = rng.choice([
        ("that have {many}", "id IN (SELECT {key} FROM {child})"),
        ("without {many}", "id NOT IN (SELECT {key} FROM {child})"),
        ("that have at least {n} {many}",
         "id IN (SELECT {key} FROM {child} GROUP BY {key} HAVING count(*) >= {n})"),
        ("that have {many} {which}", "id IN (SELECT {key} FROM {child} WHERE {filtered})")])
    which, filtered, template = make_condition(rng, schema[child])
    values = {"many": f"{child}s", "key": key, "child": child, "n": n, "which": which,
              "filtered": filtered}
    return (words.format(**values), query.format(**values),
            f"nested {words} {template if 'which' in words else ''}")


def make_where(rng, table, schema):
    """Make zero to two conditions on a table, joined by "and" or "or"."""
    n = rng.choice((0, 1, 1, 2, 2, 2))
    if n == 0:
        return "", "", "all"
    english, query, template = zip(*(
        make_nested_condition(rng, table, schema) if rng.random() < 0.4
        else make_condition(rng, schema[table])
        for _ in range(n)))
    link = rng.choice(("and", "or"))
    return (" " + f" {link} ".join(english), " WHERE " + f" {link.upper()} ".join(query),
            f" {link} ".join(template))


# What can be asked about some rows of one table: two wordings, and the query.
ONE_TABLE = {
    "list": ("Show the {chosen[0]} of all {rows}.", "What are the {chosen[0]} of {rows}?",
             "SELECT {chosen[0]} {source}"),
    "list2": ("Show the {chosen[0]} and {chosen[1]} of all {rows}.",
              "What are the {chosen[0]} and {chosen[1]} of {rows}?",
              "SELECT {chosen[0]}, {chosen[1]} {source}"),
    "count": ("How many {rows} are there?", "Count the {rows}.", "SELECT count(*) {source}"),
    "aggregate": ("What is the {words} of {rows}?", "Find the {words} of all {rows}.",
                  "SELECT {function} {source}"),
    "order": ("List the {text} of {rows}, sorted by {number}{turned}.",
              "Order the {rows} by {number} and show the {text}{turned}.",
              "SELECT {text} {source} ORDER BY {number}{desc}"),
    "top": ("Show the {text} of the {n} {rows} that have the {best} {number}.",
            "Which {n} {rows} have the {best} {number}? Give the {text}.",
            "SELECT {text} {source} ORDER BY {number}{desc} LIMIT {n}"),
    "group": ("For each {text}, show the {words}{only}.",
              "What is the {words} for every {text}{among}?",
              "SELECT {text}, {function} {source} GROUP BY {text}"),
    "having": ("Which {text} do at least {n} {rows} have?",
               "Show every {text} that is shared by at least {n} {rows}.",
               "SELECT {text} {source} GROUP BY {text} HAVING count(*) >= {n}"),
    "distinct": ("How many different {text} values do {rows} have?",
                 "List the different {text} values of {rows}.", "SELECT {distinct} {source}")}
# What can be asked about rows of one table that belong to some rows of another.
TWO_TABLES = {
    "list": ("Show the {shown} of {rows}.", "What are the {shown} values of the {rows}?",
             "SELECT c.{shown} {source} WHERE {filtered}"),
    "count": ("How many {rows} are there?", "Count the {rows}.",
              "SELECT count(*) {source} WHERE {filtered}"),
    "aggregate": ("What is the {words} {number} of {rows}?",
                  "Find the {words} {number} of the {rows}.",
                  "SELECT {function}(c.{number}) {source} WHERE {filtered}"),
    "order": ("List the {shown} of {rows}, sorted by {number}.",
              "Order the {rows} by {number} and show the {shown}.",
              "SELECT c.{shown} {source} WHERE {filtered} ORDER BY c.{number}"),
    "each": ("For each {column} of a {parent}, show the number of {child}s.",
             "Count the {child}s for every {parent} {column}.",
             "SELECT p.{column}, count(*) {source} GROUP BY p.{column}")}


def draw_details(rng, kind, table, columns, number):
    """Draw what a question about one table asks for.

    kind     a key of ONE_TABLE
    columns  the columns of the table, among them `number`, a column of numbers
    returns  values for the wordings and the query, and what they add to the template
    """
    if kind in ("list", "list2"):
        return {"chosen": rng.sample(columns, 2 if kind == "list2" else 1)}, ""
    if kind == "aggregate":
        words, function = rng.choice(AGGREGATES)
        return {"words": f"{words} {number}", "function": f"{function}({number})"}, f" {words}"
    if kind in ("order", "top"):
        down = rng.randrange(2)
        best, turned, desc = (("lowest", "", ""), ("highest", " from high to low", " DESC"))[down]
        n = rng.randint(1, 9) if kind == "top" else 0
        return {"best": best, "turned": turned, "desc": desc, "n": n}, f" {down}"
    if kind == "group":
        words, function = rng.choice([(f"number of {table}s", "count(*)")]
                                     + [(f"{w} {number}", f"{f}({number})")
                                        for w, f in AGGREGATES[:4]])
        return {"words": words, "function": function}, f" {function.partition('(')[0]}"
    if kind == "having":
        return {"n": rng.randint(2, 9)}, ""
    return {}, ""


# Questions. Each function returns the question, its query, and the template.

def ask_one_table(rng, schema):
    """Make a question about one table of the schema."""
    table = rng.choice(list(schema))
    columns = find_columns(schema[table])
    text = rng.choice(find_columns(schema[table], str))
    number = rng.choice(find_columns(schema[table], int))
    english, filtered, template = make_where(rng, table, schema)
    kind, way = rng.choice(list(ONE_TABLE)), rng.randrange(2)
    more, mark = draw_details(rng, kind, table, columns, number)
    rows = f"{table}s{english}"
    values = {"text": text, "number": number, "rows": rows, "source": f"FROM {table}{filtered}",
              "only": f", counting only {rows}" if english else "",
              "among": f" among {rows}" if english else "",
              "distinct": (f"count(DISTINCT {text})", f"DISTINCT {text}")[way], **more}
    question, query = ONE_TABLE[kind][way], ONE_TABLE[kind][2]
    return question.format(**values), query.format(**values), f"{kind} {way} {template}{mark}"


def ask_two_tables(rng, schema):
    """Make a question about rows of the second table that names their rows in the first."""
    parent, child = schema
    columns = schema[child]
    shown = rng.choice(find_columns(columns))
    number = rng.choice(find_columns(columns, int))
    english, filtered, template = make_condition(rng, schema[parent], "p.")
    if rng.random() < 0.5:
        more, query, extra = make_condition(rng, columns, "c.")
        english = f"{english} and only {child}s {more}"
        filtered = f"{filtered} AND {query}"
        template = f"{template} also {extra}"
    kind, way = rng.choice(list(TWO_TABLES)), rng.randrange(2)
    values = {"parent": parent, "child": child, "shown": shown, "number": number,
              "rows": f"{child}s of {parent}s {english}", "filtered": filtered,
              "source": f"FROM {child} AS c JOIN {parent} AS p ON c.{parent}_id = p.id"}
    if kind == "aggregate":
        values["words"], values["function"] = rng.choice(AGGREGATES)
        template += f" {values['words']}"
    elif kind == "each":
        values["column"] = rng.choice(find_columns(schema[parent], str))
        template = ""
    question, query = TWO_TABLES[kind][way], TWO_TABLES[kind][2]
    return question.format(**values), query.format(**values), f"join {kind} {way} {template}"


def grade_sql(example: Example, answer: str) -> bool:
    """Run an answer and the reference query on three random databases, and compare their rows.

    The order of the rows counts only if the reference query sorts.
    """
    query = example.check["query"]
    named = [int(n) for n in re.findall(r"\d+", query)]
    for seed in range(3):
        rng, database = random.Random(seed), sqlite3.connect(":memory:")
        for table, columns in example.check["schema"].items():
            database.execute(f"CREATE TABLE {table} ({', '.join(['id', *columns])})")
            # The number that the query names is frequent. Otherwise few rows would meet its
            # condition, and a wrong query would often give the same empty result.
            for i in range(100):
                row = [i + 1] + [
                    rng.choice(v.split()) if isinstance(v, str)
                    else rng.choice([rng.randint(1, v), rng.randint(1, v), *named[:1]])
                    for v in columns.values()]
                database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        budget = itertools.count()
        database.set_progress_handler(lambda: next(budget) > 1000, 1000)  # end a runaway query
        expected = database.execute(query).fetchall()
        try:
            cursor = database.execute(answer)
            rows = cursor.fetchall()
        except (sqlite3.Error, sqlite3.Warning):
            return False
        finally:
            database.close()
        if "ORDER BY" not in query:
            expected, rows = sorted(expected, key=repr), sorted(rows, key=repr)
        if rows != expected or cursor.description is None:  # None: it was no query
            return False
    return True


# ---------------------------------------------------------------- code

# Each entry: English with {k} for a number, Python with {x} for the element, and a word for the
# function's name.
FILTERS = [("even numbers", "{x} % 2 == 0", "even"), ("odd numbers", "{x} % 2 == 1", "odd"),
           ("positive numbers", "{x} > 0", "positive"), ("negative numbers", "{x} < 0", "negative"),
           ("numbers above {k}", "{x} > {k}", "large"), ("numbers below {k}", "{x} < {k}", "small"),
           ("multiples of {k}", "{x} % {k} == 0", "multiple"),
           ("numbers other than {k}", "{x} != {k}", "other"),
           ("numbers from {k} to {m}", "{k} <= {x} <= {m}", "inside"),
           ("numbers outside {k} to {m}", "{x} < {k} or {x} > {m}", "outside")]
MAPS = [("squares", "{x} * {x}", "square"), ("cubes", "{x} ** 3", "cube"),
        ("doubles", "2 * {x}", "double"), ("absolute values", "abs({x})", "abs"),
        ("negatives", "-{x}", "negate"), ("remainders modulo {j}", "{x} % {j}", "mod"),
        ("halves, rounded down,", "{x} // 2", "half"), ("sums with {j}", "{x} + {j}", "plus"),
        ("products with {j}", "{x} * {j}", "times"), ("differences from {j}", "{j} - {x}", "minus")]
CHARS = [("vowels", "{x} in 'aeiou'", "vowel"), ("digits", "{x}.isdigit()", "digit"),
         ("letters", "{x}.isalpha()", "letter"), ("capital letters", "{x}.isupper()", "capital"),
         ("small letters", "{x}.islower()", "small"), ("spaces", "{x} == ' '", "space"),
         ("characters other than '{c}'", "{x} != '{c}'", "other"),
         ("characters equal to '{c}'", "{x} == '{c}'", "same")]
WORDS = [("words longer than {k} letters", "len({x}) > {k}", "long"),
         ("words shorter than {k} letters", "len({x}) < {k}", "short"),
         ("words of {k} letters", "len({x}) == {k}", "sized"),
         ("words that start with '{c}'", "{x}.startswith('{c}')", "start"),
         ("words that end in '{c}'", "{x}.endswith('{c}')", "end"),
         ("words that contain '{c}'", "'{c}' in {x}", "with"),
         ("capitalised words", "{x}[0].isupper()", "capital")]
LISTS, TEXTS = "xs nums values numbers data items".split(), "s text line string".split()
LABELS = "low high small big cold warm old new cheap fair dear poor good near far".split()
# The inputs that functions of a list or of a text are graded on, each with the only argument.
LIST_INPUTS = [[v] for v in (
    [], [3], [-4, 7, 2, 9, 12, 5, 5], [10, -3, 6, 8, 0, 1, 15, 20],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13], [-9, -2, 14, 18, 4, 30])]
TEXT_INPUTS = [[v] for v in (
    "", "banana", "Hello World 42", "the Quick brown fox jumps over a Lazy dog",
    "A1 b2 sea eel tent  on", "abc cba Anna noon stats been to")]
# How a loop reduces values: the variable of the result, its first value, and the line for a value.
REDUCTIONS = {
    "count": ("count", "0", "{result} += 1"),
    "sum": ("total", "0", "{result} += {value}"),
    "product": ("result", "1", "{result} *= {value}"),
    "list": ("result", "[]", "{result}.append({value})"),
    "largest": ("best", "None",
                "{result} = {value} if {result} is None else max({result}, {value})"),
    "smallest": ("best", "None",
                 "{result} = {value} if {result} is None else min({result}, {value})"),
    "join": ("result", "''", "{result} += {value}"),
    "reverse": ("result", "''", "{result} = {value} + {result}"),
    "lengths": ("total", "0", "{result} += len({value})"),
    "longest": ("best", "''", "{result} = max({result}, {value}, key=len)")}
# How a docstring asks for a reduction of some numbers w.
OF_NUMBERS = {
    "count": ("Count the {w}.", "Return the number of {w}.", "Return how many {w} there are."),
    "sum": ("Return the sum of the {w}.", "Add up the {w}.", "Compute the total of the {w}."),
    "product": ("Return the product of the {w}.", "Multiply the {w}.",
                "Compute the product of all {w}."),
    "list": ("Return a list of the {w}.", "Collect the {w} in a list.", "List the {w}."),
    "largest": ("Return the largest of the {w}, or None.", "Find the maximum of the {w}, or None.",
                "Return the greatest of the {w}, or None."),
    "smallest": ("Return the smallest of the {w}, or None.",
                 "Find the minimum of the {w}, or None.", "Return the least of the {w}, or None.")}
# How a docstring asks for a reduction of some characters or words w of the text s. The words m say
# what else is done to each of them.
OF_TEXT = {
    "count": ("Count the {w} in {s}.", "Return how many {w} there are in {s}."),
    "join": ("Return the {w} in {s} as a string{m}.", "Keep only the {w} of {s}{m}."),
    "reverse": ("Return the {w} in {s} in reverse order{m}.",
                "Keep only the {w} of {s}, backwards{m}."),
    "list": ("Return a list of the {w} in {s}{m}.", "Collect the {w} of {s} in a list{m}."),
    "lengths": ("Return the total length of the {w} in {s}.",
                "Add up the lengths of the {w} of {s}."),
    "longest": ("Return the longest of the {w} in {s}, or ''.",
                "Find the longest of the {w} of {s}, or ''.")}


def make_code(rng: random.Random) -> Example:
    """Make a signature, a docstring and the body of a function."""
    kind = rng.choice((reduce_list, reduce_list, reduce_range, text_loop, word_loop, branch,
                       two_lists, tally, choose, choose, both))
    name, arguments, doc, body, inputs, template = kind(rng)
    prompt = f'def {name}({arguments}):\n    """{doc}"""'
    return Example("code", prompt, "\n" + "\n".join("    " + line for line in body),
                   f"code {template}", {"name": name, "inputs": inputs})


def grade_code(example: Example, answer: str) -> bool:
    """Run an answer and the reference on all inputs, and compare what they return.

    They run in a subprocess, which may take five seconds: an answer may be anything.
    """
    programs = [example.prompt + text for text in (example.answer, answer)]
    run = """
import copy, json, sys
name, inputs, programs = json.load(sys.stdin)
results = []
for program in programs:
    space = {}
    exec(program, space)
    results.append([repr(space[name](*copy.deepcopy(x))) for x in inputs])
print("equal" if results[0] == results[1] else "different")
"""
    try:
        return subprocess.run(
            [sys.executable, "-I", "-X", "utf8", "-c", run],
            input=json.dumps([example.check["name"], example.check["inputs"], programs]),
            encoding="utf-8", errors="replace", capture_output=True,
            timeout=5).stdout.endswith("equal\n")
    except subprocess.TimeoutExpired:
        return False


def write_reduction(how, value, result=""):
    """Write the parts of a loop that counts, sums or otherwise reduces values.

    how      a key of REDUCTIONS
    value    the value of one element, as Python
    result   another name for the variable of the result
    returns  the line before the loop, the loop's line for one element, and the variable
    """
    variable, first, line = REDUCTIONS[how]
    variable = result or variable
    return f"{variable} = {first}", line.format(result=variable, value=value), variable


def write_loop(head, test, how, value):
    """Write a function's body: a loop of this head reduces values, and their result is returned.

    test  a condition of the loop's one line, or "" if the line runs for each element
    """
    start, line, result = write_reduction(how, value)
    return [start, head, *write_line(test, line), f"return {result}"]


def write_line(test, line):
    """Write a line of a loop's body, which runs only under a condition unless `test` is ""."""
    return [f"    if {test}:", f"        {line}"] if test else [f"    {line}"]


def draw_bounds(rng):
    """Draw two numbers, the smaller one first, for the wordings of FILTERS."""
    k = rng.randint(2, 9)
    return {"k": k, "m": k + rng.randint(2, 9)}


def numbers_loop(rng, head, x, where, how):
    """Write a function that filters, maps and reduces numbers.

    head     the head of its loop
    x        the name of the element
    where    where the numbers are, in English
    how      which reduction
    returns  the docstring, the body, words for the function's name, and the template
    """
    values = draw_bounds(rng) | {"j": rng.randint(2, 9), "x": x}
    keep, test, kept = "numbers", "", "all"
    if rng.random() < 0.75:
        keep, test, kept = rng.choice(FILTERS)
    change, value, changed = "", "{x}", ""
    if how != "count" and rng.random() < 0.6:
        change, value, changed = rng.choice(MAPS)
    way = rng.randrange(3)
    words = (f"{change} of the " if change else "") + f"{keep} {where}"
    doc = OF_NUMBERS[how][way].format(w=words.format(**values))
    body = write_loop(head, test.format(**values), how, value.format(**values))
    return doc, body, [kept, changed], f"{how} {way} {keep} {change}"


def make_name(rng, *words):
    """Make the function's name of some of the words."""
    words = [w for w in words if w]
    name = "_".join(rng.sample(words, rng.randint(1, len(words))))
    # A body may call the builtin function, which it must not hide.
    return f"{name}_of" if name in ("abs", "list", "max", "min", "sum") else name


# What a function does. Each maker returns its name, its arguments, its docstring, its body, the
# inputs that it is graded on, and the template.

def reduce_list(rng):
    """Write a function that reduces the numbers of a list."""
    xs, x, how = rng.choice(LISTS), rng.choice("x n v".split()), rng.choice(list(OF_NUMBERS))
    doc, body, words, template = numbers_loop(rng, f"for {x} in {xs}:", x, f"in {xs}", how)
    return make_name(rng, how, *words), xs, doc, body, LIST_INPUTS, f"list {template}"


def reduce_range(rng):
    """Write a function that reduces the numbers from 1 to n."""
    n, i = rng.choice("n limit end".split()), rng.choice("i j".split())
    how = rng.choice(list(OF_NUMBERS))
    doc, body, words, template = numbers_loop(rng, f"for {i} in range(1, {n} + 1):", i,
                                              f"from 1 to {n}", how)
    return (make_name(rng, how, *words), n, doc, body, [[v] for v in (0, 1, 2, 5, 9, 14, 20)],
            f"range {template}")


def choose(rng):
    """Write a function that maps the numbers that pass a test in one way, and all others in
    another, before it reduces them."""
    xs, x = rng.choice(LISTS), rng.choice("x n v".split())
    how, way = rng.choice(list(OF_NUMBERS)[1:]), rng.randrange(2)
    values = draw_bounds(rng)
    words, test, word = rng.choice(FILTERS)
    (first, one, _), (second, other, _) = rng.sample(MAPS, 2)
    i, j = rng.randint(2, 9), rng.randint(2, 9)
    numbers = (f"{first.format(j=i)} of {words.format(**values)} "
               f"and the {second.format(j=j)} of all others in {xs}")
    start, line, result = write_reduction(how, "y")
    body = [start, f"for {x} in {xs}:",
            f"    y = {one.format(x=x, j=i)} if {test.format(x=x, **values)} "
            f"else {other.format(x=x, j=j)}", f"    {line}", f"return {result}"]
    return (make_name(rng, how, word, "mixed"), xs, OF_NUMBERS[how][way].format(w=numbers), body,
            LIST_INPUTS, f"choose {how} {way} {words} {first} {second}")


def both(rng):
    """Write a function that returns two reductions of one list as a pair."""
    xs, x = rng.choice(LISTS), rng.choice("x n v".split())
    hows = rng.sample("count sum largest smallest".split(), 2)
    starts, lines, results, words, template = [], [], [], [], []
    for how in hows:
        values = draw_bounds(rng)
        keep, test, _ = rng.choice(FILTERS)
        name = {"largest": "high", "smallest": "low"}.get(how, "")
        start, line, result = write_reduction(how, x, name)
        starts.append(start)
        lines += write_line(test.format(x=x, **values), line)
        results.append(result)
        counted = "number" if how == "count" else how
        words.append(f"{counted} of the {keep.format(**values)}")
        template.append(f"{how} {keep}")
    doc = f"Return a pair: the {words[0]}, and the {words[1]} in {xs}."
    body = [*starts, f"for {x} in {xs}:", *lines, f"return {', '.join(results)}"]
    return (make_name(rng, *hows, "pair"), xs, doc, body, LIST_INPUTS,
            f"both {', '.join(template)}")


def text_loop(rng):
    """Write a function that filters and reduces the characters of a text."""
    s, x = rng.choice(TEXTS), rng.choice("c ch".split())
    how, way = rng.choice("count join reverse list".split()), rng.randrange(2)
    words, test, word = rng.choice(CHARS)
    c = rng.choice("abenst")
    change, value = "", "{x}"
    if how != "count":
        change, value = rng.choice([("", "{x}"), (", in upper case", "{x}.upper()"),
                                    (", each one twice", "{x} * 2")])
    doc = OF_TEXT[how][way].format(w=words.format(c=c), s=s, m=change)
    body = write_loop(f"for {x} in {s}:", test.format(x=x, c=c), how, value.format(x=x))
    return (make_name(rng, how, word), s, doc, body, TEXT_INPUTS,
            f"text {how} {way} {words} {change}")


def word_loop(rng):
    """Write a function that filters and reduces the words of a text."""
    s, x = rng.choice(TEXTS), rng.choice("w word".split())
    how, way = rng.choice("count list lengths longest".split()), rng.randrange(2)
    words, test, word = rng.choice(WORDS)
    values = {"k": rng.randint(2, 5), "c": rng.choice("abenst")}
    doc = OF_TEXT[how][way].format(w=words.format(**values), s=s, m="")
    body = write_loop(f"for {x} in {s}.split():", test.format(x=x, **values), how, x)
    return make_name(rng, how, word), s, doc, body, TEXT_INPUTS, f"words {how} {way} {words}"


def branch(rng):
    """Write a function that labels a number by the bounds that it lies between."""
    x, n, way = rng.choice("x n value score".split()), rng.randint(2, 3), rng.randrange(3)
    bounds, labels = sorted(rng.sample(range(1, 60), n)), rng.sample(LABELS, n + 1)
    down = rng.randrange(2)
    op, word = (">", "above") if down else ("<", "below")
    if down:
        bounds.reverse()
    cases = [f"'{label}' if {x} is {word} {b}" for b, label in zip(bounds, labels)]
    body = []
    for b, label in zip(bounds, labels):
        body += [f"if {x} {op} {b}:", f"    return '{label}'"]
    body.append(f"return '{labels[-1]}'")
    doc = f"{('Return', 'Give', 'Classify:')[way]} {', '.join(cases)}, else '{labels[-1]}'."
    inputs = [[b + d] for b in bounds for d in (-1, 0, 1)]
    return (make_name(rng, "label", "classify", "level"), x, doc, body, inputs,
            f"branch {n} {way} {down}")


def two_lists(rng):
    """Write a function that reduces the values of pairs, one number from each of two lists."""
    a, b = rng.choice([("xs", "ys"), ("a", "b"), ("left", "right")])
    x, y = rng.choice([("x", "y"), ("p", "q")])
    words, value, word = rng.choice([
        ("sums", "{x} + {y}", "sum"), ("products", "{x} * {y}", "product"),
        ("differences", "{x} - {y}", "difference"), ("maxima", "max({x}, {y})", "max"),
        ("minima", "min({x}, {y})", "min"), ("distances", "abs({x} - {y})", "distance")])
    test, kept = rng.choice([
        ("", ""), ("{x} > {y}", " where the first is larger"),
        ("{x} < {y}", " where the first is smaller"), ("{x} != {y}", " where the two differ")])
    how, way = rng.choice(list(OF_NUMBERS)[1:]), rng.randrange(3)
    doc = OF_NUMBERS[how][way].format(w=f"{words} of the pairs in {a} and {b}{kept}")
    body = write_loop(f"for {x}, {y} in zip({a}, {b}):", test.format(x=x, y=y), how,
                      value.format(x=x, y=y))
    return (make_name(rng, how, word, "pairs"), f"{a}, {b}", doc, body,
            [[[], []], [[1, 5, 3], [4, 2, 3]], [[2, 9, -4, 6], [7, 1, -8, 6]]],
            f"pairs {how} {way} {words}{kept}")


def tally(rng):
    """Write a function that counts how often each value occurs."""
    xs, x, way = rng.choice(LISTS), rng.choice("x n v".split()), rng.randrange(2)
    k = rng.randint(2, 9)
    words, key = rng.choice([
        ("each number in {xs}", "{x}"), ("each remainder modulo {k} in {xs}", "{x} % {k}"),
        ("each absolute value in {xs}", "abs({x})"), ("each last digit in {xs}", "abs({x}) % 10"),
        ("each number in {xs} divided by {k}", "{x} // {k}")])
    keep, test, _ = rng.choice(FILTERS[:6]) if rng.random() < 0.5 else ("", "", "")
    values = {"k": k, "m": k + 3, "x": x, "xs": xs}
    only = f", for {keep} only" if keep else ""
    doc = (f"Count how often {words} occurs{only}.",
           f"Return a dict with the number of times {words} occurs{only}.")[way].format(**values)
    line = f"counts[{key}] = counts.get({key}, 0) + 1".format(**values)
    body = ["counts = {}", f"for {x} in {xs}:", *write_line(test.format(**values), line),
            "return counts"]
    return (make_name(rng, "tally", "count", "groups"), xs, doc, body, LIST_INPUTS,
            f"tally {way} {words} {keep}")


def main(argv: list[str] | None = None) -> None:
    """Print training prompts as JSON lines, or without a number some examples to read."""
    from cli.text import Parser
    parser = Parser(description="Print some examples; with N, training prompts.")
    parser.add_argument("n", type=int, nargs="?", help="training prompts of each task")
    parser.add_argument("seed", type=int, nargs="?", default=-2)
    parser.add_argument("tasks", nargs="*", metavar="task", help=f"of {', '.join(TASKS)}")
    args = parser.parse_args(argv)
    if args.n is not None and args.n < 0:
        parser.error(f"n must be 0 or more, got {args.n}")
    unknown = {*args.tasks} - {*TASKS}
    if unknown:
        parser.error(f"task must be one of {', '.join(TASKS)}, got {', '.join(sorted(unknown))}")
    for task in args.tasks or TASKS:
        if args.n is None:
            for example in take(task, "test", 3, seed=1):
                print(f"--- {task}: {example.template}\n{example.prompt}"
                      f"\033[36m{example.answer}\033[0m\n")
        else:
            for example in take(task, "train", args.n, args.seed):
                print(json.dumps({"category": task, "prompt": example.prompt}))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from cli.main import run_script
    sys.exit(run_script(main))
