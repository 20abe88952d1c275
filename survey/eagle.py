"""EAGLE guesses the target's next features with one decoder layer, and tokens from these features.

    eagle             Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature
                      Uncertainty", arXiv 2401.15077
    dynamic trees     Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft
                      Trees", arXiv 2406.16858. `--no-dynamic` has EAGLE's static trees
    train --vocab     Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via
                      Frequency-Ranked Speculative Sampling", arXiv 2502.14856

    python -m survey.eagle train --prompts FILE --out my.safetensors
    python -m survey.eagle --adapter my.safetensors --prompt "..."

A head that others have released decodes as well (not tried here, since it is for a large model):

    python -m survey.eagle --target meta-llama/Meta-Llama-3-8B-Instruct --chat \
        --adapter yuhuili/EAGLE-LLaMA3-Instruct-8B --prompt "..."

The feature f_i of position i is what the LM head reads to choose token t_{i+1}. The draft's row i:

    fc [e(t_{i+1}); f_i]  ->  one decoder layer  ->  f̂_{i+1}  ->  LM head  ->  guesses of t_{i+2}
    loss = SmoothL1(f̂_{i+1}, f_{i+1}) + 0.1 CrossEntropy(head(f_{i+1}), head(f̂_{i+1}))

The token is one AHEAD of the feature. f_i leaves open which token is drawn from it, and so what
f_{i+1} is (Section 3.1). Below, the target knows the text up to its root t_4 and the features up to
f_3, so the last row of the context guesses t_5. Every later row reads a guess for its feature:

    row      0     1     2     3  │    4       5
    token   t_1   t_2   t_3   t_4 │   t̂_5     t̂_6       t_4 is the root
    feature f_0   f_1   f_2   f_3 │   f̂_4     f̂_5       a hat is on what is guessed
    makes   f̂_1   f̂_2   f̂_3   f̂_4 │   f̂_5     f̂_6
    guesses                   t̂_5 │   t̂_6     t̂_7

A row may guess several tokens, and each of them may have a row of its own. So the guesses are a
tree, which one call of the target verifies. The output is the target's own, greedily or with one
sample of the target at each node.

Departures (paper / here / why):
    plan at a temperature: static trees are the same at all temperatures / they are planned for
        greedy decoding, and so are the sizes of dynamic trees / planned by the mass that the target
        gives to each rank at temperature 1, static trees of 16 nodes made 1.5% more tokens a call
        there for the layer of models/
    sampled output of EAGLE-1: children are drawn from the draft / they are its likeliest tokens,
        and the target draws once at each node / one rule for both outputs is just as lossless
    static tree: made by hand / the tree that measured acceptance asks for / acceptance differs from
        model to model
    dynamic tree: of 60 nodes, and the 10 surest nodes of every level get children / of n nodes, and
        n / 6 of every level get children, if they are among the n likeliest so far / no other node
        can have a child in the tree
    size of a tree: fixed / the fastest on this machine, unless --nodes says it / costs differ. A
        released head that nobody has measured gets the tree of the released code, which is dynamic
    depth of a tree: fixed / up to 8 levels / the planned tree has the depth that pays
    layer: Llama's, in the released code without its input norm / of the target's class, with its
        input norm / any family can be the target. `train --released` makes the released layer, and
        `export` writes it for engines
    data: a fixed set of dialogues / the target's own greedy answers / the draft guesses those
    learning rate: 3e-5, in the released code after 2,000 steps of warm-up and then falling in a
        line / 1e-3 and a cosine, after a warm-up of a twentieth of the steps / it suits small
        models and 1,000 steps. Use a lower rate for a target of billions of parameters
    AdamW's betas: 0.9 and 0.95 / 0.9 and 0.999 / they are PyTorch's default
    noise on features: uniform in ± 0.1, in the released code times 512 / length / ± 0.1 for every
        length / that is the paper's number
    cross-entropy: over all rows / over a sample of 512 rows of a step / a large vocabulary's logits
        for all rows do not fit in memory
    --vocab: FR-Spec counts tokens in a large corpus, and drops the others after training / counts
        them in prompts and answers, and trains the layer with the few tokens / training then sees
        what decoding will use
    --begin last: the layer begins at random / it can begin as the target's last layer / it learns
        faster

Left out: training on the draft's own outputs and features of several layers, which are EAGLE-3.
"""
import copy
import functools
import math
import random
import sys
import timeit
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from common import CachedLM, InputError, Sampler, check, greedy, walk
from survey.clock import Node, best_tree, fastest, row_costs
from training.layers import FeatureLM, depth_of, take_layers
from training.parts import (MODELS, Part, fill, head_for, load_trained, logits_of, match_type,
                          save_trained)
from training.released import (RANKS, describe_layer, is_released, load_measured, make_config,
                             read_head, read_layer_config, refuse_settings, save_accept,
                             take_embeddings, write_head)

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

ADAPTER = f"{MODELS}/eagle.safetensors"
DEPTH = 8  # the most levels of guesses that a tree has
MOST = 64  # the most nodes that a tree has
NOISE = 0.1  # training adds noise to features, uniform in ± NOISE
SAMPLED = 512  # how many rows of a step the cross-entropy reads
RELEASED_NODES = 60  # of the released code's tree, in which RANKS nodes of each level get children
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}

Text = tuple[torch.Tensor, torch.Tensor, int]  # ids [T], features [T, f], length of the prompt


# ----------------------------------------------------------------------------------- the draft

class Pairs(NamedTuple):
    """Hold what n rows of the draft read. Row i learns f_{i+1} and guesses t_{i+2}.

    Tokens are lists or tensors [n].
    """
    features: torch.Tensor  # f_i, [n, f]
    tokens: list[int]  # t_{i+1}

    def part(self, span: slice) -> "Pairs":
        """Return the pairs of a slice."""
        return Pairs(self.features[span], self.tokens[span])


def make_layer(model, mlp: int, n: int = 1) -> tuple:
    """Make random layers of the kind of the model's last ones, for the draft to train.

    model    the target
    mlp      the width of a layer's MLP. 0: as wide as the model's
    n        how many layers. EAGLE has one
    returns  a model of the random layers in float32, and a model of the last layers themselves.
             Both have 8 tokens, since the draft puts in the target's embeddings and LM head.
    """
    L = depth_of(model)
    last = take_layers(model, [*range(L - n, L)], vocab_size=8, pad_token_id=None)
    config = copy.deepcopy(last.config)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if mlp:
        config.get_text_config().intermediate_size = mlp
        plain, lm = lm, AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if [p.shape for p in plain.parameters()] == [p.shape for p in lm.parameters()]:
            raise InputError(f"--mlp must be 0, or a width that changes the MLP of "
                             f"{type(lm).__name__}, got {mlp}")
    return check(lm), last


def make_released_layer(config: PreTrainedConfig):
    """Make a random layer of the released form, which has no input norm, as a model of 8 tokens.

    config   of the layer
    """
    config = copy.deepcopy(config)
    config.vocab_size, config.pad_token_id = 8, None
    lm = check(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    lm.model.layers[0].input_layernorm = torch.nn.Identity()
    return lm


@torch.no_grad()
def copy_layer(last, lm) -> None:
    """Copy the weights of the target's last layer into a draft's layer.

    An MLP of another width stays as it is. Learned positions are copied too.

    last, lm   the last layer and the draft's layer, each a model of one layer
    """
    weights = last.state_dict()
    for name, x in lm.state_dict().items():
        if weights[name].shape == x.shape:
            x.copy_(weights[name])


class EagleLayer(Part):
    """Guess the feature after a token and a feature. Making a draft freezes the target.

    `fc` joins a token's embedding and a feature. `lm` reads that: it is a model of one layer, with
    the target's embeddings and LM head.

    model    the target
    begin    how the layer begins: random, or last (as the target's last layer)
    mlp      the width of the layer's MLP. 0: as wide as the target's
    seed     a seed for the random weights
    config   of a layer of the released form, which is random and has no input norm. None: the layer
             is of the target's class
    bias     whether `fc` has a bias

    accept   accept[n][r], how often the guess of rank r is right on held-out answers, below a path
             of n right guesses. It is empty if nobody has measured that.
    levels   the most levels that `accept` can have
    vocab    [V'], the tokens that the draft can guess. Row i of the LM head stands for vocab[i].
    """
    title = "an EAGLE layer"

    def __init__(self, model, begin: str = "random", mlp: int = 0, seed: int = 0,
                 config: PreTrainedConfig | None = None, bias: bool = True):
        super().__init__()
        if begin not in ("random", "last"):
            raise InputError(f"--begin must be random or last, got {begin}")
        if begin == "last" and config is not None:
            raise InputError(f"--begin must be random with --released, got {begin}")
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        e, f = table.weight.shape[1], head.weight.shape[1]
        self.begin = begin
        self.mlp = mlp
        self.config = config
        self.accept = []
        self.levels = DEPTH
        self.vocab = torch.arange(len(head.weight), device=head.weight.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if config is None:
                lm, last = make_layer(model, mlp)
            else:
                lm = make_released_layer(config)
            self.fc = torch.nn.Linear(e + f, e, bias)
        if begin == "last":
            copy_layer(last, lm)
        for name, part in list(lm.get_decoder().named_children()):
            # The decoder's own norm is the final one. A feature is what comes after that norm, so
            # the draft makes features without it.
            if "Norm" in type(part).__name__:
                setattr(lm.get_decoder(), name, torch.nn.Identity())
        model.requires_grad_(False)
        self.lm = lm
        self.to(model.device)
        lm.set_input_embeddings(table)
        lm.set_output_embeddings(head)

    def keep(self, vocab: list[int]) -> None:
        """Guess the tokens of `vocab` alone, through their rows of the LM head.

        vocab   the tokens; the new LM head has its rows in this order
        """
        self.vocab = self.vocab[vocab]
        self.lm.set_output_embeddings(head_for(self.lm.get_output_embeddings(), self.vocab))

    def join(self, pairs: Pairs) -> torch.Tensor:
        """Return the layer's inputs [..., e], which `fc` makes of tokens and features.

        pairs   tokens [...] and features [..., f], of any leading shape
        """
        ids = torch.as_tensor(pairs.tokens, dtype=torch.long, device=pairs.features.device)
        e = self.lm.get_input_embeddings()(ids)
        return self.fc(torch.cat([x.to(self.fc.weight.dtype) for x in (e, pairs.features)], -1))


def eagle_loss(draft: EagleLayer, to_logits: Callable, batch: list[Text],
               rng: torch.Generator) -> torch.Tensor:
    """Compute the loss of Section 3.2 in nats, the mean over rows that guess a token of an answer.

    draft       the draft
    to_logits   a function that scales or caps the LM head's output where the target does so, as
                `logits_of` of training/parts.py finds out
    batch       texts with their features
    rng         a generator of the draft's device, which draws the noise, and the rows whose
                guesses are compared
    """
    from training.loop import compute_in_parts
    head, device = draft.lm.get_output_embeddings(), draft.fc.weight.device
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ids = pad([ids for ids, _, _ in batch]).to(device)  # [B, T]
    f = pad([f for _, f, _ in batch]).to(device)  # [B, T, f]
    place = torch.arange(2, ids.shape[1])  # of the token that row i guesses: i + 2
    learns = [(place >= length) & (place < len(text)) for text, _, length in batch]
    learns = torch.stack(learns).to(device)
    # The layer reads noisy features, as it will have to read its own guesses, and learns true ones.
    noise = NOISE * (2 * torch.rand(f.shape, generator=rng, device=device) - 1)
    inputs = draft.join(Pairs((f + noise)[:, :-2], ids[:, 1:-1]))  # [B, T - 2, e]
    guessed = draft.lm.get_decoder()(inputs_embeds=inputs, use_cache=False)[0]  # [B, T - 2, f]
    guessed = guessed[learns].float()  # [N, f]
    features = f[:, 1:-1][learns].float()

    def losses_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute the cross-entropy of the target's distributions p and the draft's q."""
        q, p = (to_logits(head(z.to(head.weight.dtype)).float()) for z in (x, y))  # [n, V']
        return F.cross_entropy(q, p.softmax(-1), reduction="none")
    # The guesses of a sample of the rows are compared.
    few = torch.randperm(len(features), generator=rng, device=device)[:SAMPLED]
    each = compute_in_parts(losses_of, len(head.weight), guessed[few], features[few])
    return F.smooth_l1_loss(guessed, features) + 0.1 * each.mean()


# ---------------------------------------------------------------------------------- decoding

def count_levels(tree: list[Node]) -> list[int]:
    """Count the nodes of a tree that have children, level by level from the root down."""
    depth = max(node.depth for node in tree)
    return [len({child.parent for child in tree if child.depth == d + 1}) for d in range(depth)]


def spread_levels(n: int, depth: int) -> list[int]:
    """Say how many nodes of each level get children, at most, in a dynamic tree of n nodes.

    A row of the draft costs time even if its guesses are not kept. So a small tree has as large a
    share of such nodes as EAGLE-2's tree of 60 nodes, where they are 10.
    """
    most = min(RANKS, max(1, RANKS * n // RELEASED_NODES))
    return [1, *[most] * (depth - 1)][:depth]


def rank_tokens(draft: EagleLayer, logits: torch.Tensor,
                ranks: int) -> tuple[list[list[float]], list[list[float]]]:
    """Rank the guesses after some nodes, with one wait for a GPU.

    logits   [nodes, V'], the draft's guesses after each of these nodes
    ranks    how many guesses a node has at most
    returns  the likeliest tokens after each node, and their probabilities
    """
    probs = logits.float().softmax(-1).nan_to_num(0.0)  # a draft that overflows gives NaN
    best = probs.topk(min(ranks, probs.shape[1]))
    return torch.stack([draft.vocab[best.indices].float(), best.values]).tolist()


def plan_eagle(draft: EagleLayer, lm: CachedLM, target: CachedLM, dynamic: bool) -> Iterator[tuple]:
    """Yield trees of all sizes and depths, for `fastest` to choose from.

    What a static tree gives was measured on held-out answers. A dynamic tree of as many nodes and
    levels gives a little more. Costs are measured on this machine.

    lm       the draft's layer with its cache
    dynamic  whether the trees are dynamic
    yields   nodes and levels of a tree and whether it is dynamic, the tokens to be expected, and
             the seconds that growing the tree and the target's call take together
    """
    costs, draft_costs = row_costs(target, MOST), row_costs(lm, MOST)
    some = torch.zeros(4, len(draft.vocab), device=draft.vocab.device)
    ranking = min(timeit.repeat(lambda: rank_tokens(draft, some, RANKS), number=1, repeat=4))

    for depth in range(len(draft.accept) + 1):
        tree = best_tree(draft.accept[:depth], MOST)
        for n in range(1, len(tree) + 1):
            levels = spread_levels(n, depth) if dynamic else count_levels(tree[:n])
            tokens = sum(node.chance for node in tree[:n])
            # A pass has a row for each node that gets children. But the first one feeds a pair for
            # each token of the last chunk.
            passes = [math.ceil(tokens), *levels[1:]][:len(levels)]
            growing = sum(draft_costs[rows] + ranking for rows in passes)
            yield (n, levels, dynamic), tokens, costs[n] + growing


@torch.inference_mode()
def feed(draft: EagleLayer, lm: FeatureLM, chunks: list[Pairs]) -> torch.Tensor | None:
    """Add pairs of final tokens to the draft's context. Those of a long prompt come in parts.

    lm       the draft's layer with its cache
    chunks   pairs, in the order of the text
    returns  the logits [1, V'] after the last pair. None: there is no pair
    """
    logits = None
    for pairs in chunks:
        for i in range(0, len(pairs.tokens), lm.PART):
            part = pairs.part(slice(i, i + lm.PART))
            logits = lm.forward(draft.join(part), keep=1)
            lm.commit(range(len(lm.parents)))
    return logits


@torch.inference_mode()
def grow_eagle(draft: EagleLayer, lm: FeatureLM, unfed: list[Pairs], root: int, n: int,
               levels: list[int], dynamic: bool) -> tuple[list[int], list[int]]:
    """Grow a tree below the root, level by level, and keep the nodes that are likeliest accepted.

    A node has a chance, a product along its path. Its factors are the measured acceptance or, where
    the tree is dynamic, the draft's own probabilities (EAGLE-2, Section 4).

    Let levels be [1, 2], and let every node have two guesses. The draft's row of a node reads the
    node's own token, and the feature that the row of its parent made. In the header's letters:

        node           row of the draft                  reads       makes   is parent of
        0, the root    the last of the context, or -1    t_4, f_3    f̂_4     nodes 1 and 2
        1, below 0     0, below row -1                   t̂_5, f̂_4    f̂_5     nodes 3 and 4
        2, below 0     1, below row -1                   t̂_5, f̂_4    f̂_5     nodes 5 and 6
        3, 4, 5, 6     none, since they get no children

    Nodes 1 and 2 hold different tokens t̂_5. So they make different features f̂_5.

    draft     the draft
    lm        the draft's layer with its cache
    unfed     pairs of the tokens that became final since the last tree
    root      the token of node 0
    n         how many nodes are kept, the root among them
    levels    for each level how many of its nodes get children, the likeliest ones
    dynamic   whether chances are the draft's own
    returns   ids and parents of the nodes
    """
    ids, parents, chances = [root], [-1], [1.0]  # of each node; most nodes are not kept
    # The last pair that is fed is the root's: its token is the root. So this pass makes the root's
    # feature and guesses the root's children.
    expanded, logits = [0], feed(draft, lm, unfed)
    row_of = {0: -1}  # the row of a node in the draft's pending tree. -1: the end of the context
    feature_of = {0: lm.features[-1]}  # the feature that the row of a node made
    kept = [0]  # the n likeliest nodes. A parent is at least as likely as its children, and earlier
    for depth, most in enumerate(levels):
        if depth > 0:
            # The likeliest nodes of the newest level get children. A node that is not kept now is
            # not kept later, and neither are its children.
            expanded = [x for x in kept if x >= first][:most]
            if not expanded:
                break
            # The row of a node reads its token, and what the row of its parent made. It hangs below
            # the row of the parent, so that it sees the rows of its path alone.
            above = [parents[x] for x in expanded]
            pairs = Pairs(torch.stack([feature_of[x] for x in above]), [ids[x] for x in expanded])
            rows = len(lm.parents)  # the number that the first of the new rows gets
            logits = lm.forward(draft.join(pairs), [row_of[x] for x in above])
            row_of |= zip(expanded, range(rows, len(lm.parents)))
            feature_of |= zip(expanded, lm.features)
        first = len(ids)
        ranks = RANKS if dynamic else len(draft.accept[depth])
        for node, tokens, probs in zip(expanded, *rank_tokens(draft, logits, ranks)):
            factors = probs if dynamic else draft.accept[depth][:len(probs)]
            ids += map(int, tokens)
            parents += [node] * len(tokens)
            chances += [chances[node] * p for p in factors]
        kept = sorted(range(len(ids)), key=lambda x: -chances[x])[:n]
    lm.truncate(lm.length)  # rows that read guessed features never join the context
    new_number = {old: new for new, old in enumerate(kept)}
    return [ids[x] for x in kept], [-1, *(new_number[parents[x]] for x in kept[1:])]


def plan_eagle_tree(draft: EagleLayer, nodes: int, dynamic: bool) -> tuple[int, list[int], bool]:
    """Plan a tree of a given size. A draft that nobody has measured gets the released code's tree.

    nodes     how many nodes the tree is to have, the root among them. 0: as many as pay, which
              `fastest` says later, or as in the released code
    dynamic   whether the tree is to be dynamic
    returns   how many nodes, how many of each level get children, and whether it is dynamic
    """
    n = nodes or RELEASED_NODES
    if draft.accept and not dynamic:
        return n, count_levels(best_tree(draft.accept, n)), False
    return n, spread_levels(n, min(DEPTH, n - 1)), True


def eagle(target: FeatureLM, prompt: list[int], *, nodes: int = 0, dynamic: bool = True,
          adapter: str = ADAPTER, accept: str = "", trained: EagleLayer | None = None,
          sample: Sampler = greedy, log: list | None = None) -> Iterator[list[int]]:
    """Grow a tree from guessed features, verify it in one call of the target, and keep one path.

    trained   a draft to use in place of a file's

    nodes:   how many nodes a tree has with its root, up to 64, with 0 for as many as pay on this
             machine
    dynamic: grow the tree that the draft is surest of now (EAGLE-2), in place of the tree that was
             right most often
    adapter: file of a draft layer, made by `python -m survey.eagle train`, or the directory or hub
             id of a released head
    accept:  file that `python -m survey.eagle measure` made for a released head. Without it the
             tree of such a head is the released code's own: dynamic, with 60 nodes if --nodes is 0
    Yields chunks of 1 to 9 tokens; logs {"guessed", "accepted"} a call.
    """
    draft = trained or load_measured(target, "eagle", adapter, accept, load_draft)
    yield from decode(target, draft, prompt, nodes, dynamic, sample, log)


def decode(target: FeatureLM, draft: EagleLayer, prompt: list[int], nodes: int, dynamic: bool,
           sample: Sampler, log: list | None) -> Iterator[list[int]]:
    """Decode with a draft that guesses features: the loop of EAGLE, and of EAGLE-3.

    target    the target, whose `features` are what the draft reads

    The other arguments, and what is yielded and logged, are those of `eagle`.
    """
    if not 0 <= nodes <= MOST:
        raise InputError(f"--nodes must be 0 to {MOST}, got {nodes}")
    lm = target.once((draft, "cached"), lambda: type(target)(draft.lm, target.vocab))
    target.start(prompt[:-1])
    lm.start([])
    root = prompt[-1]
    # Each token of the prompt but the root has a feature, and a token after it. The pair with the
    # root waits for the first tree, since its pass also guesses the root's children.
    pairs = Pairs(target.features, prompt[1:])
    feed(draft, lm, [pairs.part(slice(0, -1))])
    unfed = [pairs.part(slice(-1, None))] if len(prompt) > 1 else []
    tree = plan_eagle_tree(draft, nodes, dynamic)
    while True:
        # The clock chooses, and may choose anew as the context grows.
        if nodes == 0 and draft.accept:
            tree = fastest(target, (draft, dynamic),
                           lambda: plan_eagle(draft, lm, target, dynamic))
        n, levels, grown = tree
        # A prompt of one token has no pair, and a tree of one node needs no draft. In both cases
        # the call has the root alone, and new pairs wait until a tree is grown.
        ids, parents = [root], [-1]
        if levels and unfed:
            ids, parents = grow_eagle(draft, lm, unfed, root, n, levels, grown)
            unfed = []
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents)))
        # The draft learns what the target made of the accepted nodes: a true feature for each, and
        # the token chosen after it. These replace the features that the draft guessed.
        unfed.append(Pairs(target.features[path], chunk))
        root = chunk[-1]
        target.commit(path)
        if log is not None:
            log.append({"guessed": len(ids) - 1, "accepted": len(path) - 1})
        yield chunk


# ------------------------------------------------------------------------------------ training

def compute_features(model, data: list[tuple[list[int], list[int]]]) -> list[Text]:
    """Run the target over texts, and return them with its features.

    model    the target
    data     pairs of a prompt and its answer
    returns  for each pair its ids [T], features [T, f] in bfloat16, and the length of the prompt
    """
    from training.loop import read_texts
    texts = [prompt + answer for prompt, answer in data]
    return [(torch.tensor(text), f, len(prompt))
            for (prompt, _), text, f in zip(data, texts, read_texts(model, texts))]


@torch.inference_mode()
def measure_acceptance(draft: EagleLayer, held_out: list[Text]) -> list[list[float]]:
    """Measure how often guesses are right on the path that a static tree reaches most often.

    draft     the draft
    held_out  texts with their features
    returns   accept[n][r]: how often the guess of rank r is the next token when the last n features
              are guessed, and the likeliest guess was right at each of them. Elsewhere the tree of
              a call ends earlier

    The tokens of an answer are guessed again, step by step. All steps of a text are one pending
    tree of the draft, here of a text t_0 … t_5:

        guesses      t_2  t_3  t_4  t_5
        step 0 rows   0 ── 1 ── 2 ── 3    row i reads the text's f_i
                        ╲    ╲    ╲
        step 1 rows       1'   2'   3'    row i' reads what row i-1 guessed
                             ╲    ╲
        step 2 rows            2"   3"    row i" reads what row (i-1)' guessed

    A line leads from a row down to the row that hangs below it. Every row reads the text's own
    token t_{i+1}. So row 3" sees the rows 0, 1, 2' and itself, which read two features of the text
    and then two guessed ones.
    """
    ranks = min(RANKS, len(draft.vocab))
    hits, total = torch.zeros(DEPTH, ranks), torch.zeros(DEPTH, 1)
    for ids, features, length in held_out:
        first = max(0, length - 2)  # the first row that guesses a token of the answer
        lm = FeatureLM(draft.lm)
        lm.start([])
        pairs = Pairs(features[:-2].to(draft.lm.device), ids[1:-1])
        above = None  # the rows of step 0 are a chain
        reached = torch.ones(len(ids), 1, dtype=torch.bool, device=draft.vocab.device)
        for n in range(min(DEPTH, len(ids) - 2 - first)):
            logits = lm.forward(draft.join(pairs), above)
            labels = ids[first + n + 2:].to(logits.device)
            rows = len(labels)
            best = draft.vocab[logits[-rows:].topk(ranks).indices]  # [rows, ranks]
            reached = reached[:rows]
            right = (best == labels[:, None]) & reached
            hits[n] += right.sum(0).cpu()
            total[n] += reached.sum().cpu()
            reached = right[:, :1]
            # The next step's rows hang below all rows of this step but its last, which guesses the
            # text's last token: no token of the text is left to read beside its feature.
            above = range(len(lm.parents) - rows, len(lm.parents) - 1)
            pairs = Pairs(lm.features[-rows:-1], ids[first + n + 2:-1])
    return (hits / total.clamp(min=1)).tolist()


def evaluate(draft, held_out: list[Text]) -> tuple[dict, str]:
    """Measure the acceptance of a draft that is being trained, as `Training` asks for it.

    draft     the draft, of EAGLE or of EAGLE-3
    held_out  texts with what the draft reads of them
    returns   {"accept": the table}, and a line to print
    """
    from training.loop import low_precision
    with low_precision(draft.lm.device, draft.lm):
        accept = measure_acceptance(draft, held_out)
    return {"accept": accept}, f"held-out acceptance {[round(ranks[0], 3) for ranks in accept]}"


def fit(model, draft: EagleLayer, data: list, held_out: list, *, steps: int, batch: int, lr: float,
        seed: int = 0, work: Path | None = None) -> dict:
    """Train a draft on pairs of a prompt and its answer, and set its `accept`.

    AdamW's learning rate is a cosine after a warm-up of a twentieth of the steps, and each value of
    a gradient is cut to ± 0.5 as in the released code.

    model     the target
    draft     the draft
    data      pairs to learn from
    held_out  pairs to measure by
    steps     how many steps are trained
    batch     how many answers a step learns from
    lr        the highest learning rate
    seed      chooses the answers, the noise and the sampled rows
    work      folder of checkpoints, or None to keep none.
    returns   {step: {"accept": ...}}, the table of `measure_acceptance` on `held_out`
    """
    from training.loop import (compute_frozen, count_tokens, fit_part, sample_alike,
                                 warm_cosine)
    to_logits = logits_of(model)
    texts_of, _ = compute_frozen(lambda pairs: compute_features(model, pairs), data,
                              model.get_output_embeddings().weight.shape[1])
    held_texts = compute_features(model, held_out)
    if draft.begin == "random":
        # Embeddings and features differ in size. The weights of the embeddings are scaled so that
        # at first both weigh the same.
        [(ids, features, _)] = texts_of([0])
        e = model.get_input_embeddings()(ids.to(model.device))  # scaled, where the model does that
        draft.fc.weight.data[:, :e.shape[1]] *= features.float().std() / e.float().std()

    def loss_of(rng: random.Random) -> torch.Tensor:
        numbers = sample_alike(range(len(data)), batch, rng, lambda i: count_tokens(data[i]))
        noise = torch.Generator(model.device).manual_seed(rng.getrandbits(60))
        return eagle_loss(draft, to_logits, texts_of(numbers), noise)

    form = draft.mlp, draft.vocab.tolist(), batch, draft.config and draft.config.to_dict()
    return fit_part(draft, model, form, data, held_out, loss_of,
                    lambda: evaluate(draft, held_texts), name="eagle", steps=steps, lr=lr,
                    rate=warm_cosine, max_norm=math.inf, max_value=0.5, seed=seed, folder=work,
                    models=(draft.lm,), texts=batch)


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          begin: str = "random", released: bool = False, mlp: int = 0, vocab: int = 0,
          max_new_tokens: int = 200, steps: int = 1000, batch: int = 16, lr: float = 1e-3,
          seed: int = 0) -> None:
    """Train a draft layer for a frozen model on its own answers. A stopped run goes on.

    out:     the safetensors file to make
    work:    folder of answers and checkpoints, OUT.work by default
    begin:   how the layer begins, at random as in the paper, or as the target's last layer. That
             learns faster only where the layer adds no more than about a feature's size
    released: train a layer of the released form, which `export` can write. It is Llama's without
             its input norm, it begins at random, and `fc` has no bias
    mlp:     width of the layer's MLP, with 0 for the target's
    vocab:   how many tokens the draft can guess, the most frequent of prompts and answers, with 0
             for all
    max_new_tokens: the longest answer that is collected
    batch:   how many answers a step learns from
    lr:      the highest learning rate, after a warm-up. 1e-3 suited targets of 10M to 135M
             parameters. The released command has 3e-5 for 7B
    """
    from training.loop import (collect_examples, find_frequent, require,
                                 require_training_options)
    require_training_options(lr, steps=steps, batch=batch, max_new_tokens=max_new_tokens)
    require(mlp >= 0, "mlp", "0 or more", mlp)
    require(vocab >= 0, "vocab", "0 or more", vocab)
    work = work or Path(f"{out}.work")
    config = make_config(model, mlp) if released else None
    draft = EagleLayer(model, begin, mlp, seed, config, bias=not released)
    data, held_out = collect_examples(model, tokenizer, prompts, max_new_tokens, work, seed=seed,
                                      most=50)
    if vocab:
        draft.keep(find_frequent(data, vocab))
    fit(model, draft, data, held_out, steps=steps, batch=batch, lr=lr, seed=seed, work=work)
    save_draft(out, draft, model)


# ------------------------------------------------------------------------------------ the file

def save_draft(path: Path, draft: EagleLayer, model) -> None:
    """Write a draft to a file, with the fingerprint of the model that it is for.

    path    the safetensors file to make
    draft   the draft
    model   the target
    """
    config = draft.config and draft.config.to_dict()
    save_trained(path, draft, model, mlp=draft.mlp, config=config, bias=draft.fc.bias is not None)


def load_draft(path: str | Path, model) -> EagleLayer:
    """Read a draft from a file, or a released one from a directory or a hub id.

    path      the safetensors file, the directory or the hub id
    model     the target
    returns   the draft. InputError if it is damaged, unknown, or of another model
    """
    if is_released(path):
        return load_released(str(path), model)

    def make(header: dict) -> EagleLayer:
        config = LlamaConfig(**header["config"]) if header.get("config") else None
        return EagleLayer(model, mlp=header.get("mlp", 0), config=config,
                          bias=header.get("bias", True))
    return load_trained(path, EagleLayer.title, model, make)


# ------------------------------------------------------------------------------- released heads

def name_released(draft: EagleLayer) -> dict[str, torch.nn.Parameter]:
    """Return what is trained in a draft, by the names of the released files."""
    return {name.removeprefix("lm.model."): p for name, p in draft.trainable().items()}


def load_released(path: str, model) -> EagleLayer:
    """Read a draft in the released form of EAGLE and EAGLE-2, whose heads are the same.

    path     a directory or hub id
    returns  the draft, which nobody has measured. InputError if it is damaged, unknown, or of
             another model
    """
    config, tensors = read_head(path, "an EAGLE head")
    refuse_settings(path, config, tensors)
    biases = [x for x in "qkvo" if f"layers.0.self_attn.{x}_proj.bias" in tensors]
    # With biases of queries, keys and values alone the attention is Qwen2's.
    family = Qwen2Config if biases == [*"qkv"] else LlamaConfig
    layer = read_layer_config(path, config, model, family)
    layer.attention_bias = "o" in biases
    widths = {x.weight.shape[1] for x in (model.get_input_embeddings(),
                                          model.get_output_embeddings())}
    if widths != {layer.hidden_size}:
        raise InputError(f"--adapter must be a head for features of width {max(widths)}, got "
                         f"{path!r} for {layer.hidden_size}")
    draft = EagleLayer(model, config=layer, bias="fc.bias" in tensors)
    own = take_embeddings(path, tensors, model, layer.hidden_size)
    if own is not None:
        draft.lm.set_input_embeddings(own)
    fill(name_released(draft), tensors, path)
    return match_type(draft, model)


def measure(model, tokenizer, prompts: list[list[int]], *, adapter: Path, out: Path,
            work: Path = None, max_new_tokens: int = 200) -> None:
    """Measure how often a draft's guesses are right on the model's own answers.

    adapter: file, directory or hub id of a draft
    out:     the JSON file to make, for `--accept`
    work:    folder of answers, OUT.work by default
    max_new_tokens: the longest answer that is collected
    """
    from training.loop import collect_examples
    draft = load_draft(adapter, model)
    data = sum(collect_examples(model, tokenizer, prompts, max_new_tokens,
                                work or Path(f"{out}.work"), seed=0), [])
    save_accept(out, model, draft, measure_acceptance(draft, compute_features(model, data)))


def export(model, tokenizer, *, adapter: Path, out: Path, engine: str = "vllm") -> None:
    """Write a draft in the released form, as a directory that an engine loads.

    adapter: file of a draft layer, made by `python -m survey.eagle train --released`
    out:     the directory to make
    engine:  vllm or sglang. They know the architecture by other names. vLLM's `fc` has no bias and
             SGLang's has one
    """
    if engine not in ARCHITECTURES:
        raise InputError(f"--engine must be vllm or sglang, got {engine}")
    draft = load_draft(adapter, model)
    tensors = name_released(draft)
    if draft.config is None or any("_proj.bias" in name for name in tensors):
        raise InputError(f"--adapter must be a layer trained with --released, got {str(adapter)!r}")
    if len(draft.vocab) < len(model.get_output_embeddings().weight):
        raise InputError(f"--adapter must guess all tokens, got {str(adapter)!r}, trained with "
                         "--vocab")
    if engine == "vllm" and draft.fc.bias is not None:
        raise InputError(f"--engine must be sglang for a head whose fc has a bias, got {engine}")
    if engine == "sglang":
        tensors.setdefault("fc.bias", torch.zeros_like(draft.fc.weight[:, 0]))
    tensors["embed_tokens.weight"] = draft.lm.get_input_embeddings().weight
    # "bias" says to EAGLE's own code whether fc has one, and to engines whether queries have one.
    config = describe_layer(draft.config, model) | {"bias": False}
    write_head(out, config | {"architectures": [ARCHITECTURES[engine]]}, tensors)


if __name__ == "__main__":
    from cli.main import main  # the command line is in cli/, a folder of this project
    sys.exit(main([eagle], commands=[train, measure, export],
                  folders=[export], ranges={"nodes": (4, 8, 16, 32, 64)}))
