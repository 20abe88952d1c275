"""Medusa and Hydra: small heads on the target's own features guess the tokens ahead.

medusa   Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
         Heads", arXiv 2401.10774
hydra    Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding",
         arXiv 2402.05109; released code: zankner/Hydra, hydra_heads/mlp_head.py
--vocab  Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked
         Speculative Sampling", arXiv 2502.14856

    python -m survey.medusa train --prompts FILE --heads hydra --out my.safetensors
    python -m survey.medusa --heads hydra --adapter my.safetensors --prompt "..."

The feature f of position t is what the LM head reads to choose token t + 1. Head k (1 … K) guesses
token t + k + 1 through the same LM head:

    Medusa   p_k = softmax(LM(f + SiLU(W_k f + b_k)))                    Section 2.1.1
    Hydra    z   = [f; e(x_{t+1}); …; e(x_{t+k})]
             p_k = softmax(LM(R_k z + c_k + SiLU(W_k z + b_k)))          as released
    loss     Medusa Σ_k 0.8^k (- log p_k(x_{t+k+1})), Section 2.2.1; Hydra without the 0.8^k

A Medusa head does not know what the heads before it guessed. A Hydra head reads those guesses:

      Medusa                                Hydra
      f ──┬── head 1 ── x_{t+2} ?           f, x_{t+1} ──────────────────── head 1 ── x_{t+2} ?
          ├── head 2 ── x_{t+3} ?           f, x_{t+1}, x_{t+2} ─────────── head 2 ── x_{t+3} ?
          └── head 3 ── x_{t+4} ?           f, x_{t+1}, x_{t+2}, x_{t+3} ── head 3 ── x_{t+4} ?

x_{t+1} is the root: the target has chosen it already. The likeliest guesses form a tree, which one
call of the target verifies. The output is the target's own, greedily or with one sample of the
target at each node. With --typical it is not, except at temperature 0.

Departures (paper / here / why):
    LM heads: each head trains its own / all share the model's, frozen / they would multiply a file
        of a few MB
    training data: Medusa-1 has ShareGPT / the model's own greedy answers, as in Medusa's
        self-distillation (Section 2.3.2) / verification asks for those tokens
    accuracies that a tree is planned by: of each head by itself / counted where the heads before it
        are right / a node is reached only there
    size of the tree: fixed, 64 nodes / as many as pay on this machine, or --nodes / rows that are
        free on a GPU are expensive on a CPU
    acceptance: typical / exact, or typical with --typical / the output is then the target's own
    first token with --typical: the target's greedy choice after the prompt / judged as any other
        guess / the prompt's last token is the first root, and the prompt costs no call
    Hydra's R_k before training: the released one is random / R_k z = f / an untrained head then
        says what the frozen LM head says
    Hydra's labels: tokens, or the model's distribution (Hydra++) / tokens / one loss for both kinds
Left out: Medusa-2, which tunes the model as well. Hydra++, whose heads are four layers deep behind
a decoder layer, which is EAGLE's idea.

Older files load too. Their header names no residual, and f stands in place of R_k z + c_k. Both
forms are compared in results/hydra.md.
"""
import random
import sys
import timeit
from pathlib import Path
from typing import Callable, Iterator

from common import (CachedLM, InputError, Node, Sampler, best_tree, fastest, greedy, row_costs,
                    walk)
from survey.parts import MODELS, fill, head_for, load_part, logits_of, save_part

import torch
import torch.nn.functional as F
from tqdm import tqdm

KINDS = ("medusa", "hydra")
DECAY = {"medusa": 0.8, "hydra": 1.0}  # the weight of head k in the loss is DECAY ** k
MOST = 64  # nodes of the largest tree that the clock may choose
RANKS = 10  # guesses of a head whose accuracies are measured, and children of a node


# ------------------------------------------------------------------------- the heads, their loss

class Heads(torch.nn.Module):
    """Guess the tokens ahead of a position by K small heads, all through the model's LM head.

    model      the target, whose weights are frozen here
    kind       medusa or hydra
    K          number of heads
    residual   what SiLU(…) is added to: "feature" (f) or "trained" (R_k z + c_k). Default: Medusa
               has the first, Hydra the second

    accept     accept[k - 1][r], how often the guess of rank r of head k is right, counted at
               held-out positions where each earlier head has the right token among its RANKS
               guesses
    vocab      the tokens [V'] that the rows of `lm_head` stand for: all, or those of `keep`
    """

    def __init__(self, model, kind: str, K: int, residual: str = ""):
        super().__init__()
        if kind not in KINDS:
            raise InputError(f"--heads must be medusa or hydra, got {kind}")
        if K < 1:
            raise InputError(f"--K must be 1 or more, got {K}")
        model.requires_grad_(False)
        self.kind = kind
        self.K = K
        self.residual = residual or {"medusa": "feature", "hydra": "trained"}[kind]
        self.accept = []
        self.lm_head = model.get_output_embeddings()
        V, d = self.lm_head.weight.shape
        e = model.get_input_embeddings().weight.shape[1]
        widths = [d + k * e if kind == "hydra" else d for k in range(1, K + 1)]
        self.W = torch.nn.ModuleList(torch.nn.Linear(width, d) for width in widths)
        self.R = torch.nn.ModuleList()
        if self.residual == "trained":
            self.R.extend(torch.nn.Linear(width, d) for width in widths)
        self.begin_as_the_lm_head()
        self.to(self.lm_head.weight.device)
        self.vocab = torch.arange(V, device=self.lm_head.weight.device)
        self.row_of = self.vocab  # the row of each token in `lm_head`, -100 where it has none

    @torch.no_grad()
    def begin_as_the_lm_head(self) -> None:
        """Let every head guess what the LM head says of f: W_k and b_k are 0, R_k z + c_k is f."""
        for layer in [*self.W, *self.R]:
            layer.weight.zero_()
            layer.bias.zero_()
        for layer in self.R:
            torch.nn.init.eye_(layer.weight)  # f comes first in z

    def keep(self, vocab: list[int]) -> None:
        """Guess the tokens of `vocab` alone, through their rows of the LM head."""
        self.vocab = self.vocab[vocab]
        self.lm_head = head_for(self.lm_head, self.vocab)
        self.row_of = torch.full_like(self.row_of, -100)
        self.row_of[self.vocab] = torch.arange(len(vocab), device=self.vocab.device)

    def labels(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of `lm_head` that stand for tokens, -100 where there is none."""
        return self.row_of[tokens.clamp(min=0)].masked_fill(tokens < 0, -100)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return what is trained and kept in a file, by name: all but the LM head."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, k: int, f: torch.Tensor, between: torch.Tensor | None) -> torch.Tensor:
        """Return what the LM head reads for head k, [n, d].

        k        the head, from 1 on
        f        features [n, d]
        between  embeddings [n, k, e] of the k tokens between f and the guess; a Medusa head
                 ignores them
        """
        z = f if self.kind == "medusa" else torch.cat([f, between.flatten(1)], 1)
        residual = f if self.residual == "feature" else self.R[k - 1](z)
        return residual + F.silu(self.W[k - 1](z))

    def rank_tokens(self, x: torch.Tensor, vocab: int | None) -> list[list[int]]:
        """Return for each row of x [n, d], which the LM head reads, its RANKS likeliest tokens.

        vocab  how many rows of the LM head count; None: all
        """
        logits = self.lm_head(x)[:, :vocab]
        return self.vocab[logits.topk(min(RANKS, logits.shape[1])).indices].tolist()


def head_logits(trained: Heads, model, to_logits: Callable, f: torch.Tensor, tokens: torch.Tensor):
    """Yield for each head its logits [N, V'] and the labels [N] among them, -100 where none is.

    to_logits  turns the LM head's output into logits: parts.logits_of
    f          features [N, d]
    tokens     the K + 1 tokens [N, K + 1] after each feature, -100 beyond the end
    """
    between = model.get_input_embeddings()(tokens.clamp(min=0))
    labels = trained.labels(tokens)
    for k in range(1, trained.K + 1):
        x = trained(k, f, between[:, :k]).to(model.dtype)
        yield to_logits(trained.lm_head(x).float()), labels[:, k]


def heads_loss(trained: Heads, model, to_logits: Callable, f: torch.Tensor,
               tokens: torch.Tensor) -> torch.Tensor:
    """Return the sum over heads of DECAY^k times the mean of -log p_k, in nats.

    Medusa: Section 2.2.1. Hydra: train.py of its code adds the heads' losses as they are.
    The arguments are those of `head_logits`.
    """
    loss = 0.0
    for k, (logits, labels) in enumerate(head_logits(trained, model, to_logits, f, tokens), 1):
        total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        loss = loss + DECAY[trained.kind] ** k * total / (labels >= 0).sum().clamp(min=1)
    return loss


# ---------------------------------------------------------------------------------- decoding

def fill_medusa_tree(trained: Heads, target: CachedLM, f: torch.Tensor, root: int,
                     tree: list[Node]) -> list[int]:
    """Return the tokens of a planned tree, guessed by Medusa heads.

    A Medusa head ignores the guesses before it: one pass of the LM head serves all levels. The
    arguments are those of `grow`.
    """
    depth = max(node.depth for node in tree)
    if depth == 0:
        return [root]
    x = torch.cat([trained(k, f, None) for k in range(1, depth + 1)])
    ranked = trained.rank_tokens(x, target.vocab)  # [depth][rank]
    return [root] + [ranked[node.depth - 1][node.rank] for node in tree[1:]]


def fill_hydra_tree(trained: Heads, target: CachedLM, f: torch.Tensor, root: int,
                    tree: list[Node]) -> list[int]:
    """Return the tokens of a planned tree, guessed by Hydra heads level by level.

    Head k reads the k tokens on the way down to each parent. The arguments are those of `grow`.
    """
    embed = target.model.get_input_embeddings()
    texts = {0: [root]}  # for each node the tokens from the root down to it
    for k in range(1, max(node.depth for node in tree) + 1):
        level = [i for i, node in enumerate(tree) if node.depth == k]
        owners = sorted({tree[i].parent for i in level})
        between = embed(torch.tensor([texts[node] for node in owners], device=f.device))
        x = trained(k, f.expand(len(owners), -1), between)
        ranked = dict(zip(owners, trained.rank_tokens(x, target.vocab)))
        for i in level:
            parent = tree[i].parent
            texts[i] = texts[parent] + [ranked[parent][tree[i].rank]]
    return [texts[i][-1] for i in range(len(tree))]


@torch.inference_mode()
def grow(trained: Heads, target: CachedLM, f: torch.Tensor, root: int,
         tree: list[Node]) -> list[int]:
    """Return the tokens of a planned tree below a root.

    f     the feature [1, d] of the token before the root
    root  the token of node 0
    tree  the nodes, as `best_tree` plans them: parents, depths and ranks without tokens
    """
    if trained.kind == "medusa":
        return fill_medusa_tree(trained, target, f, root, tree)
    return fill_hydra_tree(trained, target, f, root, tree)


def list_plans(trained: Heads, target: CachedLM, f: torch.Tensor) -> Iterator[tuple]:
    """Yield trees with their expected tokens and the seconds to grow and to verify them, for
    `fastest` to choose from. Medusa, Section 2.3.3, by depth and size, with this machine's costs.

    f  a feature [1, d] to grow trees from while the clock runs
    """
    costs = row_costs(target, MOST)
    for depth in range(trained.K + 1):
        tree = best_tree(trained.accept[:depth], MOST)
        growing = min(timeit.repeat(lambda: grow(trained, target, f, 0, tree[:16]), number=1,
                                    repeat=3))
        for n in range(1, len(tree) + 1):
            yield tree[:n], sum(node.chance for node in tree[:n]), costs[n] + growing


def typical_path(ids: list[int], parents: list[int], logits: torch.Tensor, sample: Sampler,
                 epsilon: float, delta: float) -> tuple[list[int], list[int]]:
    """Verify a tree by typical acceptance: choose the longest path of typical tokens, and end it
    with the token that is likeliest after it. Medusa, Section 2.3.1.

    A token x is typical where p(x) > min(ε, δ exp(-H(p))), with H the entropy in nats.

    logits   the target's, [n, V], after each node
    returns  path, the accepted nodes with the root first, and chunk, the accepted guesses and the
             token after them
    """
    p = sample.probs(logits)  # [n, V]
    H = torch.special.entr(p).sum(-1)  # [n]
    least = (delta * (-H).exp()).clamp(max=epsilon)
    typical = (p[parents, ids] > least[parents]).tolist()  # entry 0, of no parent, is never read
    paths = {0: [0]}
    for node in range(1, len(ids)):
        if typical[node] and parents[node] in paths:
            paths[node] = paths[parents[node]] + [node]

    def rank(path: list[int]) -> tuple[int, float]:
        """Rank a path by its length, and among equally long ones by the target's probability."""
        return len(path), sum(p[parents[node], ids[node]].log().item() for node in path[1:])
    path = max(paths.values(), key=rank)
    return path, [ids[n] for n in path[1:]] + [logits[path[-1]].argmax().item()]


def check_options(heads: str, nodes: int, epsilon: float, delta: float) -> None:
    """Raise InputError for the first option of `medusa` that is wrong."""
    if heads not in KINDS:
        raise InputError(f"--heads must be medusa or hydra, got {heads}")
    if not 0 <= nodes <= 128:
        raise InputError(f"--nodes must be 0 to 128, got {nodes}")
    if not epsilon > 0:
        raise InputError(f"--epsilon must be above 0, got {epsilon}")
    if not delta > 0:
        raise InputError(f"--delta must be above 0, got {delta}")


def medusa(target: CachedLM, prompt: list[int], *, heads: str = "medusa", nodes: int = 0,
           typical: bool = False, epsilon: float = 0.09, delta: float = 0.3, adapter: str = "",
           trained: "Heads | None" = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Verify the tree of the heads' guesses in one call of the target, keep one path, and let the
    heads read the feature of its last node.

    trained   heads to use in place of a file's

    heads:   medusa or hydra
    nodes:   nodes of the tree with its root, up to 128; 0 takes as many as pay on this machine
    typical: accept what is typical of the target (lossy), not only what it chooses
    epsilon: for typical acceptance, a probability that is always enough (ε)
    delta:   for typical acceptance, the factor of exp(-entropy), which is enough where it is less
             than epsilon (δ)
    adapter: file of heads from `python -m survey.medusa train`; default: models/HEADS.safetensors
    Yields chunks of 1 to K + 1 tokens; logs {"guessed", "accepted", "rows"} a call.
    """
    check_options(heads, nodes, epsilon, delta)
    file = adapter or f"{MODELS}/{heads}.safetensors"
    trained = trained or target.once((heads, file), lambda: load_heads(file, heads, target.model))
    target.start(prompt[:-1])
    root = prompt[-1]
    f = target.features[-1:]  # [1, d], of the token before the root
    if len(prompt) == 1:  # the first token of a text has no token before it
        f = torch.zeros_like(trained.W[0].bias)[None]
    tree = best_tree(trained.accept, max(nodes, 1))  # the plan is fixed, its tokens are not
    while True:
        if nodes == 0:  # the clock chooses, and may choose anew as the context grows
            tree = fastest(target, trained, lambda: list_plans(trained, target, f))
        parents = [node.parent for node in tree]
        ids = grow(trained, target, f, root, tree)
        logits = target.forward(ids, parents)  # [nodes, V]
        if typical:
            path, chunk = typical_path(ids, parents, logits, sample, epsilon, delta)
        else:
            path, chunk = walk(ids, parents, sample(logits))
        target.commit(path)
        root = chunk[-1]
        f = target.features[path[-1:]]  # of the last accepted node, which stands before the root
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1, "rows": len(ids)})
        yield chunk


# ------------------------------------------------------------------------------------ training

@torch.inference_mode()
def collect_features(model, data: list[tuple[list[int], list[int]]], K: int):
    """Return what K heads learn from: features, and the tokens after them.

    Every position t counts at which a head has a token of the answer to guess.

    data     pairs of a prompt and its answer
    returns  features [N, d] on the CPU, and the K + 1 tokens [N, K + 1] after each of them, -100
             beyond the end
    """
    lm = CachedLM(model)
    features, tokens = [], []
    for prompt, answer in tqdm(data, desc="features"):
        text = prompt + answer
        first = max(0, len(prompt) - 2)
        end = len(text) - 2  # the first head guesses token t + 2, which the answer must have
        lm.start(text[:end])
        features.append(lm.features[first:].cpu().to(torch.bfloat16))
        after = torch.tensor(text + [-100] * K).unfold(0, K + 1, 1)
        tokens.append(after[first + 1:end + 1])
    return torch.cat(features), torch.cat(tokens)


@torch.inference_mode()
def accuracy(trained: Heads, model, to_logits: Callable, f: torch.Tensor, tokens: torch.Tensor,
             size: int = 512):
    """Measure heads on held-out positions.

    f, tokens  as `collect_features` returns them
    size       positions of a pass
    returns    the loss of each head in nats, and the table Heads.accept
    """
    K = trained.K
    losses, labelled, reached = torch.zeros(K), torch.zeros(K), torch.zeros(K)
    hits = torch.zeros(K, RANKS)
    for features, after in zip(f.split(size), tokens.to(trained.vocab.device).split(size)):
        said = head_logits(trained, model, to_logits, features.to(trained.W[0].weight), after)
        above = torch.ones(len(features), dtype=torch.bool, device=after.device)
        for k, (logits, labels) in enumerate(said):
            loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            losses[k] += loss.cpu()
            labelled[k] += (labels >= 0).sum().cpu()
            best = logits.topk(min(RANKS, logits.shape[1])).indices
            right = best == labels[:, None]  # [n, ranks]
            counted = above & (after[:, k + 1] >= 0)
            hits[k, :right.shape[1]] += right[counted].sum(0).cpu()
            reached[k] += counted.sum().cpu()
            above &= right.any(1)  # deeper heads count only below a right guess
    ranks = min(RANKS, len(trained.vocab))
    accept = hits[:, :ranks] / reached.clamp(min=1)[:, None]
    return (losses / labelled.clamp(min=1)).tolist(), accept.tolist()


def fit(model, trained: Heads, data: list, held_out: list, *, steps: int, batch: int, lr: float,
        seed: int = 0, work: Path | None = None) -> dict:
    """Train heads on pairs of a prompt and its answer, the model frozen, and set their `accept`.

    data      pairs to learn from
    held_out  pairs to measure by
    lr        where the cosine of AdamW's learning rate begins
    work      folder of checkpoints; None: there are none
    returns   {step: {"loss", "accept"}} on `held_out`, an entry for each head
    """
    from models.training import Training, digest
    to_logits = logits_of(model)
    features, tokens = collect_features(model, data, trained.K)
    held_features, held_tokens = collect_features(model, held_out, trained.K)

    def loss_of(rng: random.Random) -> torch.Tensor:
        chosen = rng.choices(range(len(features)), k=batch)
        return heads_loss(trained, model, to_logits, features[chosen].to(trained.W[0].weight),
                          tokens[chosen].to(model.device))

    def evaluate() -> tuple[dict, str]:
        losses, accept = accuracy(trained, model, to_logits, held_features, held_tokens)
        first = [round(ranks[0], 3) for ranks in accept]
        return ({"loss": losses, "accept": accept},
                f"held-out loss {sum(losses) / trained.K:.3f}, right {first}")
    kept = trained.vocab.tolist()
    of = digest(model.state_dict()), trained.kind, trained.K, kept, data, held_out, batch
    curve = Training(trained.trainable(), of, name=trained.kind, steps=steps, lr=lr, seed=seed,
                     folder=work).train(loss_of, evaluate)
    trained.accept = curve[steps]["accept"]
    return curve


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          heads: str = "medusa", K: int = 4, vocab: int = 0, max_new_tokens: int = 200,
          steps: int = 1000, batch: int = 512, lr: float = 1e-3, seed: int = 0) -> None:
    """Train heads for a frozen model on its own answers. A stopped run goes on.

    out:    the safetensors file to make
    work:   folder of answers and checkpoints (default: OUT.work)
    heads:  medusa or hydra
    K:      number of heads
    vocab:  how many tokens heads can guess, the most frequent of prompts and answers; 0 is all
    max_new_tokens: of an answer
    batch:  positions a step
    lr:     where the cosine of the learning rate begins; 1e-3 suited models of 10M to 135M
    """
    from models.training import collect_examples, find_frequent
    for name, value, least in (("steps", steps, 1), ("batch", batch, 1), ("vocab", vocab, 0),
                               ("max-new-tokens", max_new_tokens, 1)):
        if value < least:
            raise InputError(f"--{name} must be {least} or more, got {value}")
    if not lr > 0:
        raise InputError(f"--lr must be above 0, got {lr}")
    work = work or Path(f"{out}.work")
    trained = Heads(model, heads, K)
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed)
    if vocab:
        trained.keep(find_frequent(data, vocab))
    print(f"{sum(x.numel() for x in trained.trainable().values()):,} parameters")
    fit(model, trained, data, held_out, steps=steps, batch=batch, lr=lr, seed=seed, work=work)
    save_heads(out, trained, model)


# ---------------------------------------------------------------------------------- their file

def save_heads(path: Path, trained: Heads, model) -> None:
    """Write heads to a file, with the model that they are for."""
    header = {"K": trained.K, "residual": trained.residual, "accept": trained.accept}
    if len(trained.vocab) < len(trained.row_of):
        header["vocab"] = trained.vocab.tolist()
    save_part(path, f"{trained.kind} heads", model, trained.trainable(), **header)


def load_heads(path: str | Path, kind: str, model) -> Heads:
    """Read heads from a file. Raise InputError where it is another model's or of another kind.

    kind  medusa or hydra
    """
    header, tensors = load_part(path, f"{kind} heads", model)
    trained = Heads(model, kind, header["K"], header.get("residual", "feature"))
    fill(trained.trainable(), tensors, path)
    trained.accept = header["accept"]
    if "vocab" in header:
        trained.keep(header["vocab"])
    return trained.to(model.dtype)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    """Return a line that says what a call of the target verified and accepted."""
    guessed = sum(record["guessed"] for record in run.log) / len(run.log)
    accepted = sum(record["accepted"] for record in run.log) / len(run.log)
    return f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli.main import main
    sys.exit(main([medusa], report, commands=[train], ranges={"nodes": (2, 4, 8, 16, 32, 64)}))
