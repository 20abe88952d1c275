"""Makes the embedded models: a tokenizer, a target (9M parameters), and a draft (0.6M) \
distilled from the target.

    python models/train.py                    # everything, about two hours on two CPU cores;
                                                stopped, it goes on where it was
    python models/train.py --stage evaluate   # only measure what is there
    python models/train.py prompts --target MODEL --count 1000 --out FILE
    python models/train.py distil --target MODEL --layers 0 1 2 3 --prompts FILE --out DIR

1. tokenizer: byte-level BPE on the training tasks; digits are single tokens, a newline never joins
   what follows it.
2. target: Llama architecture with grouped-query attention, next-token loss on tasks.py's endless
   training split; no example is seen twice.
3. draft: the same on a smaller model, then DistillSpec (Zhou et al., arXiv 2310.08461): answers
   sampled from the draft or the target are scored by both, and the draft learns the target's
   distribution under a divergence. Acceptance is what a draft is for: its rate is
   1 - TVD(target, draft) at every position, averaged (Leviathan et al., arXiv 2211.17192,
   Cor. 3.6).
4. evaluate: held-out loss, accuracy on each task, loops and acceptance, written to evaluation.json.
"""
import argparse
import copy
import itertools
import json
import os
import random
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig,
                          LlamaForCausalLM, PreTrainedTokenizerFast)

import tasks

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import common  # noqa: E402  (the path is set above)

MIX = {"sql": 0.35, "math": 0.4, "code": 0.25}  # shares of the examples
# in the target's second phase: arithmetic takes longest
LATER = {"sql": 0.15, "math": 0.6, "code": 0.25}
SIZES = {"target": dict(hidden_size=256, intermediate_size=704, num_hidden_layers=12,
                        num_attention_heads=8, num_key_value_heads=4),
         "draft": dict(hidden_size=128, intermediate_size=352, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2)}
PROMPT_WEIGHT = 0.1  # prompts are mostly chance: their tokens count less than the answers'
CONTEXT = 2048


def make_tokenizer(vocabulary: int = 1536) -> PreTrainedTokenizerFast:
    text = [e.prompt + e.answer for task in tasks.TASKS
            for e in tasks.take(task, "train", 20000, seed=-1)]
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"\n| ?[A-Za-z_]+| ?\d|\d| ?[^\sA-Za-z_\d]+| +(?=[^\s])| +|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pieces, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                   pad_token="</s>", model_max_length=CONTEXT,
                                   clean_up_tokenization_spaces=False)


def new_model(name: str, tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, **SIZES[name]))


def stream(split: str, seed: int, mix: dict[str, float] = MIX):
    """Endless examples of all tasks, mixed."""
    sources, rng = {t: tasks.examples(t, split, seed) for t in tasks.TASKS}, random.Random(seed)
    while True:
        yield next(sources[rng.choices(list(mix), mix.values())[0]])


def pad(rows: list[tuple[list[int], list[float]]]):
    """(ids [B, T], weights [B, T]), filled up on the right with any token: it weighs nothing, and
    in a causal model changes nothing."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([w + [0.0] * (width - len(w)) for _, w in rows])


def encode(tokenizer, prompts: list[str], answers: list[str]):
    """[(ids, weights)]: <s> prompt answer </s>."""
    p, a = (tokenizer(prompts)["input_ids"],
            tokenizer(answers, add_special_tokens=False)["input_ids"])
    return [(x + y + [tokenizer.eos_token_id], [PROMPT_WEIGHT] * len(x) + [1.0] * (len(y) + 1))
            for x, y in zip(p, a)]


def batches(tokenizer, split: str, seed: int, size: int, mix: dict[str, float] = MIX,
            pool: int = 512):
    """Endless batches of about `size` tokens, of examples of similar length."""
    source, rng = stream(split, seed, mix), random.Random(seed)
    while True:
        some = [next(source) for _ in range(pool)]
        rows = sorted(encode(tokenizer, [e.prompt for e in some], [e.answer for e in some]),
                      key=lambda r: len(r[0]))
        groups, group = [], []
        for row in rows:
            if (len(group) + 1) * len(row[0]) > size and group:
                groups.append(group)
                group = []
            group.append(row)
        rng.shuffle(groups)  # the last, incomplete group is dropped
        yield from map(pad, groups)


def next_token_loss(model, ids, weights):
    """Weighted mean cross-entropy (nats) of token t + 1 given tokens up to t."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (loss * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def optimizers(model, lr: float):
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def fit(name, model, loss_of, data, lr: float, total: int, work: Path):
    """Train on `total` tokens of `data`, the rate falling linearly to 0 after a warm-up of a
    twentieth of them; a checkpoint every five minutes and when it is interrupted."""
    optims, checkpoint = optimizers(model, lr), work / f"{name}.pt"
    seen = step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optims, state["optimizers"]):
            optimizer.load_state_dict(saved)
        seen, step = state["seen"], state["step"]
    saved_at, whole = time.time(), True  # no update is half made

    def save_state():
        torch.save({"model": model.state_dict(), "optimizers": [o.state_dict() for o in optims],
                    "seen": seen, "step": step}, checkpoint.with_suffix(".new"))
        os.replace(checkpoint.with_suffix(".new"), checkpoint)
    bar = tqdm(total=total, initial=seen, unit="tok", desc=name, mininterval=5, dynamic_ncols=True)
    average = None
    try:
        for ids, weights in data(step):  # a resumed run goes on with other examples
            if seen >= total:
                break
            rate = lr * min(1.0, (seen + 1) / (0.05 * total)) * max(0.0, 1 - seen / total)
            for group in (g for o in optims for g in o.param_groups):
                group["lr"] = rate
            loss = loss_of(ids, weights)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            whole = False
            for optimizer in optims:
                optimizer.step()
                optimizer.zero_grad()
            seen, step, whole = seen + ids.numel(), step + 1, True
            average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
            bar.update(ids.numel())
            bar.set_postfix(loss=f"{average:.4f}", lr=f"{rate:.1e}")
            if time.time() - saved_at > 300:
                save_state()
                saved_at = time.time()
    finally:
        if whole:
            save_state()
    bar.close()
    return model


def prompts_of(split: str, seed: int):
    for example in stream(split, seed):
        yield example.prompt


@torch.inference_mode()
def answer(model, tokenizer, prompts: list[str], temperature: float, limit: int = 200,
           size: int = 128) -> list[list[int]]:
    """Token ids of each prompt's answer, EOS included where one came within `limit` tokens;
    temperature 0 is greedy."""
    tokenizer.padding_side, answers = "left", {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), size):
        some = order[start:start + size]
        inputs = tokenizer([prompts[i] for i in some], return_tensors="pt", padding=True,
                           return_token_type_ids=False).to(model.device)
        how = (dict(do_sample=True, temperature=temperature, top_k=0) if temperature
               else dict(do_sample=False))
        rows = model.generate(
            **inputs, max_new_tokens=limit, **how)[:, inputs["input_ids"].shape[1]:].tolist()
        for i, row in zip(some, rows):
            answers[i] = (row[:row.index(tokenizer.eos_token_id) + 1]
                          if tokenizer.eos_token_id in row else row)
    return [answers[i] for i in range(len(prompts))]


def sampled_batches(source, tokenizer, split: str, seed: int, size: int, temperature: float = 1.0,
                    pool: int = 512):
    """Endless batches of held-in prompts with answers sampled from `source`, the model being
    trained or its teacher."""
    prompts = prompts_of(split, seed)
    torch.manual_seed(seed)
    while True:
        some = [next(prompts) for _ in range(pool)]
        rows = [(x + y, [0.0] * len(x) + [1.0] * len(y))
                for x, y in zip(tokenizer(some)["input_ids"],
                                answer(source, tokenizer, some, temperature))]
        rows.sort(key=lambda r: len(r[0]))
        width = max(1, size // len(rows[-1][0]))
        groups = [rows[i:i + width] for i in range(0, len(rows), width)]
        random.Random(seed).shuffle(groups)
        yield from map(pad, groups)


def divergence(kind: str, target_logits, draft_logits):
    """D(target, draft) in nats at each position: [..., V], [..., V] -> [...]. DistillSpec, Table 1;
    `tvd` is 1 - acceptance rate."""
    log_p, log_q = F.log_softmax(target_logits.float(), -1), F.log_softmax(draft_logits.float(), -1)
    if kind == "forward-kl":  # by itself: V may be large
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "reverse-kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
        return 0.5 * (p * (log_p - log_m)).sum(-1) + 0.5 * (q * (log_q - log_m)).sum(-1)
    if kind == "tvd":
        return 0.5 * (p - q).abs().sum(-1)
    raise ValueError(f"expected forward-kl, reverse-kl, jsd or tvd, got {kind!r}")


def logits_before(model, ids, weights):
    """Logits [N, V] for the tokens ids[:, 1:] that have a weight."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        hidden = model.get_decoder()(input_ids=ids[:, :-1], use_cache=False)[0]
        return model.get_output_embeddings()(hidden[weights[:, 1:] > 0])


def distill(name, target, draft, kind, data, total, work, lr=2e-3):
    """Move the draft towards the target on batches of data(step)."""
    def loss_of(ids, weights):
        with torch.no_grad():
            teacher = logits_before(target, ids, weights)
        return divergence(kind, teacher, logits_before(draft, ids, weights)).mean()
    fit(name, draft, loss_of, data, lr, total, work)


@torch.inference_mode()
def own_prompts(argv: list[str]) -> None:
    """Prompts that a chat model writes itself, in the user's place: it goes on with its template
    from where the user would speak (Magpie: Xu et al., arXiv 2406.08464)."""
    parser = argparse.ArgumentParser(prog="train.py prompts", description=own_prompts.__doc__,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="model directory or hub id")
    add("--out", type=Path, required=True, help="file of JSON lines to make")
    add("--count", type=int, default=1000, help="of prompts")
    add("--batch", type=int, default=64, help="written at once")
    add("--max-new-tokens", type=int, default=200, help="of a prompt; longer ones are dropped")
    add("--temperature", type=float, default=0.8)
    add("--seed", type=int, default=0)
    add("--device")
    args = parser.parse_args(argv)
    if min(args.count, args.batch, args.max_new_tokens) < 1 or not args.temperature > 0:
        raise common.InputError("expected count, batch and max-new-tokens of 1 or more and a "
                                "temperature above 0")
    model, tokenizer = common.load(args.target, args.device, "bfloat16")
    if not tokenizer.chat_template:
        raise common.InputError("expected a model with a chat template, got one without")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "HERE"}], tokenize=False)
    before = tokenizer.encode(chat.partition("HERE")[0], add_special_tokens=False)
    eos, found = common.eos_ids(model, tokenizer), set()
    model.generation_config = GenerationConfig(
        max_new_tokens=args.max_new_tokens, eos_token_id=sorted(eos), pad_token_id=min(eos),
        do_sample=True, temperature=args.temperature, top_k=0)
    torch.manual_seed(args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "w") as out, tqdm(total=args.count, desc="prompts") as bar:
        while len(found) < args.count:
            ids = torch.tensor([before] * args.batch, device=model.device)
            rows = model.generate(ids, attention_mask=torch.ones_like(ids))
            for row in rows[:, len(before):].tolist():
                end = next((n for n, token in enumerate(row) if token in eos), None)
                text = tokenizer.decode(row[:end], skip_special_tokens=True).strip()
                if end and text and text not in found and len(found) < args.count:
                    found.add(text)
                    out.write(json.dumps({"prompt": text}) + "\n")
            out.flush()
            if len(found) == bar.n:
                raise common.InputError("expected a model that writes prompts and ends them, got "
                                        f"no new one of {args.batch}, {bar.n} before")
            bar.update(len(found) - bar.n)


def some_layers(model, layers: list[int]):
    """A smaller model of these layers of a Llama-like one; its embeddings and LM head are frozen
    and stay the model's."""
    config, state = copy.deepcopy(model.config), model.state_dict()
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in layers]
    small = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, x in small.state_dict().items():
        old = re.sub(r"\.layers\.(\d+)\.", lambda i: f".layers.{layers[int(i[1])]}.", name)
        x.copy_(state[old])
    for embedding in small.get_input_embeddings(), small.get_output_embeddings():
        embedding.requires_grad_(False)
    return small.to(model.device)


def distil_layers(argv: list[str]) -> None:
    """A draft for any Llama-like model: some of its layers, which learn its distribution on its own
    greedy answers."""
    parser = argparse.ArgumentParser(prog="train.py distil", description=distil_layers.__doc__,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="model directory or hub id")
    add("--layers", type=int, nargs="+", required=True, help="of the target, from 0")
    add("--prompts", type=tasks.read_prompts, required=True, metavar="FILE")
    add("--chat", action="store_true", help="put prompts into the model's chat template")
    add("--out", type=Path, required=True, help="directory of the draft")
    add("--work", type=Path, default=HERE / "work", help="answers and checkpoints")
    add("--max-new-tokens", type=int, default=200, help="of an answer")
    add("--tokens", type=int, default=2_000_000, help="to train on")
    add("--batch", type=int, default=2, help="answers a step")
    add("--lr", type=float, default=3e-3)
    add("--device")
    args = parser.parse_args(argv)
    if min(args.batch, args.tokens, args.max_new_tokens) < 1 or not args.lr > 0:
        raise common.InputError("expected batch, tokens and max-new-tokens of 1 or more and a "
                                "learning rate above 0")
    target, tokenizer = common.load(args.target, args.device, "bfloat16")
    if not set(args.layers) <= {*range(target.config.num_hidden_layers)}:
        raise common.InputError(f"expected layers below {target.config.num_hidden_layers}, got "
                                f"{args.layers}")
    torch.set_default_device(target.device)
    args.work.mkdir(parents=True, exist_ok=True)
    prompts = [common.encode(tokenizer, text, args.chat) for text in args.prompts]
    longest = common.context_length(target) - args.max_new_tokens
    prompts = [p for p in prompts if len(p) <= longest]
    if len(prompts) < 2:
        raise common.InputError(f"expected 2 prompts or more of at most {longest} tokens, "
                                f"got {len(prompts)}")
    answers = common.own_answers(target, tokenizer, prompts, args.max_new_tokens, args.work)
    rows = [(p + a, [0.0] * len(p) + [1.0] * len(a)) for p, a in zip(prompts, answers)]
    random.Random(0).shuffle(rows)
    held_out, rows = rows[:len(rows) // 20 + 1], rows[len(rows) // 20 + 1:]

    def data(step):
        rng = random.Random(step)
        while True:
            yield pad(rng.sample(rows, min(args.batch, len(rows))))
    draft = some_layers(target, args.layers)
    settings = args.layers, args.tokens, args.batch, args.lr, rows
    distill(f"distil-{common.digest(target, settings)}", target, draft, "forward-kl", data,
            args.tokens, args.work, args.lr)
    right = accepted = total = 0
    for row in held_out:
        ids, weights = pad([row])
        with torch.no_grad():
            p, q = logits_before(target, ids, weights), logits_before(draft, ids, weights)
        right += (p.argmax(-1) == q.argmax(-1)).sum().item()
        accepted += (1 - divergence("tvd", p, q)).sum().item()
        total += len(p)
    print(f"on {len(held_out)} held-out answers: {right / total:.3f} of the tokens guessed, "
          f"1 - TVD {accepted / total:.3f}")
    save(draft, tokenizer, args.out)


@torch.inference_mode()
def acceptance(target, draft, tokenizer, prompts: list[str]) -> dict:
    """Over the target's answers to these prompts: the share of greedy answer tokens that the draft
    would guess, and the mean 1 - TVD on sampled ones (temperature 1)."""
    figures = {}
    for temperature in (0.0, 1.0):
        torch.manual_seed(0)
        rows = [(x + y, [0.0] * len(x) + [1.0] * len(y))
                for x, y in zip(tokenizer(prompts)["input_ids"],
                                answer(target, tokenizer, prompts, temperature))]
        good = total = 0.0
        for i in range(0, len(rows), 25):
            ids, weights = (x.to(target.device) for x in pad(rows[i:i + 25]))
            p, q, weights = target(ids[:, :-1]).logits, draft(ids[:, :-1]).logits, weights[:, 1:]
            right = (1 - divergence("tvd", p, q) if temperature
                     else (p.argmax(-1) == q.argmax(-1)).float())
            good, total = good + (right * weights).sum().item(), total + weights.sum().item()
        figures["sampled" if temperature else "greedy"] = round(good / total, 4)
    return figures


@torch.inference_mode()
def evaluate(model, tokenizer, n: int = 100, seed: int = 0) -> dict:
    """Held-out loss (nats per answer token) and accuracy of greedy answers on n held-out prompts of
    each task; and how many loop."""
    figures = {}
    for task in tasks.TASKS:
        held_out = tasks.take(task, "test", n, seed)
        rows = encode(tokenizer, [e.prompt for e in held_out], [e.answer for e in held_out])
        loss = total = 0.0
        for i in range(0, n, 25):
            ids, weights = (x.to(model.device) for x in pad(rows[i:i + 25]))
            weights = (weights == 1.0).float()
            loss += next_token_loss(model, ids, weights).item() * weights[:, 1:].sum().item()
            total += weights[:, 1:].sum().item()
        ids = answer(model, tokenizer, [e.prompt for e in held_out], 0.0)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        figures[task] = {"loss": round(loss / total, 4),
                         "accuracy": sum(map(tasks.grade, held_out, texts)) / n,
                         "loops": sum(map(tasks.loops, ids)),
                         "tokens": round(sum(map(len, ids)) / n, 1)}
    return figures


def save(model, tokenizer, folder: Path):
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.float()


def load(folder: Path):
    return (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            AutoTokenizer.from_pretrained(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", choices=["target", "plain-draft", "compare", "draft", "evaluate",
                                            "all"], default="all")
    parser.add_argument("--target-tokens", type=int, default=6_000_000,
                        help="and half as many in the second phase")
    parser.add_argument("--draft-tokens", type=int, default=1_500_000)
    parser.add_argument("--distill-tokens", type=int, default=800_000)
    parser.add_argument("--compare-tokens", type=int, default=250_000,
                        help="for each divergence and source of text that --stage compare tries")
    parser.add_argument("--divergence", default="forward-kl",
                        choices=["forward-kl", "reverse-kl", "jsd", "tvd"])
    parser.add_argument("--source", default="target", choices=["draft", "target"],
                        help="whose samples the draft is distilled on")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    torch.set_default_device(args.device)
    tokenizer = make_tokenizer()

    def wanted(stage):
        return args.stage in (stage, "all")

    if wanted("target"):
        target = new_model("target", tokenizer)
        for name, mix, lr, tokens in (("target", MIX, 1.5e-3, args.target_tokens),
                                      ("target-later", LATER, 5e-4, args.target_tokens // 2)):
            seed = 0 if name == "target" else 10 ** 6  # other examples
            fit(name, target, lambda *batch: next_token_loss(target, *batch),
                lambda step: batches(tokenizer, "train", seed + step, 3072, mix), lr, tokens,
                args.work)
        save(target, tokenizer, HERE / "target")

    def plain_draft():
        draft = new_model("draft", tokenizer)
        return fit("draft", draft, lambda *batch: next_token_loss(draft, *batch),
                   lambda seed: batches(tokenizer, "train", seed, 4096), 4e-3, args.draft_tokens,
                   args.work)

    if args.stage == "plain-draft":  # the draft before distillation needs no target
        plain_draft()
        return
    target, tokenizer = load(HERE / "target")
    held_out = [e.prompt for e in itertools.islice(stream("test", 1), 150)]

    def sampled(source, draft):
        model = {"draft": draft, "target": target}[source]
        return lambda step: sampled_batches(model, tokenizer, "train", 1000 + step, 4096)
    # short runs of each divergence on each source of text, from the same plain draft
    if wanted("compare"):
        print(f"{'before':24}", acceptance(target, plain_draft(), tokenizer, held_out))
        for kind, source in itertools.product(("forward-kl", "reverse-kl", "jsd", "tvd"),
                                              ("draft", "target")):
            draft = plain_draft()
            distill(f"compare-{kind}-{source}", target, draft, kind, sampled(source, draft),
                    args.compare_tokens, args.work)
            print(f"{kind + ' on ' + source:24}", acceptance(target, draft, tokenizer, held_out),
                  flush=True)
    if wanted("draft"):
        draft = plain_draft()
        distill("distilled", target, draft, args.divergence, sampled(args.source, draft),
                args.distill_tokens, args.work)
        save(draft, tokenizer, HERE / "draft")
    if wanted("evaluate"):
        draft, _ = load(HERE / "draft")
        figures = {"target": evaluate(target, tokenizer), "draft": evaluate(draft, tokenizer),
                   "acceptance": acceptance(target, draft, tokenizer, held_out)}
        (HERE / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    commands = {"prompts": own_prompts, "distil": distil_layers}
    command = commands.get(sys.argv[1]) if sys.argv[1:] else None
    try:
        command(sys.argv[2:]) if command else main()
    except common.InputError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
