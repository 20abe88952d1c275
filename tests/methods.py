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
from support.released import describe_dflash, some_weights
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


def store_of(texts: list[list[int]]) -> rest.Datastore:
    return rest.Datastore("".join(as_text(text) + BOUNDARY for text in texts))


def pool_of(texts: list[list[int]]) -> ouroboros.NgramPool:
    """Put all phrases of three tokens into a pool."""
    pool = ouroboros.NgramPool()
    for text in texts:
        for phrase in zip(text, text[1:], text[2:]):
            pool.add(phrase)
    return pool


def trusting(model, part=None, kind: str = "none") -> Callable:
    """Prepare what the hybrid reads: a datastore, trust, and a part's guesses."""
    known = {"trust": [[[0.5] * 3] * 5] * 3, "pools": {"none": [], kind: [3.0, 0.5, 0.5]},
             "parts": {kind: some_weights(part.requires_grad_())} if part else {}}
    store = store_of(own_texts(model))
    return lambda lm, *_: {(rest.load_datastore, ("store", lm.model)): store,
                           (hybrid.load_trust, ("trust", lm.model)): known,
                           (dflash.load_draft, ("part", lm.model)): part,
                           (mtp.load_draft, ("part", lm.model)): part,
                           (medusa.load_heads, ("part", kind, lm.model)): part}


def tuning_of(model, P: int, M: int) -> bita.Tuning:
    """Make P prompt tokens and M mask tokens for a model."""
    return rand(bita.Tuning(model, P, M)).to(model.device)


FILES = dict(datastore="store", trust="trust", adapter="part")

METHODS = {
    "jacobi": lambda model: Line(jacobi.jacobi, dict(n=8)),
    "lookahead": lambda model: Line(jacobi.lookahead, dict(W=4, N=4, G=4)),
    "prompt_lookup": lambda model: Line(jacobi.prompt_lookup, dict(N=4, G=4)),
    "cllm": lambda model: Line(cllm.cllm, dict(n=8)),
    "speculative": lambda model: Line(
        speculative.speculative, dict(gamma=4), [near(model, 0.02)], dict(gamma=2)),
    "speculative, unsure": lambda model: Line(
        speculative.speculative, dict(gamma=4, confidence=0.3), [near(model, 0.02)],
        dict(gamma=2, confidence=0.4)),
    "speculative, block": lambda model: Line(
        speculative.speculative, dict(gamma=4, verification="block"), [near(model, 0.02)],
        dict(gamma=2, verification="block")),
    "specinfer": lambda model: Line(
        several_drafts.specinfer, dict(gamma=4, K=3), [near(model, 0.05)], dict(gamma=1, K=2)),
    "specinfer, two drafts": lambda model: Line(
        several_drafts.specinfer, dict(gamma=4, K=2), [near(model, 1.0), near(model, 2.0)],
        dict(gamma=1, K=2)),
    "spectr": lambda model: Line(
        several_drafts.spectr, dict(gamma=4, K=3), [near(model, 0.05)], dict(gamma=1, K=2),
        vocab=2),
    "bild, rollback 0": lambda model: Line(
        lossy.bild, dict(gamma=4, fallback=0.1, rollback=0.0), [near(model, 0.02)]),
    "specdec, beta 1": lambda model: Line(
        lossy.specdec, dict(gamma=4, beta=1), [near(model, 0.02)]),
    "ouroboros": lambda model: Line(
        ouroboros.ouroboros, dict(gamma=4, W=3, pool=pool_of(own_texts(model))),
        [near(model, 0.02)]),
    "bita": lambda model: Line(
        bita.bita, dict(tree="efficient", k=3, tuning=tuning_of(model, 4, 3))),
    "bita, full tree": lambda model: Line(
        bita.bita, dict(tree="full", k=2, tuning=tuning_of(model, 4, 2))),
    "cascade": lambda model: Line(
        cascade.cascade, dict(gamma=4, inner=2, tail=2, grams=""),
        [near(model, 0.02), near(model, 0.05)], dict(gamma=1, inner=1, tail=0), vocab=2),
    "triforce": lambda model: Line(
        triforce.triforce, dict(gamma=4, inner=2, budget=6, chunk=2, sinks=2, window=5),
        [near(model, 0.02)], dict(gamma=1, inner=1, budget=2, sinks=1, window=2), vocab=2),
    "draft_verify": lambda model: Line(
        draft_verify.draft_verify,
        dict(gamma=4, threshold=0.02, skipped={"attention": [1], "mlp": []}), few=dict(gamma=2)),
    "eagle": lambda model: Line(eagle.eagle, dict(nodes=9, trained=rand(eagle.EagleLayer(model)))),
    "eagle3": lambda model: Line(eagle3.eagle3, dict(nodes=9, trained=eagle3_layer(model))),
    "mtp": lambda model: Line(mtp.mtp, dict(nodes=9, trained=rand(mtp.MTPBlock(model)))),
    "dflash": lambda model: Line(dflash.dflash, dict(nodes=9, trained=block_draft(model))),
    "medusa": lambda model: Line(
        medusa.medusa, dict(nodes=9, trained=rand(medusa.Heads(model, "medusa", 3)))),
    "hydra": lambda model: Line(
        medusa.medusa, dict(heads="hydra", nodes=9, trained=rand(medusa.Heads(model, "hydra", 3)))),
    "hybrid, n-grams": lambda model: Line(
        hybrid.hybrid, dict(guess="none", nodes=9, **FILES), memo=trusting(model)),
    "hybrid, hydra": lambda model: Line(
        hybrid.hybrid, dict(guess="hydra", nodes=9, **FILES),
        memo=trusting(model, rand(medusa.Heads(model, "hydra", 3)), "hydra")),
    "hybrid, dflash": lambda model: Line(
        hybrid.hybrid, dict(guess="dflash", nodes=9, **FILES),
        memo=trusting(model, block_draft(model), "dflash")),
    "hybrid, mtp": lambda model: Line(
        hybrid.hybrid, dict(guess="mtp", nodes=9, **FILES),
        memo=trusting(model, rand(mtp.MTPBlock(model)), "mtp")),
    "early_exit": lambda model: Line(
        early_exit.early_exit,
        dict(gamma=4, threshold=0.2, trained=rand(early_exit.Exit(model, 1))),
        few=dict(gamma=2, threshold=0.4)),
    "layerskip": lambda model: Line(
        layerskip.layerskip, dict(gamma=4, E=1, tuning=""), few=dict(gamma=2)),
    "pass": lambda model: Line(
        masks.pass_sampling, dict(L=3, trained=tuning_of(model, 0, 3)), few=dict(L=1)),
    "space": lambda model: Line(
        masks.space, dict(k=3, tuning="own"), text_of=near(model, 0.1),
        memo=lambda target, *_: {(masks.load_space, ("own", target)): (
            type(target)(near(model, 0.1), target.vocab),
            near(model, 0.5).get_input_embeddings().weight[:1].detach())}),
    "online": lambda model: Line(
        online.online, dict(gamma=4, every=1, lr=1e-3), [near(model, 0.05)]),
    "recycling": lambda model: Line(recycling.recycling, dict(nodes=12)),
    "another_tokenizer": lambda model: Line(
        another_tokenizer.another_tokenizer, dict(gamma=4, tokenizers=TOKENIZERS),
        [near(model, 0.02)], dict(gamma=2)),
    "rest": lambda model: Line(rest.rest, dict(nodes=12, store=store_of(own_texts(model)))),
    "suffixdecoding": lambda model: Line(
        rest.rest, dict(nodes=12, alpha=2.0, store=store_of(own_texts(model)))),
    "sequoia": lambda model: Line(
        sequoia.sequoia, dict(nodes=9, depth=4), [near(model, 0.05)], dict(nodes=6, depth=2),
        vocab=2),
}
LOSSY = {  # methods that write a text of their own, whose rounds must be right all the same
    "mjsd": lambda model: Line(mjsd.mjsd, dict(gamma=4, beams=3), [near(model, 0.05)]),
    "bild": lambda model: Line(lossy.bild, dict(gamma=4, fallback=0.3), [near(model, 0.05)]),
    "mjgd": lambda model: Line(mjsd.mjgd, dict(K=3, beams=4)),
    "medusa, typical": lambda model: Line(
        medusa.medusa, METHODS["medusa"](model).options | dict(typical=True))}


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
                earlier: list[int] = []) -> list:
    """Play rounds of a method, and return what each fed the target, its chunk and its record. All
    rows but the last of the LM head are tokens.

    run_as   the class of target and drafts
    anew     whether each round is the first one of a new call, whose prompt is the text so far
    earlier  a prompt that the same target serves before, for a round of this method and one of
             DFlash, which reads features of its own
    """
    vocab = len(model.get_output_embeddings().weight) - 1
    rounds, text, chunks, kept = [], [*prompt], None, {}
    if name.startswith("hybrid"):  # it remembers no more than this besides the text
        kept = {"successors": recycling.Successors()}
    while len(rounds) < 9:
        if anew or chunks is None:
            other, line = METHODS["dflash"](model), (METHODS | LOSSY)[name](model)
            target, log, fed = kind_for(line.method, run_as)(model, vocab), [], []
            for before in [line, other] if earlier else []:
                next(chunks_of(before, target, earlier, run_as))
            chunks = chunks_of(line, target, text[:], run_as, log=log, **kept)
            forward = target.forward

            def spy(ids, parents=None, **options):
                if options.get("keep") != 0:
                    fed.append((torch.as_tensor(ids).tolist(), parents and [*parents]))
                return forward(ids, parents, **options)
            target.forward = spy
        del fed[:]
        chunk = next(chunks)
        text += chunk
        record = {key: x for key, x in log[-1].items() if key not in ("chances", "logp")}
        rounds.append((fed[:], chunk, record))
    return rounds
