"""Jacobi decoding, lookahead decoding and prompt lookup: what they do, step by step."""
import ast
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F

from cllm import cllm
from cli.trajectory import show_trajectory
from common import Sampler, greedy, trie, until
from fake_models import Oranges, ScriptedLM, branches, counting, markov, scripted
from helpers import take, tokens_of
from jacobi import NgramPool, jacobi, lookahead, prompt_lookup


# -------------------------------------------------------------------------------------- Jacobi

@pytest.mark.parametrize("sample", [greedy, Sampler(1.0)], ids=["greedy", "sampled"])
def test_a_block_of_independent_tokens_takes_two_calls(sample):
    """The next token depends on the position alone: the first call makes every guess right, the
    second confirms them and chooses the next root. A root that is fed twice would show. The
    numbers of a sampled text depend on the position alone, too."""
    def choose(text):
        return 11 if text[-1:] == text[-2:-1] != [11] else len(text) * 7 % 11
    target, log = scripted(choose, 12), []
    chunks = take(jacobi(target, [11, 11], n=8, sample=sample, log=log), 4)
    assert [len(chunk) for chunk in chunks] == [1, 7, 1, 7]
    assert [r["final"] for r in log] == [[1, 2, 9], [1, 2, 9]]  # the next root too
    assert log[0]["states"][1] == log[0]["states"][2]


def test_a_cllm_decodes_by_the_same_loop():
    """Line for line, comments aside: who compares the two files has nothing to compare."""
    loops = [ast.unparse(ast.parse(inspect.getsource(method)).body[0].body[1:])
             for method in (jacobi, cllm)]
    assert loops[0] == loops[1] and "target.forward" in loops[0]


# ----------------------------------------------------------------------------------- the viewer

class Words:
    """A tokenizer of letters; token 1 is a line break."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join("a\ncdefgh"[i] for i in ids)


PLAIN = "  0: a [a] [a]\n  1: a \\n  [\\n]\n  2: a \\n  c\n\n  0: c [a]\n  1: c d\n\n\ncd\n"
WHOLE = PLAIN.partition("\n\n")[0] + "\n\n\nc\n"


@pytest.mark.parametrize("limit, expected", [(3, PLAIN), (2, WHOLE)], ids=["plain", "whole"])
def test_the_trajectory(limit, expected, capsys):
    """Each state is shown on a line, in columns, with the text at the end. Wrong tokens are in
    brackets. Nothing is shown of an earlier prompt, whose last block was cut. Of a block that is
    cut here only the final tokens are shown. The command line makes the first chunk itself."""
    log = [{"states": [[7, 7], [7, 7]], "final": [1, 3]}, {"states": [[7, 7]], "final": [1]}]
    chunks = until(jacobi(counting(8), [0], n=3, log=log), limit)
    show_trajectory(itertools.chain([next(chunks)], chunks), Words(), False, log)
    assert capsys.readouterr().out == expected


# ----------------------------------------------------------------------------------- lookahead

@pytest.mark.parametrize("sample", [greedy, Sampler(1.0)], ids=["greedy", "sampled"])
def test_the_window_of_the_survey(sample, monkeypatch):
    """This is the window of the survey's figure, with W = 5 and N = 4. The hundreds of a token are
    its colour: 0 is blue, 1 orange, 2 green, 3 red and 4 grey. The units are its position. The
    model puts blue p + 1 after blue p, green p + 1 after orange p, and so on. A sampled text is
    drawn, but the window holds argmaxes."""
    def after(tokens):
        last = tokens[-1]
        following = last + 1 if last < 100 else last + 101
        return F.one_hot(torch.tensor(following % 900), 900).float()
    found, target, log = [], ScriptedLM(after), []
    monkeypatch.setattr("jacobi.random.Random", Oranges)
    monkeypatch.setattr(NgramPool, "add", lambda pool, ngrams: found.extend(ngrams))
    chunks = lookahead(target, [0], W=5, N=4, G=2, prompt_ngrams=False, sample=sample, log=log)
    text = [0, *tokens_of(chunks, 5)]
    assert (text == [0, 1, 2, 3, 4, 5]) == (sample is greedy)
    assert [branches(tree) for tree in target.trees] == [
        [[0, *range(101, 107)]],
        [[text[1], *range(102, 102 + i), 202 + i] for i in range(6)],
        [[text[2], *range(103, 103 + i), 203 + i, 304 + i] for i in range(5)],
        [[text[3], *range(204, 204 + i), 304 + i, 405 + i] for i in range(5)],
        [[text[4], *range(305, 305 + i), 405 + i, 506 + i] for i in range(5)]]
    assert found[:10] == [
        (text[2], 203, 304, 405), *((p, p + 101, p + 202, p + 303) for p in range(103, 107)),
        (text[3], 304, 405, 506), *((p, p + 101, p + 202, p + 303) for p in range(204, 208))]
    assert log == [{"guessed": n, "accepted": 0} for n in (6, 11, 14, 14, 14)]


def test_the_window_is_verified_too():
    """The next token depends on the position alone. So the level that the first call adds is right,
    and its first token below the next root is accepted. The pool is empty until the window is
    full."""
    target = scripted(lambda text: len(text) * 7 % 11, 12)
    assert take(lookahead(target, [11, 11], W=3, N=4, prompt_ngrams=False), 2) == [[3], [10, 6]]


@pytest.mark.parametrize("prompt", [[1], [0, 1, 2, 0, 1]])
def test_prompt_lookup_tries_what_followed_the_last_token(prompt):
    """By a search of the text before each call: the newest G guesses, each of them once."""
    model, log, N, G = markov(3), [], 3, 2
    target = ScriptedLM(lambda tokens: model([0, *tokens]))
    chunks = take(prompt_lookup(target, prompt, N=N, G=G, sample=Sampler(0.5), log=log), 30)
    text = [*prompt]
    for chunk, (ids, parents), record in zip(chunks, target.trees, log):
        places = [i for i in range(len(text) - N + 1) if text[i] == text[-1]]
        newest = dict.fromkeys(tuple(text[i + 1:i + N]) for i in reversed(places))
        assert (ids, parents) == trie(text[-1], [*newest][:G])[:2]
        assert record == {"guessed": len(ids) - 1, "accepted": len(chunk) - 1}
        text += chunk
    assert max(r["guessed"] for r in log) > 2 and max(r["accepted"] for r in log) == N - 1
