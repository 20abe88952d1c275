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
GOODS = [("a pen", "pens"), ("a book", "books"), ("a cup", "cups"), ("a hat", "hats"),
         ("a pie", "pies"), ("a toy", "toys"), ("a ball", "balls"), ("a kite", "kites"),
         ("a cake", "cakes"), ("a lamp", "lamps"), ("a plate", "plates"), ("a ticket", "tickets"),
         ("a shirt", "shirts"), ("a plant", "plants"), ("a map", "maps"), ("a doll", "dolls"),
         ("a card", "cards"), ("a candle", "candles")]
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


@dataclass
class Story:
    """Say whose things a story is about, which things they are, and how many there are now."""
    name: str
    he: str
    him: str
    his: str
    items: str
    n: int
    friend: str

    @property
    def He(self) -> str:
        return self.he.capitalize()


# What can happen to the things of a story. Each function returns three wordings, the steps of the
# solution, and how many things there are then.

def gain(rng, s: Story):
    k = rng.randint(2, rng.choice((20, 150)))
    return ((f"{s.He} buys {k} more {s.items}.", f"{s.friend} gives {s.him} {k} {s.items}.",
             f"Then {s.he} finds {k} more."),
            [f"{s.name} now has {s.n} + {k} = {s.n + k} {s.items}."], s.n + k)


def lose(rng, s: Story):
    k = rng.randint(2, s.n - 2)
    return ((f"{s.He} gives {k} {s.items} to {s.friend}.", f"Then {s.he} loses {k} of them.",
             f"{s.He} sells {k} of {s.his} {s.items}."),
            [f"{s.name} has {s.n} - {k} = {s.n - k} {s.items} left."], s.n - k)


def pack(rng, s: Story):
    boxes, k, p = rng.choice(PACKS), rng.randint(2, 9), rng.randint(2, 12)
    return ((f"{s.He} buys {k} {boxes} of {p} {s.items} each.",
             f"{s.friend} brings {s.him} {k} {boxes} with {p} {s.items} in each.",
             f"Then {s.he} gets {k} {boxes}, each with {p} {s.items}."),
            [f"The {k} {boxes} hold {k} * {p} = {k * p} {s.items}.",
             f"{s.name} now has {s.n} + {k * p} = {s.n + k * p} {s.items}."], s.n + k * p)


def double(rng, s: Story):
    if s.n > 80 or rng.random() < 0.5:
        k, doubles, twice = 2, "doubles", "twice"
    else:
        k, doubles, twice = 3, "triples", "three times"
    return ((f"{s.friend} {doubles} {s.his} {s.items}.",
             f"A week later {s.he} has {twice} as many.",
             f"Then the number of {s.his} {s.items} {doubles}."),
            [f"{s.name} now has {s.n} * {k} = {s.n * k} {s.items}."], s.n * k)


def half(rng, s: Story):
    return ((f"{s.He} gives half of them to {s.friend}.",
             f"Then {s.he} eats or breaks half of {s.his} {s.items}.",
             f"{s.He} sells half of {s.his} {s.items}."),
            [f"{s.name} has {s.n} / 2 = {s.n // 2} {s.items} left."], s.n // 2)


EVENTS = {"gain": gain, "lose": lose, "pack": pack, "double": double, "half": half}


# What can be asked at the end of a story. Each function returns two wordings, the steps of the
# solution for each, and the answer.

def count(rng, s: Story):
    return ((f"How many {s.items} does {s.name} have now?",
             f"How many {s.items} does {s.he} have in the end?"), ([], []), s.n)


def share(rng, s: Story):
    k = rng.choice(find_shares(s.n))
    return ((f"{s.He} shares all {s.items} equally among {k} friends. "
             "How many does each friend get?",
             f"{s.He} puts them into {k} equal groups. How many {s.items} are in each group?"),
            ([f"Each friend gets {s.n} / {k} = {s.n // k} {s.items}."],
             [f"Each group has {s.n} / {k} = {s.n // k} {s.items}."]), s.n // k)


def sell(rng, s: Story):
    k = rng.randint(2, 9)
    return ((f"{s.He} sells all of them for {k} dollars each. "
             f"How many dollars does {s.he} get?",
             f"Each one is worth {k} dollars. How many dollars are they worth?"),
            ([f"{s.name} gets {s.n} * {k} = {s.n * k} dollars."],
             [f"They are worth {s.n} * {k} = {s.n * k} dollars."]), s.n * k)


ENDS = {"count": count, "share": share, "sell": sell}


def find_shares(n: int) -> list[int]:
    """Find the numbers from 2 to 10 that divide n things into equal shares of 2 or more."""
    return [k for k in range(2, 11) if n % k == 0 and n // k >= 2]


# What a word problem is about. Each function returns the question, the steps of the solution, the
# answer, and the template.

def story(rng):
    """Tell how one person's things become more and fewer, one event after another."""
    who = choose_person(rng)
    items, n = rng.choice(ITEMS), rng.randint(5, rng.choice((30, 200)))
    friend = rng.choice([x for x in HE + SHE if x != who[0]])
    s = Story(*who, items, n, friend)
    first = rng.randrange(2)
    text = [(f"{s.name} has {n} {items}.", f"At first {s.name} has {n} {items}.")[first]]
    steps, template = [], [f"story {first}"]
    for _ in range(rng.randint(1, 4)):
        kinds = (["gain", "pack"] * (s.n <= 300) + ["lose"] * (s.n >= 5)
                 + ["double"] * (s.n <= 150) + ["half"] * (s.n % 2 == 0 and s.n >= 8))
        kind, way = rng.choice(kinds), rng.randrange(3)
        template.append(f"{kind} {way}")
        wordings, solved, s.n = EVENTS[kind](rng, s)
        text.append(wordings[way])
        steps += solved
    end = rng.choice(["count", "count"] + ["share"] * bool(find_shares(s.n))
                     + ["sell"] * (s.n <= 60))
    way = rng.randrange(2)
    template.append(f"{end} {way}")
    wordings, solved, answer = ENDS[end](rng, s)
    text.append(wordings[way])
    steps += solved[way]
    return " ".join(text), steps, answer, ", ".join(template)


def shop(rng):
    """Ask what a purchase costs, or how much money is left after it."""
    name, he, *_ = choose_person(rng)
    goods = rng.sample(GOODS, rng.randint(2, 3))
    prices, amounts = [rng.randint(2, 25) for _ in goods], [rng.randint(2, 9) for _ in goods]
    way, end = rng.randrange(2), rng.randrange(2 if len(goods) == 3 else 4)
    costs = [f"{one} costs {p} dollars" for (one, _), p in zip(goods, prices)]
    bought = [f"{a} {many}" for (_, many), a in zip(goods, amounts)]
    costs, bought = (", ".join(x[:-1]) + " and " + x[-1] for x in (costs, bought))
    text = (costs[0].upper() + costs[1:] + ". "
            + (f"{name} buys {bought}.", f"{name} needs {bought}.")[way])
    steps = [f"The {many} cost {a} * {p} = {a * p} dollars."
             for (_, many), p, a in zip(goods, prices, amounts)]
    total = prices[0] * amounts[0]
    for p, a in zip(prices[1:], amounts[1:]):
        steps.append(f"That makes {total} + {p * a} = {total + p * a} dollars.")
        total += p * a
    if end < 2:
        text += (f" How many dollars does {he} pay?", " How much is that in dollars?")[end]
    else:
        paid = next(x for x in (50, 100, 200, 500, 1000) if x > total)
        text += (f" {he.capitalize()} pays with {paid} dollars. "
                 f"How many dollars does {he} get back?",
                 f" {he.capitalize()} has {paid} dollars. How many dollars are left?")[end - 2]
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
    if end == 0:
        text += f" how many {items} is that?"
    else:
        bad = rng.randint(2, total - 2)
        text += (f" how many {items} are good if {bad} are broken?",
                 f" how many {items} are left if {bad} are sold?")[end - 1]
        steps.append((f"There are {total} - {bad} = {total - bad} good {items}.",
                      f"There are {total} - {bad} = {total - bad} {items} left.")[end - 1])
        total -= bad
    return text, steps, total, f"rate {way} {first} {end}"


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

CITIES = "Paris London Rome Madrid Berlin Tokyo Lima Cairo Oslo Delhi Boston Sydney".split()
COUNTRIES = "France Spain Italy Japan Peru Egypt Norway India Canada Brazil Chile Kenya".split()
COLORS = "red blue green black white yellow brown silver".split()
PEOPLE = HE + SHE
LEVELS = "low medium high basic gold top".split()
# For each table: its plural, its text columns with their values, and its number columns with their
# largest values.
TABLES = {
    "singer": ("singers", {"name": PEOPLE, "country": COUNTRIES,
                           "style": "pop rock jazz folk opera blues".split()},
               {"age": 90, "albums": 30, "fans": 500}),
    "student": ("students", {"name": PEOPLE, "city": CITIES,
                             "major": "math history biology law art physics".split()},
                {"age": 40, "grade": 20, "credits": 200}),
    "teacher": ("teachers", {"name": PEOPLE, "country": COUNTRIES,
                             "subject": "math history biology music art physics".split()},
                {"age": 70, "salary": 900, "hours": 40}),
    "car": ("cars", {"brand": "Ford Fiat Audi Seat Volvo Honda".split(), "color": COLORS,
                     "fuel": "gas diesel electric hybrid".split()},
            {"price": 900, "doors": 5, "speed": 250}),
    "book": ("books", {"title": "Dawn Rivers Winter Garden Silence Home".split(), "author": PEOPLE,
                       "genre": "crime poetry drama fantasy travel history".split()},
             {"pages": 900, "price": 80, "copies": 60}),
    "hotel": ("hotels", {"name": "Plaza Grand Royal Astoria Central Palace".split(),
                         "city": CITIES, "level": LEVELS},
              {"rooms": 400, "stars": 5, "price": 500}),
    "dog": ("dogs", {"name": "Rex Bella Rocky Luna Buddy Daisy".split(),
                     "breed": "poodle beagle boxer husky collie terrier".split(), "color": COLORS},
            {"age": 18, "weight": 60, "prizes": 9}),
    "flight": ("flights", {"origin": CITIES,
                           "airline": "Delta Iberia Qantas Lufthansa Finnair".split(),
                           "status": "late early cancelled boarding".split()},
               {"distance": 900, "seats": 400, "price": 800}),
    "employee": ("employees", {"name": PEOPLE,
                               "job": "clerk driver nurse cook engineer manager".split(),
                               "city": CITIES},
                 {"age": 70, "salary": 900, "bonus": 90}),
    "player": ("players", {"name": PEOPLE, "country": COUNTRIES,
                           "position": "goalkeeper defender striker captain".split()},
               {"age": 45, "goals": 99, "height": 220}),
    "film": ("films", {"title": "Dawn Rivers Winter Garden Silence Home".split(),
                       "director": PEOPLE,
                       "genre": "crime comedy drama fantasy horror action".split()},
             {"year": 99, "length": 240, "rating": 10}),
    "product": ("products", {"name": "chair table lamp sofa desk shelf".split(), "color": COLORS,
                             "material": "wood steel glass plastic leather".split()},
                {"price": 900, "stock": 99, "weight": 80}),
    "shop": ("shops", {"name": "Corner Market Bazaar Depot Outlet Store".split(), "city": CITIES,
                       "owner": PEOPLE},
             {"size": 900, "sales": 800, "staff": 50}),
    "team": ("teams", {"name": "Tigers Lions Eagles Sharks Wolves Bears".split(), "city": CITIES,
                       "league": "north south east west".split()},
             {"wins": 60, "losses": 60, "points": 180}),
    "museum": ("museums", {"name": "National Modern Science Maritime Folk".split(), "city": CITIES,
                           "topic": "art war nature space trains".split()},
               {"rooms": 90, "visitors": 900, "price": 40}),
    "plant": ("plants", {"name": "fern cactus ivy orchid tulip palm".split(), "color": COLORS,
                         "climate": "dry wet cold mild".split()},
              {"height": 300, "price": 90, "age": 50}),
}
COMPARISONS = [("above {n}", ">"), ("below {n}", "<"), ("over {n}", ">"), ("under {n}", "<"),
               ("of at least {n}", ">="), ("of at most {n}", "<="), ("equal to {n}", "=")]
AGGREGATES = [("average", "avg"), ("maximum", "max"), ("minimum", "min"), ("total", "sum"),
              ("highest", "max"), ("lowest", "min")]


def make_sql(rng: random.Random) -> Example:
    """Make a schema of one or two tables, and a question about it."""
    tables = rng.sample(sorted(TABLES), rng.choice((1, 2, 2)))
    schema = {}  # for each table its columns, each with its values or its largest number
    for table in tables:
        _, texts, numbers = TABLES[table]
        columns = (rng.sample(sorted(texts), rng.randint(2, len(texts)))
                   + rng.sample(sorted(numbers), rng.randint(1, len(numbers))))
        schema[table] = {c: (texts | numbers)[c] for c in rng.sample(columns, len(columns))}
    if len(tables) == 2:  # rows of the second table belong to rows of the first
        schema[tables[1]][f"{tables[0]}_id"] = 12
    question, query, template = (
        ask_two_tables if len(tables) == 2 and rng.random() < 0.5 else ask_one_table)(rng, schema)
    described = "; ".join(f"{t}({', '.join(['id', *columns])})" for t, columns in schema.items())
    return Example("sql", f"{described}\n{question}", f"\n{query};", f"sql {template}",
                   {"query": query, "schema": schema})


# Conditions on rows. Each function returns a condition in English and in SQL, and its part of the
# template.

def make_condition(rng, columns, prefix=""):
    """Make a condition on one of these columns.

    columns  for each column its values, or its largest number
    prefix   what stands before the column in SQL, such as "p."
    """
    column = rng.choice([c for c in columns if not c.endswith("_id")])
    values = columns[column]
    if isinstance(values, int):
        (words, op), n = rng.choice(COMPARISONS), rng.randint(2, max(2, values - 1))
        return f"with {column} {words.format(n=n)}", f"{prefix}{column} {op} {n}", words
    value, (words, op) = rng.choice(values), rng.choice([
        ("whose {c} is {v}", "="), ("with {c} {v}", "="), ("whose {c} is not {v}", "!=")])
    return words.format(c=column, v=value), f"{prefix}{column} {op} '{value}'", words


def make_nested_condition(rng, table, schema):
    """Make a condition on a table that holds a query of its own."""
    number = rng.choice([c for c, v in schema[table].items()
                         if isinstance(v, int) and not c.endswith("_id")])
    children = [t for t in schema if f"{table}_id" in schema[t]]
    if not children or rng.random() < 0.4:
        if rng.random() < 0.3:
            best, function = rng.choice([("highest", "max"), ("lowest", "min")])
            return (f"with the {best} {number}",
                    f"{number} = (SELECT {function}({number}) FROM {table})", f"nested {best}")
        words, op = rng.choice([("above", ">"), ("below", "<")])
        return (f"with {number} {words} the average",
                f"{number} {op} (SELECT avg({number}) FROM {table})", f"nested {words}")
    many, key, n = TABLES[children[0]][0], f"{table}_id", rng.randint(2, 6)
    words, query = rng.choice([
        ("that have {many}", "id IN (SELECT {key} FROM {child})"),
        ("without {many}", "id NOT IN (SELECT {key} FROM {child})"),
        ("that have at least {n} {many}",
         "id IN (SELECT {key} FROM {child} GROUP BY {key} HAVING count(*) >= {n})"),
        ("that have {many} {which}", "id IN (SELECT {key} FROM {child} WHERE {filtered})")])
    which, filtered, template = make_condition(rng, schema[children[0]])
    values = {"many": many, "key": key, "child": children[0], "n": n, "which": which,
              "filtered": filtered}
    return (words.format(**values), query.format(**values),
            f"nested {words} {template if 'which' in words else ''}")


def make_where(rng, columns, table, schema):
    """Make zero to two conditions, joined by "and" or "or"."""
    n = rng.choice((0, 1, 1, 2, 2, 2))
    if n == 0:
        return "", "", "all"
    english, query, template = zip(*(
        make_nested_condition(rng, table, schema) if rng.random() < 0.4
        else make_condition(rng, columns)
        for _ in range(n)))
    link = rng.choice(("and", "or"))
    return (" " + f" {link} ".join(english), " WHERE " + f" {link.upper()} ".join(query),
            f" {link} ".join(template))


@dataclass
class Asked:
    """Say which table, which two of its columns and which of its rows a question is about."""
    table: str
    plural: str
    columns: dict
    text: str
    number: str
    english: str
    filtered: str


# What can be asked about one table. Each function returns two wordings, the query of each, and what
# it adds to the template.

def list_columns(rng, q: Asked, n: int = 1):
    chosen = rng.sample(list(q.columns), n)
    query = f"SELECT {', '.join(chosen)} FROM {q.table}{q.filtered}"
    return (f"Show the {' and '.join(chosen)} of all {q.plural}{q.english}.",
            f"What are the {' and '.join(chosen)} of {q.plural}{q.english}?"), [query] * 2, ""


def list_two(rng, q: Asked):
    return list_columns(rng, q, 2)


def count_rows(rng, q: Asked):
    query = f"SELECT count(*) FROM {q.table}{q.filtered}"
    return (f"How many {q.plural}{q.english} are there?",
            f"Count the {q.plural}{q.english}."), [query] * 2, ""


def aggregate(rng, q: Asked):
    words, function = rng.choice(AGGREGATES)
    query = f"SELECT {function}({q.number}) FROM {q.table}{q.filtered}"
    return (f"What is the {words} {q.number} of {q.plural}{q.english}?",
            f"Find the {words} {q.number} of all {q.plural}{q.english}."), [query] * 2, f" {words}"


def order(rng, q: Asked):
    down = rng.randrange(2)
    end = (".", " from high to low.")[down]
    query = (f"SELECT {q.text} FROM {q.table}{q.filtered} ORDER BY {q.number}"
             f"{('', ' DESC')[down]}")
    return (f"List the {q.text} of {q.plural}{q.english}, sorted by {q.number}{end}",
            f"Order the {q.plural}{q.english} by {q.number} and show the {q.text}{end}"), \
        [query] * 2, f" {down}"


def top(rng, q: Asked):
    down, n = rng.randrange(2), rng.randint(1, 9)
    best = ("lowest", "highest")[down]
    query = (f"SELECT {q.text} FROM {q.table}{q.filtered} "
             f"ORDER BY {q.number}{('', ' DESC')[down]} LIMIT {n}")
    return (f"Show the {q.text} of the {n} {q.plural}{q.english} that have the {best} {q.number}.",
            f"Which {n} {q.plural}{q.english} have the {best} {q.number}? Give the {q.text}."), \
        [query] * 2, f" {down}"


def group(rng, q: Asked):
    words, function = rng.choice([(f"number of {q.plural}", "count(*)")]
                                 + [(f"{w} {q.number}", f"{f}({q.number})")
                                    for w, f in AGGREGATES[:4]])
    only = f", counting only {q.plural}{q.english}" if q.english else ""
    among = f" among {q.plural}{q.english}" if q.english else ""
    query = f"SELECT {q.text}, {function} FROM {q.table}{q.filtered} GROUP BY {q.text}"
    return (f"For each {q.text}, show the {words}{only}.",
            f"What is the {words} for every {q.text}{among}?"), [query] * 2, \
        f" {function.partition('(')[0]}"


def having(rng, q: Asked):
    n = rng.randint(2, 9)
    query = (f"SELECT {q.text} FROM {q.table}{q.filtered} GROUP BY {q.text} "
             f"HAVING count(*) >= {n}")
    return (f"Which {q.text} do at least {n} {q.plural}{q.english} have?",
            f"Show every {q.text} that is shared by at least {n} {q.plural}{q.english}."), \
        [query] * 2, ""


def distinct(rng, q: Asked):
    return (f"How many different {q.text} values do {q.plural}{q.english} have?",
            f"List the different {q.text} values of {q.plural}{q.english}."), \
        [f"SELECT count(DISTINCT {q.text}) FROM {q.table}{q.filtered}",
         f"SELECT DISTINCT {q.text} FROM {q.table}{q.filtered}"], ""


SINGLE = {"list": list_columns, "list2": list_two, "count": count_rows, "aggregate": aggregate,
          "order": order, "top": top, "group": group, "having": having, "distinct": distinct}


# Questions. Each function returns the question, its query, and the template.

def ask_one_table(rng, schema):
    """Make a question about one table of the schema."""
    table = rng.choice(list(schema))
    columns = {c: v for c, v in schema[table].items() if not c.endswith("_id")}
    texts = [c for c in columns if not isinstance(columns[c], int)]
    numbers = [c for c in columns if isinstance(columns[c], int)]
    text, number = rng.choice(texts), rng.choice(numbers)
    english, filtered, template = make_where(rng, columns, table, schema)
    asked = Asked(table, TABLES[table][0], columns, text, number, english, filtered)
    kind = rng.choice(list(SINGLE))
    way = rng.randrange(2)
    questions, queries, more = SINGLE[kind](rng, asked)
    return questions[way], queries[way], f"{kind} {way} {template}{more}"


def ask_two_tables(rng, schema):
    """Make a question about rows of the second table that names their rows in the first."""
    parent, child = schema
    columns = {c: v for c, v in schema[child].items() if not c.endswith("_id")}
    plural, shown = TABLES[child][0], rng.choice(list(columns))
    number = rng.choice([c for c in columns if isinstance(columns[c], int)])
    english, filtered, template = make_condition(rng, schema[parent], "p.")
    if rng.random() < 0.5:
        more, query, extra = make_condition(rng, columns, "c.")
        english, filtered, template = (f"{english} and only {plural} {more}",
                                       f"{filtered} AND {query}", f"{template} also {extra}")
    joined = f"FROM {child} AS c JOIN {parent} AS p ON c.{parent}_id = p.id"
    kind, way = rng.choice("list count aggregate order each".split()), rng.randrange(2)
    owned = f"{plural} of {TABLES[parent][0]} {english}"
    if kind == "list":
        question = (f"Show the {shown} of {owned}.",
                    f"What are the {shown} values of the {owned}?")[way]
        query = f"SELECT c.{shown} {joined} WHERE {filtered}"
    elif kind == "count":
        question = (f"How many {owned} are there?", f"Count the {owned}.")[way]
        query = f"SELECT count(*) {joined} WHERE {filtered}"
    elif kind == "aggregate":
        words, function = rng.choice(AGGREGATES)
        template += f" {words}"
        question = (f"What is the {words} {number} of {owned}?",
                    f"Find the {words} {number} of the {owned}.")[way]
        query = f"SELECT {function}(c.{number}) {joined} WHERE {filtered}"
    elif kind == "order":
        question = (f"List the {shown} of {owned}, sorted by {number}.",
                    f"Order the {owned} by {number} and show the {shown}.")[way]
        query = f"SELECT c.{shown} {joined} WHERE {filtered} ORDER BY c.{number}"
    else:
        column = rng.choice([c for c, v in schema[parent].items() if not isinstance(v, int)])
        question = (f"For each {column} of a {parent}, show the number of {plural}.",
                    f"Count the {plural} for every {parent} {column}.")[way]
        query, template = f"SELECT p.{column}, count(*) {joined} GROUP BY p.{column}", ""
    return question, query, f"join {kind} {way} {template}"


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
                    rng.choice(v) if isinstance(v, list)
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
LIST_INPUTS = [[], [3], [-4, 7, 2, 9, 12, 5, 5], [10, -3, 6, 8, 0, 1, 15, 20],
               [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13], [-9, -2, 14, 18, 4, 30]]
TEXT_INPUTS = ["", "banana", "Hello World 42", "the Quick brown fox jumps over a Lazy dog",
               "A1 b2 sea eel tent  on", "abc cba Anna noon stats been to"]


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
    run = f"""
import copy, json, sys
name, inputs, programs = json.load(sys.stdin)
results = []
for program in programs:
    space = {{}}
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


def write_reduction(how, value):
    """Write the parts of a loop that counts, sums or otherwise reduces values.

    returns  the lines before the loop, its line for one element, and the result
    """
    return {"count": (["count = 0"], "count += 1", "count"),
            "sum": (["total = 0"], f"total += {value}", "total"),
            "product": (["result = 1"], f"result *= {value}", "result"),
            "list": (["result = []"], f"result.append({value})", "result"),
            "largest": (["best = None"],
                        f"best = {value} if best is None else max(best, {value})", "best"),
            "smallest": (["best = None"],
                         f"best = {value} if best is None else min(best, {value})", "best"),
            "join": (["result = ''"], f"result += {value}", "result"),
            "reverse": (["result = ''"], f"result = {value} + result", "result")}[how]


def write_loop(start, head, test, line, result):
    """Write a function's body: the lines `start`, a loop of this head, and `return` of the result.

    test  a condition of the loop's one line, or "" if the line runs for each element
    """
    inner = [f"    if {test}:", f"        {line}"] if test else [f"    {line}"]
    return [*start, head, *inner, f"return {result}"]


REDUCE = {"count": ("Count the {w}.", "Return the number of {w}.",
                    "Return how many {w} there are."),
          "sum": ("Return the sum of the {w}.", "Add up the {w}.", "Compute the total of the {w}."),
          "product": ("Return the product of the {w}.", "Multiply the {w}.",
                      "Compute the product of all {w}."),
          "list": ("Return a list of the {w}.", "Collect the {w} in a list.", "List the {w}."),
          "largest": ("Return the largest of the {w}, or None.",
                      "Find the maximum of the {w}, or None.",
                      "Return the greatest of the {w}, or None."),
          "smallest": ("Return the smallest of the {w}, or None.",
                       "Find the minimum of the {w}, or None.",
                       "Return the least of the {w}, or None.")}


def numbers_loop(rng, head, x, where, how):
    """Write a function that filters, maps and reduces numbers.

    head     the head of its loop
    x        the name of the element
    where    where the numbers are, in English
    how      which reduction
    returns  the docstring, the body, words for the function's name, and the template
    """
    values = {"k": (k := rng.randint(2, 9)), "m": k + rng.randint(2, 9), "j": rng.randint(2, 9)}
    keep = rng.choice(FILTERS) if rng.random() < 0.75 else ("numbers", "", "all")
    mapped = rng.choice(MAPS) if how != "count" and rng.random() < 0.6 else ("", "{x}", "")
    way = rng.randrange(3)
    words = (f"{mapped[0]} of the " if mapped[0] else "") + f"{keep[0]} {where}"
    doc = REDUCE[how][way].format(w=words.format(**values))
    test, value = keep[1].format(x=x, **values), mapped[1].format(x=x, **values)
    start, line, result = write_reduction(how, value)
    return (doc, write_loop(start, head, test, line, result), [keep[2], mapped[2]],
            f"{how} {way} {keep[0]} {mapped[0]}")


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
    xs, x, how = rng.choice(LISTS), rng.choice("x n v".split()), rng.choice(list(REDUCE))
    doc, body, words, template = numbers_loop(rng, f"for {x} in {xs}:", x, f"in {xs}", how)
    return (make_name(rng, how, *words), xs, doc, body, [[v] for v in LIST_INPUTS],
            f"list {template}")


def reduce_range(rng):
    """Write a function that reduces the numbers from 1 to n."""
    n, i = rng.choice("n limit end".split()), rng.choice("i j".split())
    how = rng.choice(list(REDUCE))
    doc, body, words, template = numbers_loop(rng, f"for {i} in range(1, {n} + 1):", i,
                                              f"from 1 to {n}", how)
    return (make_name(rng, how, *words), n, doc, body, [[v] for v in (0, 1, 2, 5, 9, 14, 20)],
            f"range {template}")


def choose(rng):
    """Write a function that maps the numbers that pass a test in one way, and all others in
    another, before it reduces them."""
    xs, x = rng.choice(LISTS), rng.choice("x n v".split())
    how, way = rng.choice(list(REDUCE)[1:]), rng.randrange(2)
    values = {"k": (k := rng.randint(2, 9)), "m": k + rng.randint(2, 9)}
    words, test, word = rng.choice(FILTERS)
    (first, one, _), (second, other, _) = rng.sample(MAPS, 2)
    i, j = rng.randint(2, 9), rng.randint(2, 9)
    numbers = (f"{first.format(j=i)} of {words.format(**values)} "
               f"and the {second.format(j=j)} of all others in {xs}")
    start, line, result = write_reduction(how, "y")
    body = [*start, f"for {x} in {xs}:",
            f"    y = {one.format(x=x, j=i)} if {test.format(x=x, **values)} "
            f"else {other.format(x=x, j=j)}", f"    {line}", f"return {result}"]
    return (make_name(rng, how, word, "mixed"), xs, REDUCE[how][way].format(w=numbers), body,
            [[v] for v in LIST_INPUTS], f"choose {how} {way} {words} {first} {second}")


def both(rng):
    """Write a function that returns two reductions of one list as a pair."""
    xs, x = rng.choice(LISTS), rng.choice("x n v".split())
    hows = rng.sample("count sum largest smallest".split(), 2)
    names = {"count": "count", "sum": "total", "largest": "high", "smallest": "low"}
    start, lines, words, template = [], [], [], []
    for how in hows:
        values = {"k": (k := rng.randint(2, 9)), "m": k + rng.randint(2, 9)}
        keep, test, _ = rng.choice(FILTERS)
        start.append(f"{names[how]} = {'None' if how in ('largest', 'smallest') else 0}")
        line = {"count": "count += 1", "sum": f"total += {x}",
                "largest": f"high = {x} if high is None else max(high, {x})",
                "smallest": f"low = {x} if low is None else min(low, {x})"}[how]
        lines += [f"    if {test.format(x=x, **values)}:", f"        {line}"]
        words.append({"count": "number", "sum": "sum", "largest": "largest",
                      "smallest": "smallest"}[how] + f" of the {keep.format(**values)}")
        template.append(f"{how} {keep}")
    doc = f"Return a pair: the {words[0]}, and the {words[1]} in {xs}."
    body = [*start, f"for {x} in {xs}:", *lines, f"return {names[hows[0]]}, {names[hows[1]]}"]
    return (make_name(rng, *hows, "pair"), xs, doc, body, [[v] for v in LIST_INPUTS],
            f"both {', '.join(template)}")


def text_loop(rng):
    """Write a function that filters and reduces the characters of a text."""
    s, x = rng.choice(TEXTS), rng.choice("c ch".split())
    how, way = rng.choice("count join reverse list".split()), rng.randrange(2)
    words, test, word = rng.choice(CHARS)
    c = rng.choice("abenst")
    change, mapped = rng.choice([
        ("", "{x}"), (", in upper case", "{x}.upper()"), (", each one twice", "{x} * 2")
    ]) if how != "count" else ("", "{x}")
    ways = {"count": ("Count the {w} in {s}.", "Return how many {w} there are in {s}."),
            "join": ("Return the {w} in {s} as a string{m}.", "Keep only the {w} of {s}{m}."),
            "reverse": ("Return the {w} in {s} in reverse order{m}.",
                        "Keep only the {w} of {s}, backwards{m}."),
            "list": ("Return a list of the {w} in {s}{m}.",
                     "Collect the {w} of {s} in a list{m}.")}
    start, line, result = write_reduction(how, mapped.format(x=x))
    doc = ways[how][way].format(w=words.format(c=c), s=s, m=change)
    body = write_loop(start, f"for {x} in {s}:", test.format(x=x, c=c), line, result)
    return (make_name(rng, how, word), s, doc, body, [[v] for v in TEXT_INPUTS],
            f"text {how} {way} {words} {change}")


def word_loop(rng):
    """Write a function that filters and reduces the words of a text."""
    s, x = rng.choice(TEXTS), rng.choice("w word".split())
    how, way = rng.choice("count list lengths longest".split()), rng.randrange(2)
    words, test, word = rng.choice(WORDS)
    values = {"k": rng.randint(2, 5), "c": rng.choice("abenst")}
    ways = {"count": ("Count the {w} in {s}.", "Return how many {w} there are in {s}."),
            "list": ("Return a list of the {w} in {s}.", "Collect the {w} of {s} in a list."),
            "lengths": ("Return the total length of the {w} in {s}.",
                        "Add up the lengths of the {w} of {s}."),
            "longest": ("Return the longest of the {w} in {s}, or ''.",
                        "Find the longest of the {w} of {s}, or ''.")}
    start, line, result = {
        "count": (["count = 0"], "count += 1", "count"),
        "list": (["result = []"], f"result.append({x})", "result"),
        "lengths": (["total = 0"], f"total += len({x})", "total"),
        "longest": (["best = ''"], f"best = max(best, {x}, key=len)", "best")}[how]
    doc = ways[how][way].format(w=words.format(**values), s=s)
    body = write_loop(start, f"for {x} in {s}.split():", test.format(x=x, **values), line, result)
    return (make_name(rng, how, word), s, doc, body, [[v] for v in TEXT_INPUTS],
            f"words {how} {way} {words}")


def branch(rng):
    """Write a function that labels a number by the bounds that it lies between."""
    x, n, way = rng.choice("x n value score".split()), rng.randint(2, 3), rng.randrange(3)
    bounds, labels = sorted(rng.sample(range(1, 60), n)), rng.sample(LABELS, n + 1)
    down = rng.randrange(2)
    op, word = ("<", "below") if not down else (">", "above")
    bounds = bounds[::-1] if down else bounds
    cases = [(f"'{label}' if {x} is {word} {b}", f"if {x} {op} {b}:", label)
             for b, label in zip(bounds, labels)]
    doc = (("Return ", "Give ", "Classify: ")[way] + ", ".join(c[0] for c in cases)
           + f", else '{labels[-1]}'.")
    body = ([line for _, test, label in cases for line in (test, f"    return '{label}'")]
            + [f"return '{labels[-1]}'"])
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
    how, way = rng.choice(list(REDUCE)[1:]), rng.randrange(3)
    doc = REDUCE[how][way].format(w=f"{words} of the pairs in {a} and {b}{kept}")
    start, line, result = write_reduction(how, value.format(x=x, y=y))
    body = write_loop(start, f"for {x}, {y} in zip({a}, {b}):", test.format(x=x, y=y), line,
                      result)
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
    doc = ("Count how often {w} occurs{f}.",
           "Return a dict with the number of times {w} occurs{f}.")[way]
    doc = doc.format(w=words, f=", for " + keep + " only" if keep else "").format(**values)
    body = ["counts = {}"] + write_loop(
        [], f"for {x} in {xs}:", test.format(**values),
        f"counts[{key}] = counts.get({key}, 0) + 1".format(**values), "counts")
    return (make_name(rng, "tally", "count", "groups"), xs, doc, body,
            [[v] for v in LIST_INPUTS], f"tally {way} {words} {keep}")


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
            continue
        for example in take(task, "train", args.n, args.seed):
            print(json.dumps({"category": task, "prompt": example.prompt}))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    from cli.main import run_script
    sys.exit(run_script(main))
