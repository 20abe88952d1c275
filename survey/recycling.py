"""Token Recycling: guess what the target itself said after the same token before.

    python -m survey.recycling --prompt "..."

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
Recycling", arXiv 2408.08696

A call of the target gives a distribution after every node of a tree. Other methods take one token
of each distribution on the accepted path, and throw everything else away. Token Recycling keeps the
likeliest tokens of all of them. A matrix M holds for each token the eight tokens that were the
likeliest ones after it, the last time that it was fed to the target. A tree of a fixed form is
filled from M:

    M[sat] = on  in  at …        sat ─┬─ on ─┬─ the ── cat      child j of a node with token t
    M[on]  = the my …                 │      └─ my              is the token M[t, j]
    M[in]  = a  the …                 ├─ in ── a
    M[the] = cat mat …                └─ at

    after the call               M[sat], M[on], M[the], M[cat], M[my], M[in], M[a] and M[at] are
                                 what the target says at these eight nodes, wrong ones too

There is nothing to train and no text to search. M knows only one token of what was before, so it
guesses grammar and habits rather than content.

Departures:
- A token that was never fed. Paper: its row of M is zeros, so that token 0 is guessed. Here:
  nothing is guessed. Why: a wrong guess costs a row.
- The prompt. Paper: its logits fill M. Here: what follows each of its tokens comes first in the
  token's row. Why: the LM head would have to read all of the prompt.
- The tree. Paper: 80 nodes at 6 levels, found by hand. Here: the likeliest tree by how often each
  successor was right so far, of as many nodes as pay. Why: rows cost time on a CPU, models differ.
"""
from typing import Iterator

from common import Sampler, begin, greedy, walk
from support.clock import Clock, list_sizes
from support.engine import EngineLM, log_round, run_as_program
from support.trees import Acceptance, Node

import torch

WIDTH = 8  # successors that are kept of a token
DEPTH = 6  # levels of guesses in a tree
PRIOR = 0.4  # for `Acceptance`. It was 0.49 and 0.42 for two models (results/survey.md)


class Successors:
    """Hold the matrix M: for each token that was fed, its likeliest successors.

    rows     {token: up to WIDTH tokens, the likeliest first}
    learnt   how often the guesses of each place in a row were right
    """

    def __init__(self):
        self.rows = {}
        self.learnt = Acceptance(PRIOR)

    def read(self, text: list[int]) -> None:
        """Put what follows each token of a text first in the token's row.

        text   tokens. Nothing follows the last one
        """
        for token, following in zip(text, text[1:]):
            others = [x for x in self.rows.get(token, []) if x != following]
            self.rows[token] = [following, *others][:WIDTH]

    def learn(self, ids: list[int], logits: torch.Tensor) -> None:
        """Replace the rows of all tokens that were fed.

        ids      the tokens of a tree, the root first
        logits   [n, V] after each of them. Of several nodes with one token the last one counts
        """
        likeliest = logits.topk(min(WIDTH, logits.shape[-1])).indices.tolist()
        self.rows.update(zip(ids, likeliest))

    def fill(self, root: int, planned: list[Node]) -> tuple[list[int], list[int]]:
        """Put tokens of M into a planned tree.

        root      the token of node 0
        planned   the nodes, the root first. A node for which M has no token of its rank is left
                  out, with all nodes below it
        returns   ids and parents of the nodes that are kept
        """
        ids, parents = [root], [-1]
        built = {0: 0}  # for each planned node that is kept its number in the tree
        for i, node in enumerate(planned[1:], 1):
            parent = built.get(node.parent)
            row = [] if parent is None else self.rows.get(ids[parent], [])
            if node.rank < len(row):
                built[i] = len(ids)
                ids.append(row[node.rank])
                parents.append(parent)
        return ids, parents


def recycling(target: EngineLM, prompt: list[int], *, nodes: int = 0,
              successors: Successors | None = None, sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Guess what the target said when it read the same tokens before, and verify it in one call.

    nodes: the most nodes of a tree, the root among them, 0 to 64. With 0, as many as pay on this
           machine

    Yields chunks of 1 to 7 tokens; logs {"guessed", "accepted"} a call.

    `successors` is M, which is changed in place. Prompts that are given the same M share it, as
    those of a command line do.
    """
    successors = successors or Successors()
    successors.read(prompt)
    chunk = begin(prompt, target)[-1:]  # the last token of a chunk is the root of the next round
    learnt = successors.learnt
    clock = target.once(Clock, target, key=(recycling, nodes))
    while True:
        # Plan: the likeliest tree by how often each successor was right so far.
        planned = clock.choose(lambda: list_sizes(learnt.rates(), DEPTH, nodes))
        # Guess: fill the tree from M.
        ids, parents = successors.fill(chunk[-1], planned)
        # Verify.
        logits = target.forward(ids, parents)
        path, chunk = walk(ids, parents, sample(logits, target.places))
        target.commit(path)
        learnt.learn(parents, path)
        # Recycle: the target gave logits after all nodes, and so all of them update M.
        successors.learn(ids, logits)
        clock.note(1, len(planned))
        log_round(log, guessed=len(ids) - 1, accepted=len(path) - 1)
        yield chunk


COMMAND_LINE = dict(methods=[recycling], shared={"successors": Successors},
                    ranges={"nodes": (2, 4, 8, 16, 32, 64)})

if __name__ == "__main__":
    run_as_program(__file__)
