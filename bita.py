"""BiTA: a frozen model learns to look ahead through a few prompt and mask tokens.

Lin et al., "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models",
arXiv 2401.12522

    python bita.py train --prompts FILE --out my.safetensors        # tune (Section 3.1)
    python bita.py --adapter my.safetensors --prompt "..."          # decode (Section 3.2)

A mask token is a trained embedding in the place of a token that is not known yet. A group of M mask
tokens follows a real token, their anchor. If the anchor is at position a, mask token j (1 … M) is
at position a + j and predicts the token of position a + j + 1. The token of position a + 1 needs no
mask, because the anchor predicts it.

The P prompt tokens are trained too. They are keys and values in every layer, and only mask tokens
see them. Real tokens see neither prompt tokens nor masks, so the output is the model's own: BiTA is
lossless. Above temperature 0 the model's choice after a node is one sample of its distribution.

One call verifies the candidates of the last call and makes the next ones. These are the rows of a
call with M = 2 and k = 2. Mask 1 had the candidates a and b. Those of mask 2, below a, are left
out. An x says that the row on the left sees the column:

                     prompt tokens   text   root   a   b   root's masks   a's masks   b's masks
    root                   .          x      x     .   .      .  .          .  .        .  .
    a                      .          x      x     x   .      .  .          .  .        .  .
    b                      .          x      x     .   x      .  .          .  .        .  .
    mask 1 of root         x          x      x     .   .      x  .          .  .        .  .
    mask 2 of root         x          x      x     .   .      x  x          .  .        .  .
    mask 1 of a            x          x      x     x   .      .  .          x  .        .  .
    mask 2 of a            x          x      x     x   .      .  .          x  x        .  .
    mask 1 of b            x          x      x     .   x      .  .          .  .        x  .
    mask 2 of b            x          x      x     .   x      .  .          .  .        x  x

If the model chooses a after the root, a is accepted. Unless it then chooses a candidate below a,
its choice is the next root, and the masks of a predict the candidates that follow the next root. If
it chooses neither a nor b, its choice is the next root, and the root's masks predict the
candidates.

    L_SAR = - sum_{i=k+2}^{k+M+1} log P(y_i | X, y_0 … y_k; prompt and mask tokens)     Eq. 1

X is the prompt and y its answer. A group of masks follows the anchor y_k. SAR stands for
semi-autoregressive: several tokens a call.

Departures:
    Eq. 1. Paper: the sum runs from k + 1 to k + M. Here: it runs from k + 2 to k + M + 1, as in the
        released code. Why: by Section 3.2 and Fig. 4 the last real token y_k predicts y_{k+1}, and
        the masks predict the tokens after it. The loss is a mean over all labels, as in the
        released code. A sum would grow with their number.
    Anchors. Paper: one random k of each answer, 0 < k < N - M. Here: up to --anchors random
        positions, which may be the prompt's last token. Groups near the end of an answer have fewer
        than M labels. Why: one pass over the text serves them all. The released code takes up to 64
        consecutive positions.
    Size. Paper: 128 answers a step, four epochs of 150,000, and M = 4 above 13B parameters. Here:
        16 answers a step, drawn anew, of similar length and at most 200 tokens, 1,000 steps and
        M = 3. Why: tuning the model in models/ then takes minutes. Gradients are clipped to a norm
        of 1, as in the released code.

Smaller departures are in results/masks.md. None changes the text. Left out: several GPUs, and
Table 3's shallow prompt tokens, which are input embeddings.
"""
import functools
import json
import random
import sys
from pathlib import Path
from typing import Callable, Iterator

from common import (CachedLM, InputError, KVCache, Sampler, attention_mask, begin, greedy, main,
                    walk, windows_of)

import torch
import torch.nn.functional as F
from safetensors import safe_open

TREES = ("efficient", "full", "chain")
ADAPTER = str(Path(__file__).resolve().parent / "models/bita.safetensors")


# ----------------------------------------------------------------------------- what is tuned
class Tuning(torch.nn.Module):
    """Hold what is tuned: P prompt tokens and M mask tokens. Its file is called an adapter.

    model     the model that they are for
    P, M      numbers of prompt tokens and of mask tokens. With P 0 there are only mask tokens
    seed      seed of the numbers that the tuning begins with

    prompts   keys and values of the prompt tokens, [layers, 2, key heads, P, head size]. Attention
              reads them as they are: no position is rotated into them
    masks     embeddings of the mask tokens, [M, width]
    """
    title = "prompt and mask tokens"  # in its file, and in error messages

    def __init__(self, model, P: int = 16, M: int = 3, seed: int = 0):
        super().__init__()
        lm = CachedLM(model)  # refuses layers without keys and values
        # A pass over any one embedding leaves keys and values in the cache, which shows their size.
        lm.forward(lm.weight[:1])
        keys, *others = [x for rows in lm.cache.layers.values() for x in rows]
        if any(x.shape != keys.shape for x in others):
            raise InputError(f"expected keys and values of one size, got {type(model).__name__}")
        rng = torch.Generator().manual_seed(seed)
        size = len(lm.cache.layers), 2, keys.shape[1], P, keys.shape[3]
        # Section 4.1: both begin with normal numbers of a standard deviation of 0.02.
        self.prompts = torch.nn.Parameter(0.02 * torch.randn(size, generator=rng))
        self.masks = torch.nn.Parameter(0.02 * torch.randn(M, lm.weight.shape[1], generator=rng))


# ---------------------------------------------------------------------------------- decoding
def build_tree(candidates: list[list[int]], root: int,
               full: bool = False) -> tuple[list[int], list[int]]:
    """Build a tree with the likeliest tokens of mask j on level j.

    candidates  for each mask its k likeliest tokens, the best first
    root        the token of node 0
    full        True: every node above the last level has children, which makes 1 + k + … + k^M
                nodes. False: only the first node of each such level has children, which makes the
                1 + M k nodes of Fig. 5
    returns     ids and parents
    """
    ids, parents = [root], [-1]
    inner = [0]  # the nodes that get children
    for tokens in candidates:
        first = len(ids)
        for parent in inner:
            ids += tokens
            parents += [parent] * len(tokens)
        inner = range(first, len(ids)) if full else [first]
    return ids, parents


def attach_masks(parents: list[int], owners: list[int], M: int) -> list[int]:
    """Add a group of masks below some nodes of a tree. A group is a chain of M mask tokens.

    parents  parents of the tree of real tokens
    owners   the nodes that get a group
    M        number of masks of a group
    returns  parents of the real tokens, followed by those of the masks, group after group
    """
    parents = list(parents)
    for owner in owners:
        first = len(parents)
        parents += [owner, *range(first, first + M - 1)][:M]  # none if M is 0
    return parents


class PrefixLM(CachedLM):
    """Be a CachedLM with P rows before the context, the prompt tokens, which only masks see.

        │ prompt tokens │ … the cat │ sat  on  … │ free …

    They have no position, so no window hides them.
    """

    @torch.inference_mode()
    def start(self, ids: list[int], prefix: list = (), **options) -> None:
        """Cache a context as CachedLM does, after prompt tokens.

        prefix   for each layer keys and values [key heads, P, head size]
        options  arguments of the next class, if there is one between this class and CachedLM
        """
        self.prefix, self.cache.start = 0, 0
        for layer, (keys, values) in enumerate(prefix):
            self.cache.update(keys[None], values[None], layer)
            self.prefix = keys.shape[1]
        super().start(ids, **options)

    def forward(self, ids, parents=None, *, sees_prefix=None, keep=None) -> torch.Tensor:
        """Run the model as CachedLM does.

        sees_prefix   for each node whether it sees the prompt tokens. None: no node does
        """
        sees = torch.tensor(sees_prefix or [False] * len(ids))
        # `layout`, which CachedLM.forward calls, puts these columns before the mask.
        self.columns = torch.where(sees, 0.0, -torch.inf)[:, None].expand(-1, self.prefix)
        return super().forward(ids, parents, keep=keep)

    def layout(self, parents: list[int], n: int):
        """Compute positions and mask as CachedLM does, with a column for each prompt token."""
        positions, mask = super().layout(parents, n)
        columns = self.columns[None, None].to(self.weight)
        if isinstance(mask, dict):
            return positions, {kind: torch.cat([columns, x], 3) for kind, x in mask.items()}
        return positions, torch.cat([columns, mask], 3)


def bita(target: PrefixLM, prompt: list[int], *, tree: str = "efficient", k: int = 5,
         adapter: str = ADAPTER, tuning: Tuning | None = None, sample: Sampler = greedy,
         log: list | None = None) -> Iterator[list[int]]:
    """Verify the last call's candidates and produce the next ones in the same call. Section 3.2.

    tree:    efficient is the paper's tree, in which only the likeliest candidate of a mask has
             children. full gives children to all candidates but those of the last mask. chain is
             the paper's straightforward decoding. It has one candidate of each mask, and masks
             after the root only
    k:       candidates of each mask token, 1 or more. A chain has one. A full tree has 1 + k + … +
             k^M nodes with M masks after each: take 2
    adapter: file of prompt and mask tokens, made by `python bita.py train`

    Yields chunks of 1 to M + 1 tokens. For each call it logs {"guessed", "accepted", "rows"}, the
    numbers of candidates, of accepted candidates, and of all rows.

    `tuning` is used instead of the file.
    """
    if tree not in TREES:
        raise InputError(f"--tree must be {', '.join(TREES)}, got {tree!r}")
    if tree == "chain":
        k = 1
    tuning = tuning or load_tuning(adapter, target.model)
    masks = tuning.masks.detach().to(target.weight)
    M = len(masks)  # the number of masks of a group
    embed = target.model.get_input_embeddings()
    prefix = list(tuning.prompts.detach().to(target.model.dtype))
    prompt = begin(prompt, target, prefix=prefix)
    root = prompt[-1]
    candidates = []  # the guesses: for each mask its k likeliest tokens. The first call has none
    while True:
        # Fig. 5: the candidates become a tree of n real tokens, the root first.
        ids, tree_parents = build_tree(candidates, root, full=tree == "full")
        n = len(ids)
        # Whichever node is accepted last, the masks after it have looked ahead already. In a chain
        # only the root has masks.
        owners = [0] if tree == "chain" else range(n)
        parents = attach_masks(tree_parents, owners, M)
        with torch.inference_mode():
            tokens = embed(torch.tensor(ids, device=masks.device))
            inputs = torch.cat([tokens, masks.repeat(len(owners), 1)])
        sees_prefix = [False] * n + [True] * (len(inputs) - n)  # real tokens never do
        logits = target.forward(inputs, parents, sees_prefix=sees_prefix)
        # Verification: the accepted candidates and the model's own token are final. The rows of
        # masks leave the cache, since they are not text.
        path, chunk = walk(ids, tree_parents, sample(logits[:n]))
        target.commit(path)
        root = chunk[-1]
        # Generation: the masks after the last accepted node predict what follows the new root.
        groups = logits[n:].view(len(owners), M, logits.shape[1])
        if tree == "chain":
            # A chain has masks after the old root only. With c candidates accepted, the positions
            # that the first c masks predict are final by now.
            group = groups[0, len(path) - 1:]
        else:
            group = groups[path[-1]]
        candidates = group.topk(min(k, group.shape[1])).indices.tolist()
        if log is not None:
            log.append({"guessed": n - 1, "accepted": len(path) - 1, "rows": len(parents)})
        yield chunk


# ------------------------------------------------------------------------- what is trained on
def sample_anchors(data: list[tuple[list[int], list[int]]], M: int, most: int, rng: random.Random):
    """Make a batch of texts, and draw anchors, the positions that groups of masks follow.

    data     pairs of a prompt and its answer, token ids
    M        number of masks of a group
    most     the most anchors of an answer
    rng      the source of randomness
    returns  ids [B, T], anchors [B, G] and labels [B, G, M]. G is the most anchors that a text has.
             Anchors are 0 where a text has fewer. The label of mask j after position a is the token
             of position a + j + 1. It is -100 where there is no anchor, and beyond the end of the
             answer
    """
    # From the prompt's last token on, as long as two tokens follow: the anchor itself predicts the
    # first one, and mask 1 the second one.
    spans = [range(len(p) - 1, len(p) + len(a) - 2) for p, a in data]
    chosen = [sorted(rng.sample(span, min(most, len(span)))) for span in spans]
    G = max(1, max(map(len, chosen)))
    ids = torch.zeros(len(data), max(len(p) + len(a) for p, a in data), dtype=torch.long)
    anchors = torch.zeros(len(data), G, dtype=torch.long)
    labels = torch.full((len(data), G, M), -100)
    for b, ((prompt, answer), positions) in enumerate(zip(data, chosen)):
        tokens = torch.tensor(prompt + answer)
        ids[b, :len(tokens)] = tokens
        for g, a in enumerate(positions):
            anchors[b, g] = a
            following = tokens[a + 2:a + 2 + M]
            labels[b, g, :len(following)] = following
    return ids, anchors, labels


def run_rows(model, cache: KVCache, inputs, visible, positions, slots) -> torch.Tensor:
    """Run the layers of a model over n new rows, whose keys and values join a cache.

    model      the model
    cache      the keys and values of earlier rows
    inputs     ids [B, n] or embeddings [B, n, d] of the new rows
    visible    bool [B, n, m], whether a new row sees a slot of the cache. The last n of the m slots
               are the new rows themselves
    positions  positions of the new rows, [B, n]
    slots      positions of all slots, [B, m]
    returns    what the LM head would read, [B, n, d]
    """
    like = model.get_input_embeddings().weight
    mask = attention_mask(windows_of(model), visible, positions, slots, like)
    name = "input_ids" if inputs.ndim == 2 else "inputs_embeds"
    return model.get_decoder()(
        **{name: inputs.to(like.device)}, position_ids=positions.to(like.device),
        attention_mask=mask, past_key_values=cache, use_cache=True)[0]


def mask_states(model, masks: torch.Tensor, prompts, ids: torch.Tensor,
                anchors: torch.Tensor) -> torch.Tensor:
    """Return what the LM head reads at groups of mask tokens after anchors. Fig. 3.

    masks     embeddings of the mask tokens, [M, width]
    prompts   the prompt tokens as in `Tuning`. An empty list: there are none
    ids       real tokens [B, T]
    anchors   positions [B, G] of the real tokens that have a group after them
    returns   hidden states [B, G, M, d]
    """
    (B, T), G, M = ids.shape, anchors.shape[1], len(masks)
    P = prompts[0].shape[2] if len(prompts) else 0
    cache = KVCache()
    # Real tokens see nothing that is tuned, so their rows need no gradients. Every token sees
    # itself and those before it.
    places = torch.arange(T).expand(B, -1)
    with torch.no_grad():
        causal = torch.ones(T, T, dtype=torch.bool).tril().expand(B, -1, -1)
        run_rows(model, cache, ids, causal, places, places)
    # The prompt tokens may follow the text in the cache, since only the mask says who sees them.
    cache.start = T
    for layer, (keys, values) in enumerate(prompts):
        cache.update(keys.expand(B, -1, -1, -1), values.expand(B, -1, -1, -1), layer)
    cache.start = T + P
    # Mask j after position a is at a + j. It sees the text up to a, all prompt tokens, and its own
    # group up to itself.
    positions = (anchors[:, :, None] + 1 + torch.arange(M)).flatten(1)  # [B, G · M]
    anchor_of = anchors.repeat_interleave(M, 1)  # of each mask, [B, G · M]
    sees_text = places[:, None] <= anchor_of[:, :, None]  # [B, G · M, T]
    sees_prompts = torch.ones(B, G * M, P, dtype=torch.bool)
    row = torch.arange(G * M)  # row r is of group r // M
    sees_group = (row // M == row[:, None] // M) & (row <= row[:, None])  # [G · M, G · M]
    visible = torch.cat([sees_text, sees_prompts, sees_group.expand(B, -1, -1)], 2)
    far = torch.full((B, P), 10 ** 9)  # after all rows, so no window hides the prompt tokens
    slots = torch.cat([places, far, positions], 1)
    embeds = masks.to(model.dtype).repeat(G, 1).expand(B, -1, -1)
    return run_rows(model, cache, embeds, visible, positions, slots).unflatten(1, (G, M))


def sar_loss(states: torch.Tensor, labels: torch.Tensor, score: Callable) -> torch.Tensor:
    """Compute Eq. 1, as a mean over the labels.

    states  what the LM head reads at masks, [B, G, M, d]
    labels  [B, G, M], -100 where there is none
    score   a function from states to logits: the LM head, made by `score_with` of support/parts.py
    """
    labels = labels.to(states.device)
    known = labels >= 0
    return F.cross_entropy(score(states[known]), labels[known])


# ------------------------------------------------------------------------------------ tuning
@torch.inference_mode()
def measure(model, tuning: Tuning, data: list, most: int) -> tuple[float, list[float]]:
    """Measure a tuning on pairs of a prompt and its answer.

    data     the pairs
    most     the most anchors of an answer
    returns  the loss, and for each mask how often its likeliest guess is right
    """
    from support.parts import score_with
    score, rng = score_with(model), random.Random(0)
    loss, right, total = 0.0, 0, 0  # the last two are counts, [M] after the first pair
    for pair in data:
        ids, anchors, labels = sample_anchors([pair], len(tuning.masks), most, rng)
        logits = score(mask_states(model, tuning.masks, tuning.prompts, ids, anchors))
        labels = labels.to(logits.device)
        known = labels >= 0
        loss += F.cross_entropy(logits[known], labels[known], reduction="sum").item()
        right = right + (logits.argmax(-1) == labels).sum((0, 1))  # [M]. No guess is ever -100
        total = total + known.sum((0, 1))
    return loss / total.sum().item(), (right / total.clamp(min=1)).tolist()


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None, P: int = 16,
          M: int = 3, max_new_tokens: int = 200, steps: int = 1000, batch: int = 16,
          anchors: int = 64, lr: float = 3e-2, seed: int = 0) -> None:
    """Tune prompt and mask tokens for a frozen model on its own answers. Run it again to resume a
    stopped run.

    out:    the safetensors file to make
    work:   folder of answers and checkpoints, by default OUT.work
    P:      prompt tokens, 0 or more. With 0 there are only mask tokens
    M:      mask tokens, 1 or more
    batch:  answers of a pass. The paper's step has 128 answers. The logits of all masks are in
            memory at once. If they do not fit, take fewer answers and more passes: --accumulate, an
            option of every training
    anchors: the most mask groups of an answer, 1 or more
    lr:     learning rate at the start of its cosine. The paper's 3e-2 also suits 10M parameters
    """
    from support.parts import score_with
    from training.loop import (Training, cosine, count_tokens, digest, prepare_training,
                               sample_alike)
    tuning = Tuning(model.requires_grad_(False), P, M, seed).to(model.device)
    work, data, held_out = prepare_training(model, tokenizer, prompts, out, work, seed=seed,
                                            max_new_tokens=max_new_tokens)
    score = score_with(model)
    # A stopped run is resumed only if nothing that the tuning depends on has changed.
    fingerprint = digest(model.state_dict()), batch, anchors, data, held_out
    adam = torch.optim.AdamW(tuning.parameters(), lr, weight_decay=0.0)
    training = Training(dict(tuning.named_parameters()), fingerprint, name="tuning", steps=steps,
                        lr=lr, rate=cosine, optimizers=[adam], seed=seed, folder=work,
                        models=(model,))

    def evaluate() -> tuple[dict, str]:
        loss, right = measure(model, tuning, held_out, anchors)
        shares = " ".join(f"{x:.3f}" for x in right)
        return {"loss": loss}, f"held-out loss {loss:.3f}, likeliest guess right by mask {shares}"
    # A turn of this loop is an update. `training` has the rate, the checkpoints and the precision.
    for rng in training.updates(evaluate):
        adam.zero_grad()
        for _ in range(training.passes):  # one, or more with --accumulate
            # Section 3.1: questions X, the model's own answers Y, and random k. Pairs of similar
            # length need little padding. `at` has the anchors' positions.
            pairs = sample_alike(data, batch, rng, count_tokens)
            ids, at, labels = sample_anchors(pairs, M, anchors, rng)
            with training.precision():
                states = mask_states(model, tuning.masks, tuning.prompts, ids, at)
                loss = sar_loss(states, labels, score) / training.passes  # Eq. 1
            training.check(loss)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(tuning.parameters(), 1.0)
        adam.step()  # the model is frozen, so only prompt and mask tokens change
    save_tuning(out, tuning, model)


def save_tuning(path: Path, tuning: Tuning, model) -> None:
    """Write a tuning to a file, with the model that it is for."""
    from support.parts import save_part
    save_part(path, tuning.title, model, dict(tuning.named_parameters()),
              P=tuning.prompts.shape[3], M=len(tuning.masks))


@functools.lru_cache(maxsize=1)  # each prompt asks for it anew
def load_tuning(path: str, model) -> Tuning:
    """Read a tuning from a file, which `train` made.

    path     the safetensors file
    model    the model that it must be for. The file has some of its embeddings
    returns  the tuning. InputError if the file is damaged, of another kind, or for another model
    """
    try:
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["part"])
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}
        if header["kind"] != Tuning.title:
            raise ValueError(f"it is one of {header['kind']}")
        # The file has some numbers of its model's embeddings, less their mean: every 16th of the
        # first 1,024 tokens, 64 numbers of each. If there are 16 tokens or fewer, it has all of
        # them. The cosine of two models trained apart is near 0.
        table = model.get_input_embeddings().weight
        here = table[:1024:16 if len(table) > 16 else 1, :64].detach().float().cpu()
        some = tensors.pop("model").flatten()
        if F.cosine_similarity(some, (here - here.mean(0)).flatten(), 0) < 0.5:
            raise ValueError("it was made for another model")
        if not all(x.isfinite().all() for x in tensors.values()):
            raise ValueError("it has numbers that are not finite")
        tuning = Tuning(model, header["P"], header["M"])
        tuning.load_state_dict(tensors)
    except Exception as error:  # readers of files raise all kinds, and so does a wrong header
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"expected a file of {Tuning.title} for this model, got {str(path)!r}: "
                         f"{said}") from error
    return tuning.to(model.device, model.dtype)


# ------------------------------------------------------------------------- the command line
def report(run) -> str:
    """Return a line with the mean rows, candidates and accepted candidates of a call."""
    guessed, accepted, rows = (sum(r[name] for r in run.log) / len(run.log)
                               for name in ("guessed", "accepted", "rows"))
    return f"a call: {rows:.1f} rows, {guessed:.1f} of them candidates, {accepted:.2f} accepted"


COMMAND_LINE = dict(methods=[bita], commands=[train], report=report, ranges={"tree": TREES})

if __name__ == "__main__":
    sys.exit(main(**COMMAND_LINE))
