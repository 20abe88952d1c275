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
import random
import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import (AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM,
                          PreTrainedTokenizerFast)

import tasks

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import common  # noqa: E402  (the path is set above)
from cli.loading import encode_prompts, load_checked, open_chat  # noqa: E402
from models.training import (Training, generate_answers, digest, divergence,  # noqa: E402
                             collect_examples, warm_linear)

MIX = {"sql": 0.35, "math": 0.4, "code": 0.25}  # shares of the examples
# in the target's second phase: arithmetic takes longest
LATER = {"sql": 0.15, "math": 0.6, "code": 0.25}
SIZES = {"target": dict(hidden_size=256, intermediate_size=704, num_hidden_layers=12,
                        num_attention_heads=8, num_key_value_heads=4),
         "draft": dict(hidden_size=128, intermediate_size=352, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2)}
PROMPT_WEIGHT = 0.1  # prompts are mostly chance: their tokens count less than the answers'
CONTEXT = 2048
DIVERGENCES = ("forward-kl", "reverse-kl", "jsd", "tvd")
POOL = 512  # examples that a batch of like length is chosen from

Row = tuple[list[int], list[float]]  # token ids, and what each counts in the loss


# ---------------------------------------------------------------------- tokenizer and models

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


# ------------------------------------------------------------------------------------- batches

def stream(split: str, seed: int, mix: dict[str, float] = MIX):
    """Endless examples of all tasks, mixed."""
    sources = {task: tasks.examples(task, split, seed) for task in tasks.TASKS}
    rng = random.Random(seed)
    while True:
        yield next(sources[rng.choices(list(mix), mix.values())[0]])


def pad(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [B, T], weights [B, T]), filled up on the right with any token: it weighs nothing, and
    in a causal model changes nothing."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([w + [0.0] * (width - len(w)) for _, w in rows])


def encode(tokenizer, prompts: list[str], answers: list[str]) -> list[Row]:
    """<s> prompt answer </s>."""
    p = tokenizer(prompts)["input_ids"]
    a = tokenizer(answers, add_special_tokens=False)["input_ids"]
    return [(x + y + [tokenizer.eos_token_id], [PROMPT_WEIGHT] * len(x) + [1.0] * (len(y) + 1))
            for x, y in zip(p, a)]


def answer_rows(prompts: list[list[int]], answers: list[list[int]]) -> list[Row]:
    """The answers' tokens alone count."""
    return [(p + a, [0.0] * len(p) + [1.0] * len(a)) for p, a in zip(prompts, answers)]


def batch_of(tokenizer, split: str, size: int, mix: dict[str, float], rng: random.Random):
    """(ids, weights) of about `size` tokens, of examples alike in length."""
    some = list(itertools.islice(stream(split, rng.getrandbits(60), mix), POOL))
    rows = encode(tokenizer, [e.prompt for e in some], [e.answer for e in some])
    groups, group = [], []
    for row in sorted(rows, key=lambda row: len(row[0])):
        if (len(group) + 1) * len(row[0]) > size and group:
            groups.append(group)
            group = []
        group.append(row)
    return pad(rng.choice(groups or [group]))  # not the last group, which is incomplete


@torch.inference_mode()
def answers_of(model, tokenizer, prompts: list[str], temperature: float,
               limit: int = 200) -> list[list[int]]:
    """Token ids of each prompt's answer, EOS included where one came within `limit` tokens;
    temperature 0 is greedy."""
    ids = tokenizer(prompts)["input_ids"]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found = generate_answers(model, {tokenizer.eos_token_id}, [ids[i] for i in order], limit,
                             temperature, size=128)
    by_number = dict(zip(order, itertools.chain.from_iterable(found)))
    return [by_number[i] for i in range(len(ids))]


def sampled_batch(source, tokenizer, size: int, rng: random.Random):
    """(ids, weights) of about `size` tokens: answers sampled from `source`, the model that is
    trained or its teacher, to prompts alike in length."""
    some = sorted(itertools.islice(stream("train", rng.getrandbits(60)), size // 24),
                  key=lambda e: len(e.prompt))
    few = size // 96  # prompts: with its answer each has about so many tokens
    first = rng.randrange(0, len(some) - few + 1)
    prompts = [e.prompt for e in some[first:first + few]]
    torch.manual_seed(rng.getrandbits(60))
    answers = answers_of(source, tokenizer, prompts, temperature=1.0)
    return pad(answer_rows(tokenizer(prompts)["input_ids"], answers))


# -------------------------------------------------------------------------------------- losses

def next_token_loss(model, ids, weights):
    """Weighted mean cross-entropy (nats) of token t + 1 given tokens up to t."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (loss * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def logits_before(model, ids, weights):
    """Logits [N, V] for the tokens ids[:, 1:] that have a weight."""
    hidden = model.get_decoder()(input_ids=ids[:, :-1], use_cache=False)[0]
    return model.get_output_embeddings()(hidden[weights[:, 1:] > 0])


# ----------------------------------------------------------------------------------- training

def optimizers(model, lr: float) -> list:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in trained if p.ndim != 2 or "embed" in n]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def fit(name: str, model, loss_of, held_out, of: tuple, *, lr: float, steps: int,
        work: Path) -> None:
    """Train all weights that are not frozen: loss_of(rng) on what it draws, held_out(rng) on what
    is held out; the rate falls linearly to 0 after a warm-up."""
    @torch.no_grad()
    def evaluate():
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            loss = sum(held_out(random.Random(i)).item() for i in range(4)) / 4
        return {"loss": loss}, f"held-out loss {loss:.4f}"
    part = {n: p for n, p in model.named_parameters() if p.requires_grad}
    Training(part, of, name=name, steps=max(1, steps), lr=lr, rate=warm_linear,
             optimizers=optimizers(model, lr), folder=work).train(loss_of, evaluate)


def train_on_tasks(name: str, model, tokenizer, mix: dict[str, float], size: int, *, lr: float,
                   tokens: int, work: Path) -> None:
    def loss_on(split: str):
        return lambda rng: next_token_loss(model, *batch_of(tokenizer, split, size, mix, rng))
    fit(name, model, loss_on("train"), loss_on("test"), (mix, size), lr=lr, steps=tokens // size,
        work=work)


def distill(name: str, target, draft, kind: str, source, tokenizer, *, tokens: int, work: Path,
            size: int = 4096) -> None:
    """Move the draft towards the target on answers that `source` samples (DistillSpec)."""
    def loss_of(rng):
        batch = sampled_batch(source, tokenizer, size, rng)
        with torch.no_grad():
            teacher = logits_before(target, *batch)
        return divergence(kind, teacher, logits_before(draft, *batch)).mean()
    of = (digest(target.state_dict()), kind, source is draft, size)
    fit(name, draft, loss_of, loss_of, of, lr=2e-3, steps=tokens // size, work=work)


# ----------------------------------------------------------------------------- for any target

def new_parser(name: str, doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"train.py {name}", description=doc,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", required=True, help="model directory or hub id")
    parser.add_argument("--device")
    return parser


def own_prompts(argv: list[str]) -> None:
    """Prompts that a chat model writes itself, in the user's place: it goes on with its template
    from where the user would speak (Magpie: Xu et al., arXiv 2406.08464)."""
    parser = new_parser("prompts", own_prompts.__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="file of JSON lines to make")
    add("--count", type=int, default=1000, help="of prompts")
    add("--batch", type=int, default=64, help="written at once")
    add("--max-new-tokens", type=int, default=200, help="of a prompt; longer ones are dropped")
    add("--temperature", type=float, default=0.8)
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if min(args.count, args.batch, args.max_new_tokens) < 1 or not args.temperature > 0:
        raise common.InputError("expected count, batch and max-new-tokens of 1 or more and a "
                                "temperature above 0")
    model, tokenizer = load_checked(args.target, args.device, "bfloat16")
    before = open_chat(tokenizer)
    torch.manual_seed(args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=args.count, desc="prompts")
    with bar, open(args.out, "w", encoding="utf-8") as out:
        found = set()
        while len(found) < args.count:
            for text in written(model, tokenizer, before, args):
                if text not in found and len(found) < args.count:
                    found.add(text)
                    out.write(json.dumps({"prompt": text}) + "\n")
            out.flush()
            if len(found) == bar.n:
                raise common.InputError("expected a model that writes prompts and ends them, got "
                                        f"no new one of {args.batch}, {bar.n} before")
            bar.update(len(found) - bar.n)


def written(model, tokenizer, before: list[int], args: argparse.Namespace) -> list[str]:
    """What the model writes after these tokens and ends, in a batch."""
    eos = common.eos_ids(model, tokenizer)
    [rows] = generate_answers(model, eos, [before] * args.batch, args.max_new_tokens,
                              args.temperature, size=args.batch)
    ended = [row[:-1] for row in rows if row[-1] in eos]
    texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in ended]
    return [text for text in texts if text]


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
    greedy answers. A stopped run goes on."""
    parser = new_parser("distil", distil_layers.__doc__)
    add = parser.add_argument
    add("--layers", type=int, nargs="+", required=True, help="of the target, from 0")
    add("--prompts", type=tasks.read_prompts, required=True, metavar="FILE")
    add("--chat", action="store_true", help="put prompts into the model's chat template")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the target")
    add("--out", type=Path, required=True, help="directory of the draft")
    add("--work", type=Path, default=HERE / "work", help="answers and checkpoints")
    add("--max-new-tokens", type=int, default=200, help="of an answer")
    add("--steps", type=int, default=4000)
    add("--batch", type=int, default=2, help="answers a step")
    add("--lr", type=float, default=3e-3)
    args = parser.parse_args(argv)
    if min(args.batch, args.steps, args.max_new_tokens) < 1 or not args.lr > 0:
        raise common.InputError("expected batch, steps and max-new-tokens of 1 or more and a "
                                "learning rate above 0")
    target, tokenizer = load_checked(args.target, args.device, args.dtype)
    if not set(args.layers) <= {*range(target.config.num_hidden_layers)}:
        raise common.InputError(f"expected layers below {target.config.num_hidden_layers}, got "
                                f"{args.layers}")
    torch.set_default_device(target.device)
    prompts = encode_prompts([target], tokenizer, args.prompts, args.chat)
    data, held_out = collect_examples(target, tokenizer, prompts, args.max_new_tokens, args.work,
                                      seed=0)
    rows, others = answer_rows(*zip(*data)), answer_rows(*zip(*held_out))
    draft = some_layers(target, args.layers)

    def loss_on(some: list[Row], rng: random.Random) -> torch.Tensor:
        batch = pad(rng.sample(some, min(args.batch, len(some))))
        with torch.no_grad():
            teacher = logits_before(target, *batch)
        return divergence("forward-kl", teacher, logits_before(draft, *batch)).mean()
    of = (digest(target.state_dict()), args.layers, args.batch, rows)
    fit("distil", draft, lambda rng: loss_on(rows, rng), lambda rng: loss_on(others, rng), of,
        lr=args.lr, steps=args.steps, work=args.work)
    guessed, accepted = agreement(target, draft, others)
    print(f"on {len(others)} held-out answers: {guessed:.3f} of the tokens guessed, 1 - TVD "
          f"{accepted:.3f}")
    save(draft, tokenizer, args.out)


@torch.inference_mode()
def agreement(target, draft, rows: list[Row]) -> tuple[float, float]:
    """(share of tokens that both choose, mean of 1 - TVD) over the tokens that count."""
    right = accepted = total = 0
    for row in rows:
        with torch.autocast(target.device.type, dtype=torch.bfloat16):
            p, q = (logits_before(model, *pad([row])) for model in (target, draft))
        right += (p.argmax(-1) == q.argmax(-1)).sum().item()
        accepted += (1 - divergence("tvd", p, q)).sum().item()
        total += len(p)
    return right / total, accepted / total


# ------------------------------------------------------------------------------------ figures

@torch.inference_mode()
def acceptance(target, draft, tokenizer, prompts: list[str]) -> dict[str, float]:
    """Over the target's answers to these prompts: the share of greedy answer tokens that the draft
    would guess, and the mean 1 - TVD on sampled ones (temperature 1)."""
    figures = {}
    for name, temperature in ("greedy", 0.0), ("sampled", 1.0):
        torch.manual_seed(0)
        answers = answers_of(target, tokenizer, prompts, temperature)
        rows = answer_rows(tokenizer(prompts)["input_ids"], answers)
        good = total = 0.0
        for i in range(0, len(rows), 25):
            ids, weights = (x.to(target.device) for x in pad(rows[i:i + 25]))
            p, q = (model(ids[:, :-1]).logits for model in (target, draft))
            right = (1 - divergence("tvd", p, q) if temperature
                     else (p.argmax(-1) == q.argmax(-1)).float())
            good += (right * weights[:, 1:]).sum().item()
            total += weights[:, 1:].sum().item()
        figures[name] = round(good / total, 4)
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
        ids = answers_of(model, tokenizer, [e.prompt for e in held_out], 0.0)
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
    how = dict(trust_remote_code=False)
    return (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how),
            AutoTokenizer.from_pretrained(folder, **how))


# ------------------------------------------------------------------------------------- stages

def make_target(tokenizer, args: argparse.Namespace) -> None:
    """In two phases, of other examples."""
    target = new_model("target", tokenizer)
    train_on_tasks("target", target, tokenizer, MIX, 3072, lr=1.5e-3, tokens=args.target_tokens,
                   work=args.work)
    train_on_tasks("target-later", target, tokenizer, LATER, 3072, lr=5e-4,
                   tokens=args.target_tokens // 2, work=args.work)
    save(target, tokenizer, HERE / "target")


def plain_draft(tokenizer, args: argparse.Namespace):
    draft = new_model("draft", tokenizer)
    train_on_tasks("draft", draft, tokenizer, MIX, 4096, lr=4e-3, tokens=args.draft_tokens,
                   work=args.work)
    return draft


def held_out_prompts() -> list[str]:
    return [e.prompt for e in itertools.islice(stream("test", 1), 150)]


def compare_divergences(tokenizer, args: argparse.Namespace) -> None:
    """Short runs of each divergence on each source of text, from the same plain draft."""
    target, prompts = load(HERE / "target")[0], held_out_prompts()
    plain = plain_draft(tokenizer, args)
    print(f"{'before':24}", acceptance(target, plain, tokenizer, prompts))
    for kind, source in itertools.product(DIVERGENCES, ("draft", "target")):
        draft = copy.deepcopy(plain)
        distill(f"compare-{kind}-{source}", target, draft, kind,
                {"draft": draft, "target": target}[source], tokenizer, tokens=args.compare_tokens,
                work=args.work)
        print(f"{kind + ' on ' + source:24}", acceptance(target, draft, tokenizer, prompts),
              flush=True)


def make_draft(tokenizer, args: argparse.Namespace) -> None:
    target, draft = load(HERE / "target")[0], plain_draft(tokenizer, args)
    distill("distilled", target, draft, args.divergence,
            {"draft": draft, "target": target}[args.source], tokenizer,
            tokens=args.distill_tokens, work=args.work)
    save(draft, tokenizer, HERE / "draft")


def write_evaluation(tokenizer, args: argparse.Namespace) -> None:
    target, draft = load(HERE / "target")[0], load(HERE / "draft")[0]
    figures = {"target": evaluate(target, tokenizer), "draft": evaluate(draft, tokenizer),
               "acceptance": acceptance(target, draft, tokenizer, held_out_prompts())}
    lines = json.dumps(figures, indent=1)
    (HERE / "evaluation.json").write_text(lines + "\n", encoding="utf-8")
    print(lines)


STAGES = {"target": make_target, "plain-draft": plain_draft, "compare": compare_divergences,
          "draft": make_draft, "evaluate": write_evaluation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", choices=[*STAGES, "all"], default="all")
    parser.add_argument("--target-tokens", type=int, default=6_000_000,
                        help="and half as many in the second phase")
    parser.add_argument("--draft-tokens", type=int, default=1_500_000)
    parser.add_argument("--distill-tokens", type=int, default=800_000)
    parser.add_argument("--compare-tokens", type=int, default=250_000,
                        help="for each divergence and source of text that --stage compare tries")
    parser.add_argument("--divergence", default="forward-kl", choices=DIVERGENCES)
    parser.add_argument("--source", default="target", choices=["draft", "target"],
                        help="whose samples the draft is distilled on")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    torch.set_default_device(args.device)
    tokenizer = make_tokenizer()
    for stage, make in STAGES.items():
        if args.stage in (stage, "all"):
            make(tokenizer, args)


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
