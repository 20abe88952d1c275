"""REST: the target's own output, exactly; what is looked up, and what the datastore holds."""
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import tasks
from common import CachedLM, InputError, Sampler, autoregressive, encode, eos_ids, greedy
from fake_models import ScriptedLM, markov, scripted
from families import near, tiny
from helpers import ROOT, choices, main, tokens_of
from survey import rest as module
from survey.parts import load_part, save_part
from survey.rest import (AFTER, BOUNDARY, LONGEST, Datastore, TokensPerCall, as_text, as_tokens,
                         build, load_datastore, measure_tokens_per_call, report, rest, retrieve)

PROMPT = [3, 14, 15, 3, 14]
def store_of(*texts):
    return Datastore("".join(as_text(text) + BOUNDARY for text in texts))


# -------------------------------------------------------------------------------------- lookup

def naive(stores, query, longest=LONGEST):
    """For each suffix of `query`, the longest first, and each list of texts {prefix: count} of what
    follows it there, by looking at every place."""
    for size in range(min(longest, len(query)), 0, -1):
        for texts in stores:
            counts = {}
            for text in texts:
                for i in range(size, len(text)):
                    if text[i - size:i] == query[-size:]:
                        for end in range(i + 1, min(i + AFTER, len(text)) + 1):
                            counts[tuple(text[i:end])] = counts.get(tuple(text[i:end]), 0) + 1
            yield counts


def paths_of(ids, parents):
    """The tokens from below the root to each node but the root, which comes first."""
    paths = [()]
    for token, parent in zip(ids[1:], parents[1:]):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("vocab", [2, 3, 8, 56322, 70000])
def test_the_lookup_equals_a_scan_of_every_place(vocab):
    """On random texts that repeat parts of each other, with one store and with two; token ids
    among and beyond the surrogates too. Of equally frequent prefixes any may be taken."""
    rng, sizes = random.Random(vocab), set()
    kinds = range(max(0, vocab - 6), vocab)  # few kinds, so that suffixes are found
    for _ in range(150):
        texts = [rng.choices(kinds, k=rng.randint(1, 40)) for _ in range(4)]
        texts[0] += texts[1][:rng.randint(1, 30)] + rng.choices(kinds, k=5)
        query, n = rng.choice(texts)[:rng.randint(1, 40)], rng.choice([0, 1, 2, 5, 20, 500])
        longest, own, grow = rng.choice([1, 3, LONGEST]), Datastore(), rng.random() < 0.5
        for i in range(0, len(query), 3) if grow else ():
            own.add(as_text(query[i:i + 3]))
        ids, parents = retrieve([own, store_of(*texts)], as_text(query), n, longest)
        found, seen, taken = set(paths_of(ids, parents)), set(), 0
        assert ids[0] == query[-1] and parents[0] == -1 and len(found) == len(ids) - 1 <= n
        for counts in naive([[query] * grow, texts], query, longest):
            new = {path: count for path, count in counts.items() if path not in seen}
            here = sorted((new[path] for path in found & new.keys()), reverse=True)
            assert here == sorted(new.values(), reverse=True)[:n - taken]
            seen, taken = seen | new.keys(), taken + len(here)
        assert taken == len(found) == min(n, len(seen))
        sizes.add(taken)
    assert len(sizes) > 5


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


def test_of_many_matches_an_even_sample_counts(monkeypatch):
    """The first of the sorted ones would all be followed by token 3."""
    monkeypatch.setattr(module, "MATCHES", 8)
    store = store_of(*([1, 2, 3 + i // 10] for i in range(40)))
    assert 5 <= len(store.find_following(as_text([1, 2]))) <= 8
    assert sorted(retrieve([store], as_text([1, 2]), 9)[0]) == [2, 3, 4, 5, 6]


def test_as_many_matches_as_count_all_count():
    """100 of 100, half of 101."""
    for n, counted in ((99, 99), (100, 100), (101, 51), (200, 100), (201, 67)):
        store = store_of(*([1, 2, 3 + i] for i in range(n)))
        assert len(store.find_following(as_text([1, 2]))) == counted


def same(grown: Datastore, fresh: Datastore) -> bool:
    """Equal but for the order of positions where the same stands."""
    return (grown.text == fresh.text and sorted(grown.order) == sorted(fresh.order)
            and [*map(grown.sort_key, grown.order)] == [*map(fresh.sort_key, fresh.order)])


@pytest.mark.parametrize("vocab", [1, 2, 3, 50])
def test_a_store_that_grew_is_that_of_its_whole_text(vocab):
    """By nothing, by a token, by more than what is compared; in texts of few tokens, with the same
    parts over and over, many places are alike."""
    rng = random.Random(vocab)
    for begin in (0, 1, 7, 40):
        text = as_text(rng.choices(range(vocab), k=begin))
        grown = Datastore(text)
        for _ in range(60):
            more = as_text(rng.choices(range(vocab), k=rng.choice([0, 1, 1, 2, 5, 11, 40])))
            more += text[rng.randrange(len(text) + 1):][:rng.choice([0, 0, 30])]
            grown.add(more)
            text += more
            assert same(grown, Datastore(text))
            if text:
                s = text[(at := rng.randrange(len(text))):at + rng.randint(1, LONGEST)]
                assert sorted(grown.find_following(s)) == sorted(Datastore(text).find_following(s))
    assert as_text(as_tokens(text)) == text


def test_a_store_that_grows_moves_its_last_places_alone():
    """However long it is: 25 stand before the end of what is compared."""
    text, asked = as_text(random.Random(0).choices(range(9), k=3000)), []
    store = Datastore(text)
    here = store.sort_key
    store.sort_key = lambda i: asked.append(i) or here(i)
    store.add(as_text([1, 2]))
    assert len(asked) < (25 + 27) * 15  # 12 comparisons find one of 3,000
    assert same(store, Datastore(text + as_text([1, 2])))


# ------------------------------------------------------------------------------ what is guessed

@pytest.mark.parametrize("sample", [greedy, Sampler(0.01, seed=1)])
@pytest.mark.parametrize("nodes, size", [(30, 11), (10, 11), (4, 5), (1, 2)])
def test_an_answer_of_the_datastore_is_accepted_whole(sample, nodes, size):
    """10 tokens a call and one more, or all nodes and one more, from the first call on: two tokens
    of the prompt are enough."""
    answer, log = random.Random(0).sample(range(20, 200), 110), []
    target = scripted(lambda text: (PROMPT + answer + [0] * 99)[len(text)], 200)
    store = store_of([7, 7, 7], PROMPT[-2:] + answer, [7, 7, 8])
    got = tokens_of(rest(target, PROMPT, nodes=nodes, store=store, grow=False, sample=sample,
                         log=log), 110)
    assert got == answer and target.calls == 110 // size
    assert all(r["accepted"] == r["guessed"] == size - 1 for r in log[:-1])


def test_the_text_itself_is_looked_up():
    """A period of 23 tokens, with nothing in the datastore: from its second round on every guess
    is accepted."""
    def calls(**options):
        target, log = scripted(lambda text: (text[-1] + 1) % 23, 23), []
        got = tokens_of(rest(target, [5, 6], nodes=10, store=Datastore(), log=log, **options), 111)
        assert got == [(7 + i) % 23 for i in range(111)]
        return [r["accepted"] for r in log]
    assert calls(grow=False) == [0] * 111
    # 22 tokens, one by one: 5 is there for the second time; then 11 in a call
    assert calls() == [0] * 22 + [10] * 9


def test_the_text_comes_before_the_datastore_for_a_suffix():
    """4 follows 1 2 once in the text, 3 twice in the datastore; 7 follows a longer suffix, where
    that is looked up."""
    def guessed(prompt, store, **options):
        lm, seen = scripted(lambda text: 0, 9), []
        forward = lm.forward
        lm.forward = lambda ids, parents: seen.append(ids) or forward(ids, parents)
        next(rest(lm, prompt, store=store, **{"nodes": 1} | options))
        return seen[0][1:]
    prompt, store = [1, 2, 4, 8, 1, 2], store_of([1, 2, 3], [1, 2, 3], [6, 1, 2, 7])
    assert guessed(prompt, store) == [4]
    assert guessed(prompt, store, grow=False) == [3]
    assert guessed(prompt, store, nodes=9) == [4, 8, 1, 2, 3, 7]
    assert guessed([1, 2, 4, 6, 1, 2], store) == [7]
    assert guessed([1, 2, 4, 6, 1, 2], store, longest=2) == [4]


@pytest.mark.parametrize("gain, nodes", [
    ((1, 1.9, 2.5, 2.6, 2.7, 2.8, 2.9), 3), ((1, 1.04, 1.1, 1.2, 1.3, 1.4, 1.5), 0),
    ((1, 2, 4, 8, 16, 32, 80), 63)])
def test_as_many_guesses_as_pay(gain, nodes, monkeypatch):
    """Tokens per call over seconds per call, both by the rows of a call; the gains of what is
    searched, for the same target."""
    lm, rows, seen = CachedLM(tiny("llama")), (1, 2, 4, 8, 16, 32, 64), []
    seconds = dict(zip(rows, (1, 1.05, 1.2, 2, 4, 8, 16)))
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [
        seconds.get(n, 0.001) for n in range(most + 1)] if most == 64 else None)

    def spy(stores, text, n, longest):
        seen.append(n)
        return retrieve(stores, text, n, longest)
    monkeypatch.setattr(module, "retrieve", spy)
    stores = [Datastore(as_text(PROMPT * 20), {m: kept(x) for m, x in zip(rows, gain)})
              for kept in (lambda x: TokensPerCall(x, 1), lambda x: TokensPerCall(1, x))]
    for grow, searched in itertools.product((False, True), repeat=2):
        tokens_of(rest(lm, PROMPT, store=stores[searched], grow=grow), 5)
        assert set(seen) == {nodes if grow == searched else 0}
        seen.clear()


def test_guesses_are_chosen_again_when_the_context_has_doubled(monkeypatch):
    """Rows cost nothing until it has 256 tokens, then each as much as the first."""
    lm, log = CachedLM(tiny("llama", max_position_embeddings=400)), []
    monkeypatch.setattr(module, "row_costs", lambda lm, most: [
        1.0 if lm.length < 256 else float(n) for n in range(most + 1)])
    store = Datastore(as_text([*range(61)] * 20), {
        1: TokensPerCall(1, 1), 2: TokensPerCall(1.5, 1.6)})
    prompt = [n % 61 for n in range(252)]
    chunks = rest(lm, prompt, store=store, grow=False, log=log)
    lengths = [*itertools.accumulate((len(next(chunks)) for _ in range(12)), initial=251)]
    guessed = [r["guessed"] for r in log]
    assert guessed == [int(length < 256) for length in lengths[:12]] and {*guessed} == {0, 1}


# ------------------------------------------------------------------------------- the datastore

@pytest.mark.parametrize("grow", [False, True])
def test_tokens_per_call_are_those_of_decoding(grow):
    """Answers replayed without a model give what the method gives with it."""
    rng = random.Random(3)
    texts = [rng.choices(range(4), k=40) for _ in range(8)]
    store, data = store_of(*texts[2:]), [(texts[0][:5], texts[0][5:]), (texts[1][:2], texts[1][2:])]
    for n in (0, 1, 6, 30):
        calls = 0
        for prompt, answer in data:
            lm = scripted(lambda text: (prompt + answer + [0] * 99)[len(text)], 4)
            assert tokens_of(rest(lm, prompt, nodes=n or 1, store=store if n else Datastore(),
                                  grow=grow and n > 0), len(answer)) == answer
            calls += lm.calls
        assert measure_tokens_per_call(store, data, n, grow) == (35 + 38) / calls
    assert measure_tokens_per_call(store, data, 0, grow) == 1 < 73 / calls


def test_a_datastore_is_made_and_used(tmp_path, capsys):
    """Of a tiny model's own answers: the file has them, each after two tokens of its prompt, in the
    order of the prompts; a repeated prompt once. With it their prompts take few calls."""
    model, wordless = tiny("llama"), SimpleNamespace(eos_token_id=None, pad_token_id=None)
    eos = eos_ids(model, wordless)
    prompts = [[a, b, 9, 7] for a in range(20, 24) for b in range(30, 33)]
    file = tmp_path / "new" / "store.safetensors"
    build(model, wordless, [*prompts, prompts[0], [5] * 150], out=file, max_new_tokens=40)
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
    assert [measured[16].alone, measured[16].with_text] == pytest.approx(expected)
    assert expected[0] != expected[1]
    lm, longest = CachedLM(model), max(range(12), key=lambda i: len(answers[i]))
    got = tokens_of(rest(lm, prompts[longest], nodes=40, datastore=str(file)), 40, eos)
    assert got == answers[longest] and lm.calls < len(got) / 2
    build(model, wordless, prompts[:3], out=file, max_new_tokens=40)  # again: not the old one
    assert len(load_datastore(str(file), model).text) < len(text) / 2


def test_a_datastore_of_another_model_is_refused(tmp_path):
    """By its embeddings: those of a tuned model are nearly the same, in any type."""
    model, file, wordless = tiny("llama"), tmp_path / "store.safetensors", SimpleNamespace()
    build(model, wordless, [[1, 2, 3], [1, 2, 4, 5]], out=file, text=True)
    assert not file.with_suffix(".safetensors.work").exists()  # no answers were needed
    for own in near(model, 0.05), tiny("llama").bfloat16():
        assert as_tokens(load_datastore(str(file), own).text) == [1, 2, 3, -1, 1, 2, 4, 5, -1]
    for other in tiny("llama", seed=7), tiny("gpt2"), tiny("llama", hidden_size=16):
        with pytest.raises(InputError, match="datastore for this model, got .*store.*: another"):
            next(rest(CachedLM(other), PROMPT, datastore=str(file)))


def test_tokens_that_the_model_has_not_are_refused(tmp_path):
    """Of 61 tokens the first 50 were kept."""
    model, file = tiny("llama"), tmp_path / "store"
    build(model, None, [[14, 15, 60], [14, 15, 60, 3]], out=file, text=True)
    assert next(rest(CachedLM(model), PROMPT[:3], nodes=2, datastore=str(file)))
    model.resize_token_embeddings(50)
    with pytest.raises(InputError, match="tokens that the model has, got .*store"):
        next(rest(CachedLM(model), PROMPT[:3], nodes=2, datastore=str(file)))


@pytest.mark.parametrize("largest, kind", [(65534, torch.uint16), (65535, torch.int32)])
def test_tokens_of_any_size_are_kept(largest, kind, tmp_path):
    """In two bytes where they fit."""
    model, texts = tiny("llama", vocab_size=65536), [[3, largest, 0], [55296, 57343]]
    build(model, None, texts, out=tmp_path / "x", text=True)
    assert load_file(tmp_path / "x")["tokens"].dtype == kind
    store = load_datastore(tmp_path / "x", model)
    assert as_tokens(store.text) == [3, largest, 0, -1, 55296, 57343, -1]


def test_what_is_no_datastore_is_refused(tmp_path):
    model = tiny("llama")
    save_file({"masks": torch.zeros(2)}, tmp_path / "other")
    save_part(tmp_path / "heads", "Medusa heads", model, {"tokens": torch.zeros(2)})
    (tmp_path / "text").write_text("no tensors")
    for path in tmp_path / "none", tmp_path, tmp_path / "other", tmp_path / "text":
        with pytest.raises(InputError, match="expected a file of a REST .*, got") as error:
            load_datastore(str(path), model)
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="expected a file of a REST .*, one of Medusa heads"):
        load_datastore(str(tmp_path / "heads"), model)


@pytest.mark.parametrize("tensors, gain, said", [
    ({}, [[1, 1]] * 7, "'tokens'"), ({"tokens": torch.tensor([4.0, 0.0])}, [[1, 1]] * 7, "float"),
    ({"tokens": torch.tensor([[4, 0]])}, [[1, 1]] * 7, "list"),
    ({"tokens": torch.tensor([-4, 0])}, [[1, 1]] * 7, "range"),
    ({"tokens": torch.tensor([4, 0])}, [[1, 1]] * 6, "IndexError"),
    ({"tokens": torch.tensor([4, 0])}, [[1]] * 7, "with_text"),
    ({"tokens": torch.tensor([4, 0])}, [[1, None]] * 7, "NoneType"),
    ({"tokens": torch.tensor([4, 0])}, None, "NoneType"),
    ({"tokens": torch.zeros(0, dtype=torch.int32)}, [[1, 1]] * 7, "tokens that the model has"),
    ({"tokens": torch.zeros(3, dtype=torch.int32)}, [[1, 1]] * 7, "tokens that the model has"),
    ({"tokens": torch.tensor([62, 0])}, [[1, 1]] * 7, "tokens that the model has")])
def test_a_damaged_datastore_is_refused(tensors, gain, said, tmp_path):
    model = tiny("llama")
    save_part(tmp_path / "store", "a REST datastore", model, tensors, tokens_per_call=gain)
    with pytest.raises(InputError, match=f"expected .*store.*{said}|expected {said}") as error:
        load_datastore(tmp_path / "store", model)
    assert "\n" not in str(error.value)


def test_a_datastore_is_loaded_once(monkeypatch):
    """Of each file, for each target."""
    model, loads = tiny("llama"), []
    monkeypatch.setattr(module, "load_datastore",
                        lambda path, model: loads.append(path) or store_of(PROMPT))
    targets = CachedLM(model), CachedLM(model)
    for target, file in ((0, "a"), (0, "b"), (0, "a"), (0, "b"), (1, "a")):
        next(rest(targets[target], PROMPT, nodes=2, datastore=file))
    assert loads == ["a", "b", "a"]


@pytest.mark.parametrize("options, message", [
    (dict(nodes=-1), "--nodes must be 0 or more, got -1"),
    (dict(longest=0), "--longest must be 1 to 16, got 0"),
    (dict(longest=17), "--longest must be 1 to 16, got 17"),
    ({}, "--nodes must be 1 or more for a store without tokens_per_call, got 0")])
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        next(rest(ScriptedLM(markov(1)), [0, 1], store=Datastore(), **options))


def test_of_long_texts_the_beginning_is_measured(tmp_path):
    """Replaying all of a document could take hours; the file keeps all of it."""
    texts, gains = [[*range(10, 30), *[8] * 40], [*range(30, 50), *[8] * 40]], []
    for tokens in 19, 59:
        build(tiny("llama"), None, texts, out=tmp_path / "x", text=True, max_new_tokens=tokens)
        header, tensors = load_part(tmp_path / "x", "a REST datastore", tiny("llama"))
        assert len(tensors["tokens"]) == 122
        gains.append(header["tokens_per_call"][-1])
    assert gains[0] == [1, 1] and min(gains[1]) > 2  # only the ends have something in common


def test_answers_of_no_tokens_are_refused(tmp_path):
    with pytest.raises(InputError, match="--max-new-tokens must be 1 or more, got -1"):
        build(tiny("llama"), None, [[1, 2], [3]], out=tmp_path / "x", max_new_tokens=-1)


@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2], [1, 2]], [[1] * 150, [2] * 150, [3]]])
def test_too_little_text_is_refused(tmp_path, prompts):
    with pytest.raises(InputError, match="2 texts or more, or prompts of at most 40 tokens, got 1"):
        build(tiny("llama"), SimpleNamespace(eos_token_id=None, pad_token_id=None), prompts,
              out=tmp_path / "x", max_new_tokens=120)
    with pytest.raises(InputError, match="2 texts or more.*, got [01]"):
        build(tiny("llama"), None, [*prompts[:1], [4]], out=tmp_path / "x", text=True)


def test_the_report():
    log = [{"guessed": 8, "accepted": 3}, {"guessed": 0, "accepted": 0},
           {"guessed": 4, "accepted": 0}]
    assert report(SimpleNamespace(log=log)) == (
        "a call: 4.0 guesses, 1.00 accepted; no guess in 1 of 3 calls")


# ----------------------------------------------------------------------------- the committed one

def test_the_committed_datastore_has_answers_to_training_prompts_alone(embedded):
    """Its n-th text answers the n-th prompt of `make rest`, whose templates are never those of
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


def test_held_out_prompts_of_the_embedded_target(embedded):
    """Greedy output up to EOS, a prompt of each task, with at least 1.6 tokens a call."""
    model, _, tokenizer = embedded
    eos, target, tokens = {tokenizer.eos_token_id}, CachedLM(model), 0
    for task in tasks.TASKS:
        for example in tasks.take(task, "test", 1, seed=50):
            prompt = encode(tokenizer, example.prompt)
            got = tokens_of(rest(target, prompt, nodes=15), 150, eos)
            assert got == choices(model, prompt, got) and got[-1] in eos
            tokens += len(got)
    assert tokens / target.calls >= 1.6


def test_the_command_line(tmp_path, capsys):
    """A datastore of a file's own texts, then decoding with it, to the same text as without."""
    texts, file = tmp_path / "texts", tmp_path / "store.safetensors"
    texts.write_text("".join(f"{e.prompt}{e.answer}".replace("\n", " ") + "\n"
                             for e in tasks.take("sql", "train", 8)))
    argv = ["build", "--prompts", str(texts), "--out", str(file), "--text"]
    assert main([rest], report, argv, commands=[build]) == 0
    assert "8 texts" in capsys.readouterr().out
    argv = ["--prompt", "def double(x):", "--max-new-tokens", "12", "--compare", "--nodes", "3"]
    argv += ["--datastore", str(file)]
    assert main([rest], report, [*argv, "--no-grow"], commands=[build]) == 0
    assert "output equals autoregressive" in capsys.readouterr().err
    argv += ["--target", str(ROOT / "models/draft")]
    assert main([rest], report, argv, commands=[build]) == 2
    assert "expected a file of a REST datastore for this model, got" in capsys.readouterr().err
