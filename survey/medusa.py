"""Medusa and Hydra: small heads on the target's own features guess the tokens ahead.

    medusa    Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple
              Decoding Heads", arXiv 2401.10774
    hydra     Ankner et al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding",
              arXiv 2402.05109, and its released code, zankner/Hydra
    --vocab   Zhao et al., "FR-Spec", arXiv 2502.14856: only frequent tokens are guessed

    python -m survey.medusa train --prompts FILE --heads hydra --out my.safetensors
    python -m survey.medusa --heads hydra --adapter my.safetensors --prompt "..."
    python -m survey.medusa --target lmsys/vicuna-7b-v1.3 \
        --adapter FasterDecoding/medusa-vicuna-7b-v1.3 --prompt "..."

The feature f of position t is what the LM head reads to choose token t + 1. Head k (1 … K) guesses
token t + k + 1, through the same LM head:

    Medusa   p_k = softmax(LM(f + SiLU(W_k f + b_k)))                    Section 2.1.1
             loss = Σ_k 0.8^k (- log p_k(x_{t+k+1}))                     Section 2.2.1
    Hydra    z   = [f; e(x_{t+1}); …; e(x_{t+k})]
             p_k = softmax(LM(R_k z + c_k + SiLU(W_k z + b_k)))          as released
             loss = Σ_k (- log p_k(x_{t+k+1}))                           as released

The target has chosen x_{t+1} already, the root. The likeliest guesses of all heads form a tree
below it, and one call of the target verifies the tree. Here heads 1 and 2 make two guesses each. A
Medusa head does not know what the heads before it guessed. A Hydra head reads those guesses:

    Medusa   root ─┬─ on ─┬─ the          Hydra   root ─┬─ on ─┬─ the
                   │      └─ my                         │      └─ my
                   └─ in ─┬─ the                        └─ in ─┬─ a
                          └─ my                                └─ the

The output is the target's own, greedily or with one sample of the target at each node. With
--typical (Medusa) it may differ, except at temperature 0.

Departures:
- LM heads. Paper: each head trains its own. Here: all share the model's, which is frozen, as in the
  released code. Why: LM heads would multiply a file of a few MB. Released heads may have their own.
- Training. Paper: 5 heads, and whole texts of ShareGPT in a step. Here: 4 heads (`--K`), and random
  positions of the model's own answers. Why: verification asks for the model's own tokens.
- The tree. Paper: 64 nodes, planned by accuracies of each head that are measured beforehand. Here:
  as many as pay (`--nodes`), planned by how often guesses of each rank were right so far, of all
  heads together. Why: rows cost time on a CPU, and released heads come without accuracies.
- Hydra. Paper: R_k begins at random. Here: R_k z = f. Why: a head then begins as the LM head does.

Left out: the training of Medusa-2, which changes the target, and Hydra++, whose heads are deeper
and read a further decoder layer.
"""
import random
from pathlib import Path
from typing import Callable, Iterator

from common import Sampler, begin, greedy, walk
from support.clock import list_sizes, recall
from support.engine import MODELS, EngineLM, log_round, require, run_as_program
from support.parts import Part, fill, head_for, load_trained, match_type, score_with
from support.released import is_released, read_head
from support.trees import Node, rank_tokens
from training.loop import cross_entropy_in_parts, fit_part, warm_cosine
from training.texts import compute_frozen, find_frequent, prepare_training, read_texts, sample_rows

import torch
import torch.nn.functional as F

KINDS = ("medusa", "hydra")
DECAY = {"medusa": 0.8, "hydra": 1.0}  # the weight of head k in the loss is DECAY ** k


# ------------------------------------------------------------------------- the heads, their loss

class Heads(Part):
    """Guess the tokens ahead of a position by K small heads. Making heads freezes the model.

    model      the target, whose LM head all heads share
    kind       medusa or hydra
    K          how many heads there are
    own        whether each head has an LM head of its own, in `lm_heads`, which the caller fills

    vocab      [V'], the tokens that heads can guess. Row i of `lm_head` stands for vocab[i]
    row_of     [V], the row of each token in `lm_head`. A token without a row has -100
    """
    # For `Acceptance`. The embedded heads of Medusa guess 0.68 to 0.52, and Hydra's 0.74 to 0.69.
    prior = 0.65

    def __init__(self, model, kind: str, K: int, own: bool = False):
        super().__init__()
        require(kind in KINDS, "heads", "medusa or hydra", kind)
        model.requires_grad_(False)
        self.kind = kind
        self.title = f"{kind} heads"
        self.K = K
        self.lm_head = model.get_output_embeddings()
        V, d = self.lm_head.weight.shape
        e = model.get_input_embeddings().weight.shape[1]
        widths = [d + k * e if kind == "hydra" else d for k in range(1, K + 1)]
        self.W = torch.nn.ModuleList(torch.nn.Linear(width, d) for width in widths)
        self.R = torch.nn.ModuleList(  # for Hydra only
            torch.nn.Linear(width, d) for width in widths if kind == "hydra")
        # At first SiLU(…) is 0, and R_k z + c_k is f, since f comes first in z.
        for layer in [*self.W, *self.R]:
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        for layer in self.R:
            torch.nn.init.eye_(layer.weight)
        self.lm_heads = torch.nn.ModuleList(  # without random weights, which take time to draw
            torch.nn.utils.skip_init(torch.nn.Linear, d, V, bias=False) for _ in range(K * own))
        self.to(self.lm_head.weight.device)
        self.vocab = torch.arange(V, device=self.lm_head.weight.device)
        self.row_of = self.vocab  # until `keep` is called, token i has row i

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return what is trained and kept in a file. Medusa's has the names of released files."""
        if self.kind == "hydra":
            return super().trainable()
        named = {f"{k}.0.linear.{name}": p for k, layer in enumerate(self.W)
                 for name, p in layer.named_parameters()}
        return named | {f"{k}.1.weight": head.weight for k, head in enumerate(self.lm_heads)}

    def header(self) -> dict:
        return {"K": self.K}

    def keep(self, vocab: list[int]) -> None:
        """Guess only the tokens of `vocab`, whose rows the new LM head has in this order."""
        self.vocab = self.vocab[vocab]
        self.lm_head = head_for(self.lm_head, self.vocab)
        self.row_of = torch.full_like(self.row_of, -100)
        self.row_of[self.vocab] = torch.arange(len(vocab), device=self.vocab.device)

    def forward(self, k: int, f: torch.Tensor, between: torch.Tensor | None) -> torch.Tensor:
        """Compute what the LM head reads for head k, [n, d]. The first head has number 1.

        f         features [n, d]
        between   embeddings [n, k, e] of x_{t+1} … x_{t+k}, the tokens between the feature and the
                  guess. A Medusa head ignores them, so there None will do
        """
        if self.kind == "medusa":
            return f + F.silu(self.W[k - 1](f))
        z = torch.cat([f, between.flatten(1)], 1)
        return self.R[k - 1](z) + F.silu(self.W[k - 1](z))


def head_states(trained: Heads, model, f: torch.Tensor, tokens: torch.Tensor):
    """Yield for each head what the LM head reads, where all earlier tokens are the text's.

    f            features [N, d]
    tokens       [N, K + 1], x_{t+1} … x_{t+K+1} after each feature. Beyond the text's end: -100
    yields       k, states [N, d], and labels [N], which are rows of the LM head or -100
    """
    between = model.get_input_embeddings()(tokens.clamp(min=0))
    labels = trained.row_of[tokens.clamp(min=0)].masked_fill(tokens < 0, -100)
    for k in range(1, trained.K + 1):  # column 0 is x_{t+1}, so head k has the label in column k
        yield k, trained(k, f, between[:, :k]).to(model.dtype), labels[:, k]


def heads_loss(trained: Heads, model, score: Callable, f: torch.Tensor,
               tokens: torch.Tensor) -> torch.Tensor:
    """Compute the loss of all heads: the sum over k of DECAY^k times the mean loss of head k.

    A mean is over positions with a label. The other arguments are those of `head_states`.

    score   turns what the LM head reads into logits (parts.score_with)
    """
    loss = 0.0
    for k, x, labels in head_states(trained, model, f, tokens):
        each = cross_entropy_in_parts(score, len(trained.vocab), x, labels)
        mean = each.sum() / (labels >= 0).sum().clamp(min=1)
        loss = loss + DECAY[trained.kind] ** k * mean
    return loss


# ---------------------------------------------------------------------------------- decoding

def fill_hydra_tree(trained: Heads, target: EngineLM, f: torch.Tensor, root: int,
                    tree: list[Node]) -> list[int]:
    """Fill a planned tree with the guesses of Hydra heads, level by level, as `fill_tree` does."""
    embed = target.model.get_input_embeddings()
    tokens_to = {0: [root]}  # for each node the tokens from the root down to the node
    for k in range(1, max(node.depth for node in tree) + 1):
        level = [i for i, node in enumerate(tree) if node.depth == k]
        # Head k runs once for each parent of this level, and reads the k tokens down to it.
        owners = sorted({tree[i].parent for i in level})
        between = embed(torch.tensor([tokens_to[node] for node in owners], device=f.device))
        x = trained(k, f.expand(len(owners), -1), between)  # [owners, d]
        tokens, _ = rank_tokens(trained.lm_head(x)[:, :target.vocab], trained.vocab)
        ranked = dict(zip(owners, tokens))
        for i in level:
            parent = tree[i].parent
            tokens_to[i] = tokens_to[parent] + [ranked[parent][tree[i].rank]]
    return [tokens_to[i][-1] for i in range(len(tree))]


@torch.inference_mode()
def fill_tree(trained: Heads, target: EngineLM, f: torch.Tensor, root: int,
              tree: list[Node]) -> list[int]:
    """Fill a planned tree with the guesses of heads.

    f         the feature [1, d] of the token before the root
    root      the token of node 0
    tree      the nodes, as `best_tree` plans them: parents, depths and ranks without tokens
    returns   ids, the token of each node
    """
    depth = max(node.depth for node in tree)
    if depth == 0:
        return [root]
    if trained.kind == "hydra":
        return fill_hydra_tree(trained, target, f, root, tree)
    # Medusa heads ignore each other's guesses, so one pass of the LM head serves all levels.
    x = [trained(k, f, None) for k in range(1, depth + 1)]  # each [1, d]
    if trained.lm_heads:
        logits = torch.cat([head(row) for head, row in zip(trained.lm_heads, x)])
    else:
        logits = trained.lm_head(torch.cat(x))
    ranked, _ = rank_tokens(logits[:, :target.vocab], trained.vocab)  # [depth][rank]
    # A node of depth k and rank r holds the guess of rank r of head k, whatever its parent holds.
    return [root] + [ranked[node.depth - 1][node.rank] for node in tree[1:]]


def typical_path(ids: list[int], parents: list[int], logits: torch.Tensor, sample: Sampler,
                 epsilon: float, delta: float) -> tuple[list[int], list[int]]:
    """Choose the longest path of typical tokens and the likeliest token after it (Section 2.3.1).

    A token x is typical where p(x) > min(ε, δ exp(-H(p))), with H the entropy in nats.

    logits         the target's logits [n, V] after each node
    sample         turns logits into the probabilities p
    returns        path and chunk, as `walk` returns them
    """
    p = sample.probs(logits)  # [n, V]
    H = torch.special.entr(p).sum(-1)  # [n]
    least = (delta * (-H).exp()).clamp(max=epsilon)
    # A guess is judged by the distribution after its parent. The root's entry is never read.
    typical = (p[parents, ids] > least[parents]).tolist()
    paths = {0: [0]}  # for each node that can be accepted the nodes from the root down to it
    for node in range(1, len(ids)):  # a parent comes before its children
        if typical[node] and parents[node] in paths:
            paths[node] = paths[parents[node]] + [node]

    def rank(path: list[int]) -> tuple[int, float]:  # of equal lengths the likeliest path wins
        return len(path), sum(p[parents[node], ids[node]].log().item() for node in path[1:])
    path = max(paths.values(), key=rank)
    # The token after the path is the paper's greedy first token of the next step.
    return path, [ids[node] for node in path[1:]] + [logits[path[-1]].argmax().item()]


def medusa(target: EngineLM, prompt: list[int], *, heads: str = "medusa", nodes: int = 0,
           typical: bool = False, epsilon: float = 0.09, delta: float = 0.3, adapter: str = "",
           trained: Heads | None = None, sample: Sampler = greedy,
           log: list | None = None) -> Iterator[list[int]]:
    """Grow a tree from the feature before the root, verify it in one call, and keep one path.

    trained   heads to use in place of a file's

    heads:   medusa or hydra
    nodes:   how many nodes a tree has with its root, 0 to 128. With 0, as many as pay on this
             machine
    typical: accept what is typical of the target (lossy), not only what it chooses
    epsilon: a probability that is always typical (ε), above 0
    delta:   the factor δ, above 0. A probability above δ exp(-entropy) is typical, too
    adapter: file of heads, made by `python -m survey.medusa train`, or the directory or hub id of
             released Medusa heads. Without a name it is models/HEADS.safetensors

    Yields chunks of 1 to K + 1 tokens; logs {"guessed", "accepted"} a call.
    """
    file = adapter or f"{MODELS}/{heads}.safetensors"
    trained = trained or target.once(load_heads, file, heads, target.model)
    prompt = begin(prompt, target)
    chunk = prompt[-1:]  # the last token of a chunk is the root of the next round
    f = target.features[-1:]  # [1, d], the feature of the token before the root
    if len(prompt) == 1:  # no token stands before the root, so zeros stand for the feature
        f = torch.zeros_like(trained.W[0].bias)[None]
    learnt, clock = recall(target, trained.prior, (trained,), (nodes,))
    while True:
        # A plan has no tokens, which differ in each round. The clock chooses it (Section 2.3.3).
        ranks = learnt.rates()[:len(trained.vocab)]  # all of a head that knows only a few tokens
        tree = clock.choose(lambda: list_sizes(ranks, trained.K, nodes))
        # Heads fill the plan with tokens, and the target verifies all of them in one call.
        parents = [node.parent for node in tree]
        ids = fill_tree(trained, target, f, chunk[-1], tree)
        logits = target.forward(ids, parents)  # [nodes, V]
        if typical:
            path, chunk = typical_path(ids, parents, logits, sample, epsilon, delta)
        else:
            path, chunk = walk(ids, parents, sample(logits, target.places))
        target.commit(path)
        learnt.learn(parents, path)
        # The next root follows the last accepted node, so heads read that node's feature.
        f = target.features[path[-1:]]  # [1, d]
        clock.note(int(len(tree) > 1), len(tree))
        log_round(log, guessed=len(ids) - 1, accepted=len(path) - 1)
        yield chunk


# ------------------------------------------------------------------------------------ training

def collect_features(model, data: list[tuple[list[int], list[int]]],
                     K: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Compute what K heads learn from.

    returns   for each pair the features [n, d] of its n positions in bfloat16, and tokens
              [n, K + 1]: x_{t+1} … x_{t+K+1}, with -100 beyond the end of the text
    """
    texts = [prompt + answer for prompt, answer in data]
    found = []
    for (prompt, _), text, f in zip(data, texts, read_texts(model, [x[:-1] for x in texts])):
        first = max(0, len(prompt) - 2)  # where head 1 guesses the first token of the answer
        after = torch.tensor(text + [-100] * K, device=f.device).unfold(0, K + 1, 1)
        # Row i of `after` has the tokens i … i + K. The first of them follows position i - 1.
        found.append((f[first:-1], after[first + 1:-1]))
    return found


@torch.inference_mode()
def accuracy(trained: Heads, model, f: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """Measure how often the likeliest guess of each head is right, where all tokens before are.

    The arguments are those of `head_states`. A token that no head can guess counts as missed.
    """
    hits, tried = torch.zeros(trained.K), (tokens[:, 1:] >= 0).sum(0).cpu()
    for some, after in zip(f.split(512), tokens.to(trained.vocab.device).split(512)):
        for k, x, labels in head_states(trained, model, some.to(trained.W[0].weight), after):
            hits[k - 1] += (trained.lm_head(x).argmax(-1) == labels).sum().cpu()
    return (hits / tried.clamp(min=1)).tolist()


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          heads: str = "medusa", K: int = 4, vocab: int = 0, max_new_tokens: int = 200,
          steps: int = 1000, batch: int = 512, lr: float = 1e-3, seed: int = 0) -> None:
    """Train heads for a frozen model on its own answers. A stopped run goes on.

    heads:  medusa or hydra
    K:      how many heads are trained, 1 or more
    batch:  how many positions a pass learns from
    lr:     the highest learning rate. 1e-3 suited 10M to 135M parameters, and is Medusa's for 7B
    """
    trained = Heads(model, heads, K)
    lessons = prepare_training(model, tokenizer, prompts, out, work, max_new_tokens, seed)
    if vocab:
        trained.keep(find_frequent(lessons.data, vocab))
    score = score_with(model, trained.lm_head)
    states_of, texts = compute_frozen(lambda pairs: collect_features(model, pairs, K),
                                      lessons.data, trained.lm_head.weight.shape[1])
    lengths = [len(answer) - max(0, 2 - len(prompt)) for prompt, answer in lessons.data]  # in rows
    measured = [*map(torch.cat, zip(*collect_features(model, lessons.held_out, K)))]

    def loss_of(rng: random.Random) -> torch.Tensor:
        f, tokens = sample_rows(states_of, texts, lengths, batch, rng)
        return heads_loss(trained, model, score, f.to(trained.W[0].weight), tokens)

    def evaluate() -> tuple[dict, str]:
        right = [round(x, 3) for x in accuracy(trained, model, *measured)]
        return {"right": right}, f"held-out guesses right, by head {right}"
    fit_part(trained, model, (batch, texts), lessons, loss_of, evaluate, out=out, steps=steps,
             lr=lr, seed=seed, name=heads, rate=warm_cosine)


# ---------------------------------------------------------------------------------- their files

def load_heads(path: str | Path, kind: str, model) -> Heads:
    """Read heads from a file, or released Medusa heads from a directory or a hub id."""
    if not is_released(path):
        return load_trained(path, f"{kind} heads", model,
                            lambda header: Heads(model, kind, header["K"]))
    require(kind == "medusa", "heads", "medusa for released heads", kind)
    _, found = read_head(str(path), "Medusa heads")
    known = {name.removeprefix("model.") for name in model.state_dict()}  # Medusa-2 has its target
    tensors = {key.removeprefix("medusa_head."): x for key, x in found.items() if key not in known}
    K = sum(name.endswith(".linear.weight") for name in tensors)
    trained = Heads(model, "medusa", K, own="0.1.weight" in tensors)
    fill(trained.trainable(), tensors, path)
    return match_type(trained, model)


COMMAND_LINE = dict(methods=[medusa], commands=[train], lossy=["typical"],
                    ranges={"nodes": (2, 4, 8, 16, 32, 64)})

if __name__ == "__main__":
    run_as_program(__file__)
