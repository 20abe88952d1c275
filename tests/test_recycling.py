"""Token Recycling: the matrix and the trees that are filled from it. That its text is the target's
is in test_lossless.py."""
import torch

from fake_models import counting
from helpers import tokens_of
from support.trees import Node
from survey.recycling import WIDTH, Successors, recycling


def test_a_text_puts_what_follows_first():
    known = Successors()
    known.rows = {1: [5, 6, 2], 2: [*range(10, 10 + WIDTH)]}
    known.read([1, 2, 1, 6, 2, 9])
    assert known.rows == {1: [6, 2, 5], 2: [9, 1, *range(10, 10 + WIDTH - 2)], 6: [2]}


def test_every_node_is_learned_from():
    """The likeliest tokens after each node are kept. If a token is at two nodes, the last one
    counts."""
    known = Successors()
    known.rows = {7: [1], 4: [3]}
    logits = torch.zeros(3, 20)
    logits[0, [5, 6]] = torch.tensor([2.0, 1.0])
    logits[1, 9] = logits[2, 8] = 1
    known.learn([7, 2, 2], logits)
    assert known.rows[7][:2] == [5, 6] and known.rows[2][0] == 8 and known.rows[4] == [3]
    assert {len(known.rows[7]), len(known.rows[2])} == {WIDTH}


def test_a_planned_tree_is_filled_by_hand():
    """This is the header's tree. Tokens that M does not know are left out, and all below them."""
    known = Successors()
    known.rows = {1: [2, 3, 4], 2: [5, 6], 5: [7], 3: [8]}
    tree = [Node(1, -1, 0, 0), Node(1, 0, 1, 0), Node(1, 0, 1, 3), Node(1, 2, 2, 0),
            Node(1, 1, 2, 0), Node(1, 1, 2, 1), Node(1, 4, 3, 0), Node(1, 5, 3, 0),
            Node(1, 0, 1, 1), Node(1, 8, 2, 0)]
    assert known.fill(1, tree) == ([1, 2, 5, 6, 7, 3, 8], [-1, 0, 1, 1, 2, 0, 5])


def test_the_prompt_is_read_and_every_guess_is_learned_from():
    """The prompt has said all, so the first call accepts a chain of six. Then the rows of the
    chain's tokens are what the target said after each of them."""
    target, known = counting(9), Successors()
    chunk = next(recycling(target, [*range(9), 0], nodes=64, successors=known))
    assert chunk == [1, 2, 3, 4, 5, 6, 7]
    lengths = {token: len(row) for token, row in known.rows.items()}
    assert lengths == {**{fed: WIDTH for fed in range(7)}, 7: 1, 8: 1}


def test_what_is_kept_from_prompt_to_prompt():
    known, counts = Successors(), []
    for successors in (known, known, None):
        lm = counting(20)
        tokens_of(recycling(lm, [3, 4], nodes=16, successors=successors), 12)
        counts.append(lm.calls)
    assert counts == [12, 2, 12]
