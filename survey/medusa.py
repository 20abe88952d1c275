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
import json
import math
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Iterator

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from common import (CachedLM, InputError, Sampler, best_tree, context_length, digest, greedy,
                    own_answers, row_costs, seconds_of, walk)

MODELS = Path(__file__).resolve().parent.parent / "models"
MOST, RANKS = 64, 10  # nodes of a tree; guesses of a node


# ----------------------------------------------------------------------------------- the heads

class Heads(torch.nn.Module):
    """K heads for the features, of width d, and if `kind` is hydra the token embeddings, of width
    e, of a model, which they freeze. `accept[k - 1][r]`: how often the guess of rank r of head k is
    right on held-out answers. `vocab`: the tokens of the LM head's rows, all or those to `keep`."""

    def __init__(self, model, kind: str, K: int):
        super().__init__()
        if kind not in ("medusa", "hydra") or K < 1:
            raise InputError(f"expected medusa or hydra heads and K of 1 or more, got {kind}, {K}")
        model.requires_grad_(False)
        self.kind, self.K, self.accept, self.lm_head = kind, K, [], model.get_output_embeddings()
        (V, d), e = self.lm_head.weight.shape, model.get_input_embeddings().weight.shape[1]
        reads = [d + k * e if kind == "hydra" else d for k in range(1, K + 1)]
        self.W = torch.nn.ModuleList(torch.nn.Linear(n, d) for n in reads)
        for layer in self.W:  # at first every head guesses what the LM head says
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        self.to(device := self.lm_head.weight.device)
        self.vocab = self.rows = torch.arange(V, device=device)

    def keep(self, vocab: list[int]) -> None:
        """Guess these tokens alone, with their rows of the LM head: it costs less (FR-Spec)."""
        head, self.vocab = self.lm_head, self.vocab[vocab]
        few = torch.nn.Linear(head.weight.shape[1], len(vocab), "bias" in head.state_dict())
        few.to(head.weight).load_state_dict({n: x[vocab] for n, x in head.state_dict().items()})
        self.lm_head = few.requires_grad_(False)
        self.rows = torch.full_like(self.rows, -100)  # of each token, -100 where there is none
        self.rows[self.vocab] = torch.arange(len(vocab), device=self.rows.device)

    def labels(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of the LM head that stand for tokens; -100 where there is none."""
        return self.rows[tokens.clamp(min=0)].masked_fill(tokens < 0, -100)

    def own(self) -> dict[str, torch.nn.Parameter]:
        """What is trained: all but the LM head."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def forward(self, k: int, f: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        """What the LM head reads for head k [n, d], of features f [n, d] and the embeddings
        `above` [n, k, e] of the k tokens between, which a Medusa head ignores."""
        reads = torch.cat([f, above.flatten(1)], 1) if self.kind == "hydra" else f
        return f + F.silu(self.W[k - 1](reads))


def some_embeddings(model) -> torch.Tensor:
    """Enough of a model's embeddings [16, 16] to know it by, in whatever type it is loaded."""
    return model.get_input_embeddings().weight[:16, :16].detach().float().cpu()


def save_heads(path: Path, heads: Heads, model) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"kind": heads.kind, "K": heads.K, "accept": heads.accept}
    if len(heads.vocab) < len(heads.rows):
        header["vocab"] = heads.vocab.tolist()
    tensors = heads.own() | {"model": some_embeddings(model)}
    save_file({name: x.detach().cpu().to(torch.bfloat16) for name, x in tensors.items()}, path,
              {"heads": json.dumps(header)})


def load_heads(path: str | Path, model) -> Heads:
    """InputError where the file was made for another model."""
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {})["heads"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        known = tensors.pop("model").float()
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError("expected a file made by `python -m survey.medusa train`, got "
                         f"{str(path)!r}: {error!r}") from error
    heads, own = Heads(model, header["kind"], header["K"]), some_embeddings(model)
    same = heads.own()
    if {x: y.shape for x, y in tensors.items()} != {x: y.shape for x, y in same.items()} or (
            known.shape != own.shape or not torch.allclose(known, own, atol=1e-4, rtol=1e-2)):
        raise InputError("expected heads of this model, got those of another")
    heads.load_state_dict(tensors, strict=False)
    heads.accept = header["accept"]
    if "vocab" in header:
        heads.keep(header["vocab"])
    return heads.to(model.dtype)


# ---------------------------------------------------------------------------------- decoding

@torch.inference_mode()
def grow(heads: Heads, target: CachedLM, f: torch.Tensor, root: int, tree: list) -> list[int]:
    """The tokens of a tree of `best_tree` below feature f [1, d] and the root. The LM head runs
    once for all Medusa heads; once a level for Hydra heads, over the nodes with children."""
    ids, above = [root] * len(tree), {0: [root]}  # above[n]: the tokens from the root to node n
    embed = target.model.get_input_embeddings()
    depths = range(1, max(depth for _, _, depth, _ in tree) + 2)

    def likeliest(x: torch.Tensor) -> list[list[int]]:
        logits = heads.lm_head(x)[:, :target.vocab]
        return heads.vocab[logits.topk(min(RANKS, logits.shape[1])).indices].tolist()
    if heads.kind == "medusa" and depths:
        said = likeliest(torch.cat([heads(k, f, f[:, None]) for k in depths]))
    for k in depths:
        level = [n for n, (_, _, depth, _) in enumerate(tree) if depth == k - 1]
        owners = sorted({tree[n][1] for n in level})
        if heads.kind == "medusa":  # whatever a node's tokens are
            guesses = dict.fromkeys(owners, said[k - 1])
        else:
            texts = torch.tensor([above[n] for n in owners], device=f.device)  # [owners, k]
            x = heads(k, f.expand(len(owners), -1), embed(texts))
            guesses = dict(zip(owners, likeliest(x)))
        for n in level:
            _, parent, _, rank = tree[n]
            ids[n] = guesses[parent][rank]
            above[n] = above[parent] + [ids[n]]
    return ids


def tree_that_pays(heads: Heads, target: CachedLM, f: torch.Tensor) -> list:
    """Of the best trees (Medusa, Section 2.3.3), by depth and size, the one with the most expected
    tokens a second: the costs of growing it and of the target's call are measured here."""
    found = {}
    for K in range(heads.K + 1):
        tree = best_tree(heads.accept[:K], MOST)
        growing = seconds_of(target, (heads.kind, K), lambda: grow(heads, target, f, 0, tree[:16]))
        for n, seconds in row_costs(target, len(tree)).items():
            tokens = sum(chance for chance, *_ in tree[:n])
            found[tokens / (seconds + growing)] = tree[:n]
    return found[max(found)]


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
    path = max(paths.values(), key=len)  # of equally long ones the first, which is likeliest
    return path, [ids[n] for n in path[1:]] + [logits[path[-1]].argmax().item()]


def medusa(target: CachedLM, prompt: list[int], *, heads: str = "medusa", nodes: int = 0,
           typical: bool = False, epsilon: float = 0.09, delta: float = 0.3, adapter: str = "",
           trained: Heads | None = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Verify the tree of the heads' guesses in one target call, keep one path, and let the heads
    read the feature of its last node.

    heads:   medusa or hydra
    nodes:   of the tree, the root among them; 0: as many as pay on this machine
    typical: accept what is typical of the target (lossy), not only what it chooses
    epsilon: of typical acceptance: a probability that always is enough (ε)
    delta:   of typical acceptance: times exp(-entropy), where that is less (δ)
    adapter: file of heads from `python -m survey.medusa train`; default: models/HEADS.safetensors
    Yields chunks of 1 to K + 1 tokens; `trained` replaces the file. Logs {"guessed", "accepted",
    "rows"} a call.
    """
    if heads not in ("medusa", "hydra") or nodes < 0 or not (epsilon > 0 and delta > 0):
        raise InputError("expected medusa or hydra heads, nodes of 0 or more, epsilon and delta "
                         f"above 0, got {heads}, {nodes}, {epsilon} and {delta}")
    trained = trained or load_heads(adapter or MODELS / f"{heads}.safetensors", target.model)
    target.start(prompt[:-1], width=nodes or MOST)
    root, f = prompt[-1], target.features[-1:]  # [1, d], of the token before the root
    f = f if prompt[1:] else trained.W[0].bias[None]  # there is none: any will do
    tree = best_tree(trained.accept, nodes) if nodes else tree_that_pays(trained, target, f)
    parents = [parent for _, parent, _, _ in tree]
    while True:
        ids = grow(trained, target, f, root, tree)
        logits = target.forward(ids, parents)
        if typical:
            path, chunk = typical_path(ids, parents, logits, sample, epsilon, delta)
        else:
            path, chunk = walk(ids, parents, sample(logits))
        target.commit(path)
        root, f = chunk[-1], target.features[path[-1:]]
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1, "rows": len(ids)})
        yield chunk


# ------------------------------------------------------------------------------------ training

@torch.inference_mode()
def positions(model, data: list[tuple[list[int], list[int]]], K: int):
    """What the heads learn from, of (prompt, answer) pairs: the features [N, d] of all positions t
    where a head has a token of the answer to guess, on the CPU, and the K + 1 tokens [N, K + 1]
    after them, -100 beyond the end."""
    lm, features, tokens = CachedLM(model, max(len(p) + len(a) for p, a in data)), [], []
    for prompt, answer in tqdm(data, desc="features"):
        text = prompt + answer
        first, last = max(0, len(prompt) - 2), len(text) - 2  # t + 2 is in the answer
        lm.start(text[:last])
        features.append(lm.features[first:].cpu().to(torch.bfloat16))
        after = torch.tensor(text + [-100] * K).unfold(0, K + 1, 1)
        tokens.append(after[first + 1:last + 1])
    return torch.cat(features), torch.cat(tokens)


def head_logits(heads: Heads, model, f: torch.Tensor, tokens: torch.Tensor):
    """For each head its logits [N, V'] of features f [N, d] and the tokens after them, and the
    labels [N] among them."""
    above, labels = model.get_input_embeddings()(tokens.clamp(min=0)), heads.labels(tokens)
    for k in range(1, heads.K + 1):
        yield heads.lm_head(heads(k, f, above[:, :k]).to(model.dtype)).float(), labels[:, k]


@torch.inference_mode()
def accuracy(heads: Heads, model, f: torch.Tensor, tokens: torch.Tensor, size: int = 512):
    """(loss of each head in nats, accept[k - 1][rank]) on held-out positions."""
    losses, known, total = torch.zeros(heads.K), torch.zeros(heads.K), torch.zeros(heads.K)
    right = torch.zeros(heads.K, RANKS)
    for some, after in zip(f.split(size), tokens.to(heads.W[0].bias.device).split(size)):
        said = head_logits(heads, model, some.to(heads.W[0].weight), after)
        for k, (logits, labels) in enumerate(said):
            loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            losses[k] += loss.cpu()
            known[k] += (labels >= 0).sum().cpu()
            total[k] += (after[:, k + 1] >= 0).sum().cpu()
            best = logits.topk(min(RANKS, logits.shape[1])).indices
            right[k, :best.shape[1]] += (best == labels[:, None]).sum(0).cpu()
    return (losses / known.clamp(min=1)).tolist(), (right / total.clamp(min=1)[:, None]).tolist()


def fit(model, heads: Heads, data: list, held_out: list, *, steps: int, batch: int, lr: float,
        seed: int = 0, work: Path | None = None, say=tqdm.write) -> dict[int, tuple]:
    """Train on (prompt, answer) pairs, the model frozen: AdamW, the rate a cosine. Returns {step:
    (held-out loss, accuracy) of each head}; sets `heads.accept`. A file in `work` keeps what is
    done, also when it is interrupted."""
    own, vocab = heads.own(), len(heads.vocab)
    settings = heads.kind, heads.K, vocab, steps, batch, lr, seed, data
    file = work and work / f"heads-{digest(model, settings)}.pt"
    optimizer = torch.optim.AdamW(own.values(), lr=lr, weight_decay=0.0)
    done, curve = 0, {}
    if file and file.exists():
        state = torch.load(file, weights_only=True, map_location="cpu")
        heads.load_state_dict(state["heads"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        done, curve, heads.accept = state["done"], state["curve"], state["accept"]
    (f, tokens), others = positions(model, data, heads.K), positions(model, held_out, heads.K)

    def save() -> None:
        if file:
            torch.save({"heads": own, "optimizer": optimizer.state_dict(),
                        "done": done, "curve": curve, "accept": heads.accept},
                       file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)
    whole = True  # no update is half made
    try:
        for done in tqdm(range(done, steps + 1), initial=done, total=steps, desc="heads"):
            whole = True
            if done == steps or done and done % max(1, steps // 10) == 0:
                losses, heads.accept = accuracy(heads, model, *others)
                first = [round(ranks[0], 3) for ranks in heads.accept]
                curve[done] = losses, first
                say(f"step {done}: held-out loss {sum(losses) / heads.K:.3f}, right {first}")
                save()
            if done == steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * done / steps))
            some = random.Random(f"{seed} {done}").choices(range(len(f)), k=batch)
            known, after = f[some].to(heads.W[0].weight), tokens[some].to(model.device)
            with torch.autocast(model.device.type, dtype=torch.bfloat16):
                losses = [F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
                          / (labels >= 0).sum().clamp(min=1)
                          for logits, labels in head_logits(heads, model, known, after)]
            loss = sum(0.8 ** k * x for k, x in enumerate(losses, 1))  # Section 2.2.1
            if not loss.isfinite():
                raise InputError(f"expected a learning rate below {lr}: the loss is {loss}")
            loss.backward()
            whole = False
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if whole:
            save()
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
    if min(steps, batch, max_new_tokens) < 1 or vocab < 0 or not lr > 0:
        raise InputError("expected steps, batch and max-new-tokens of 1 or more, vocab of 0 or "
                         "more, lr above 0")
    work, longest = work or Path(f"{out}.work"), context_length(model) - max_new_tokens
    work.mkdir(parents=True, exist_ok=True)
    fitting = [list(p) for p in dict.fromkeys(map(tuple, prompts)) if len(p) <= longest]
    torch.manual_seed(seed)
    new = Heads(model, heads, K)
    answers = own_answers(model, tokenizer, fitting, max_new_tokens, work)
    data = [(p, a) for p, a in zip(fitting, answers) if len(a) > 1]
    if len(data) < 2:
        raise InputError(f"expected 2 answers or more of 2 tokens or more, got {len(data)}")
    random.Random(seed).shuffle(data)
    few = max(1, min(100, len(data) // 10))
    if vocab:
        seen = Counter(token for p, a in data[few:] for token in p + a)
        new.keep([token for token, _ in seen.most_common(vocab)])
    print(f"{sum(x.numel() for x in new.own().values()):,} parameters; {len(data) - few} answers "
          f"of {sum(len(a) for _, a in data[few:]):,} tokens, {few} held out")
    fit(model, new, data[few:], data[:few], steps=steps, batch=batch, lr=lr, seed=seed, work=work)
    save_heads(out, new, model)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    guessed, accepted = (sum(r[x] for r in run.log) / len(run.log) for x in ("guessed", "accepted"))
    return f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli import main
    sys.exit(main([medusa], report, commands=[train], ranges={"nodes": (2, 4, 8, 16, 32, 64)}))
