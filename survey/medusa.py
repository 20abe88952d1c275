"""Medusa and Hydra: small heads on the target's own features guess the tokens ahead.

medusa   Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
         Heads", arXiv 2401.10774
hydra    Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding",
         arXiv 2402.05109
--vocab  Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked
         Speculative Sampling", arXiv 2502.14856

    python -m survey.medusa train --prompts FILE --heads hydra --out my.safetensors
    python -m survey.medusa --heads hydra --adapter my.safetensors --prompt "..."

The feature f of position t is what the LM head reads to choose token t + 1. Head k (1 … K) guesses
token t + k + 1, through the same LM head:

    Medusa   p_k = softmax(LM(f + SiLU(W_k f + b_k)))                               Section 2.1.1
    Hydra    p_k = softmax(LM(f + SiLU(W_k [f; e(x_{t+1}); …; e(x_{t+k})] + b_k)))  Section 3
    loss     Σ_k 0.8^k (- log p_k(x_{t+k+1})), the model frozen: Medusa-1, Section 2.2.1

A Medusa head does not know what the heads before it guessed; a Hydra head reads it. The likeliest
guesses are a tree, verified in one target call: lossless, greedily or by one draw of the target at
each node; with --typical (Medusa, Section 2.3.1) lossy but at temperature 0.

Departures: the LM head is the model's own, frozen (the papers train one for each head); trees have
the size that pays on the machine at hand; sampling is exact by default. Left out: tuning the model
as well (Medusa-2), Hydra++ (its extra layer is EAGLE's idea).
"""
import random
import sys
import timeit
from pathlib import Path
from typing import Callable, Iterator

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import (CachedLM, InputError, Node, Sampler, best_tree, fastest, greedy, row_costs,
                    walk)
from survey.parts import MODELS, fill, head_for, load_part, logits_of, save_part

MOST, RANKS = 64, 10  # nodes of a tree that is chosen here; guesses of a node


# ---------------------------------------------------------------------------------- decoding

@torch.inference_mode()
def grow(trained: "Heads", target: CachedLM, f: torch.Tensor, root: int,
         tree: list[Node]) -> list[int]:
    """The tokens of a planned tree below feature f [1, d] and the root. The LM head runs once for
    all Medusa heads; once a level for Hydra heads, over the nodes with children."""
    depth = max(node.depth for node in tree)
    embed = target.model.get_input_embeddings()
    texts = {0: [root]}  # node: the tokens from the root down to it
    ranked = []  # by each Medusa head, whatever a node's tokens are
    if trained.kind == "medusa" and depth > 0:
        x = torch.cat([trained(k, f, None) for k in range(1, depth + 1)])
        ranked = trained.likeliest(x, target.vocab)

    def guesses_of(k: int, owners: list[int]) -> list[list[int]]:
        """By head k, for each of these nodes, the likeliest first."""
        if trained.kind == "medusa":
            return [ranked[k - 1]] * len(owners)
        between = embed(torch.tensor([texts[node] for node in owners], device=f.device))
        return trained.likeliest(trained(k, f.expand(len(owners), -1), between), target.vocab)
    for k in range(1, depth + 1):
        level = [(i, node) for i, node in enumerate(tree) if node.depth == k]
        owners = sorted({node.parent for _, node in level})
        guesses = dict(zip(owners, guesses_of(k, owners)))
        for i, node in level:
            texts[i] = texts[node.parent] + [guesses[node.parent][node.rank]]
    return [texts[i][-1] for i in range(len(tree))]


def plans(trained: "Heads", target: CachedLM, f: torch.Tensor) -> Iterator[tuple]:
    """(a best tree, expected tokens, seconds to grow it and to verify it): Medusa, Section 2.3.3,
    by depth and size, with the costs of this machine."""
    costs = row_costs(target, MOST)
    for depth in range(trained.K + 1):
        tree = best_tree(trained.accept[:depth], MOST)
        growing = min(timeit.repeat(lambda: grow(trained, target, f, 0, tree[:16]), number=1,
                                    repeat=3))
        for n in range(1, len(tree) + 1):
            yield tree[:n], sum(node.chance for node in tree[:n]), costs[n] + growing


def typical_path(ids: list[int], parents: list[int], logits: torch.Tensor, sample: Sampler,
                 epsilon: float, delta: float) -> tuple[list[int], list[int]]:
    """(path, chunk) of the longest path of typical tokens, p(x) > min(ε, δ exp(-H(p))) with H the
    entropy in nats; then the likeliest token. Medusa, Section 2.3.1."""
    p = sample.probs(logits)  # [n, V]
    H = torch.special.entr(p).sum(-1)  # [n]
    least = (delta * (-H).exp()).clamp(max=epsilon)
    typical = (p[parents, ids] > least[parents]).tolist()  # of the root: whatever, of no use
    paths = {0: [0]}
    for node in range(1, len(ids)):
        if typical[node] and parents[node] in paths:
            paths[node] = paths[parents[node]] + [node]
    def likely(path: list[int]) -> tuple[int, float]:
        """Of equally long ones the target's likeliest."""
        return len(path), sum(p[parents[node], ids[node]].log().item() for node in path[1:])
    path = max(paths.values(), key=likely)
    return path, [ids[n] for n in path[1:]] + [logits[path[-1]].argmax().item()]


def medusa(target: CachedLM, prompt: list[int], *, heads: str = "medusa", nodes: int = 0,
           typical: bool = False, epsilon: float = 0.09, delta: float = 0.3, adapter: str = "",
           trained: "Heads | None" = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Verify the tree of the heads' guesses in one target call, keep one path, and let the heads
    read the feature of its last node.

    heads:   medusa or hydra
    nodes:   of the tree, the root among them, up to 128; 0: as many as pay on this machine
    typical: accept what is typical of the target (lossy), not only what it chooses
    epsilon: of typical acceptance: a probability that always is enough (ε)
    delta:   of typical acceptance: times exp(-entropy), where that is less (δ)
    adapter: file of heads from `python -m survey.medusa train`; default: models/HEADS.safetensors
    Yields chunks of 1 to K + 1 tokens; `trained` replaces the file. Logs {"guessed", "accepted",
    "rows"} a call.
    """
    if heads not in ("medusa", "hydra") or not (0 <= nodes <= 128 and epsilon > 0 and delta > 0):
        raise InputError("expected medusa or hydra heads, 0 to 128 nodes, epsilon and delta above "
                         f"0, got {heads}, {nodes}, {epsilon} and {delta}")
    path = adapter or f"{MODELS}/{heads}.safetensors"
    trained = trained or target.once((heads, path), lambda: load_heads(path, heads, target.model))
    target.start(prompt[:-1])
    root = prompt[-1]
    f = target.features[-1:]  # [1, d], of the token before the root
    if len(prompt) == 1:  # a first token has none before it
        f = torch.zeros_like(trained.W[0].bias)[None]
    while True:
        tree = best_tree(trained.accept, nodes) if nodes else fastest(
            target, trained, lambda: plans(trained, target, f))
        parents = [node.parent for node in tree]
        ids = grow(trained, target, f, root, tree)
        logits = target.forward(ids, parents)
        if typical:
            path, chunk = typical_path(ids, parents, logits, sample, epsilon, delta)
        else:
            path, chunk = walk(ids, parents, sample(logits))
        target.commit(path)
        root = chunk[-1]
        f = target.features[path[-1:]]
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1, "rows": len(ids)})
        yield chunk


# ----------------------------------------------------------------------------------- the heads

class Heads(torch.nn.Module):
    """K heads for the features, of width d, and if `kind` is hydra the token embeddings, of width
    e, of a model, which they freeze. `accept[k - 1][r]`: how often the guess of rank r of head k is
    right on held-out answers, where the heads before it are. `vocab`: the tokens of the LM head's
    rows, all or those to `keep`."""

    def __init__(self, model, kind: str, K: int):
        super().__init__()
        if kind not in ("medusa", "hydra") or K < 1:
            raise InputError(f"expected medusa or hydra heads and K of 1 or more, got {kind}, {K}")
        model.requires_grad_(False)
        self.kind = kind
        self.K = K
        self.accept = []
        self.lm_head = model.get_output_embeddings()
        V, d = self.lm_head.weight.shape
        e = model.get_input_embeddings().weight.shape[1]
        widths = [d + k * e if kind == "hydra" else d for k in range(1, K + 1)]
        self.W = torch.nn.ModuleList(torch.nn.Linear(width, d) for width in widths)
        for layer in self.W:  # at first every head guesses what the LM head says
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        self.to(self.lm_head.weight.device)
        self.vocab = torch.arange(V, device=self.lm_head.weight.device)
        self.row_of = self.vocab  # of a token in the LM head, -100 where it has none

    def keep(self, vocab: list[int]) -> None:
        """Guess these tokens alone."""
        self.vocab = self.vocab[vocab]
        self.lm_head = head_for(self.lm_head, self.vocab)
        self.row_of = torch.full_like(self.row_of, -100)
        self.row_of[self.vocab] = torch.arange(len(vocab), device=self.vocab.device)

    def labels(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of the LM head that stand for tokens; -100 where there is none."""
        return self.row_of[tokens.clamp(min=0)].masked_fill(tokens < 0, -100)

    def own(self) -> dict[str, torch.nn.Parameter]:
        """What is trained: all but the LM head."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, k: int, f: torch.Tensor, between: torch.Tensor | None) -> torch.Tensor:
        """What the LM head reads for head k [n, d], of features f [n, d] and the embeddings
        [n, k, e] of the k tokens between, which a Medusa head ignores."""
        reads = torch.cat([f, between.flatten(1)], 1) if self.kind == "hydra" else f
        return f + F.silu(self.W[k - 1](reads))

    def likeliest(self, x: torch.Tensor, vocab: int | None) -> list[list[int]]:
        """The tokens of the RANKS largest logits that the LM head reads in x [n, d]."""
        logits = self.lm_head(x)[:, :vocab]
        return self.vocab[logits.topk(min(RANKS, logits.shape[1])).indices].tolist()


def save_heads(path: Path, trained: Heads, model) -> None:
    header = {"K": trained.K, "accept": trained.accept}
    if len(trained.vocab) < len(trained.row_of):
        header["vocab"] = trained.vocab.tolist()
    save_part(path, f"{trained.kind} heads", model, trained.own(), **header)


def load_heads(path: str | Path, kind: str, model) -> Heads:
    """InputError where the file was made for another model or has other heads."""
    header, tensors = load_part(path, f"{kind} heads", model)
    trained = Heads(model, kind, header["K"])
    fill(trained.own(), tensors, path)
    trained.accept = header["accept"]
    if "vocab" in header:
        trained.keep(header["vocab"])
    return trained.to(model.dtype)


# ------------------------------------------------------------------------------------ training

@torch.inference_mode()
def positions(model, data: list[tuple[list[int], list[int]]], K: int):
    """What the heads learn from, of (prompt, answer) pairs: the features [N, d] of all positions t
    where a head has a token of the answer to guess, on the CPU, and the K + 1 tokens [N, K + 1]
    after them, -100 beyond the end."""
    lm = CachedLM(model)
    features, tokens = [], []
    for prompt, answer in tqdm(data, desc="features"):
        text = prompt + answer
        first = max(0, len(prompt) - 2)
        end = len(text) - 2  # t + 2 is in the answer
        lm.start(text[:end])
        features.append(lm.features[first:].cpu().to(torch.bfloat16))
        after = torch.tensor(text + [-100] * K).unfold(0, K + 1, 1)
        tokens.append(after[first + 1:end + 1])
    return torch.cat(features), torch.cat(tokens)


def head_logits(trained: Heads, model, own: Callable, f: torch.Tensor, tokens: torch.Tensor):
    """For each head its logits [N, V'] of features f [N, d] and the tokens after them, and the
    labels [N] among them. `own`: what the model makes of its LM head's output."""
    between = model.get_input_embeddings()(tokens.clamp(min=0))
    labels = trained.labels(tokens)
    for k in range(1, trained.K + 1):
        x = trained(k, f, between[:, :k]).to(model.dtype)
        yield own(trained.lm_head(x).float()), labels[:, k]


@torch.inference_mode()
def accuracy(trained: Heads, model, own: Callable, f: torch.Tensor, tokens: torch.Tensor,
             size: int = 512):
    """(loss of each head in nats, accept[k - 1][rank]) on held-out positions: `accept` counts those
    where the heads before guess right with one of their RANKS, as the tree wants it."""
    K = trained.K
    losses, known, total = torch.zeros(K), torch.zeros(K), torch.zeros(K)
    right = torch.zeros(K, RANKS)
    for some, after in zip(f.split(size), tokens.to(trained.vocab.device).split(size)):
        said = head_logits(trained, model, own, some.to(trained.W[0].weight), after)
        above = torch.ones(len(some), dtype=torch.bool, device=after.device)
        for k, (logits, labels) in enumerate(said):
            loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            losses[k] += loss.cpu()
            known[k] += (labels >= 0).sum().cpu()
            hits = logits.topk(min(RANKS, logits.shape[1])).indices == labels[:, None]  # [n, ranks]
            counted = above & (after[:, k + 1] >= 0)
            right[k, :hits.shape[1]] += hits[counted].sum(0).cpu()
            total[k] += counted.sum().cpu()
            above &= hits.any(1)
    ranks = min(RANKS, len(trained.vocab))
    accept = right[:, :ranks] / total.clamp(min=1)[:, None]
    return (losses / known.clamp(min=1)).tolist(), accept.tolist()


def heads_loss(trained: Heads, model, own: Callable, f: torch.Tensor,
               tokens: torch.Tensor) -> torch.Tensor:
    """Σ_k 0.8^k (mean of -log p_k), in nats: Section 2.2.1."""
    loss = 0.0
    for k, (logits, labels) in enumerate(head_logits(trained, model, own, f, tokens), 1):
        total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        loss = loss + 0.8 ** k * total / (labels >= 0).sum().clamp(min=1)
    return loss


def fit(model, trained: Heads, data: list, held_out: list, *, steps: int, batch: int, lr: float,
        seed: int = 0, work: Path | None = None) -> dict:
    """Train on (prompt, answer) pairs, the model frozen: AdamW, the rate a cosine. Returns {step:
    {"loss", "accept"}, of each head} on `held_out`; sets `trained.accept`."""
    from models.training import Training, digest
    own = logits_of(model)
    f, tokens = positions(model, data, trained.K)
    others = positions(model, held_out, trained.K)

    def loss_of(rng: random.Random) -> torch.Tensor:
        some = rng.choices(range(len(f)), k=batch)
        return heads_loss(trained, model, own, f[some].to(trained.W[0].weight),
                          tokens[some].to(model.device))

    def evaluate() -> tuple[dict, str]:
        losses, accept = accuracy(trained, model, own, *others)
        first = [round(ranks[0], 3) for ranks in accept]
        return ({"loss": losses, "accept": accept},
                f"held-out loss {sum(losses) / trained.K:.3f}, right {first}")
    kept = trained.vocab.tolist()
    of = digest(model.state_dict()), trained.kind, trained.K, kept, data, held_out, batch
    curve = Training(trained.own(), of, name=trained.kind, steps=steps, lr=lr, seed=seed,
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
    K:      heads
    vocab:  how many tokens heads can guess, the most frequent in prompts and answers; 0: all
    max_new_tokens: of an answer
    batch:  positions a step
    lr:     where the cosine begins
    """
    from models.training import collect_examples, find_frequent
    if min(steps, batch, max_new_tokens) < 1 or vocab < 0 or not lr > 0:
        raise InputError("expected steps, batch and max-new-tokens of 1 or more, vocab of 0 or "
                         "more, lr above 0")
    work = work or Path(f"{out}.work")
    trained = Heads(model, heads, K)
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed)
    if vocab:
        trained.keep(find_frequent(data, vocab))
    print(f"{sum(x.numel() for x in trained.own().values()):,} parameters")
    fit(model, trained, data, held_out, steps=steps, batch=batch, lr=lr, seed=seed, work=work)
    save_heads(out, trained, model)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    guessed, accepted = (sum(r[x] for r in run.log) / len(run.log) for x in ("guessed", "accepted"))
    return f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli import main
    sys.exit(main([medusa], report, commands=[train], ranges={"nodes": (2, 4, 8, 16, 32, 64)}))
