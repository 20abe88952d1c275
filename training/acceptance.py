"""This file measures how often the guesses of drafts are right, by which trees are planned."""
import random
from typing import Iterable, Iterator, NamedTuple

import torch
import torch.nn.functional as F

from training.layers import FeatureLM, depth_of, tap_widths
from training.loop import low_precision, read_texts
from training.released import RANKS

TEMPERATURES = [0.6 * 1.1 ** i for i in range(16)]  # 0.6 to 2.5
LEVELS = 8  # the most levels of guesses that a tree has
Text = tuple[torch.Tensor, torch.Tensor, int]  # ids [T], features [T, f], length of the prompt


@torch.inference_mode()
def tap_texts(model, taps: list[int], data: list[tuple[list[int], list[int]]]) -> Iterator[Text]:
    """Run a model over pairs of a prompt and its answer, and yield what is tapped of each."""
    lm = FeatureLM(model)
    for prompt, answer in data:
        lm.start(prompt + answer, taps=taps)
        yield torch.tensor(prompt + answer), lm.features, len(prompt)


def compute_features(model, data: list[tuple[list[int], list[int]]]) -> list[Text]:
    """Run the target over texts, and return them with its features.

    data     pairs of a prompt and its answer
    returns  for each pair its ids [T], features [T, f] in bfloat16, and the length of the prompt
    """
    texts = [prompt + answer for prompt, answer in data]
    return [(torch.tensor(text), f, len(prompt))
            for (prompt, _), text, f in zip(data, texts, read_texts(model, texts))]


@torch.inference_mode()
def measure_acceptance(draft, held_out: list[Text]) -> list[list[float]]:
    """Measure how often guesses are right on the path that a static tree reaches most often.

    draft     the draft, of EAGLE or of EAGLE-3
    held_out  texts with their features
    returns   accept[n][r]: how often guess r is right after n guessed features, where the likeliest
              guess was right at each of them. Elsewhere the tree of a call ends earlier

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
    hits, total = torch.zeros(LEVELS, ranks), torch.zeros(LEVELS, 1)
    for ids, features, length in held_out:
        first = max(0, length - 2)  # the first row that guesses a token of the answer
        lm = FeatureLM(draft.lm)
        lm.start([])
        features, tokens = features[:-2].to(draft.lm.device), ids[1:-1]
        above = None  # the rows of step 0 are a chain
        reached = torch.ones(len(ids), 1, dtype=torch.bool, device=draft.vocab.device)
        for n in range(min(LEVELS, len(ids) - 2 - first)):
            logits = lm.forward(draft.join(features, tokens), above)
            labels = ids[first + n + 2:].to(logits.device)
            rows = len(labels)
            best = draft.vocab[logits[-rows:].topk(ranks).indices]  # [rows, ranks]
            reached = reached[:rows]
            right = (best == labels[:, None]) & reached
            hits[n] += right.sum(0).cpu()
            total[n] += reached.sum().cpu()
            reached = right[:, :1]
            # The next step's rows hang below all rows of this step but its last. That one has no
            # successor: the text ends.
            above = range(len(lm.parents) - rows, len(lm.parents) - 1)
            features, tokens = lm.features[-rows:-1], ids[first + n + 2:-1]
    return (hits / total.clamp(min=1)).tolist()


def evaluate(draft, held_out: list[Text]) -> tuple[dict, str]:
    """Measure the acceptance of a draft that is being trained, as `Training` asks for it.

    draft     the draft, of EAGLE or of EAGLE-3
    held_out  texts with what the draft reads of them
    returns   {"accept": the table}, and a line to print
    """
    with low_precision(draft.lm.device, draft.lm):
        accept = measure_acceptance(draft, held_out)
    return {"accept": accept}, f"held-out acceptance {[round(ranks[0], 3) for ranks in accept]}"


# ------------------------------------------------------------------------------- blocks of guesses

class TargetText(NamedTuple):
    """Hold a prompt with its answer, and what the target computed of it."""
    ids: torch.Tensor  # [T]
    features: torch.Tensor  # [T, t], what was tapped
    last: torch.Tensor  # [T, f], what the LM head read
    length: int  # of the prompt

    def anchors(self) -> range:
        """Return the places of all roots: at least one token of the answer comes after each."""
        return range(self.length - 1, len(self.ids) - 1)


@torch.inference_mode()
def read_target_texts(model, taps: list[int], data: list) -> list[TargetText]:
    """Run the target over pairs of a prompt and its answer; keep what it computed in bfloat16."""
    used = sum(tap_widths(model, taps))
    last = model.get_output_embeddings().weight.shape[1]
    texts = []
    for ids, features, length in tap_texts(model, sorted({*taps, depth_of(model)}), data):
        rows = features.cpu().to(torch.bfloat16)
        texts.append(TargetText(ids, rows[:, :used], rows[:, -last:], length))
    return texts


def sample_roots(text: TargetText, n: int, rng: random.Random) -> list[int]:
    """Sample n places of roots. No place comes twice, unless a text has fewer than n places."""
    places = text.anchors()
    return rng.sample(places, n, counts=[-(-n // len(places))] * len(places))


@torch.inference_mode()
def measure_places(blocks: Iterable[tuple], B: int) -> list[float]:
    """Measure for each of the B places of blocks how often its likeliest guess is right.

    Only blocks count in which all guesses before it are right.

    blocks   logits [..., B, V'] of the guesses, the rows of the right tokens [..., B], which are V'
             for a token that cannot be guessed, and whether there is a right token, [..., B]
    """
    right, reached = torch.zeros(B), torch.zeros(B)
    for logits, labels, inside in blocks:
        hits = ((logits.argmax(-1) == labels) & inside).reshape(-1, B).cpu()
        so_far = hits.cumprod(-1).bool()
        earlier = F.pad(so_far[:, :-1], (1, 0), value=True)
        right += so_far.sum(0)
        reached += (earlier & inside.reshape(-1, B).cpu()).sum(0)
    return (right / reached.clamp(min=1)).tolist()


@torch.inference_mode()
def fit_temperatures(blocks: Iterable[tuple], B: int) -> list[float]:
    """Choose for each place the temperature that makes the right tokens likeliest.

    The arguments are those of `measure_places`. Tokens before a guess are taken as they are.
    """
    losses = torch.zeros(len(TEMPERATURES), B)
    for logits, labels, inside in blocks:
        known, last = inside & (labels < logits.shape[-1]), logits.shape[-1] - 1
        for i, temperature in enumerate(TEMPERATURES):
            log_p = (logits / temperature).log_softmax(-1)
            of_labels = log_p.gather(-1, labels.clamp(max=last)[..., None])[..., 0]
            losses[i] -= (of_labels * known).reshape(-1, B).sum(0).cpu()
    return [TEMPERATURES[i] for i in losses.argmin(0).tolist()]
