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

Departures: children are a node's likeliest tokens, never drawn; a static tree has the shape that
measured acceptance asks for (the paper's is made by hand); a dynamic one expands as many nodes at
each level as the static one of its size (the paper: always 10); both have the size that is fastest
here. The layer is of the target's class, its input norm included (the released code drops it), and
learns from the target's own answers, at 1e-3 (the paper: a fixed data set, 3e-5). With --vocab the
layer is trained with the few tokens that it can guess (FR-Spec drops the others after training).
"""
import copy
import functools
import math
import random
import sys
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from common import (WIDTHS, CachedLM, InputError, Node, Sampler, best_tree, fastest, greedy,
                    prepare, row_costs, walk)
from survey.parts import MODELS, fill, head_for, load_part, logits_of, save_part

ADAPTER = f"{MODELS}/eagle.safetensors"
DEPTH = 8  # levels of guesses of a tree
RANKS = 10  # guesses of a node
MOST = 64  # nodes of a tree
NOISE = 0.1  # in training: added to features, uniform in ±
SAMPLED = 512  # in training: rows of a step for the cross-entropy


# ---------------------------------------------------------------------------------- decoding

class Pairs(NamedTuple):
    """What rows of the draft layer read. Row i reads f_i and t_{i+1}, learns f_{i+1} and guesses
    t_{i+2}. Lists of n tokens, or tensors."""
    before: list[int]  # t_i
    features: torch.Tensor  # f_i, [n, f]
    tokens: list[int]  # t_{i+1}


def levels_of(tree: list[Node]) -> list[int]:
    """How many nodes of a tree have children, level by level from the root down."""
    depth = max(node.depth for node in tree)
    return [len({child.parent for child in tree if child.depth == d + 1}) for d in range(depth)]


def plans(draft: "Draft", lm: CachedLM, target: CachedLM) -> Iterator[tuple]:
    """((nodes, levels) of a tree, expected tokens, seconds of its draft passes and of its target
    call): acceptance is that of held-out answers, costs are measured on this machine."""
    costs, draft_costs = row_costs(target, MOST), row_costs(lm, MOST)
    for depth in range(len(draft.accept) + 1):
        tree = best_tree(draft.accept[:depth], MOST)
        for n in range(1, len(tree) + 1):
            levels = levels_of(tree[:n])
            tokens = sum(node.chance for node in tree[:n])
            passes = []
            if levels:  # the first pass feeds a pair for each token of the last chunk
                passes = [math.ceil(tokens), *levels[1:]]
            yield (n, levels), tokens, costs[n] + sum(draft_costs[rows] for rows in passes)


@torch.inference_mode()
def feed(draft: "Draft", lm: CachedLM, true: list[Pairs]) -> torch.Tensor | None:
    """True pairs join the draft's context; the logits [1, V'] after the last. A prompt comes in
    parts."""
    logits = None
    for pairs in true:
        for i in range(0, len(pairs.before), WIDTHS[-1]):
            part = Pairs(*(some[i:i + WIDTHS[-1]] for some in pairs))
            logits = lm.forward(draft.rows(part), keep=1)
            lm.commit(range(len(lm.parents)))
    return logits


@torch.inference_mode()
def grow(draft: "Draft", lm: CachedLM, true: list[Pairs], root: int, n: int, levels: list[int],
         dynamic: bool) -> tuple[list[int], list[int]]:
    """(ids, parents) of a tree of n nodes below the root. `true`: all pairs since the last tree. At
    each level as many of the likeliest nodes as `levels` says get children; the likeliest n of all
    are kept. A chance is the product along a path of measured acceptance, or of the draft's own
    probabilities (dynamic: EAGLE-2, Section 4)."""
    ids, parents, chances = [root], [-1], [1.0]

    def hang(nodes: list[int], logits: torch.Tensor, accept: list[float]) -> range:
        """Their likeliest children, new nodes; a row of logits for each of `nodes`."""
        first = len(ids)
        probs = logits.float().softmax(-1).nan_to_num(0.0)  # of a draft that overflows
        likely, tokens = probs.topk(len(accept))  # [nodes, ranks]
        for node, some, own in zip(nodes, draft.vocab[tokens].tolist(), likely.tolist()):
            ids.extend(some)
            parents.extend([node] * len(some))
            chances.extend(chances[node] * right for right in (own if dynamic else accept))
        return range(first, len(ids))
    leaves = hang([0], feed(draft, lm, true), draft.accept[0])
    row_of = {0: -1}  # of a node in the draft's pending tree; the root's is the end of its context
    feature_of = {0: lm.features[-1]}  # what that row guessed
    for expanded, accept in zip(levels[1:], draft.accept[1:]):
        nodes = sorted(leaves, key=lambda x: -chances[x])[:expanded]
        above = [parents[x] for x in nodes]
        row_of |= {x: len(lm.parents) + i for i, x in enumerate(nodes)}
        rows = draft.rows(Pairs([ids[x] for x in above],
                                torch.stack([feature_of[x] for x in above]),
                                [ids[x] for x in nodes]))
        logits = lm.forward(rows, [row_of[x] for x in above])
        feature_of |= zip(nodes, lm.features)
        leaves = hang(nodes, logits, accept)
    lm.truncate(lm.length)
    kept = sorted(range(len(ids)), key=lambda x: -chances[x])[:n]  # parents before children
    place = {x: i for i, x in enumerate(kept)}
    return [ids[x] for x in kept], [-1, *(place[parents[x]] for x in kept[1:])]


def eagle(target: CachedLM, prompt: list[int], *, nodes: int = 0, dynamic: bool = False,
          adapter: str = ADAPTER, trained: "Draft | None" = None, sample: Sampler = greedy,
          log: list | None = None) -> Iterator[list[int]]:
    """Grow a tree from guessed features, verify it in one target call, keep a path. Section 3.

    nodes:   of the tree, the root among them, up to 64; 0: as many as pay on this machine
    dynamic: the tree that the draft is surest of now (EAGLE-2), not the one right most often
    adapter: file of a draft layer, made by `python -m survey.eagle train`
    Yields chunks of 1 to 9 tokens; logs {"guessed", "accepted"} a call. `trained`: for the file.
    """
    if not 0 <= nodes <= MOST:
        raise InputError(f"expected 0 to {MOST} nodes, got {nodes}")
    draft = trained or target.once(("eagle", adapter), lambda: load_draft(adapter, target.model))
    lm = target.once((draft, "cached"), lambda: type(target)(draft.lm, target.vocab))
    target.start(prompt[:-1])
    lm.start([])
    root = prompt[-1]
    # Of each final token but the root its feature, and the token after it; the last is fed later
    pairs = Pairs(prompt[:-1], target.features, prompt[1:])
    feed(draft, lm, [Pairs(*(some[:-1] for some in pairs))])
    true = [Pairs(*(some[-1:] for some in pairs))] if prompt[1:] else []
    asked = nodes, levels_of(best_tree(draft.accept, nodes or 1))
    while True:
        n, levels = asked if nodes else fastest(target, draft, lambda: plans(draft, lm, target))
        ids, parents = [root], [-1]
        if levels and true:
            ids, parents = grow(draft, lm, true, root, n, levels, dynamic)
            true = []
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents)))
        true.append(Pairs([ids[x] for x in path], target.features[path], chunk))
        root = chunk[-1]
        target.commit(path)
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1})
        yield chunk


# ----------------------------------------------------------------------------------- the draft

def one_layer(model, mlp: int) -> torch.nn.Module:
    """A random model of the same class with one layer, float32; its vocabulary is 8, for the caller
    puts the target's embeddings and LM head in."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[-1:])  # of each layer its kind: the last one's
    if hasattr(text, "first_k_dense_replace"):  # DeepSeek's first layers have no experts
        text.first_k_dense_replace = int(text.first_k_dense_replace >= text.num_hidden_layers)
    text.num_hidden_layers = 1
    text.vocab_size = 8
    text.pad_token_id = None
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if mlp:
        text.intermediate_size = mlp
        plain, lm = lm, AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if [p.shape for p in plain.parameters()] == [p.shape for p in lm.parameters()]:
            raise InputError(f"expected 0, or a width that changes the MLP of {type(lm).__name__}, "
                             f"for --mlp, got {mlp}")
    return prepare(lm)


def copy_last_layer(model, lm, mlp: int) -> None:
    """Into the only layer of `lm`, but for an MLP of another width; and what is no layer, as
    positions that were learned."""
    last = f".{model.config.get_text_config().num_hidden_layers - 1}."
    own = lm.state_dict()
    for name, x in model.state_dict().items():
        place = name.replace(last, ".0.", 1)
        fits = place in own and own[place].shape == x.shape
        if fits and (last in name or ".0." not in name):  # of this layer or of none
            own[place].copy_(x)
        elif last in name and not mlp:
            raise InputError("expected a model whose last layer can be made alone, got "
                             f"{type(model).__name__} with {name}")


class Draft(torch.nn.Module):
    """`fc` and `lm`, a model of one layer with the target's embeddings and LM head; making one
    freezes the target. `accept[n][r]`: how often on held-out answers guess r is right, after n
    guessed features. `vocab`: the tokens that the LM head's rows stand for, all or those kept."""

    def __init__(self, model, inputs: str = "shifted", begin: str = "random", mlp: int = 0,
                 seed: int = 0):
        super().__init__()
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        e, f = table.weight.shape[1], head.weight.shape[1]
        widths = {"shifted": e + f, "unshifted": e + f, "feature": f, "token": e}
        if inputs not in widths or begin not in ("random", "last"):
            raise InputError(f"expected inputs of {', '.join(widths)} and to begin with random or "
                             f"last, got {inputs} and {begin}")
        self.inputs = inputs
        self.begin = begin
        self.mlp = mlp
        self.accept = []
        self.vocab = torch.arange(len(head.weight), device=head.weight.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            lm = one_layer(model, mlp)
            self.fc = torch.nn.Linear(widths[inputs], e)
        if begin == "last":
            copy_last_layer(model, lm, mlp)
        for name, part in list(lm.get_decoder().named_children()):
            if "Norm" in type(part).__name__:  # the final one: a feature is what comes after it
                setattr(lm.get_decoder(), name, torch.nn.Identity())
        model.requires_grad_(False)
        self.lm = lm
        self.to(model.device)
        lm.set_input_embeddings(table)
        lm.set_output_embeddings(head)

    def own(self) -> dict[str, torch.nn.Parameter]:
        """What is trained: all but the target's embeddings and LM head."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def keep(self, vocab: list[int]) -> None:
        """Guess these tokens alone, of all."""
        self.vocab = self.vocab[vocab]
        self.lm.set_output_embeddings(head_for(self.lm.get_output_embeddings(), self.vocab))

    def rows(self, pairs: Pairs) -> torch.Tensor:
        """The layer's inputs [..., e]; tokens may be tensors [...], features [..., f]."""
        ids = pairs.before if self.inputs == "unshifted" else pairs.tokens
        ids = torch.as_tensor(ids, dtype=torch.long, device=pairs.features.device)
        e = self.lm.get_input_embeddings()(ids)
        reads = {"feature": [pairs.features], "token": [e]}.get(self.inputs, [e, pairs.features])
        return self.fc(torch.cat([x.to(self.fc.weight.dtype) for x in reads], -1))


def save_draft(path: Path, draft: Draft, model) -> None:
    header = {"inputs": draft.inputs, "mlp": draft.mlp, "accept": draft.accept}
    if len(draft.vocab) < len(model.get_output_embeddings().weight):
        header["vocab"] = draft.vocab.tolist()
    save_part(path, "an EAGLE layer", model, draft.own(), **header)


def load_draft(path: str | Path, model) -> Draft:
    """InputError where the file was made for another model."""
    header, tensors = load_part(path, "an EAGLE layer", model)
    draft = Draft(model, header["inputs"], mlp=header.get("mlp", 0))
    fill(draft.own(), tensors, path)
    for p in draft.own().values():
        p.data = p.data.to(model.dtype)
    draft.accept = header["accept"]
    if "vocab" in header:
        draft.keep(header["vocab"])
    return draft


# ------------------------------------------------------------------------------------ training

def features_of(model, data: list[tuple[list[int], list[int]]]) -> list[tuple]:
    """(ids [T], features [T, f] in bfloat16 on the CPU, length of the prompt) of (prompt, answer)
    pairs."""
    lm, found = CachedLM(model), []
    for prompt, answer in tqdm(data, desc="features"):
        lm.start(prompt + answer)
        features = lm.features.cpu().to(torch.bfloat16)
        found.append((torch.tensor(prompt + answer), features, len(prompt)))
    return found


def eagle_loss(draft: Draft, own: Callable, some: list[tuple],
               rng: torch.Generator) -> torch.Tensor:
    """Section 3.2 on some of `features_of`, a mean over the rows that guess a token of an answer;
    the cross-entropy, in nats, over a sample of them. `own`: what the target makes of its LM head's
    output."""
    head, device = draft.lm.get_output_embeddings(), draft.fc.weight.device
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ids, f = pad([ids for ids, _, _ in some]), pad([f for _, f, _ in some])  # [B, T], [B, T, f]
    place = torch.arange(2, ids.shape[1])  # of the token that row i guesses: i + 2
    learns = torch.stack([(place >= length) & (place < len(text)) for text, _, length in some])
    noisy = f + NOISE * (2 * torch.rand(f.shape, generator=rng) - 1)
    rows = draft.rows(Pairs(ids[:, :-2], noisy[:, :-2].to(device), ids[:, 1:-1]))  # [B, T - 2, e]
    guessed = draft.lm.get_decoder()(inputs_embeds=rows, use_cache=False)[0]  # [B, T - 2, f]
    guessed = guessed[learns.to(device)].float()  # [N, f]
    true = f[:, 1:-1][learns].to(device).float()
    few = torch.randperm(len(true), generator=rng)[:SAMPLED].to(device)
    p, q = (own(head(x[few].to(head.weight.dtype)).float()) for x in (true, guessed))  # [n, V']
    return F.smooth_l1_loss(guessed, true) + 0.1 * F.cross_entropy(q, p.softmax(-1))


@torch.inference_mode()
def acceptance(draft: Draft, held_out: list[tuple]) -> list[list[float]]:
    """accept[n][r] on some of `features_of`: how often the guess of rank r is the next token, when
    the last n features are guessed (the paper's n-α) and all tokens before it are right. A tree:
    the true rows, and below each of them a chain of rows of guessed features. In step n, row i
    reads the guessed feature i + n and the token i + n + 1, and guesses the token i + n + 2."""
    ranks = min(RANKS, draft.lm.get_output_embeddings().weight.shape[0])
    right, total = torch.zeros(DEPTH, ranks), torch.zeros(DEPTH, 1)
    lm = CachedLM(draft.lm)
    for ids, features, length in held_out:
        first = max(0, length - 2)  # the first true row that counts
        lm.start([])
        pairs = Pairs(ids[:-2], features[:-2].to(draft.fc.weight.device), ids[1:-1])
        above = None  # a chain
        for n in range(min(DEPTH, len(ids) - 2 - first)):
            logits = lm.forward(draft.rows(pairs), above)
            labels = ids[first + n + 2:].to(logits.device)
            best = draft.vocab[logits[-len(labels):].topk(ranks).indices]
            right[n] += (best == labels[:, None]).sum(0).cpu()
            total[n] += len(labels)
            # Below all of these rows but the last: a row that reads the feature they guessed
            above = range(len(lm.parents) - len(labels), len(lm.parents) - 1)
            guessed = lm.features[-len(labels):-1]
            pairs = Pairs(ids[first + n + 1:-2], guessed, ids[first + n + 2:-1])
    return (right / total.clamp(min=1)).tolist()


def fit(model, draft: Draft, data: list, held_out: list, *, steps: int, batch: int, lr: float,
        seed: int = 0, work: Path | None = None) -> dict:
    """Train on (prompt, answer) pairs: AdamW, the rate a cosine, values of gradients clipped at
    0.5. Returns {step: {"accept"}} on `held_out`; sets `draft.accept`."""
    from models.training import Training, sample_alike, digest
    own = logits_of(model)
    known, others = features_of(model, data), features_of(model, held_out)
    if draft.begin == "random" and draft.inputs in ("shifted", "unshifted"):
        ids, features, _ = known[0]  # at first both inputs weigh the same
        e = model.get_input_embeddings()(ids.to(model.device))  # scaled, where the model does that
        draft.fc.weight.data[:, :e.shape[1]] *= features.float().std() / e.float().std()

    def loss_of(rng: random.Random) -> torch.Tensor:
        some = sample_alike(known, batch, rng, lambda row: len(row[0]))
        return eagle_loss(draft, own, some, torch.Generator().manual_seed(rng.getrandbits(60)))

    def evaluate() -> tuple[dict, str]:
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            accept = acceptance(draft, others)
        return {"accept": accept}, f"held-out n-α {[round(ranks[0], 3) for ranks in accept]}"
    kept = draft.vocab.tolist()
    of = digest(model.state_dict()), draft.inputs, draft.mlp, kept, data, held_out, batch
    curve = Training(draft.own(), of, name="eagle", steps=steps, lr=lr, max_norm=math.inf, max_value=0.5,
                     seed=seed, folder=work).train(loss_of, evaluate)
    draft.accept = curve[steps]["accept"]
    return curve


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
    from models.training import collect_examples, find_frequent
    if min(steps, batch, max_new_tokens) < 1 or min(mlp, vocab) < 0 or not lr > 0:
        raise InputError("expected steps, batch and max-new-tokens of 1 or more, mlp and vocab of "
                         "0 or more, lr above 0")
    work = work or Path(f"{out}.work")
    draft = Draft(model, inputs, begin, mlp, seed)
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed,
                                      most=50)
    if vocab:
        draft.keep(find_frequent(data, vocab))
    print(f"{sum(x.numel() for x in draft.own().values()):,} parameters")
    fit(model, draft, data, held_out, steps=steps, batch=batch, lr=lr, seed=seed, work=work)
    save_draft(out, draft, model)


# ------------------------------------------------------------------------- the command line

def report(run) -> str:
    guessed, accepted = (sum(r[x] for r in run.log) / len(run.log) for x in ("guessed", "accepted"))
    return f"a call: {guessed:.1f} guesses, {accepted:.2f} accepted"


if __name__ == "__main__":
    from cli import main
    sys.exit(main([eagle], report, commands=[train], ranges={"nodes": (4, 8, 16, 32, 64)}))
