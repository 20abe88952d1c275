"""EAGLE: one decoder layer guesses the target's features; the target's own head reads tokens there.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv 2401.15077
--dynamic: "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", arXiv 2406.16858
train --vocab: Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via
Frequency-Ranked Speculative Sampling", arXiv 2502.14856

    python -m survey.eagle train --prompts FILE --out my.safetensors
    python -m survey.eagle --adapter my.safetensors --prompt "..."

The feature f_i of position i is what the LM head reads to choose token t_{i+1}. The draft's row i:

    fc [e(t_{i+1}); f_i]  ->  one decoder layer  ->  f̂_{i+1}  ->  LM head  ->  guesses of t_{i+2}
    loss = SmoothL1(f̂_{i+1}, f_{i+1}) + 0.1 CrossEntropy(head(f_{i+1}), head(f̂_{i+1}))

The token is one AHEAD of the feature: f_i leaves open which token is drawn from it, and so what
f_{i+1} is (Section 3.1). Deeper guesses are made of guessed features. All are a tree, verified in
one target call: lossless, greedily or by one draw of the target at each node.

Departures: children are a node's likeliest tokens, never drawn; static trees have the shape that
measured acceptance asks for (the paper's is made by hand), dynamic ones as many nodes a level, both
the size that pays here; the layer is of the target's class and learns from the target's answers.
"""
import copy
import json
import math
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Iterator
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from common import (CachedLM, InputError, Sampler, best_tree, context_length, digest, greedy,
                    own_answers, prepare, row_costs, walk)

ADAPTER = str(Path(__file__).resolve().parent.parent / "models/eagle.safetensors")
DEPTH, RANKS, MOST = 8, 10, 64  # of a tree: levels of guesses, guesses of a node, nodes
NOISE, SAMPLED = 0.1, 512  # in training: ± on features; rows of a step for the cross-entropy
DRAFTS = WeakKeyDictionary()  # for a target what all its prompts use, with measured costs


# ----------------------------------------------------------------------------------- the draft

class Draft(torch.nn.Module):
    """`fc` and `lm`, one layer with the target's embeddings and LM head, which freezes the target.
    `accept[d][r]`: how often on held-out answers guess r is right, after d guessed features.
    `vocab`: the tokens that the LM head's rows stand for, all or the few to `keep`."""

    def __init__(self, model, inputs: str = "shifted", begin: str = "random", mlp: int = 0,
                 seed: int = 0):
        super().__init__()
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        e, f = table.weight.shape[1], head.weight.shape[1]
        widths = {"shifted": e + f, "unshifted": e + f, "feature": f, "token": e}
        if inputs not in widths or begin not in ("random", "last"):
            raise InputError(f"expected inputs of {', '.join(widths)} and to begin with random or "
                             f"last, got {inputs} and {begin}")
        self.inputs, self.begin, self.mlp, self.accept = inputs, begin, mlp, []
        self.vocab = torch.arange(len(head.weight), device=head.weight.device)
        config = copy.deepcopy(model.config)
        text = config.get_text_config()
        last, text.num_hidden_layers = f".{text.num_hidden_layers - 1}.", 1
        if mlp:
            text.intermediate_size = mlp
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[-1:]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            lm = prepare(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
            self.fc = torch.nn.Linear(widths[inputs], e).to(model.device)
        if begin == "last":
            own = lm.state_dict()
            for name, x in model.state_dict().items():  # of the last layer after that of the first
                if (name := name.replace(last, ".0.", 1)) in own and own[name].shape == x.shape:
                    own[name].copy_(x)
        for name, part in list(lm.get_decoder().named_children()):
            if "Norm" in type(part).__name__:  # a feature is what comes after the final norm
                setattr(lm.get_decoder(), name, torch.nn.Identity())
        model.requires_grad_(False)
        self.lm = lm.to(model.device)
        lm.set_input_embeddings(table)
        lm.set_output_embeddings(head)

    def own(self) -> dict[str, torch.nn.Parameter]:
        """What is trained: all but the target's embeddings and LM head."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def keep(self, vocab: list[int]) -> None:
        """Guess these tokens alone, with their rows of the LM head: a pass costs less (FR-Spec)."""
        head = self.lm.get_output_embeddings()
        few = torch.nn.Linear(head.weight.shape[1], len(vocab), "bias" in head.state_dict())
        few.to(head.weight).load_state_dict({n: x[vocab] for n, x in head.state_dict().items()})
        self.lm.set_output_embeddings(few.requires_grad_(False))
        self.vocab = self.vocab[vocab]

    def rows(self, before, tokens, features: torch.Tensor) -> torch.Tensor:
        """The layer's input [..., e]: features [..., f] of tokens `before`, and `tokens` next."""
        ids = torch.as_tensor(before if self.inputs == "unshifted" else tokens, dtype=torch.long)
        e = self.lm.get_input_embeddings()(ids.to(features.device))
        reads = {"feature": [features], "token": [e]}.get(self.inputs, [e, features])
        return self.fc(torch.cat(reads, -1).to(self.fc.weight.dtype))


def some_embeddings(model) -> torch.Tensor:
    """Enough of a model's embeddings [16, 16] to know it by, in whatever type it is loaded."""
    return model.get_input_embeddings().weight[:16, :16].detach().float().cpu()


def save_draft(path: Path, draft: Draft, model) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = draft.own() | {"model": some_embeddings(model)}
    header = {"inputs": draft.inputs, "mlp": draft.mlp, "accept": draft.accept}
    if len(draft.vocab) < len(model.get_output_embeddings().weight):
        header["vocab"] = draft.vocab.tolist()
    save_file({name: x.detach().cpu().to(torch.bfloat16) for name, x in tensors.items()}, path,
              {"eagle": json.dumps(header)})


def load_draft(path: str | Path, model) -> Draft:
    """InputError where the file was made for another model."""
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {})["eagle"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError("expected a file made by `python -m survey.eagle train`, got "
                         f"{str(path)!r}: {error!r}") from error
    draft, here = Draft(model, header["inputs"], mlp=header.get("mlp", 0)), some_embeddings(model)
    own, known, draft.accept = draft.own(), tensors.pop("model").float(), header["accept"]
    if {name: x.shape for name, x in tensors.items()} != {n: x.shape for n, x in own.items()} or (
            known.shape != here.shape or not torch.allclose(known, here, atol=1e-4, rtol=1e-2)):
        raise InputError("expected a draft layer of this model, got one of another")
    for name, p in own.items():
        p.data = tensors[name].to(p.device, model.dtype)
    if "vocab" in header:
        draft.keep(header["vocab"])
    return draft


# ---------------------------------------------------------------------------------- decoding

def levels_of(tree: list[tuple]) -> list[int]:
    """How many nodes of a `best_tree` have children: at the root, at depth 0, at depth 1, …"""
    parents = [{parent for _, parent, d, _ in tree if d == depth} for depth in range(DEPTH)]
    return [len(some) for some in parents if some]


def plan(draft: Draft, lm: CachedLM, target: CachedLM) -> tuple[int, list[int]]:
    """(nodes, levels) of the tree with the most expected tokens a second: acceptance is that of
    held-out answers, the costs of target calls and draft passes are measured on this machine."""
    found, costs, own = {}, row_costs(target, MOST), row_costs(lm, MOST)
    for depth in range(len(draft.accept) + 1):
        tree = best_tree(draft.accept[:depth], MOST)
        for n, seconds in costs.items():
            levels, tokens = levels_of(tree[:n]), sum(chance for chance, *_ in tree[:n])
            for rows in [tokens, *levels[1:]][:len(levels)]:  # first the last round's true pairs
                seconds += min(cost for width, cost in own.items() if width >= rows)
            found.setdefault(tokens / seconds, (n, levels))
    return found[max(found)]


@torch.inference_mode()
def grow(draft: Draft, lm: CachedLM, pairs, root: int, n: int, levels: list[int], dynamic: bool):
    """(ids, parents) of a tree of n nodes below the root. `pairs`: what `Draft.rows` takes, of all
    true rows since the last tree. At each level as many of the likeliest nodes as `levels` says get
    children; the likeliest n of all are kept. A chance is the product along a path of measured
    acceptance, or of the draft's own probabilities (dynamic: EAGLE-2, Section 4)."""
    ids, parents, chances, nodes = [root], [-1], [1.0], [0]
    if not levels or not pairs[0]:  # before the second token there is no pair
        return ids, parents
    logits = lm.forward(draft.rows(*pairs), keep=1)
    lm.commit(range(len(pairs[0])))  # true pairs stay, guessed ones will not
    for depth, expanded in enumerate(levels):
        if depth:
            nodes = sorted(leaves, key=lambda x: -chances[x])[:expanded]
            at = [owners.index(parents[x]) - len(owners) for x in nodes]  # rows of the last pass
            rows = draft.rows([ids[parents[x]] for x in nodes], [ids[x] for x in nodes],
                              lm.features[at])
            logits = lm.forward(rows, [len(lm.parents) + x for x in at])
        likely, tokens = logits.float().softmax(-1).topk(len(draft.accept[depth]))  # [nodes, ranks]
        likely = likely.tolist() if dynamic else [draft.accept[depth]] * len(nodes)
        leaves, owners = range(len(ids), len(ids) + tokens.numel()), nodes
        for node, some, right in zip(nodes, draft.vocab[tokens].tolist(), likely):
            ids, parents = ids + some, parents + [node] * len(some)
            chances += [chances[node] * chance for chance in right]
    lm.truncate(lm.length)
    kept = sorted(range(len(ids)), key=lambda x: -chances[x])[:n]  # parents before children
    place = {x: i for i, x in enumerate(kept)}
    return [ids[x] for x in kept], [-1, *(place[parents[x]] for x in kept[1:])]


def eagle(target: CachedLM, prompt: list[int], *, nodes: int = 0, dynamic: bool = False,
          adapter: str = ADAPTER, trained: Draft | None = None, sample: Sampler = greedy,
          log: list | None = None) -> Iterator[list[int]]:
    """Grow a tree from guessed features, verify it in one target call, keep a path. Section 3.

    nodes:   of the tree, the root among them, up to 64; 0: as many as pay on this machine
    dynamic: the tree that the draft is surest of now (EAGLE-2), not the one right most often
    adapter: file of a draft layer, made by `python -m survey.eagle train`
    Yields chunks of 1 to 9 tokens; logs {"guessed", "accepted"} a call. `trained`: for a file.
    """
    if not 0 <= nodes <= MOST:
        raise InputError(f"expected 0 to {MOST} nodes, got {nodes}")
    drafts, key = DRAFTS.setdefault(target, {}), trained or adapter
    if key not in drafts:
        draft = trained or load_draft(adapter, target.model)
        drafts[key] = draft, CachedLM(draft.lm, target.capacity, target.vocab, target.graphs)
    draft, lm = drafts[key]
    target.start(prompt[:-1], width=nodes or MOST)
    lm.start([], width=2 * MOST)
    n, levels = (nodes, levels_of(best_tree(draft.accept, nodes))) if nodes else plan(
        draft, lm, target)
    pairs, root = (prompt[:-1], prompt[1:], target.features), prompt[-1]
    while True:
        ids, parents = grow(draft, lm, pairs, root, n, levels, dynamic)
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents)))
        # The true pairs: a node of the path with its feature, and the token chosen after it
        pairs, root = ([ids[x] for x in path], chunk, target.features[path]), chunk[-1]
        target.commit(path)
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1})
        yield chunk


# ------------------------------------------------------------------------------------ training

def features_of(model, data: list[tuple[list[int], list[int]]]) -> Iterator[tuple]:
    """(ids [T], features [T, f] on the CPU, length of the prompt) of (prompt, answer) pairs."""
    lm = CachedLM(model, max(len(p) + len(a) for p, a in data))
    for prompt, answer in tqdm(data, desc="features"):
        lm.start(prompt + answer)
        yield torch.tensor(prompt + answer), lm.features.cpu().to(torch.bfloat16), len(prompt)


def eagle_loss(draft: Draft, some: list[tuple], rng: torch.Generator) -> torch.Tensor:
    """Section 3.2 on some of `features_of`, a mean over the rows that guess a token of an answer;
    the cross-entropy, in nats, over a sample of them."""
    head, device = draft.lm.get_output_embeddings(), draft.fc.weight.device
    ids, f = (torch.nn.utils.rnn.pad_sequence([row[i] for row in some], True) for i in (0, 1))
    place = torch.arange(2, ids.shape[1])  # what row i guesses: the token of place i + 2
    learns = torch.stack([(place >= n) & (place < len(text)) for text, _, n in some])
    noisy = f + NOISE * (2 * torch.rand(f.shape, generator=rng) - 1)
    rows = draft.rows(ids[:, :-2], ids[:, 1:-1], noisy[:, :-2].to(device))  # [B, T - 2, e]
    guessed = draft.lm.get_decoder()(inputs_embeds=rows, use_cache=False)[0]  # [B, T - 2, f]
    guessed, f = guessed[learns.to(device)].float(), f[:, 1:-1][learns].to(device).float()  # [N, f]
    few = torch.randperm(len(f), generator=rng)[:SAMPLED].to(device)
    p = head(f[few].to(head.weight.dtype)).float().softmax(-1)  # [n, V]
    return F.smooth_l1_loss(guessed, f) + 0.1 * F.cross_entropy(head(guessed[few]).float(), p)


@torch.inference_mode()
def acceptance(draft: Draft, held_out: list[tuple]) -> list[list[float]]:
    """accept[d][r] on some of `features_of`: how often the guess of rank r is the next token, when
    the last d features are guessed (the paper's d-α) and all tokens before it are right. A tree:
    the true rows, and below each of them a chain of rows of guessed features."""
    ranks = min(RANKS, draft.lm.get_output_embeddings().weight.shape[0])
    right, total = torch.zeros(DEPTH, ranks), torch.zeros(DEPTH, 1)
    for ids, f, n in held_out:
        lm, T, first = CachedLM(draft.lm, 0), len(ids), max(0, n - 2)  # the first row that counts
        lm.start([], width=T * (DEPTH + 1))
        rows, parents = draft.rows(ids[:-2], ids[1:-1], f[:-2].to(draft.fc.weight.device)), None
        for d in range(min(DEPTH, T - 2 - first)):
            if d:
                m = T - 2 - first - d  # all of the last rows but the last get a row below them
                rows = draft.rows(ids[first + d:-2], ids[first + d + 1:-1], lm.features[-m - 1:-1])
                parents = range(len(lm.parents) - m - 1, len(lm.parents) - 1)
            logits, labels = lm.forward(rows, parents), ids[first + d + 2:].to(rows.device)
            best = draft.vocab[logits[-len(labels):].topk(ranks).indices]
            right[d] += (best == labels[:, None]).sum(0).cpu()
            total[d] += len(labels)
    return (right / total.clamp(min=1)).tolist()


def fit(model, draft: Draft, data: list, held_out: list, *, steps: int, batch: int, lr: float,
        seed: int = 0, work: Path | None = None, say=tqdm.write) -> None:
    """Train on (prompt, answer) pairs: AdamW, the rate a cosine, values of gradients clipped at
    0.5; sets `draft.accept`. A file in `work` keeps what is done, also when it is interrupted."""
    own, vocab = draft.own(), len(draft.vocab)
    settings = draft.inputs, draft.begin, draft.mlp, vocab, steps, batch, lr, seed
    file = work and work / f"draft-{digest(model, settings, data)}.pt"
    optimizer = torch.optim.AdamW(own.values(), lr=lr, weight_decay=0.0)
    done = 0
    data, held_out = list(features_of(model, data)), list(features_of(model, held_out))
    if draft.begin == "random" and "shifted" in draft.inputs:  # both inputs are as large at first
        table = model.get_input_embeddings().weight.float()
        draft.fc.weight.data[:, :table.shape[1]] *= data[0][1].float().std() / table.std()
    if file and file.exists():
        state = torch.load(file, weights_only=True, map_location="cpu")
        draft.load_state_dict(state["draft"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    half = torch.autocast(model.device.type, dtype=torch.bfloat16)

    def save() -> None:
        if file:
            state = {"draft": own, "optimizer": optimizer.state_dict(), "done": done}
            torch.save(state, file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)
    whole = True  # no update is half made
    try:
        for done in tqdm(range(done, steps + 1), initial=done, total=steps, desc="draft"):
            whole = True
            if done == steps or done and done % max(1, steps // 5) == 0:
                with half:
                    draft.accept = acceptance(draft, held_out)
                say(f"step {done}: held-out d-α {[round(ranks[0], 3) for ranks in draft.accept]}")
                save()
            if done == steps:
                break
            optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * done / steps))
            rng = torch.Generator().manual_seed(hash((seed, done)))
            pool = [data[i] for i in torch.randperm(len(data), generator=rng)[:4 * batch]]
            pool.sort(key=lambda row: len(row[0]))
            first = random.Random(done).randrange(0, len(pool), batch)
            first = min(first, max(0, len(pool) - batch))
            some = pool[first:first + batch]  # alike in length: little is padding
            with half:
                loss = eagle_loss(draft, some, rng)
            if not loss.isfinite():
                raise InputError(f"expected a learning rate below {lr}: the loss is {loss}")
            loss.backward()
            torch.nn.utils.clip_grad_value_(own.values(), 0.5)
            whole = False
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if whole:
            save()


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          inputs: str = "shifted", begin: str = "random", mlp: int = 0, vocab: int = 0,
          max_new_tokens: int = 200, steps: int = 1000, batch: int = 16, lr: float = 1e-3,
          seed: int = 0) -> None:
    """Train a draft layer for a frozen model on its own answers. A stopped run goes on.

    out:     the safetensors file to make
    work:    folder of answers and checkpoints (default: OUT.work)
    inputs:  shifted (a feature and the token after it), unshifted (a feature and its own token),
             feature (no token) or token (the one after, no feature): the paper's ablation
    begin:   at random (the paper), or as the target's last layer: better, but only where what that
             adds to the residual stream is not much larger than features are
    mlp:     width of the layer's MLP; 0: the target's
    vocab:   how many tokens it can guess, the most frequent in prompts and answers; 0: all
    max_new_tokens: of an answer
    batch:   answers a step
    lr:      where the cosine begins
    """
    if min(steps, batch, max_new_tokens) < 1 or min(mlp, vocab) < 0 or not lr > 0:
        raise InputError("expected steps, batch and max-new-tokens of 1 or more, mlp and vocab of "
                         "0 or more, lr above 0")
    work, longest = work or Path(f"{out}.work"), context_length(model) - max_new_tokens
    work.mkdir(parents=True, exist_ok=True)
    fitting = [list(p) for p in dict.fromkeys(map(tuple, prompts)) if len(p) <= longest]
    draft = Draft(model, inputs, begin, mlp, seed)
    answers = own_answers(model, tokenizer, fitting, max_new_tokens, work)
    data = [(p, a) for p, a in zip(fitting, answers) if len(a) > 1]
    if len(data) < 2:
        raise InputError(f"expected 2 answers or more of 2 tokens or more, got {len(data)}")
    random.Random(seed).shuffle(data)
    few = max(1, min(50, len(data) // 10))
    if vocab:
        seen = Counter(token for p, a in data[few:] for token in p + a)
        draft.keep([token for token, _ in seen.most_common(vocab)])
    print(f"{sum(x.numel() for x in draft.own().values()):,} parameters; {len(data) - few} answers "
          f"of {sum(len(a) for _, a in data[few:]):,} tokens, {few} held out")
    fit(model, draft, data[few:], data[:few], steps=steps, batch=batch, lr=lr, seed=seed, work=work)
    save_draft(out, draft, model)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    guessed, accepted = (sum(r[x] for r in run.log) / len(run.log) for x in ("guessed", "accepted"))
    return f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli import main
    sys.exit(main([eagle], report, commands=[train], ranges={"nodes": (4, 8, 16, 32, 64)}))
