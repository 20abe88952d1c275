"""EAGLE guesses the target's next features with one decoder layer, and tokens from these features.

    eagle             Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature
                      Uncertainty", arXiv 2401.15077
    dynamic trees     Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft
                      Trees", arXiv 2406.16858
    train --vocab     Zhao et al., "FR-Spec: Accelerating Large-Vocabulary Language Models via
                      Frequency-Ranked Speculative Sampling", arXiv 2502.14856

    python -m survey.eagle train --prompts FILE --out my.safetensors
    python -m survey.eagle --adapter my.safetensors --prompt "..."
    python -m survey.eagle --adapter yuhuili/EAGLE-LLaMA3-Instruct-8B --chat --prompt "..." \
        --target meta-llama/Meta-Llama-3-8B-Instruct        # a released head, not tried here

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

Each row proposes several tokens, and each of these can be fed as a row in turn. So the guesses form
a tree, which one call of the target verifies. The output is the target's own.

The layer is that of the released code: a Llama layer without its input norm, after an `fc`. The
target may be of any family.

Departures:
- The `fc`. Released code: it has a bias, and begins at random. Here: it has none, except in a
  released head, and its random columns for embeddings are scaled by the size of features over that
  of embeddings. Why: vLLM's layer has none either, and both inputs should weigh the same at first.
- Sampling. Paper: EAGLE-1 draws children from the draft. Here: they are its likeliest tokens, and
  the target draws once at each node. Why: one rule serves greedy and sampled output.
- The tree. EAGLE's paper: static and made by hand. EAGLE-2's: dynamic with 60 nodes, where the 10
  likeliest of a level are expanded. Here: dynamic with n nodes, as many as pay, where n / 6 of a
  level are expanded. Why: costs differ. How often guesses are right is learnt while decoding.
- Training. Paper: dialogues, a rate of 3e-5, betas .9 and .95, all rows in the cross-entropy. Here:
  the target's own greedy answers, 1e-3 with a cosine, betas .9 and .999, 512 rows of a step. Why:
  the draft guesses these answers, and small models need a higher rate.
- FR-Spec. Paper: tokens are dropped after training. Here: `--vocab` is chosen before.
"""
import math
import random
from itertools import accumulate
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from common import InputError, Sampler, begin, greedy, walk
from support.clock import MOST, Choice, recall
from support.engine import MODELS, EngineLM, depth_of, log_round, run_as_program
from support.layers import make_config
from support.loading import check
from support.parts import LayerPart, load_trained, logits_of, score_with, seeded
from support.released import fill_layer, is_released, read_eagle
from support.trees import RANKS, Growth, best_tree
from training.loop import divergence_in_parts, fit_on_texts, measure_guesses, warm_cosine
from training.texts import Text, compute_features, find_frequent, pad_texts, prepare_training

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

ADAPTER = f"{MODELS}/eagle.safetensors"
# Training adds noise to features, uniform in ± NOISE. The released code scales it by 512 / T.
NOISE = 0.1
SAMPLED = 512  # how many rows of a pass the cross-entropy reads
LEVELS = 8  # the most levels of guesses that a tree has


# ----------------------------------------------------------------------------------- the draft

class Pairs(NamedTuple):
    """Hold what n rows of the draft read. Row i learns f_{i+1} and guesses t_{i+2}."""
    features: torch.Tensor  # f_i, [n, f]
    tokens: list[int]  # t_{i+1}


class EagleLayer(LayerPart):
    """Guess the feature after a token and a feature. Making a draft freezes the target.

    `lm` is a model of one layer, with the target's embeddings and LM head. It reads what `fc` makes
    of a token's embedding and a feature.

    config   of the layer, a Llama's. None: as wide as the target
    bias     whether `fc` has a bias, as some released heads have
    seed     of the random weights that it begins with

    vocab    [V'], the tokens that the rows of the LM head stand for
    """
    title = "an EAGLE layer"
    prior = 0.85  # for `Acceptance`. The embedded layer guesses 0.87 of held-out tokens

    def __init__(self, model, config: LlamaConfig | None = None, bias: bool = False, seed: int = 0):
        super().__init__()
        self.config = config or make_config(model)
        tables = model.get_input_embeddings(), model.get_output_embeddings()
        e, f = (table.weight.shape[1] for table in tables)
        h = self.config.hidden_size
        if not e == f == h:
            raise InputError(f"expected embeddings and features of {h} numbers, as the layer has, "
                             f"got {e} and {f}")
        with seeded(seed):
            # A model of 8 tokens, in whose place come the target's embeddings and LM head.
            small = self.config.to_dict() | dict(vocab_size=8, pad_token_id=None)
            lm = LlamaForCausalLM(LlamaConfig(**small))
            self.fc = torch.nn.Linear(2 * h, h, bias)
        lm.model.layers[0].input_layernorm = torch.nn.Identity()
        lm.model.norm = torch.nn.Identity()  # a feature comes after the final norm
        self.lm = check(lm)
        self.borrow(model)
        self.to_logits = logits_of(model)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return what is trained and kept in a file, by the names of released files."""
        return {name.removeprefix("lm.model."): p for name, p in super().trainable().items()}

    def header(self) -> dict:
        return {"config": self.config.to_dict()}

    def join(self, features: torch.Tensor, tokens) -> torch.Tensor:
        """Return the layer's inputs [..., e]: `fc` of tokens [...] and features [..., f]."""
        both = [x.to(self.fc.weight.dtype) for x in (self.embed(tokens), features)]
        return self.fc(torch.cat(both, -1))


def eagle_loss(draft: EagleLayer, score: Callable, batch: list[Text],
               rng: torch.Generator) -> torch.Tensor:
    """Compute the loss of Section 3.2 in nats, the mean over rows that guess a token of an answer.

    draft   the draft
    score   turns features into logits of the tokens that the draft can guess (parts.score_with)
    batch   texts with their features
    rng     a generator of the draft's device, of the noise and of the rows that are compared
    """
    ids, f, answers = pad_texts(batch)  # [B, T], [B, T, f], [B, T - 1]
    learns = answers[:, 1:]  # row i guesses token i + 2, and not the next one
    # The layer reads noisy features, as it will have to read its own guesses, and learns true ones.
    noise = NOISE * (2 * torch.rand(f.shape, generator=rng, device=f.device) - 1)
    inputs = draft.join((f + noise)[:, :-2], ids[:, 1:-1])  # [B, T - 2, e]
    guessed = draft.lm.get_decoder()(inputs_embeds=inputs, use_cache=False)[0]  # [B, T - 2, f]
    guessed = guessed[learns].float()  # [N, f]
    features = f[:, 1:-1][learns].float()
    few = torch.randperm(len(features), generator=rng, device=f.device)[:SAMPLED]
    each = divergence_in_parts("cross-entropy", score, score, len(draft.vocab), features[few],
                               guessed[few])
    return F.smooth_l1_loss(guessed, features) + 0.1 * each.mean()


# ---------------------------------------------------------------------------------- decoding

def scale_levels(n: int, depth: int) -> list[int]:
    """Say how many nodes of each level of a tree of n nodes get children.

    Of the first level it is the root. Of each other it is n / 6, as EAGLE-2 expands 10 of 60 nodes.
    """
    most = min(RANKS, max(1, n // 6))
    return [1, *[most] * (depth - 1)][:depth]


def plan_eagle(rates: list[float]) -> Iterator[Choice]:
    """Yield trees of all sizes and depths, for the clock to choose from.

    A plan has the number of nodes of a tree, and for each level how many nodes get children. The
    tree is taken to be as good as the one that `best_tree` plans by the rates of the ranks.
    """
    whole = best_tree([rates] * LEVELS, MOST)
    for depth in range(1 + LEVELS):
        tree = [node for node in whole if node.depth <= depth]
        for n, tokens in enumerate(accumulate(node.chance for node in tree), 1):
            levels = scale_levels(n, depth)
            # A pass has a row for each node that gets children. But the first one feeds a pair for
            # each token of the last chunk.
            rows = tokens + sum(levels[1:]) if levels else 0
            yield Choice((n, levels), tokens, n, len(levels), rows)


@torch.inference_mode()
def feed(draft: EagleLayer, lm: EngineLM, chunks: list[Pairs]) -> torch.Tensor | None:
    """Add final pairs to the context of the draft's cache `lm`. A long prompt comes in parts.

    returns  the logits [1, V'] after the last pair. None: there is no pair
    """
    logits = None
    for features, tokens in chunks:
        for i in range(0, len(tokens), lm.PART):
            inputs = draft.join(features[i:i + lm.PART], tokens[i:i + lm.PART])
            logits = lm.forward(inputs, keep=1)
            lm.commit(range(len(lm.parents)))
    return logits


@torch.inference_mode()
def grow_eagle(draft: EagleLayer, lm: EngineLM, unfed: list[Pairs], root: int, n: int,
               levels: list[int]) -> tuple[list[int], list[int]]:
    """Grow a tree below the root, level by level, and keep the nodes that are likeliest accepted.

    A node has a chance, the product of the draft's own probabilities along its path (EAGLE-2,
    Section 4). Two children of a node hold different tokens t̂_5 beside the same feature f̂_4, so
    they make different features f̂_5.

    lm        the draft's layer with its cache
    unfed     pairs of the tokens that became final since the last tree
    root      the token of node 0
    n         how many nodes are kept, the root among them
    levels    for each level how many of its nodes get children, the likeliest ones
    returns   ids and parents of the nodes
    """
    tree = Growth(root, n)
    # The last pair that is fed is the root's: its token is the root. So this pass makes the root's
    # feature and guesses the root's children.
    logits = feed(draft, lm, unfed)
    row_of = {0: -1}  # the row of a node in the draft's pending tree. -1: the end of the context
    feature_of = {0: lm.features[-1]}  # the feature that the row of a node made
    for depth, most in enumerate(levels):
        # The likeliest nodes of the newest level get children.
        expanded = tree.newest[:most]
        if not expanded:
            break
        if depth > 0:
            # The row of a node reads its token, and what the row of its parent made. It hangs below
            # the row of the parent, so that it sees only the rows of its path.
            above = [tree.parents[x] for x in expanded]
            features = torch.stack([feature_of[x] for x in above])
            rows = len(lm.parents)  # the number that the first of the new rows gets
            inputs = draft.join(features, [tree.ids[x] for x in expanded])
            logits = lm.forward(inputs, [row_of[x] for x in above])
            row_of |= zip(expanded, range(rows, len(lm.parents)))
            feature_of |= zip(expanded, lm.features)
        tree.add_level(expanded, draft.to_logits(logits), draft.vocab)
    lm.truncate(lm.length)  # rows that read guessed features never join the context
    return tree.finish()


def eagle(target: EngineLM, prompt: list[int], *, nodes: int = 0, adapter: str = ADAPTER,
          trained: EagleLayer | None = None, sample: Sampler = greedy,
          log: list | None = None) -> Iterator[list[int]]:
    """Grow a tree from guessed features, verify it in one call of the target, and keep one path.

    trained   a draft to use in place of a file's

    nodes:   how many nodes a tree has with its root, 0 to 64. With 0, as many as pay on this
             machine
    adapter: file of a draft layer, made by `python -m survey.eagle train`, or the directory or hub
             id of a released head

    Yields chunks of 1 to 9 tokens; logs {"guessed", "accepted"} a call.
    """
    draft = trained or target.once(load_draft, adapter, target.model)
    yield from decode(target, draft, prompt, nodes, sample, log)


def decode(target: EngineLM, draft: EagleLayer, prompt: list[int], nodes: int, sample: Sampler,
           log: list | None) -> Iterator[list[int]]:
    """Decode with a draft that guesses features, as `eagle` says. EAGLE-3 and MTP have it too."""
    lm = target.once(type(target), draft.lm, target.vocab)
    prompt = begin(prompt, target, taps=draft.taps)
    lm.start([])
    chunk = prompt[-1:]  # the last token of a chunk is the root of the next round
    # Each token of the prompt but the root has a feature, and a token after it. The pair with the
    # root waits for the first tree, since its pass also guesses the root's children.
    feed(draft, lm, [Pairs(target.features[:-1], prompt[1:-1])])
    unfed = [Pairs(target.features[-1:], chunk)] if len(prompt) > 1 else []
    n, levels = nodes, scale_levels(nodes, min(LEVELS, max(0, nodes - 1)))
    learnt, clock = recall(target, draft.prior, (draft,), draft=lm)
    while True:
        if nodes == 0:
            n, levels = clock.choose(lambda: plan_eagle(learnt.rates()))
        # A prompt of one token has no pair, and a tree of one node needs no draft. In both cases
        # the call has only the root, and new pairs wait until a tree is grown.
        ids, parents = chunk[-1:], [-1]
        fed = sum(len(pairs.tokens) for pairs in unfed)
        if levels and unfed:
            ids, parents = grow_eagle(draft, lm, unfed, chunk[-1], n, levels)
            unfed = []
        path, chunk = walk(ids, parents, sample(target.forward(ids, parents), target.places))
        # The draft learns what the target made of the accepted nodes: a true feature for each, and
        # the token chosen after it. These replace the features that the draft guessed.
        unfed.append(Pairs(target.features[path], chunk))
        target.commit(path)
        learnt.learn(parents, path, pruned=True)
        if nodes == 0 and parents != [-1]:
            clock.note(len(levels), fed + sum(levels[1:]))
        log_round(log, guessed=len(ids) - 1, accepted=len(path) - 1)
        yield chunk


# ------------------------------------------------------------------------------------ training

def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None,
          mlp: int = 0, vocab: int = 0, max_new_tokens: int = 200, steps: int = 1000,
          batch: int = 16, lr: float = 1e-3, seed: int = 0) -> None:
    """Train a draft layer for a frozen model on its own answers. A stopped run goes on.

    mlp:     width of the layer's MLP, 0 or more. 0 stands for the target's
    lr:      the highest learning rate. 1e-3 suited 10M to 135M parameters, and 3e-5 is for 7B
    """
    draft = EagleLayer(model, make_config(model, mlp), seed=seed)
    lessons = prepare_training(model, tokenizer, prompts, out, work, max_new_tokens, seed, most=50)
    if vocab:
        draft.keep(find_frequent(lessons.data, vocab))
    score = score_with(model, draft.lm.get_output_embeddings())
    # Embeddings and features differ in size. They are scaled to weigh the same at first.
    [(ids, features, _)] = compute_features(model, lessons.data[:1], None)
    e = model.get_input_embeddings()(ids.to(model.device))  # scaled, where the model does that
    draft.fc.weight.data[:, :e.shape[1]] *= features.float().std() / e.float().std()

    def loss_of(texts: list[Text], rng: random.Random) -> torch.Tensor:
        noise = torch.Generator(model.device).manual_seed(rng.getrandbits(60))
        return eagle_loss(draft, score, texts, noise)
    # Each value of a gradient is cut to ± 0.5, as in the released code.
    fit_on_texts(draft, model, [depth_of(model)], (), lessons, loss_of,
                 lambda texts: measure_guesses(draft, texts), name="eagle", batch=batch, out=out,
                 steps=steps, lr=lr, seed=seed, rate=warm_cosine, max_norm=math.inf, max_value=0.5)


# ------------------------------------------------------------------------------------ the file

def load_draft(path: str | Path, model) -> EagleLayer:
    """Read a draft from its file, or a released one. InputError if it does not fit the model."""
    if is_released(path):
        config, tensors = read_eagle(str(path), model)
        draft = EagleLayer(model, config, "fc.bias" in tensors)
        return fill_layer(draft, draft.trainable(), tensors, str(path), model)
    return load_trained(path, EagleLayer.title, model,
                        lambda header: EagleLayer(model, LlamaConfig(**header["config"])))


COMMAND_LINE = dict(methods=[eagle], commands=[train], ranges={"nodes": (4, 8, 16, 32, 64)})

if __name__ == "__main__":
    run_as_program(__file__)
