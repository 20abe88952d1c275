"""Several drafts a round, verified as one tree: SpecInfer and SpecTr.

specinfer   Miao et al., "SpecInfer", arXiv 2305.09781. The drafts come from one model or from
            several, and the draws at a node are tried one after the other
spectr      Sun et al., "SpecTr", arXiv 2310.15141. The drafts come from one model, and all draws at
            a node are judged alike (k-SEQ)

A *draw* is the token that one draft has after a node. Drafts are drawn independently, so some draws
at a node may be equal. Equal draws share a child of the node, but each is judged by itself.

    sat ─┬─ on ─┬─ the ─── mat      three drafts of one model: "on the mat", "on my hat" and "in a
         │      └─ my ──── hat      box". The target verifies all in one call. The draws at the root
         └─ in ─── a ───── box      are on, on and in

    specinfer, at a node with draws x_1 … x_K, where x_k was drawn from q_k:
        accept x_1 with probability min(1, p(x_1) / q_1(x_1));
        else p <- norm(max(0, p - q_1)), and try x_2 with this p and q_2; and so on;
        if all K are rejected draw a token from the last p
    spectr, at a node with draws x_1 … x_K, all of them from the same q:
        accept each x with probability min(1, p(x) / (ρ q(x))), and go on with the first accepted;
        if none is accepted draw from norm(p - min(q, p / ρ) (1 - (1 - β)^K) / β)
        ρ in [1, K] solves 1 - (1 - β(ρ))^K = ρ β(ρ), where β(ρ) = Σ_x min(q(x), p(x) / ρ)

Both are lossless. For K = 1 both are speculative sampling (../speculative.py). At temperature 0 all
drafts of one model would be the same. So SpecInfer's draft k then begins with the k-th likeliest
token, and `walk` verifies the tree. SpecTr's drafts stay the same.

Departures:
- The order of the draws. Paper: SpecInfer's Alg. 2 picks the next one at random. Here: as they were
  drawn. Why: the output has the same distribution, since neither order depends on what was drawn.
- The tree. Paper: SpecInfer has a fixed number of children a level, and merges a tree of each
  model. Here: K whole drafts are merged, shared out among the models in turn. Why: one number is
  enough, and SpecTr has the same tree.

Left out:
    batches           one text at a time is what the methods make faster
    boosted drafts    a second draft that is trained where the first one is wrong brought 3% more
                      tokens a call at temperature 0, and less than a second draw at temperature 1
"""
from typing import Callable, Iterator, NamedTuple, Sequence

from common import Sampler, begin, greedy, trie, walk
from speculative import residual
from support.engine import EngineLM, log_round, require, run_as_program

import torch

STEPS = 24  # after so many steps ρ is off by (K - 1) / 2^24 at most


# ------------------------------------------------------------------ the rules, at one node

def multi_step(p: torch.Tensor, q: torch.Tensor,
               draws: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Judge the draws at a node by SpecInfer's rule (Miao et al., Alg. 2).

    A draw x_k is accepted with probability min(1, p(x_k) / q_k(x_k)). If it is rejected, the
    residual norm(max(0, p - q_k)) takes the place of p, and the next draw is tried.

    p         [V], the target's distribution at the node
    q         [K, V]. Row k is the distribution that draw x_k was drawn from
    draws     the tokens x_1 … x_K. Some may be equal
    returns   accept [K], for each draw the probability that it is accepted if all before it were
              rejected; and rest [V], the distribution of the next token if all K are rejected
    """
    ratios = []
    for x, q_x in zip(draws, q):
        ratios.append(p[x] / q_x[x])
        p = residual(p, q_x)
    # A model that overflows gives nan. No coin is below nan, so the draw is rejected.
    return torch.stack(ratios).clamp(max=1), p


def find_rho(p: torch.Tensor, q: torch.Tensor, K: int) -> torch.Tensor:
    """Find SpecTr's ρ, which is the smallest that keeps the rule exact, by a binary search.

    p         [V], the target's distribution, float64
    q         [V], the draft's distribution, float64
    K         how many draws there are
    returns   ρ on the device of p, for which no step waits. It lies above the exact root by
              (K - 1) / 2^24 at most. Below the root the residual would have negative entries

    ρ β(ρ) grows with ρ, and 1 - (1 - β(ρ))^K falls. Where ρ β(ρ) is still smaller, the root lies
    above that ρ.
    """
    low = torch.ones((), dtype=p.dtype, device=p.device)
    high = low * K
    for _ in range(STEPS):
        rho = (low + high) / 2
        beta = torch.minimum(q, p / rho).sum()
        reached = 1 - (1 - beta) ** K <= rho * beta
        low = torch.where(reached, low, rho)
        high = torch.where(reached, rho, high)
    return high


def k_seq(p: torch.Tensor, q: torch.Tensor, draws: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Judge the draws at a node by SpecTr's rule, k-SEQ (Sun et al., Alg. 2 and 3).

    A draw x is accepted with probability min(1, p(x) / (ρ q(x))).

    p         [V], the target's distribution at the node
    q         [K, V]. All rows are the same, since one model has drawn all draws
    draws     the tokens x_1 … x_K. Some may be equal
    returns   accept [K], for each draw the probability that it is accepted; and rest [V], the
              distribution of the next token if all K are rejected
    """
    K = len(draws)
    p = p.double()
    q = q[0].double()
    rho = find_rho(p, q, K)
    accept = (p[draws] / (rho * q[draws])).clamp(max=1)
    # each[x] is the probability that a draw is the token x and is accepted. p_acc is the
    # probability that at least one of the K draws is accepted.
    each = torch.minimum(q, p / rho)  # [V]
    beta = each.sum()
    p_acc = 1 - (1 - beta) ** K
    # taken[x] is the probability that an accepted draw gives x. The rest of p(x) is left for the
    # case that no draw is accepted.
    taken = each * (p_acc / beta)
    left = (p - taken).clamp(min=0)
    # Where p_acc is 0 nothing is taken, and p itself is left. Where p_acc is 1 nothing is left.
    # Then no token is ever drawn from `rest`, and p only fills its place.
    rest = torch.where((p_acc > 0) & (p_acc < 1), left, p)
    return accept, (rest / rest.sum()).float()


# ---------------------------------------------------------------------- drafting and verifying

class DrawnDraft(NamedTuple):
    """Hold what the verification needs to know of one draft."""
    text: tuple[int, ...]  # its tokens
    probs: dict[tuple[int, ...], torch.Tensor]  # the `probs` of the model that drew it
    path: list[int]  # its nodes in the target's tree, the root first


def draw_drafts(draft: EngineLM, unseen: list[int], gamma: int, K: int, sample: Sampler,
                ranked: bool = False) -> tuple[list[tuple], dict[tuple, torch.Tensor], dict]:
    """Draw K drafts of gamma tokens independently, with a draft call for each level of their tree.

    draft     the model that drafts
    unseen    the final tokens that the model has not been fed. The root comes last
    gamma     tokens of a draft
    K         how many drafts are drawn
    sample    the Sampler that draws the tokens
    ranked    whether draft k begins with the k-th token of the draft's race, which at temperature 0
              is the k-th likeliest
    returns   texts, the tokens of each draft. probs, {prefix: the distribution [V] that the next
              token was drawn from}. nodes, {prefix: the node of its last token in the model's own
              pending tree, or -1 for the root}. Drafts with the same prefix share these two
    """
    logits = draft.forward(unseen)
    draft.commit(range(len(unseen)))  # they are final, so they join the context at once
    texts = [()] * K
    nodes = {(): -1}
    probs = {(): sample.probs(logits[-1:], draft.places[-1:])[0]}
    for depth in range(gamma):
        # Feed the tokens that the depth before has drawn. The last depth's are never fed.
        if depth > 0:
            # Drafts that are equal so far share one node.
            prefixes = list(dict.fromkeys(texts))
            first = len(draft.parents)
            tokens = [prefix[-1] for prefix in prefixes]
            parents = [nodes[prefix[:-1]] for prefix in prefixes]
            rows = sample.probs(draft.forward(tokens, parents), draft.places)
            nodes.update(zip(prefixes, range(first, first + len(prefixes))))
            probs.update(zip(prefixes, rows))
        # Each draft gets a draw of its own, even if drafts are equal so far.
        if depth == 0 and ranked:
            tokens = sample.race(logits[-1:], draft.places[-1:])[0].topk(K).indices.tolist()
        else:
            tokens = sample.draw(torch.stack([probs[text] for text in texts])).tolist()
        texts = [(*text, token) for text, token in zip(texts, tokens)]
    return texts, probs, nodes


def verify_tree(rule: Callable, target_probs: torch.Tensor, drafts: list[DrawnDraft],
                sample: Sampler) -> tuple[tuple[int, ...], list[int], torch.Tensor]:
    """Go down the tree of drafts, from each node to the first draw that `rule` accepts.

    rule           multi_step or k_seq
    target_probs   [nodes, V], the target's distribution after each node
    drafts         all drafts. They have the same length
    sample         the Sampler that flips the coins
    returns        accepted, the accepted guesses; path, the root and the nodes of these guesses;
                   and the distribution [V] of the next token

    For example, let the drafts after "sat" be "on the mat" and "on my hat". Numbers are nodes:

        sat 0 ─── on 1 ─┬─ the 2 ─── mat 3
                        └─ my 4 ──── hat 5

    At node 0 both drafts have a draw, [on, on]. Each draw gets a coin of its own. With one coin for
    both the output would not have the target's distribution. Say that one "on" is accepted. At node
    1 both drafts begin with "on", and the draws are [the, my]. Say that "the" is rejected and "my"
    accepted. At node 4 the first draft does not begin with "on my", and the only draw is [hat]. If
    it is rejected, the accepted guesses are (on, my) and the nodes [0, 1, 4].
    """
    accepted = ()
    path = [0]
    gamma = len(drafts[0].text)
    for depth in range(gamma):
        here = [draft for draft in drafts if draft.text[:depth] == accepted]
        draws = [draft.text[depth] for draft in here]
        q = torch.stack([draft.probs[accepted] for draft in here])  # [draws, V]
        accept, rest = rule(target_probs[path[-1]], q, draws)
        below = sample.uniform(len(here), rest.device) < accept
        passed = [draft for draft, passes in zip(here, below.tolist()) if passes]
        if not passed:
            return accepted, path, rest
        accepted = passed[0].text[:depth + 1]
        path = passed[0].path[:depth + 2]
    # A whole draft is accepted, and one more token is the target's own.
    return accepted, path, target_probs[path[-1]]


def decode_by_rule(rule: Callable | None, target: EngineLM, models: list[EngineLM],
                   prompt: list[int], gamma: int, K: int, sample: Sampler,
                   log: list | None) -> Iterator[list[int]]:
    """Draw K drafts, and verify all of them as one tree in one target call. The models take turns.

    rule     multi_step or k_seq. None, at temperature 0: drafts begin with different tokens
    target   the model whose output is wanted
    models   the models that draft
    prompt   token ids
    gamma    tokens of a draft
    K        drafts a round, of all models together
    sample   `greedy`, or a Sampler
    log      a list that gets {"guessed", "accepted"} a round, or None
    Yields chunks of 1 to gamma + 1 tokens.
    """
    n = len(models)
    most = n * target.vocab  # as many different tokens can all models begin with
    require(n <= K <= most, "K", f"{n} to {most} with {n} drafts", K)
    text = begin(prompt, target, *models)
    turns = [i % n for i in range(K)]  # draft i is drawn by model number turns[i]
    while True:
        drawn = [draw_drafts(lm, text[lm.length:], gamma, turns.count(m), sample, rule is None)
                 for m, lm in enumerate(models)]
        texts_of, probs_of, nodes_of = zip(*drawn)  # for each model
        texts = [texts_of[m][i // n] for i, m in enumerate(turns)]
        ids, parents, paths = trie(text[-1], texts)
        logits = target.forward(ids, parents)  # [nodes, V]
        if rule is None:
            path, chunk = walk(ids, parents, sample(logits, target.places))
        else:
            drafts = [*map(DrawnDraft, texts, (probs_of[m] for m in turns), paths)]
            target_probs = sample.probs(logits, target.places)
            accepted, path, rest = verify_tree(rule, target_probs, drafts, sample)
            chunk = [*accepted, *sample.draw(rest[None]).tolist()]
        target.commit(path)
        # A model keeps the rows of those accepted guesses that it was fed. It was fed a prefix of
        # the accepted guesses if one of its own drafts begins with this prefix and is longer.
        prefixes = [tuple(chunk[:length]) for length in range(1, len(chunk))]
        for lm, nodes in zip(models, nodes_of):
            lm.commit([nodes[prefix] for prefix in prefixes if prefix in nodes])
        text += chunk
        log_round(log, guessed=len(ids) - 1, accepted=len(chunk) - 1)
        yield chunk


# ---------------------------------------------------------------------------------- the methods

def specinfer(target: EngineLM, draft: EngineLM, prompt: list[int], *, gamma: int = 5, K: int = 2,
              more_drafts: Sequence[EngineLM] = (), sample: Sampler = greedy,
              log: list | None = None) -> Iterator[list[int]]:
    """Draw several drafts, and try the draws at each node one after the other. Miao et al., Section
    4.3. More models that draft (`more_drafts`, or --draft again) take turns with the first model. A
    draw is judged by the distribution q of the model that drew it.

    gamma: tokens of a draft, 1 or more
    K:     drafts a round, drawn independently, 1 or more. At temperature 0 draft k of a model
           begins with the model's k-th likeliest token

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted"} a round. These are the
    numbers of nodes below the root and of accepted guesses.
    """
    rule = None if sample.sure else multi_step
    return decode_by_rule(rule, target, [draft, *more_drafts], prompt, gamma, K, sample, log)


def spectr(target: EngineLM, draft: EngineLM, prompt: list[int], *, gamma: int = 5, K: int = 2,
           sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Draw several drafts, and judge all draws at a node alike by k-SEQ. Sun et al., Alg. 1 to 3.

    gamma: tokens of a draft, 1 or more
    K:     drafts a round, drawn independently, 1 or more. At temperature 0 all are the same

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted"} a round. These are the
    numbers of nodes below the root and of accepted guesses.
    """
    return decode_by_rule(k_seq, target, [draft], prompt, gamma, K, sample, log)


COMMAND_LINE = dict(methods=[specinfer, spectr],
                    ranges={"gamma": (1, 2, 3, 4, 5, 6, 8, 10, 12), "K": (1, 2, 3, 4)})

if __name__ == "__main__":
    run_as_program(__file__)
