"""REST and SuffixDecoding: what is looked up, what is guessed, and what a datastore holds."""
import heapq
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import tasks
from common import CachedLM, InputError, autoregressive, encode, eos_ids
from fake_models import ScriptedLM, markov, scripted
from families import near, tiny
from helpers import ROOT, per_call, tokens_of
from survey import rest as module
from survey.rest import (AFTER, BOUNDARY, LONGEST, Datastore, TokensPerCall, as_text, as_tokens,
                         build, load_datastore, measure_tokens_per_call, rest, retrieve,
                         retrieve_by_score)
from training.parts import load_part, save_part

PROMPT = [3, 14, 15, 3, 14]
WORDLESS = SimpleNamespace(eos_token_id=None, pad_token_id=None)  # a tokenizer that ends nothing


def store_of(*texts):
    return Datastore("".join(as_text(text) + BOUNDARY for text in texts))


# -------------------------------------------------------------------------------------- lookup

def followers(texts, suffix):
    """Read what follows a suffix in texts, by looking at every place."""
    return [tuple(text[i:i + AFTER]) for text in texts for i in range(len(suffix), len(text) + 1)
            if text[i - len(suffix):i] == suffix]


def count_prefixes(following):
    counts = {}
    for found in following:
        for end in range(1, len(found) + 1):
            counts[found[:end]] = counts.get(found[:end], 0) + 1
    return counts


def paths_of(ids, parents):
    """Return the tokens from below the root to each node but the root, which comes first."""
    paths = [()]
    for token, parent in zip(ids[1:], parents[1:]):
        paths.append((*paths[parent], token))
    return paths[1:]


def random_texts(vocab):
    """Make 150 times (texts that repeat parts of each other, a part of one, whether it is searched
    as well, as a store that grew token by token)."""
    rng = random.Random(vocab)
    kinds = range(max(0, vocab - 6), vocab)  # few kinds, so that suffixes are found
    for _ in range(150):
        texts = [rng.choices(kinds, k=rng.randint(1, 40)) for _ in range(4)]
        texts[0] += texts[1][:rng.randint(1, 30)] + rng.choices(kinds, k=5)
        query, own = rng.choice(texts)[:rng.randint(1, 40)], Datastore()
        grow = rng.random() < 0.5
        for i in range(0, len(query), 3) if grow else ():
            own.add(as_text(query[i:i + 3]))
        yield texts, query, own, [query] * grow, rng


@pytest.mark.parametrize("vocab", [2, 8, 56322, 70000])
def test_the_lookup_equals_a_scan_of_every_place(vocab):
    """With token ids among and beyond the surrogates too. Of equally frequent prefixes any may be
    taken."""
    sizes = set()
    for texts, query, own, searched, rng in random_texts(vocab):
        n, longest = rng.choice([0, 1, 2, 5, 20, 500]), rng.choice([1, 3, LONGEST])
        ids, parents = retrieve([own, store_of(*texts)], as_text(query), n, longest)
        found, seen, taken = set(paths_of(ids, parents)), set(), 0
        assert ids[0] == query[-1] and parents[0] == -1 and len(found) == len(ids) - 1 <= n
        for size in range(min(longest, len(query)), 0, -1):
            for some in searched, texts:
                counts = count_prefixes(followers(some, query[-size:]))
                new = {path: count for path, count in counts.items() if path not in seen}
                here = sorted((new[path] for path in found & new.keys()), reverse=True)
                assert here == sorted(new.values(), reverse=True)[:n - taken]
                seen, taken = seen | new.keys(), taken + len(here)
        assert taken == len(found) == min(n, len(seen))
        sizes.add(taken)
    assert len(sizes) > 5


def grow_greedily(following, limit):
    """Grow SuffixDecoding's tree as its paper does: D of a child is D of its parent times the ratio
    of their counts. Return the sum of D."""
    counts, score = {(): len(following)} | count_prefixes(following), 0.0
    heap = [(-1.0, ())]
    for i in range(limit + 1):
        if not heap:
            break
        D, node = heapq.heappop(heap)
        score -= D if i else 0.0  # the suffix itself is no guess
        for child in counts:
            if child and child[:-1] == node:
                heapq.heappush(heap, (D * counts[child] / counts[node], child))
    return score


@pytest.mark.parametrize("vocab", [3, 8])
def test_the_scored_tree_is_the_best_of_all_suffixes_and_stores(vocab):
    for texts, query, own, searched, rng in random_texts(vocab):
        n, alpha = rng.choice([1, 5, 20]), rng.choice([0.5, 1, 4])
        ids, parents = retrieve_by_score([own, store_of(*texts)], as_text(query), n, LONGEST, alpha)
        found, highest, scores = paths_of(ids, parents), 0.0, []
        for size in range(1, min(LONGEST, len(query)) + 1):
            for some in searched, texts:
                following, limit = followers(some, query[-size:]), min(n, int(alpha * size))
                if following:
                    highest = max(highest, grow_greedily(following, limit))
                    counts = count_prefixes(following)
                    if len(found) <= limit:
                        scores.append(sum(counts.get(x, 0) for x in found) / len(following))
        assert highest == pytest.approx(max(scores, default=0.0))


def test_suffixdecoding_by_hand():
    """After 7 1 2 stands 8, once. After 1 2 stand 3 4 5, three times of four. With two guesses of
    D = 3/4 the shorter suffix wins; where each token allows one half, the longer one does."""
    store = store_of([7, 1, 2, 8], *[[1, 2, 3, 4, 5]] * 3)

    def guesses(alpha, n=9, text=(7, 1, 2), **more):
        ids, parents = retrieve_by_score([store], as_text(text), n, LONGEST, alpha, **more)
        return paths_of(ids, parents)
    assert guesses(1) == [(3,), (3, 4)] and guesses(0.5) == [(8,)]
    assert guesses(2) == [(3,), (3, 4), (3, 4, 5), (8,)] and guesses(2, n=1) == [(8,)]
    assert guesses(2, text=[6]) == []


def test_of_equally_frequent_prefixes_the_shorter_are_guessed():
    store = store_of([1, 2, 3, 4, 5], [1, 2, 6, 7, 8])
    ids, parents = retrieve([store], as_text([1, 2]), 4)
    assert sorted(paths_of(ids, parents)) == [(3,), (3, 4), (6,), (6, 7)]


def test_nothing_follows_the_end_of_an_answer():
    store = store_of([1, 2, 3], [4, 5], [9, 2, 3, 7])
    assert retrieve([store], as_text([9, 2]), 9) == ([2, 3, 7], [-1, 0, 1])
    assert retrieve([store], as_text([1, 2, 3]), 9) == ([3, 7], [-1, 0])  # nothing after 1 2 3
    for query in [4, 5], [5], [8, 8], [3, 7]:
        assert retrieve([store], as_text(query), 9) == (query[-1:], [-1])


@pytest.mark.parametrize("n, counted", [(99, 99), (100, 100), (101, 51), (200, 100), (201, 67)])
def test_of_more_than_100_places_an_even_sample_counts(n, counted):
    """The first in sorted order would all be followed by small tokens."""
    found = store_of(*([1, 2, 3 + i] for i in range(n))).find_following(as_text([1, 2]))
    firsts = sorted(as_tokens("".join(found)))
    assert len(found) == counted and firsts[:2] == [3, 3 + -(-n // 100)] and firsts[-1] >= n


@pytest.mark.parametrize("vocab", [1, 3, 50])
def test_a_store_that_grew_is_that_of_its_whole_text(vocab):
    """By nothing, by a token, by more than what is compared. Few tokens make many places alike."""
    rng = random.Random(vocab)
    for begin in (0, 7, 40):
        text = as_text(rng.choices(range(vocab), k=begin))
        grown = Datastore(text)
        for _ in range(40):
            more = as_text(rng.choices(range(vocab), k=rng.choice([0, 1, 1, 2, 5, 11, 40])))
            more += text[rng.randrange(len(text) + 1):][:rng.choice([0, 0, 30])]
            grown.add(more)
            text += more
            fresh = Datastore(text)
            assert grown.text == text and sorted(grown.order) == sorted(fresh.order)
            assert [*map(grown.sort_key, grown.order)] == [*map(fresh.sort_key, fresh.order)]
    assert as_text(as_tokens(text)) == text


# ------------------------------------------------------------------------------ what is guessed

@pytest.mark.parametrize("nodes, alpha, calls", [(31, 0, 19), (11, 0, 19), (5, 0, 40), (31, 9, 7),
                                                 (64, 4, 5)])
def test_an_answer_of_the_datastore_is_accepted_whole(nodes, alpha, calls):
    """10 tokens a call and one more, or as many as nodes, from the first call on: two tokens of the
    prompt are enough. With alpha a call has alpha tokens for each token of the match."""
    answer, log = random.Random(0).sample(range(20, 300), 200), []
    target = scripted(lambda text: (PROMPT + answer + [0] * 99)[len(text)], 300)
    store = store_of([7, 7, 7], PROMPT[-2:] + answer, [7, 7, 8])
    chunks = rest(target, PROMPT, nodes=nodes, alpha=alpha, store=store, grow=False, log=log)
    assert tokens_of(chunks, 200) == answer and target.calls == calls
    assert all(r["accepted"] == r["guessed"] > 0 for r in log[:-1])


def test_the_text_itself_is_looked_up():
    """A period of 23 tokens, with nothing in the datastore: 22 tokens come one by one. Then 5 is
    there for the second time, and every guess is accepted."""
    def accepted(**options):
        target, log = scripted(lambda text: (text[-1] + 1) % 23, 23), []
        got = tokens_of(rest(target, [5, 6], nodes=11, store=Datastore(), log=log, **options), 111)
        assert got == [(7 + i) % 23 for i in range(111)]
        return [r["accepted"] for r in log]
    assert accepted(grow=False) == [0] * 111 and accepted() == [0] * 22 + [10] * 9


@pytest.mark.parametrize("prompt, options, expected", [
    ([1, 2, 4, 8, 1, 2], {}, [4]), ([1, 2, 4, 8, 1, 2], dict(grow=False), [3]),
    ([1, 2, 4, 8, 1, 2], dict(nodes=10), [4, 8, 1, 2, 3, 7]), ([1, 2, 4, 6, 1, 2], {}, [7]),
    ([1, 2, 4, 6, 1, 2], dict(longest=2), [4])])
def test_the_text_comes_before_the_datastore_for_a_suffix(prompt, options, expected):
    """4 follows 1 2 once in the text, 3 twice in the datastore; 7 follows a longer suffix, where
    that is looked up."""
    target = scripted(lambda text: 0, 9)
    store = store_of([1, 2, 3], [1, 2, 3], [6, 1, 2, 7])
    next(rest(target, prompt, store=store, **{"nodes": 2} | options))
    [(ids, _)] = target.trees
    assert ids[1:] == expected


@pytest.mark.parametrize("gain, nodes", [
    ((1, 1.9, 2.5, 2.6, 2.7, 2.8, 2.9), 3), ((1, 1.04, 1.1, 1.2, 1.3, 1.4, 1.5), 0),
    ((1, 2, 4, 8, 16, 32, 80), 63)])
@pytest.mark.parametrize("grow", [False, True])
def test_as_many_guesses_as_pay(gain, nodes, grow, monkeypatch):
    """Tokens per call over seconds per call, both by the rows of a call, as they were measured with
    the text or without it."""
    rows, seen = (1, 2, 4, 8, 16, 32, 64), []
    seconds = dict(zip(rows, (1, 1.05, 1.2, 2, 4, 8, 16)))
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [
        seconds.get(n, 0.001) for n in range(most + 1)] if most == 64 else None)
    monkeypatch.setattr(module, "retrieve", lambda *given: seen.append(given[2]) or ([3], [-1]))
    measured = {m: TokensPerCall(*((1, x) if grow else (x, 1))) for m, x in zip(rows, gain)}
    lm = CachedLM(tiny("llama"))
    for searched, expected in ((grow, nodes), (not grow, 0)):
        tokens_of(rest(lm, PROMPT, store=Datastore("", measured), grow=searched), 5)
        assert set(seen) == {expected}
        seen.clear()


# ------------------------------------------------------------------------------- the datastore

@pytest.mark.parametrize("grow", [False, True])
def test_tokens_per_call_are_those_of_decoding(grow):
    """Answers replayed without a model give what the method gives with it."""
    rng = random.Random(3)
    texts = [rng.choices(range(4), k=40) for _ in range(8)]
    store, data = store_of(*texts[2:]), [(texts[0][:5], texts[0][5:]), (texts[1][:2], texts[1][2:])]
    for n in (1, 6, 30):
        calls = 0
        for prompt, answer in data:
            lm = scripted(lambda text: (prompt + answer + [0] * 99)[len(text)], 4)
            chunks = rest(lm, prompt, nodes=n + 1, store=store, grow=grow)
            assert tokens_of(chunks, len(answer)) == answer
            calls += lm.calls
        assert measure_tokens_per_call(store, data, n, grow) == (35 + 38) / calls > 1
    assert measure_tokens_per_call(store, data, 0, grow) == 1


def test_a_datastore_is_made_and_used(tmp_path, capsys):
    """It has a model's own answers in the order of the prompts, each after two tokens of its
    prompt, and a repeated prompt once. Its prompts take few calls."""
    model, file = tiny("llama"), tmp_path / "new" / "store.safetensors"
    eos = eos_ids(model, WORDLESS)
    prompts = [[a, b, 9, 7] for a in range(20, 24) for b in range(30, 33)]
    build(model, WORDLESS, [*prompts, prompts[0], [5] * 150], out=file, max_new_tokens=40)
    answers = [tokens_of(autoregressive(CachedLM(model), p), 40, eos) for p in prompts]
    text = [token for answer in answers for token in [9, 7, *answer, -1]]
    assert load_file(file)["tokens"].tolist() == [token + 1 for token in text]
    store = load_datastore(str(file), model)
    measured = store.tokens_per_call
    assert as_tokens(store.text) == text and list(measured) == [1, 2, 4, 8, 16, 32, 64]
    assert measured[1] == (1, 1) and f"12 texts, {len(text)} tokens" in capsys.readouterr().out
    held_out = random.Random(0).sample(range(12), 1)[0]  # measured without it
    others = store_of(*([9, 7, *a] for i, a in enumerate(answers) if i != held_out))
    expected = [measure_tokens_per_call(others, [(prompts[held_out], answers[held_out])], 15, grow)
                for grow in (False, True)]
    assert [*measured[16]] == pytest.approx(expected) and expected[0] != expected[1]
    lm, longest = CachedLM(model), max(range(12), key=lambda i: len(answers[i]))
    got = tokens_of(rest(lm, prompts[longest], nodes=41, datastore=str(file)), 40, eos)
    assert got == answers[longest] and lm.calls < len(got) / 2
    build(model, WORDLESS, prompts[:3], out=file, max_new_tokens=40)  # again: not the old one
    assert len(load_datastore(str(file), model).text) < len(text) / 2


@pytest.mark.parametrize("largest, kind", [(65534, torch.uint16), (65535, torch.int32)])
def test_texts_are_kept_in_two_bytes_a_token_where_they_fit(largest, kind, tmp_path):
    model, texts = tiny("llama", vocab_size=65536), [[3, largest, 0], [55296, 57343]]
    build(model, None, texts, out=tmp_path / "x", text=True)
    assert load_file(tmp_path / "x")["tokens"].dtype == kind
    store = load_datastore(tmp_path / "x", near(model, 0.05).bfloat16())  # tuned, of another type
    assert as_tokens(store.text) == [3, largest, 0, -1, 55296, 57343, -1]


GAIN = [[1, 1]] * 7


@pytest.mark.parametrize("tensors, gain, said", [
    ({}, GAIN, "'tokens'"), ({"tokens": torch.tensor([4.0, 0.0])}, GAIN, "float"),
    ({"tokens": torch.tensor([[4, 0]])}, GAIN, "list"),
    ({"tokens": torch.tensor([-4, 0])}, GAIN, "range"),
    ({"tokens": torch.tensor([4, 0])}, GAIN[:6], "shorter"),
    ({"tokens": torch.tensor([4, 0])}, [[1]] * 7, "with_text"),
    ({"tokens": torch.tensor([4, 0])}, [[1, None]] * 7, "NoneType"),
    ({"tokens": torch.tensor([4, 0])}, None, "NoneType"),
    ({"tokens": torch.zeros(0, dtype=torch.int32)}, GAIN, "tokens that the model has"),
    ({"tokens": torch.tensor([62, 0])}, GAIN, "tokens that the model has")])
def test_a_damaged_datastore_is_refused(tensors, gain, said, tmp_path):
    model = tiny("llama")
    save_part(tmp_path / "store", "a REST datastore", model, tensors, tokens_per_call=gain)
    with pytest.raises(InputError, match=f"expected .*store.*{said}|expected {said}"):
        load_datastore(tmp_path / "store", model)
    with pytest.raises(InputError, match="this model, got .*store.*another"):
        load_datastore(tmp_path / "store", tiny("llama", seed=7))
    save_file({"masks": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(InputError, match="expected a file of a REST .*, got"):
        load_datastore(tmp_path / "other", model)


def test_a_store_without_measurements_needs_nodes():
    with pytest.raises(InputError, match="--nodes must be 1 or more for a store without tokens_pe"):
        next(rest(ScriptedLM(markov(1)), [0, 1], store=Datastore()))


def test_of_long_texts_the_beginning_is_measured(tmp_path):
    """Replaying all of a document could take hours; the file keeps all of it."""
    texts, gains = [[*range(10, 30), *[8] * 40], [*range(30, 50), *[8] * 40]], []
    for tokens in 19, 59:
        build(tiny("llama"), None, texts, out=tmp_path / "x", text=True, max_new_tokens=tokens)
        header, tensors = load_part(tmp_path / "x", "a REST datastore", tiny("llama"))
        assert len(tensors["tokens"]) == 122 and not (tmp_path / "x.work").exists()
        gains.append(header["tokens_per_call"][-1])
    assert gains[0] == [1, 1] and min(gains[1]) > 2  # only the ends have something in common


@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2], [1, 2]], [[1] * 150, [2] * 150, [3]]])
def test_too_little_text_is_refused(tmp_path, prompts):
    with pytest.raises(InputError, match="2 texts or more, or prompts of at most 40 tokens, got 1"):
        build(tiny("llama"), WORDLESS, prompts, out=tmp_path / "x", max_new_tokens=120)
    with pytest.raises(InputError, match="2 texts or more.*, got [01]"):
        build(tiny("llama"), None, [*prompts[:1], [4]], out=tmp_path / "x", text=True)


# ----------------------------------------------------------------------------- the committed one

def test_the_committed_datastore_has_answers_to_training_prompts_alone(embedded):
    """Its n-th text answers the n-th prompt of its command, whose templates are never those of
    held-out prompts: many are the very answer that the task has, and none would be by chance."""
    target, _, tokenizer = embedded
    assert (ROOT / "models/rest.safetensors").stat().st_size < 1_000_000
    texts = load_datastore(module.DATASTORE, target).text.split(BOUNDARY)[:-1]
    examples = [e for task in tasks.TASKS for e in tasks.take(task, "train", 2000, -2)]
    examples = list({e.prompt: e for e in examples}.values())
    held_out = {e.template for task in tasks.TASKS for e in tasks.take(task, "test", 300)}
    assert len(texts) == len(examples) and not held_out & {e.template for e in examples}
    same = {task: [] for task in tasks.TASKS}
    for text, example in list(zip(texts, examples))[::30]:
        *begun, end = as_tokens(text)
        assert begun[:2] == encode(tokenizer, example.prompt)[-2:]
        assert end == tokenizer.eos_token_id
        same[example.task].append(tokenizer.decode(begun[2:]) == example.answer)
    for task, some in same.items():
        assert sum(some) > 0.2 * len(some) > 10, task


def test_tokens_per_call_on_held_out_prompts_of_the_embedded_target(embedded, held_out):
    for options in {}, dict(alpha=4.0):
        assert per_call(rest, embedded[0], held_out[::2], nodes=16, **options) >= 1.6
