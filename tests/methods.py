"""The table of all methods: how each is run on a tiny random model.

    METHODS        lossless ones: a name, and what makes the Line of a model. A line says with which
                   drafts, options and trained part. Random numbers stand in for training, since
                   guesses may be as bad as they like
    LOSSY          methods that write a text of their own, whose rounds must be right all the same
    chunks_of      starts a method as its line says
    play_rounds    what a method feeds the target, round by round

A new method joins by one line. What is tested of every line is in test_lossless.py."""
import copy
import functools
from functools import partial
from typing import Callable, NamedTuple

import torch

import bita
import cllm
import families
import jacobi
import mjsd
import ouroboros
import speculative
from cli.run import kind_for
from common import Sampler, autoregressive, greedy
from families import rand
from helpers import tokens_of
from hybrid import hybrid
from support.engine import EngineLM
from support.layers import make_config
from support.released import describe_dflash
from survey import (another_tokenizer, cascade, dflash, draft_verify, eagle, eagle3, early_exit,
                    layerskip, lossy, masks, medusa, mtp, online, recycling, rest, sequoia,
                    several_drafts, triforce)
from survey.rest import BOUNDARY, as_text
from toy_tokenizers import TOKENIZERS

PROMPT, END = [3, 1, 4], 40  # the context of the models ends after END tokens
near = functools.cache(families.near)  # the same draft wherever a line names it


@functools.cache
def autoregressive_text(model, prompt: tuple, n: int, sample: Sampler = greedy) -> list[int]:
    return tokens_of(autoregressive(EngineLM(model), [*prompt], sample=sample), n)


class Line(NamedTuple):
    method: Callable
    options: dict
    drafts: list = []  # models that draft, the first one as `draft`, the others as `more_drafts`
    few: dict | None = None  # options with which few draws end a round. None: no rule of its own
    vocab: int = 3  # tokens that are sampled from, for a method with such options
    memo: Callable = lambda *_: {}  # what the method would read from files: the target's memo
    text_of: torch.nn.Module | None = None  # the model whose text it writes. None: the target


def eagle3_layer(model) -> eagle3.Eagle3Layer:
    """Make a layer of random weights, which guesses every second token."""
    guessed = range(0, len(model.get_output_embeddings().weight), 2)
    return rand(eagle3.Eagle3Layer(model, make_config(model), [0, 1, 2], guessed))


def block_draft(model) -> dflash.BlockDraft:
    return rand(dflash.BlockDraft(model, describe_dflash(model, [0, 1], 5, 2, 5, 8)))


def own_texts(model) -> list[list[int]]:
    """Write texts to look up: the model's own, one with mistakes, one of the tokens 0 to 2."""
    text = PROMPT + autoregressive_text(model, tuple(PROMPT), 40)
    return [text, [token if i % 7 else 2 for i, token in enumerate(text)], [0, 1, 2, 0, 1, 1, 0, 2]]


def own_store(model) -> rest.Datastore:
    return rest.Datastore("".join(as_text(text) + BOUNDARY for text in own_texts(model)))


def pool_of(*phrases: tuple[int, ...]) -> ouroboros.NgramPool:
    """Make a pool of these phrases, the newest last."""
    pool = ouroboros.NgramPool()
    pool.add(phrases)
    return pool


def own_pool(model) -> ouroboros.NgramPool:
    """Put all phrases of three tokens into a pool."""
    return pool_of(*(x for text in own_texts(model) for x in zip(text, text[1:], text[2:])))


def trusting(model, part=None, kind: str = "none") -> Callable:
    """Prepare what the hybrid reads: a datastore, trust, and a part's guesses."""
    known = {"trust": [[[0.5] * 3] * 5] * 3, "pools": {"none": [], kind: [3.0, 0.5, 0.5]}}
    store = own_store(model)
    return lambda lm, *_: {(rest.load_datastore, ("store", lm.model)): store,
                           (hybrid.load_trust, ("trust", lm.model)): known,
                           (dflash.load_draft, ("part", lm.model)): part,
                           (mtp.load_draft, ("part", lm.model)): part,
                           (medusa.load_heads, ("part", kind, lm.model)): part}


def tuning_of(model, P: int, M: int) -> bita.Tuning:
    """Make P prompt tokens and M mask tokens for a model."""
    return rand(bita.Tuning(model, P, M)).to(model.device)


FILES = dict(datastore="store", trust="trust", adapter="part")


def line_of(method: Callable, *noise: float, few: dict | None = None, vocab: int = 3,
            **options) -> Callable:
    """Return a function that makes the Line of a model.

    noise     that of each draft, which is the model itself with noise in its weights
    options   those of the method. A function makes its value of the model
    """
    def make(model) -> Line:
        made = {name: x(model) if callable(x) else x for name, x in options.items()}
        return Line(method, made, [near(model, x) for x in noise], few, vocab)
    return make


def random_of(kind: type, *how) -> Callable:
    """Return a function that makes a trained part of a kind for a model, of random weights."""
    return lambda model: rand(kind(model, *how))


def guessing(kind: str, part_of: Callable = lambda model: None) -> Callable:
    """Return a function that makes a Line of the hybrid, whose heads are of a kind."""
    return lambda model: Line(hybrid.hybrid, dict(guess=kind, nodes=9, **FILES),
                              memo=trusting(model, part_of(model), kind))


HEADS, HYDRA = random_of(medusa.Heads, "medusa", 3), random_of(medusa.Heads, "hydra", 3)
METHODS = {
    "jacobi": line_of(jacobi.jacobi, n=8),
    "lookahead": line_of(jacobi.lookahead, W=4, N=4, G=4),
    "prompt_lookup": line_of(jacobi.prompt_lookup, N=4, G=4),
    "cllm": line_of(cllm.cllm, n=8),
    "speculative": line_of(speculative.speculative, 0.02, gamma=4, few=dict(gamma=2)),
    "speculative, unsure": line_of(speculative.speculative, 0.02, gamma=4, confidence=0.3,
                                   few=dict(gamma=2, confidence=0.4)),
    "speculative, block": line_of(speculative.speculative, 0.02, gamma=4, verification="block",
                                  few=dict(gamma=2)),
    "specinfer": line_of(several_drafts.specinfer, 0.05, gamma=4, K=3, few=dict(gamma=1, K=2)),
    "specinfer, two drafts": line_of(several_drafts.specinfer, 1.0, 2.0, gamma=2, K=2,
                                     few=dict(gamma=1)),
    "spectr": line_of(several_drafts.spectr, 0.05, gamma=4, K=3, few=dict(gamma=1, K=2), vocab=2),
    "bild, rollback 0": line_of(lossy.bild, 0.02, gamma=2, fallback=0.1, rollback=0.0),
    "specdec, beta 1": line_of(lossy.specdec, 0.02, gamma=4, beta=1),
    "ouroboros": line_of(ouroboros.ouroboros, 0.02, gamma=4, W=3, pool=own_pool),
    "bita": line_of(bita.bita, tree="efficient", k=3, tuning=partial(tuning_of, P=4, M=3)),
    "bita, full tree": line_of(bita.bita, tree="full", k=2, tuning=partial(tuning_of, P=4, M=2)),
    "cascade": line_of(cascade.cascade, 0.02, 0.05, gamma=2, inner=2, tail=2, grams="",
                       few=dict(gamma=1, inner=1, tail=0), vocab=2),
    "triforce": line_of(triforce.triforce, 0.02, gamma=4, inner=2, budget=6, chunk=2, sinks=2,
                        window=5, vocab=2,
                        few=dict(gamma=1, inner=1, budget=2, sinks=1, window=2)),
    "draft_verify": line_of(draft_verify.draft_verify, gamma=4, threshold=0.02,
                            skipped={"attention": [1], "mlp": []}, few=dict(gamma=2)),
    "eagle": line_of(eagle.eagle, nodes=9, trained=random_of(eagle.EagleLayer)),
    "eagle3": line_of(eagle3.eagle3, nodes=9, trained=eagle3_layer),
    "mtp": line_of(mtp.mtp, nodes=9, trained=random_of(mtp.MTPBlock)),
    "dflash": line_of(dflash.dflash, nodes=9, trained=block_draft),
    "medusa": line_of(medusa.medusa, nodes=9, trained=HEADS),
    "hydra": line_of(medusa.medusa, heads="hydra", nodes=9, trained=HYDRA),
    "hybrid, n-grams": guessing("none"),
    "hybrid, hydra": guessing("hydra", HYDRA),
    "hybrid, dflash": guessing("dflash", block_draft),
    "hybrid, mtp": guessing("mtp", random_of(mtp.MTPBlock)),
    "early_exit": line_of(early_exit.early_exit, gamma=4, threshold=0.2,
                          trained=random_of(early_exit.Exit, 1), few=dict(gamma=2, threshold=0.4)),
    "layerskip": line_of(layerskip.layerskip, gamma=4, E=1, tuning="", few=dict(gamma=2)),
    "pass": line_of(masks.pass_sampling, L=3, trained=partial(tuning_of, P=0, M=3), few=dict(L=1)),
    "space": lambda model: Line(
        masks.space, dict(k=3, tuning="own"), text_of=near(model, 0.1),
        memo=lambda target, *_: {(masks.load_space, ("own", target)): (
            type(target)(near(model, 0.1), target.vocab),
            near(model, 0.5).get_input_embeddings().weight[:1].detach())}),
    "online": line_of(online.online, 0.05, gamma=4, every=1, lr=1e-3),
    "recycling": line_of(recycling.recycling, nodes=12),
    "another_tokenizer": line_of(another_tokenizer.another_tokenizer, 0.02, gamma=4,
                                 tokenizers=TOKENIZERS, few=dict(gamma=2)),
    "rest": line_of(rest.rest, nodes=12, store=own_store),
    "suffixdecoding": line_of(rest.rest, nodes=12, alpha=2.0, store=own_store),
    "sequoia": line_of(sequoia.sequoia, 0.05, nodes=9, depth=4, few=dict(nodes=6, depth=2),
                       vocab=2)}
LOSSY = {  # methods that write a text of their own, whose rounds must be right all the same
    "mjsd": line_of(mjsd.mjsd, 0.05, gamma=4, beams=3),
    "bild": line_of(lossy.bild, 0.05, gamma=4, fallback=0.3),
    "mjgd": line_of(mjsd.mjgd, K=3, beams=4),
    "medusa, typical": line_of(medusa.medusa, nodes=9, trained=HEADS, typical=True)}


def chunks_of(line: Line, target: EngineLM, prompt: list[int], run_as: type = EngineLM, **options):
    """Start a method as its line says, with these options instead of the line's."""
    drafts = [run_as(draft, target.vocab) for draft in line.drafts]
    target.memo |= line.memo(target, *drafts)
    if drafts[1:]:
        options["more_drafts"] = drafts[1:]
    if "pool" in line.options:  # it learns from each text
        options["pool"] = copy.deepcopy(line.options["pool"])
    return line.method(target, *drafts[:1], prompt, **line.options | options)


def play_rounds(name: str, model, prompt: list[int], run_as: type, anew: bool = False,
                earlier: list[int] = [], **options) -> list:
    """Play rounds of a method, and return what each fed the target, its chunk and its record. All
    rows but the last of the LM head are tokens.

    run_as   the class of target and drafts
    anew     whether each round is the first one of a new call, whose prompt is the text so far
    earlier  a prompt that the same target serves before, for a round of this method and one of
             DFlash, which reads features of its own
    options  those of the method that are not as its line says
    """
    vocab = len(model.get_output_embeddings().weight) - 1
    rounds, text, chunks = [], [*prompt], None
    if name.startswith("hybrid"):  # it remembers no more than this besides the text
        options["successors"] = recycling.Successors()
    while len(rounds) < 9:
        if anew or chunks is None:
            line = (METHODS | LOSSY)[name](model)
            target, log, fed = kind_for(line.method, run_as)(model, vocab), [], []
            for before in [line, METHODS["dflash"](model)] if earlier else []:
                next(chunks_of(before, target, earlier, run_as))
            chunks = chunks_of(line, target, text[:], run_as, log=log, **options)
            forward = target.forward

            def spy(ids, parents=None, **how):
                if how.get("keep") != 0:
                    fed.append((torch.as_tensor(ids).tolist(), parents and [*parents]))
                return forward(ids, parents, **how)
            target.forward = spy
        del fed[:]
        chunk = next(chunks)
        text += chunk
        record = {key: x for key, x in log[-1].items() if key not in ("chances", "logp")}
        rounds.append((fed[:], chunk, record))
    return rounds
