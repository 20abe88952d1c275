"""Make one plausible mistake at a time in the code, and see whether a test notices.

    python tests/mutants.py                         # all mistakes that are written here
    python tests/mutants.py survey/rest.py          # those in a file
    python tests/mutants.py 3 17 jacobi.py          # those of these numbers, and those in a file
    make mutants ONLY=survey/rest.py                # with any of these words
    python tests/mutants.py --plant "a node does not see itself"    # here, for an exercise

A mutant is the code with one mistake. `MUTANTS` lists for each file the text that is replaced, what
replaces it, and what the mistake is.

Each mutant is made in a copy of the project, where the tests of its file run (`commands_of`). A
mutant is killed if a test fails. A mutant that survives shows that no test guards this line:
strengthen a test. A test that kills a mutant is run once more without the mistake.

A mutant takes seconds if a test of its file kills it, and minutes if all tests must run. The exit
status is 1 if any mutant survives. Ctrl-C ends it, and removes the copy.
"""
import argparse
import ast
import importlib
import os
import shutil
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

from sources import ROOT, find_functions, list_files, name_of, needs, read

LEFT_OUT = (".git", ".venv", "__pycache__", ".pytest_cache", "work")  # of the copy
LIMIT = 3600  # seconds for the tests of a mutant: one that never ends is killed too

MUTANTS = {
    "common.py": [
        ("torch.eye(len(parents)", "torch.zeros(2 * (len(parents),)", "a node does not see itself"),
        ("i + self.PART", "i + self.PART // 2", "a long prompt loses the second half of each part"),
        ("(path[-1], token)", "(0, token)", "equal tokens of any parent share a node"),
        ("buffer[:, :, first:first + len(path)] = buffer[:, :, rows]", "pass",
         "accepted rows stay where they are"),
        ("self.prefix + self.length + old", "self.length + old", "rows overwrite the prefix"),
        ("old - 1, old + n - 1", "-1, n - 1", "a chain does not go on from the last pending node"),
        ("length - 1 + ancestors", "length + ancestors", "positions of nodes are one too large"),
        ("inputs.ndim > 2 and hasattr", "False and hasattr",
         "layers that look up embeddings of their own are fed embeddings"),
        ("logits.reshape(-1, logits.shape[-1])", "logits",
         "top_p is given three dimensions, of which it makes nan"),
        ("not rows.amax(-1).isfinite().all()", "False", "logits that are nan choose a token"),
        ("(positions[n - keep:] + 1)", "positions[n - keep:]", "a place is one too small"),
        ("hash((self.seed % (2 ** 61 - 1), place))", "hash(self.seed)",
         "all places share their numbers"),
        ("torch.rand(V, dtype=torch.float64, generator", "torch.rand(V, generator",
         "numbers of float32, by which no token is rare"),
        ("draft.vocab = target.vocab", "draft.vocab = draft.full_vocab = target.vocab",
         "a draft remembers the smallest of its targets")],
    "support/engine.py": [
        ("self.taps, self.whole = taps, None", "self.taps, self.whole = taps or self.taps, None",
         "a method reads the features of an earlier one"),
        ("known[first:self.length] = rows", "known[:len(rows)] = rows",
         "features of a long prompt are those of its last part"),
        ("expand(-1, heads // key.shape[1], -1, -1)", "repeat_interleave(heads // key.shape[1], 2)",
         "rows of grouped heads get each other's masks")],
    "support/bridge.py": [
        ("sample.warp = logits_processor", "pass", "top-k and all other warpers are ignored"),
        ("input_ids, None).all():", "input_ids, None).all() and token == chunk[-1]:",
         "a criterion is asked after the last token of a chunk only")],
    "speculative.py": [
        ("left = (p - q).clamp(min=0)", "left = (p - q).abs()", "the residual takes |p - q|"),
        ("(joint[i] * ratio)", "ratio", "a block forgets what the guesses before had left"),
        ("passed.cumprod(0).sum()", "passed.sum()", "guesses behind a rejected one count"),
        ("draw(residual(probs[accepted], q)[None])", "draw(probs[accepted][None])",
         "after a rejection the target's p, not the residual, is drawn from"),
        ("q = sample.probs(logits, draft.places[-1:])  # [1, V]", "q = logits.softmax(-1)",
         "the draft forgets temperature, top-k and top-p"),
        ("range(1 + accepted)", "range(1 + gamma)", "rejected guesses stay in the target's cache")],
    "support/invariant.py": [
        ("sizes[tried] = find_size(part, rows)", "sizes[tried] = n", "no rows are filled up"),
        ("(run(size) == right).all()", "True", "numbers of rows are not tried"),
        ("[:3 * k]", "[:0]", "orders of summing are told apart by random numbers"),
        ("torch.cat([multiply(q, k.double().mT)", "torch.cat([multiply(q.float(), k.float().mT)",
         "scores are summed in float32"),
        ("sum(multiply(w, v.double())", "sum(multiply(w.float(), v.float())",
         "values are summed in float32"),
        ("scores = scores + seen", "scores = scores + seen.clamp(min=-1)",
         "what a window hides is seen a little"),
        ("tril(slots - n)", "tril(slots)", "a call without a mask sees what comes later"),
        ("if softcap is not None:", "if False:", "scores are not capped"),
        ("if s_aux is not None:", "if False:", "sinks take no attention"),
        ("x.double()).to(x.dtype)", "x)", "activations run in the model's type"),
        ("x.reshape(-1, 1, 1, x.shape[-1])", "x[None]", "experts get several rows"),
        ("tried = n, packed,", "tried = n,", "a copy takes the sizes of packed weights"),
        ("if not torch.equal(torch.cat(alone[2:]), tree[path]):", "if False:",
         "a model that is not invariant is taken")],
    "support/recurrent.py": [
        ("v = v - weights[..., :-n] @ old.transpose(0, 1)", "pass",
         "what kept tokens wrote is not replaced"),
        (".masked_fill(~above[-n:, :, None], -torch.inf)", "", "a node reads its siblings"),
        ('first["k"] * (G[-1] - G).exp()', 'first["k"]', "folded tokens do not decay"),
        ("self.folded, self.states, self.rows = 0, defaultdict(dict), defaultdict(dict)",
         "self.folded, self.rows = 0, defaultdict(dict)", "a new prompt begins with old states"),
        ("[n:]  # as many", "[n - 1:-1]  # as many", "the inputs of a convolution are off by one"),
        ("self.cache.keep = 2 *", "keep = 2 *", "each round of a long draft reads the text anew")],
    "jacobi.py": [
        ("(y[:final] + chosen)", "(y[:final] + chunk + y[final + agreed + 1:])",
         "the other guesses are not recomputed"),
        ("[1:i + 1] + [", "[1:i] + [", "a column lacks the token of level 0 above it"),
        ("levels[0][0] = root", "pass", "n-grams of the window begin with a wrong root"),
        ("text += chunk\n        for", "text = chunk\n        for",
         "prompt lookup forgets the text before the chunk")],
    "ouroboros.py": [
        ("chain + x for x", "x for x", "guesses do not hang below the unseen tokens"),
        ("if d[i + 1:i + beta - 1] == best[i + 1:i + beta - 1]:", "if True:",
         "a phrase goes on behind a choice that the draft does not agree with"),
        ("path[len(d):-1]", "path[len(d) + 1:]",
         "a suffix is corrected by the choices one node too late"),
        ("pool is None", "pool is None or not pool.ngrams", "prompts do not share their phrases")],
    "mjsd.py": [
        ("[beam for beam in found if beam.ended]", "[]", "a beam that ended is lost"),
        ("[beam.logps[-1] + logp]", "[logp]", "beams are ranked by their last token alone"),
        ("log_p += rows[i - 1, j]", "log_p = rows[i - 1, j]",
         "the target's probabilities are not joint"),
        ("rows[i - 1, j]", "rows[i, j]", "a token is scored by the row after it"),
        ("text[draft.length:]", "text[-1:]", "the draft never sees an accepted leaf")],
    "bita.py": [
        ("itertools.product(*candidates)", "zip(*candidates)",
         "the full tree lacks most of its paths"),
        ("[False] * n + [True]", "[False] * n + [False]", "masks do not see the prompt tokens"),
        ("else groups[path[-1]]", "else groups[0]", "candidates come from the root's masks"),
        ("repeat(B, anchors.shape[1], 1)", "repeat_interleave(anchors.shape[1], 0).repeat(B, 1, 1)",
         "masks of a group are all the same one"),
        ("(P, 0), value=FAR", "(P, 0), value=-FAR", "windows hide the prompt tokens"),
        ("            adam.zero_grad()\n", "", "gradients of earlier updates add up"),
        ("            rate.step()\n", "", "the learning rate stays as it is"),
        ("    fresh = ", "    fresh = path  # ", "a file is half made for a while"),
        ("not (loss + norm).isfinite()", "False", "a loss that is no number is learnt from"),
        ("        save_tuning(out, tuning, model)\n        print", "        print",
         "Ctrl-C loses what was learnt")],
    "cllm.py": [
        ('and not eos & set(block["states"][-1][1:])]', "]", "blocks that an EOS cuts count"),
        ("in states if y != y_star", "in states[:-1]", "a state that is y* already is learnt from"),
        ("compared]].detach()", "compared]]", "the teacher learns from its student"),
        ("(log_teacher.exp() *", "(log_student.exp() *", "D is the reverse KL divergence"),
        ("loss = consistency + w * ar", "loss = w * consistency + ar", "w weighs the other loss"),
        ("            adam.zero_grad()\n", "", "gradients of earlier steps add up"),
        ("steps - t) / steps", "steps) / steps", "the rate never falls"),
        (", buffering=1)", ")", "answers are lost if the process is killed"),
        ('fresh = out.with_name(f"{out.name}.new")', "fresh = out", "half a model is left"),
        ("        save(model, tokenizer, out)\n        print", "        print",
         "Ctrl-C loses the training")],
    "survey/cascade.py": [
        ("self.text[:same] != text[:same]:", "False:", "rows of rejected tokens are kept"),
        (", text + guesses", ", text", "later drafts go on from the text without the guesses"),
        (":accepted + 1", "-accepted - 1:", "a review hands on the distributions of other tokens")],
    "survey/draft_verify.py": [
        ("torch.zeros_like(hidden)", "hidden", "a skipped block doubles its input")],
    "survey/early_exit.py": [
        ("return hidden_states + added", "return added", "the residual is forgotten"),
        (">= x.length - 1", ">= x.length", "the first token of an answer is not learnt")],
    "survey/eagle.py": [
        ("draft.lm, target.vocab)", "draft.lm)", "rows that are no tokens are guessed"),
        ("    lm.start([])\n", "", "the draft's cache keeps an earlier prompt"),
        (", :-2], ids[:, 1:-1", ", :-2], ids[:, :-2", "the token is not one ahead of the feature"),
        ("target.features[path]", "target.features[:len(path)]", "the features of the wrong nodes"),
        ("[x] for x in expanded])", "[x] for x in above])", "a row reads the token of its parent"),
        ("lm.truncate(lm.length)  # rows that", "# rows that", "the draft's tree stays pending")],
    "survey/eagle3.py": [
        ("torch.cat([self.input_layernorm(e), normed], -1)",
         "torch.cat([normed, self.input_layernorm(e)], -1)", "the feature stands before the token"),
        ("weight.data.copy_(rows[self.vocab])", "weight.data.copy_(rows[:len(self.vocab)])",
         "rows of the LM head begin as those of other tokens")],
    "survey/mtp.py": [
        ("last = full[-1]", "last = full[0]", "training begins with an early layer"),
        ("torch.cat([gate, up], 1)", "torch.cat([up, gate], 1)", "gates of experts are swapped"),
        ("{*kinds} ==", "None !=", "a block of another attention is read"),
        ("torch.nn.Parameter)", "torch.Tensor)", "what chooses experts is rounded"),
        ("if stem in NAMES and number == 0:", "if stem in NAMES:", "only the last block is seen"),
        ("decay = 0.6", "decay = 0.8", "later passes weigh as EAGLE-3's")],
    "survey/dflash.py": [
        (", root)[:, :target.vocab]", ", root)", "rows that are no tokens are guessed"),
        ("[..., :width], cache", "[..., :width], KVCache()", "blocks learn without their context"),
        ("ids[x] for x in", "root for x in", "the Markov head always reads the root")],
    "survey/layerskip.py": [
        ("(early.features)\n", "(hidden[-1])\n", "the last guess has another's hidden state")],
    "survey/lossy.py": [
        ("sample(logits[accepted:accepted + 1]", "sample(logits[-1:]",
         "the wrong row replaces a guess")],
    "survey/masks.py": [
        ("learn(chain, path)", "learn(parents, path)", "masks count as guesses that were wrong")],
    "hybrid/hybrid.py": [
        ("*path, token)", "token,)", "a node is guessed without the path to it"),
        ("RIGHT * chance / pass_price", "RIGHT / price", "a pass pays below unlikely nodes too"),
        ("learn(ids, logits)  # rejected nodes too",
         "learn([ids[x] for x in path], logits[path])", "rejected nodes teach nothing")],
    "hybrid/guessers.py": [
        ("z[:self.target.vocab]", "z", "rows that are no tokens are guessed"),
        ("z = self.made[()][len(path)]", "z = self.made[()][0]",
         "every depth is guessed by the block's first row"),
        ("self.root, self.made = tokens[-1], {}", "self.root = tokens[-1]",
         "the passes of the round before guess"),
        ("len(missing) > worth", "False", "passes are made where they do not pay"),
        ("return {x: score / total", "return {x: score", "chances do not sum to 1")],
    "hybrid/fit.py": [
        ("if x[BEGIN:BEGIN + few] not in begins", "", "the held-out answers stay in the datastore"),
        ("said[i][None]", "said[i - 1][None]", "what the target said is that of the token before"),
        ("left *= 1 - taken", "left *= taken", "the mass that is left is the part that was taken")],
    "support/trees.py": [
        ("Node(node.chance * rate,", "Node(rate,", "a chance is not multiplied along the path"),
        ("[*path[1:], -1]", "path[1:]", "guesses below the last accepted node are not counted"),
        ("if pruned and children:", "if pruned:", "a node that nothing was grown from has guesses"),
        ("self.tried)), min)]", "self.tried)), max)]", "a rank is likelier than the one before"),
        ("if parent == node]", "]", "guesses below rejected nodes are counted")],
    "support/clock.py": [
        ("1e-9 + a + b * rows + c * steps", "1e-9 + a + c * steps", "rows of a call are free"),
        ("seconds = min(seconds, 2 * (a + b * rows)) if a > 0 else seconds", "pass",
         "a busy moment tilts the line"),
        ("rate * (row + guess)", "rate * row", "growing a tree is free")],
    "survey/medusa.py": [
        ("each.sum() / (labels >= 0).sum().clamp(min=1)", "each.mean()",
         "positions without a label count in the mean"),
        ("(x)[:, :target.vocab]", "(x)", "Hydra guesses padded tokens"),
        ("logits[:, :target.vocab], trained", "logits, trained", "padded tokens are guessed"),
        ("owners = sorted({tree[i].parent for i in level})", "owners = sorted(range(len(level)))",
         "Hydra's heads read the wrong parents")],
    "hybrid/ngrams.py": [
        ("self.successors = successors or Successors()", "self.successors = Successors()",
         "what the target said is forgotten with each prompt"),
        ("end = self.text[-LENGTHS[0]:] + as_text(path)", "end = self.text[-LENGTHS[0]:]",
         "the path of guesses is not looked up"),
        ("chances.get(token, 0.0) + mass * n / seen", "mass * n / seen",
         "a later entry replaces what an earlier one gave")],
    "survey/online.py": [
        ("copy.deepcopy(draft.model).float", "draft.model.float", "the caller's own draft learns"),
        ("if accepted < gamma and place", "if place", "a round without a failure is learnt from")],
    "survey/recycling.py": [
        ("logits.topk(", "(-logits).topk(", "the least likely tokens are kept"),
        ("learn(ids, logits)\n", "learn(ids[:1], logits[:1])\n", "the root alone is learned from")],
    "survey/another_tokenizer.py": [
        ("return bos + of_draft", "return of_draft", "the draft's BOS is missing"),
        ("self.split(half) if half else []", "[]", "half a character is lost"),
        ("(sum(self.widths[:len(path)]))", "(len(path))", "a token of several pieces loses some")],
    "survey/rest.py": [
        ("LONGEST - AFTER + 1", "LONGEST", "positions whose keys change are not sorted again"),
        ("partition(BOUNDARY)[0]", 'replace(BOUNDARY, "")', "a guess goes on into the next text"),
        ("(as_text(chunk)", "(as_text(chunk[:-1])", "the last token of a chunk is not remembered")],
    "survey/sequoia.py": [
        ("(-noise.log()).log", "(-noise[:1].log()).log", "the same noise for all rows of a level"),
        ("        q_logits[draws[i]] = -torch.inf\n", "", "a rejected token stays in q")],
    "survey/several_drafts.py": [
        ("residual(p, q_x)", "residual(p, q[0])", "every draw leaves the residual of the first q"),
        ("(len(here), rest.device)", "(1, rest.device)", "the draws at a node have one coin"),
        ("if draft.text[:depth] == accepted]", "]", "drafts that left the path are judged too"),
        ("probs[text] for", "probs[texts[0]] for", "all drafts are drawn from the first one's q")],
    "survey/triforce.py": [
        (', ("draft", draft)):', ",):", "the states of a recurrent draft are dropped"),
        ("skipped = length - self.length", "skipped = 0", "newest rows lose their positions"),
        ("indices.sort().values.cpu()", "indices.cpu()", "chunks lie in the order of their scores"),
        ("retrieved.lm.copy_newest(whole.lm, old)", "retrieved.lm.truncate(len(context))",
         "C_r keeps rows that saw a part of the text alone")],
    "training/texts.py": [
        ("ids[-rows:])", "ids[-rows - 1:-1])", "guesses are compared with the tokens before")],
    "training/unroll.py": [
        ("sees.append(own)", "sees.append(own.cumsum(1).T.bool())",
         "a row of training sees the guesses of other rows"),
        ("learned = learns[:, 2 + n:]", "learned = learns[:, 1 + n:-1]",
         "a row learns one token too late")],
    "support/packed.py": [
        ("if torch.is_grad_enabled() or", "if", "no gradient flows through packed layers"),
        ("1 << (rows.bit_length() - 3)", "1", "oneDNN keeps memory for each length of a text"),
        ("if weight in tables:", "if False:", "copies of packed models are not tied"),
        ("not in READS", "in ()", "writes to blocks pass"),
        ("return self.detach()", "return Parameter.data.__get__(self)",
         "a head does not notice what is written to `data` of its embeddings"),
        ("self.replaced += 1", "pass", "nor that their `data` is replaced"),
        ("if part.weight not in made:", "if True:", "a weight that layers shared becomes two"),
        ("(x, blocks, bias,", "(x, blocks, None,", "packed layers lose their bias")],
    "support/parts.py": [
        ("if found != kind:", "if not found:", "a file of another kind passes"),
        ('if not belongs(tensors.pop("model"), model):', 'if not tensors.pop("model").any():',
         "another model's file passes"),
        ("step = 16 if len(table) > 16 else 1", "step = 16", "few tokens have no fingerprint"),
        ("if wanted or given", "if wanted.keys() ^ given.keys()", "tensors of another shape pass"),
        ("() and x.float().isfinite().all()", "()", "a nan passes")],
    "support/released.py": [
        ("weights_only=True", "weights_only=False", "a pickled file may run code"),
        ("own = share_weights(module)", "own = module", "a head's table is put into the target"),
        ("fc[:, columns]", "fc", "columns stand for layers in another order"),
        ("0 if causal else 1 - high", "0", "sliding layers never look ahead"),
        ("torch.arange(len(offsets)) + offsets", "offsets", "rows stand for other tokens")],
    "support/layers.py": [
        ("new = share_weights(model)", "new = model", "a view changes the model itself"),
        ('text.layer_types[-1] = "full_attention"', "pass", "an adapter has a layer's window")],
    "training/low_rank.py": [
        ("zeros(out, rank)", "ones(out, rank)", "training does not begin with the model as it is"),
        ("change.hook.remove()", "pass", "a merged change counts twice")],
    "training/loop.py": [
        ("answer[:max(0, longest - len(prompt))]", "answer[:longest]", "long answers are not cut"),
        ("[answer_of[number] for number in range(len(prompts))]", "[*answer_of.values()]",
         "answers go to the wrong prompts"),
        ("if self.file is None or self.inside_update:", "if self.file is None:",
         "a checkpoint is written in the middle of an update"),
        ("{self.seed} {self.done}", "{self.seed}", "every step has the same batch"),
        ("finally:\n                self.save()", "finally:\n                pass",
         "Ctrl-C loses the updates since the last checkpoint"),
        ("register_step_pre_hook", "register_step_post_hook", "half of a step is kept"),
        ("if not loss.isfinite():", "if loss.isinf():", "a loss of nan goes on")],
    "support/files.py": [
        ('if begins == "" or not', "if False and not", "a file of the user is lost"),
        ("    write(fresh)\n    usual", "    write(path)\n    usual",
         "half a file takes the place"),
        ("path.stat().st_mode if path.is_file() else ", "", "a new page has another mode")],
    "models/train.py": [
        ("target_read,\n                                   read",
         "read,\n                                   target_read", "target and draft are swapped")],
    "models/tasks.py": [
        ('== (split == "test")', 'or split != "test"', "held-out templates are shown in training"),
        ('if "ORDER BY" not in query:', "if True:", "the order of rows never counts"),
        ("subprocess.TimeoutExpired:", "KeyError:", "a function that runs for ever is an error")],
    "support/graphs.py": [
        ("features[:n].clone()", "features[:n]", "the next replay overwrites the features"),
        ("value=-torch.inf) for x in masks", "value=0.0) for x in masks", "unseen slots are seen"),
        ("name = self.cache.slots, ", "name = 0, ", "graphs of old buffers are replayed")],
    "support/loading.py": [
        ('"lora_" in name or ', "", "LoRA beside the weights is dropped"),
        ('if (folder / "adapter_config.json").exists():', "if False:",
         "an adapter is loaded without its base")],
    "cli/main.py": [
        ("min(self.args.max_new_tokens, self.context - len(prompt))", "self.args.max_new_tokens",
         "an answer exceeds the context"),
        ("and not session.args.invariant", "", "--compare takes all differences for rounding"),
        ("return int(exact and found", "return int(False and found", "--compare never fails"),
        ("run.method not in session.table.lossy", "True", "--compare checks lossy methods")],
    "cli/options.py": [
        ("args and name not in", "args and name in", "an option of another method is ignored"),
        ("args.min_p, args.seed,", "args.min_p, 0,", "--seed is ignored"),
        ("name in args}", "name in args and vars(args)[name]}", "an option of 0 is forgotten")],
    "cli/prompts.py": [
        ("if isinstance(value, list):", "if False:", "calls of tools may be left out"),
        ("if len(messages) < 2 or messages", "if messages", "an answer to nothing is learnt"),
        ("ended, len(answer) + 1", "ended, len(answer)", "an answer that is learnt does not end")],
    "cli/run.py": [
        ("until(chunks, limit, self.eos)", "until(chunks, limit, ())", "EOS is ignored"),
        ("perf_counter() - self.setup", "perf_counter()", "set-up counts as decoding")],
    "cli/text.py": [
        ("text.rstrip(HALF)[self.given:]", "text[self.given:]", "half a character is given away")],
    "cli/trace.py": [
        ('del call["kept"][left:]', "pass", "rows behind the end of the answer are kept")],
    "cli/trajectory.py": [
        ("y[:final] for y in", "y for y in", "tokens that are not final are shown"),
        ("y_star = states[-1]", "y_star = states[0]", "y(0) is taken for the fixed point")],
    "results/bench.py": [
        ("method, category) / self.speeds(other, category",
         "method, category) / median(self.speeds(other, category)", "a ratio is not of one round"),
        ("not tasks.loops(answer)", "tasks.loops(answer)", "prompts whose answers loop are kept")],
}


class Mutant(NamedTuple):
    """Holds a mistake in a file, and the whole text of the file with it."""
    number: int
    file: str
    mistake: str
    source: str


def list_written() -> list[Mutant]:
    """Return the mutants of MUTANTS. Raises ValueError if a file does not have a text once."""
    found = []
    for file, entries in MUTANTS.items():
        source = read(file)
        for old, new, mistake in entries:
            if source.count(old) != 1:
                raise ValueError(f"expected {old!r} once in {file}, got {source.count(old)}")
            found.append(Mutant(len(found), file, mistake, source.replace(old, new)))
    return found


# ------------------------------------------------------------------------------ tests that guard

def list_product() -> list[str]:
    """List the files that can have mistakes."""
    return list_files(".", "cli", "hybrid", "models", "results", "support", "survey", "training")


ROWS = {  # lines of the table of all methods, besides those that a file's methods name
    "survey/medusa.py": ["hydra"], "survey/masks.py": ["pass"], "survey/rest.py": ["suffix"],
    "hybrid/guessers.py": ["hybrid"], "hybrid/ngrams.py": ["hybrid"],
    "support/engine.py": ["without_caches"]}


def commands_of(file: str) -> list[list[str]]:
    """Return the arguments of pytest that guard a file, as one list for each run of tests.

    The tests that have the name of the file, of its folder or of another method that it needs come
    first. Its lines of the table of all methods are next, and then come all tests.
    """
    path = Path(file)
    others = [x.removeprefix("survey.") for x in sorted(needs(name_of(file)))]
    names = dict.fromkeys((path.stem, path.parent.name, *others))
    own = [f"tests/test_{name}.py" for name in names if "." not in name]
    rows = find_functions(file) + ROWS.get(file, [])
    lines = [["tests/test_lossless.py", "-k", " or ".join(rows)]] if rows else []
    # The tests of the structure know the code's own texts, which every mistake changes.
    rest = ["tests", "--ignore=tests/test_structure.py"]
    return [[x] for x in own if (ROOT / x).exists()] + lines + [rest]


# -------------------------------------------------------------------------------------- the trial

def import_packages() -> None:
    """Import what the tests import, and forget what is the project's own.

    Every process of tests is a fork of this one. It has the packages, which take seconds to import,
    and takes the project from its copy.
    """
    own = sys.modules["__main__"]
    sys.path[:0] = [str(ROOT / folder) for folder in ("", "models", "results")]
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        importlib.import_module(file.stem)
    importlib.import_module("helpers").forget_project()
    sys.modules["__main__"] = own


def run_tests(folder: Path, arguments: list[str], output: Path) -> None:
    """Be a process that runs tests in a copy of the project, and ends with pytest's status."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with open(output, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])))


def find_killer(folder: Path, commands: list[list[str]]) -> str:
    """Run tests in a copy of the project.

    commands  the arguments of pytest, one list after the other
    returns   the first test that failed, or how else the tests ended; an empty text if all passed
    """
    output = folder / "output.txt"
    statuses = []
    for arguments in commands:
        tests = get_context("fork").Process(target=run_tests, args=(folder, arguments, output))
        tests.start()
        try:
            tests.join(LIMIT)
        finally:  # also after Ctrl-C
            tests.kill()
            tests.join()
        statuses.append(tests.exitcode)
        if tests.exitcode not in (0, 5):  # 5: a table has no line of this file
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            failed = [line.partition(" - ")[0].partition(" ")[2] for line in lines
                      if line.startswith(("FAILED", "ERROR"))]
            return failed[0] if failed else f"the end of {arguments[0]}, or {LIMIT} s"
    if 0 not in statuses:
        raise ValueError(f"expected tests, got none: {commands}")
    return ""


def try_mutant(mutant: Mutant, clean: Path) -> str:
    """Make a mutant in a copy of the project; return what killed it, or an empty text.

    The test that killed it runs once more without the mistake. It runs in another copy, `clean`,
    since a mistake may make a test write over files. Raises ValueError if it fails there, too.
    """
    ast.parse(mutant.source)  # a mistake of spelling would be killed by every test
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "project"
        shutil.copytree(clean, folder)
        (folder / mutant.file).write_text(mutant.source, encoding="utf-8")
        killer = find_killer(folder, commands_of(mutant.file))
    again = find_killer(clean, [[killer]]) if killer.startswith("tests/") else ""
    if again and not again.startswith("not found"):  # only the mistake made this line of a table
        raise ValueError(f"expected tests that pass without a mistake, but {killer} fails")
    return killer


def choose(words: list[str]) -> list[Mutant]:
    """List the mutants that a command line names by numbers and files; all of them by default."""
    for word in words:
        if word not in list_product() and not word.isdigit():
            sys.exit(f"mutants.py: expected numbers, and files of the project, got {word!r}")
    return [x for x in list_written() if not words or x.file in words or str(x.number) in words]


def main() -> int:
    """Try the mutants that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="numbers, and files")
    parser.add_argument("--plant", metavar="MISTAKE", help="make this one here (tests/README.md)")
    args = parser.parse_args()
    if args.plant:
        [mutant] = [x for x in list_written() if x.mistake == args.plant]
        (ROOT / mutant.file).write_text(mutant.source, encoding="utf-8")
        print(f"{mutant.file} has it now. This takes it back: git checkout {mutant.file}")
        return 0
    survived = 0
    chosen = choose(args.words)
    import_packages()
    with tempfile.TemporaryDirectory() as parent:
        clean = Path(parent) / "project"
        shutil.copytree(ROOT, clean, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for mutant in chosen:
            killer = try_mutant(mutant, clean)
            survived += killer == ""
            end = f"killed by {killer}" if killer else "SURVIVED"
            print(f"{mutant.number:3} {mutant.file}: {mutant.mistake}: {end}", flush=True)
    print(f"{survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
