"""Jacobi decoding, lookahead decoding and prompt lookup: what they do, step by step."""
import ast
import inspect
import itertools
import random
import sys

import pytest
import torch
import torch.nn.functional as F

import jacobi as module
from cllm import cllm
from cli.trajectory import show_trajectory
from common import CachedLM, Sampler, trie, until
from fake_models import Recorder, ScriptedLM, counting, markov, scripted
from families import tiny
from helpers import prefill, tokens_of
from jacobi import jacobi, lookahead, prompt_lookup, remember

PROMPT = [3, 14, 15, 3, 14]


# -------------------------------------------------------------------------------------- Jacobi

def test_a_block_of_independent_tokens_takes_two_calls():
    """The next token depends on the position alone: the first call makes every guess right, the
    second confirms them and chooses the next root. A root that is fed twice would show."""
    def choose(text):
        return 11 if text[-1:] == text[-2:-1] != [11] else len(text) * 7 % 11
    target, log = scripted(choose, 12), []
    chunks = list(itertools.islice(jacobi(target, [11, 11], n=8, log=log), 4))
    assert [len(chunk) for chunk in chunks] == [1, 7, 1, 7]
    assert [token for chunk in chunks for token in chunk] == [i * 7 % 11 for i in range(2, 18)]
    assert [r["final"] for r in log] == [[1, 2, 9], [1, 2, 9]]  # the next root too
    assert log[0]["states"][1] == log[0]["states"][2] == [11, *(i * 7 % 11 for i in range(2, 9))]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_states_follow_the_iteration(temperature):
    """y(j+1)_i is the model's argmax after y(j)_<i (CLLM, Eq. 3) for every state and position; with
    sampling all but the tokens that become final, which are draws. Each state has more of those."""
    model, log, drawn = tiny("llama"), [], 0
    chunks = jacobi(CachedLM(model), PROMPT, n=6, log=log, sample=Sampler(temperature, seed=1))
    text = PROMPT + tokens_of(chunks, 60)
    lm, start = CachedLM(model), len(PROMPT) - 1
    for record in log[:6]:
        states, finals = record["states"], record["final"]
        assert finals[0] == 1 and finals == sorted(set(finals)) and finals[-1] in (6, 7)
        for before, after, old, new in zip(states, states[1:], finals, finals[1:]):
            prefill(lm, text[:start])
            argmaxes = lm.forward(before[:-1]).argmax(-1).tolist()
            kept = old if temperature == 0 else new  # draws may be anything, guesses may not
            assert after[:new] == text[start:start + new][:6] and after[:old] == before[:old]
            assert after[kept:] == argmaxes[kept - 1:]
            drawn += after[old:new] != argmaxes[old - 1:new - 1]
        start += 5 if finals[-1] == 6 else 6  # where 6 are final the last is the next root
    assert (drawn > 0) == (temperature > 0)


def test_first_guesses_are_tokens_of_the_prompt():
    """Drawn at random by the seed of the sampler."""
    log, lm, prompt = [], counting(9), [*range(9)] * 2
    for seed in (1, 1, 2):
        next(jacobi(lm, prompt, n=40, sample=Sampler(seed=seed), log=log))
    first, again, other = (block["states"][0] for block in log)
    assert first == again != other and first[0] == 8 and set(first) == set(range(9))


def test_a_cllm_decodes_by_the_same_loop():
    """Line for line, comments aside: who compares the two files has nothing to compare."""
    loops = []
    for method in jacobi, cllm:
        [function] = ast.parse(inspect.getsource(method)).body
        loops.append(ast.unparse(function.body[1:]))
    assert loops[0] == loops[1] and "target.forward" in loops[0]


# ----------------------------------------------------------------------------------- the viewer

class Words:
    """A tokenizer of letters; token 1 is a line break."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join("a\ncdefgh"[i] for i in ids)


def shown(target, prompt, n, limit, log):
    """Watch Jacobi decoding as the command line does: it makes the first chunk itself."""
    chunks = until(jacobi(target, prompt, n=n, log=log), limit)
    show_trajectory(itertools.chain([next(chunks)], chunks), Words(), False, log)


def earlier():
    """The log of an earlier prompt, whose last block was cut."""
    return [{"states": [[7, 7], [7, 7]], "final": [1, 3]}, {"states": [[7, 7]], "final": [1]}]


def test_the_trajectory_as_plain_text(capsys):
    """A line a state, wrong tokens in brackets, columns in line; nothing of an earlier prompt; of a
    block that was cut what is final; the text at the end."""
    shown(counting(8), [0], 3, 5, earlier())
    assert capsys.readouterr().out == (
        "  0: a [a] [a]\n"
        "  1: a \\n  [\\n]\n"
        "  2: a \\n  c\n\n"
        "  0: c [a] [a]\n"
        "  1: c d   [\\n]\n"
        "  2: c d   e\n\n"
        "  0: e [a]\n"
        "  1: e f\n\n"
        "\ncdef\n")


def test_the_trajectory_on_a_terminal(capsys, monkeypatch):
    """Right tokens are green, wrong ones red."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown(counting(8), [0], 3, 2, earlier())
    green, red = ("\033[{}m{{}}\033[0m".format(colour).format for colour in (32, 31))
    assert capsys.readouterr().out == (
        f"  0: {green('a')} {red('a ')} {red('a ')}\n"
        f"  1: {green('a')} {green(chr(92) + 'n')} {red(chr(92) + 'n')}\n"
        f"  2: {green('a')} {green(chr(92) + 'n')} {green('c ')}\n\n\nc\n")


# ----------------------------------------------------------------------------------- lookahead

@pytest.fixture
def found(monkeypatch) -> list:
    """A list of the n-grams that enter the pool, a list for each time."""
    lists = []

    def watch(pool, ngrams, G):
        lists.append(ngrams)
        remember(pool, ngrams, G)
    monkeypatch.setattr(module, "remember", watch)
    return lists


def test_the_window_of_the_survey(monkeypatch, found):
    """W = 5, N = 4: the colours of the figure as hundreds, the position as units: blue 0, orange 1,
    green 2, red 3, grey 4. What the model puts after blue p is blue p + 1; after orange p green
    p + 1, and so on."""
    def after(tokens):
        last = tokens[-1]
        following = last + 1 if last < 100 else last + 101
        return F.one_hot(torch.tensor(following), 900).float()

    class Oranges(random.Random):
        def choices(self, prompt, k):
            assert k == 6  # W + N - 3
            return [101, 102, 103, 104, 105, 106]
    monkeypatch.setattr(module.random, "Random", Oranges)
    target, log = Recorder(after), []
    chunks = lookahead(target, [0], W=5, N=4, G=2, prompt_ngrams=False, log=log)
    assert list(itertools.islice(chunks, 5)) == [[1], [2], [3], [4], [5]]
    chain, columns = [-1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert target.trees == [
        ([0, 101, 102, 103, 104, 105, 106], chain),
        ([1, *range(102, 107), *range(202, 208)], chain[:6] + columns[:6]),
        ([2, *range(103, 107), *range(203, 208), *range(304, 309)], chain[:5] + columns),
        ([3, *range(204, 208), *range(304, 309), *range(405, 410)], chain[:5] + columns),
        ([4, *range(305, 309), *range(405, 410), *range(506, 511)], chain[:5] + columns)]
    assert found[:4] == [
        [], [],
        [(2, 203, 304, 405), (103, 204, 305, 406), (104, 205, 306, 407), (105, 206, 307, 408),
         (106, 207, 308, 409)],
        [(3, 304, 405, 506), (204, 305, 406, 507), (205, 306, 407, 508), (206, 307, 408, 509),
         (207, 308, 409, 510)]]
    assert [r["rows"] for r in log] == [7, 12, 15, 15, 15]
    assert {r["guessed"] for r in log} == {0}  # no n-gram of the pool begins with a root


def test_the_window_of_a_sampled_text_holds_argmaxes(found):
    """The text is drawn, guesses are not: each token of a column is the model's argmax after the
    one a level up. The first may have given way to the text's last token."""
    model, log = markov(5, vocab=9), []
    after = lambda tokens: model(tokens[-1:] * 2)  # noqa: E731  (of the last token alone)
    best = [after([token]).argmax().item() for token in range(9)]
    chunks = lookahead(ScriptedLM(after), [0, 1, 2], W=4, N=5, G=3, prompt_ngrams=False,
                       sample=Sampler(1.5, seed=2), log=log)
    text = [2, *tokens_of(chunks, 80)]
    assert sum(best[a] != b for a, b in zip(text, text[1:])) > 20
    ngrams = [ngram for some in found for ngram in some]
    assert len(ngrams) == 4 * (len(log) - 3)
    assert all(best[a] == b for ngram in ngrams for a, b in zip(ngram[1:], ngram[2:]))


@pytest.mark.parametrize("prompt", [[1], [0, 1, 2, 0, 1]])
def test_prompt_lookup_tries_what_followed_the_last_token(prompt):
    """By a search of the text before each call: the newest G guesses, each of them once."""
    model, log, N, G = markov(3), [], 3, 2
    target = Recorder(lambda tokens: model([0, *tokens]))
    chunks = list(itertools.islice(
        prompt_lookup(target, prompt, N=N, G=G, sample=Sampler(0.5), log=log), 30))
    text = [*prompt]
    for chunk, (ids, parents), record in zip(chunks, target.trees, log):
        places = [i for i in range(len(text) - N + 1) if text[i] == text[-1]]
        newest = dict.fromkeys(tuple(text[i + 1:i + N]) for i in reversed(places))
        tree = trie(text[-1], [*newest][:G][::-1])
        assert (ids, parents) == tree[:2]
        assert record == {"guessed": len(ids) - 1, "accepted": len(chunk) - 1, "rows": len(ids)}
        text += chunk
    assert max(r["guessed"] for r in log) > 2 and max(r["accepted"] for r in log) == N - 1


def test_the_pool_keeps_the_newest():
    pool = {}
    remember(pool, [(1, 2, 3), (1, 2, 4), (1, 2, 3), (1, 5, 6), (2, 2, 3)], 2)
    assert {key: list(tails) for key, tails in pool.items()} == {1: [(2, 3), (5, 6)], 2: [(2, 3)]}
