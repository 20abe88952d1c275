"""Make the embedded models: a tokenizer, a target (9M parameters), and a draft (0.6M) \
distilled from the target.

    python models/train.py                    # everything, about two hours on two CPU cores.
                                              # A stopped run goes on where it was
    python models/train.py distil --target MODEL --layers 0 1 2 3 --prompts FILE --out DIR

    tasks.py ──> tokenizer ──> target ──> draft
                               phase 1    next tokens
                               phase 2    distillation

1. The tokenizer is a byte-level BPE, trained on the training tasks. Digits are single tokens, and
   a newline never joins what follows it.
2. The target has Llama's architecture with grouped-query attention. It learns to predict the next
   token of the training split, which has no end: no example is seen twice.
3. The draft is a smaller model that learns the same. Then it is distilled (DistillSpec: Zhou et
   al., arXiv 2310.08461). The target samples answers, both models score them, and the draft learns
   the target's distribution under the forward KL divergence. The rate at which speculative sampling
   accepts the draft's tokens is the mean of 1 - TVD(target, draft) over positions (Leviathan et
   al., arXiv 2211.17192, Cor. 3.6).

To add a model, give it a line in SIZES and in TOKENS, a function like `make_draft` that trains and
saves it, and a name in STAGES.
"""
import argparse
import itertools
import random
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import tasks

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from cli.commands import main  # noqa: E402
from cli.main import run_script  # noqa: E402
from cli.text import Parser  # noqa: E402
import common  # noqa: E402  (the path is set above)
from support.engine import depth_of, require  # noqa: E402
from support.files import save_model  # noqa: E402
from support.layers import take_layers  # noqa: E402
from support.parts import score_with  # noqa: E402
from training.loop import (Training, divergence, divergence_in_parts, low_precision,  # noqa: E402
                           warm_linear)
from training.texts import (answer_all, digest, prepare_training, read_answers,  # noqa: E402
                            sample_alike)
from training.settings import Pair  # noqa: E402

MIX = {"sql": 0.35, "math": 0.4, "code": 0.25}  # each task's share of the examples
# The shares of the target's second phase have more math, since arithmetic is learnt last.
LATER = {"sql": 0.15, "math": 0.6, "code": 0.25}
SIZES = {"target": dict(model_type="llama", hidden_size=256, intermediate_size=704,
                        num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4),
         "draft": dict(model_type="llama", hidden_size=128, intermediate_size=352,
                       num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
         # Of four layers three have the gated delta rule, and the last one has attention.
         "recurrent": dict(model_type="qwen3_5_text", hidden_size=128, intermediate_size=256,
                           num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
                           head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4,
                           linear_key_head_dim=32, linear_value_head_dim=32)}
PROMPT_WEIGHT = 0.1  # Prompts are mostly chance, so their tokens count less than the answers'.
CONTEXT = 2048
# How many tokens each training of an embedded model reads:
TOKENS = {"target": 6_000_000, "target-later": 3_000_000, "draft": 1_500_000, "distilled": 800_000,
          "recurrent": 1_600_000, "recurrent-later": 400_000}
POOL = 512  # the examples among which a batch of like length is chosen

Row = tuple[list[int], list[float]]  # token ids, and each token's weight in the loss


# ---------------------------------------------------------------------- tokenizer and models

def make_tokenizer(vocabulary: int = 1536) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `vocabulary` tokens on the training tasks."""
    # No other step takes examples of seed -1.
    text = [e.prompt + e.answer for task in tasks.TASKS
            for e in tasks.take(task, "train", 20000, seed=-1)]
    tokenizer = Tokenizer(BPE())
    # A piece is a newline, a word, a digit, other signs, or blanks. No token spans two pieces, so a
    # prompt that ends at a newline ends at a token boundary.
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


def make_model(name: str, tokenizer, device: str):
    """Make a model with random weights, of the size that SIZES has under this name."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **SIZES[name], vocab_size=len(tokenizer), max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return AutoModelForCausalLM.from_config(config).to(device).eval()  # as loaded models are


# ------------------------------------------------------------------------------------- batches

def mix_examples(split: str, seed: int, mix: dict[str, float] = MIX):
    """Yield examples of all tasks without end.

    split  train or test
    seed   another seed gives other examples
    mix    each task's share of the examples
    """
    sources = {task: tasks.make_examples(task, split, seed) for task in tasks.TASKS}
    rng = random.Random(seed)
    while True:
        yield next(sources[rng.choices(list(mix), mix.values())[0]])


def pad_rows(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put rows into one batch; return ids [B, T] and weights [B, T], both on the CPU.

    Rows are filled up on the right with token 0, whose weight is 0. No token of a row attends to
    what fills it up, since the models are causal.
    """
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([w + [0.0] * (width - len(w)) for _, w in rows])


def encode_examples(tokenizer, prompts: list[str], answers: list[str]) -> list[Row]:
    """Encode each prompt and its answer as <s> prompt answer </s>; prompts count less."""
    prompt_ids = tokenizer(prompts)["input_ids"]
    answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
    return [(p + a + [tokenizer.eos_token_id], [PROMPT_WEIGHT] * len(p) + [1.0] * (len(a) + 1))
            for p, a in zip(prompt_ids, answer_ids)]


def sample_batch(tokenizer, split: str, size: int, mix: dict[str, float], rng: random.Random):
    """Sample a batch of about `size` tokens; its examples are alike in length.

    split    train or test
    mix      each task's share of the examples
    rng      the generator
    returns  ids and weights, as `pad_rows` does
    """
    pool = list(itertools.islice(mix_examples(split, rng.getrandbits(60), mix), POOL))
    rows = encode_examples(tokenizer, [e.prompt for e in pool], [e.answer for e in pool])
    groups, group = [], []
    for row in sorted(rows, key=lambda row: len(row[0])):
        if (len(group) + 1) * len(row[0]) > size and group:
            groups.append(group)
            group = []
        group.append(row)
    # The last group is incomplete. It counts only if there is no other.
    return pad_rows(rng.choice(groups or [group]))


def sample_answers(source, tokenizer, size: int, rng: random.Random) -> list[Pair]:
    """Sample answers to training prompts that are alike in length, about `size` tokens in all.

    source   the model that answers
    rng      the generator
    returns  pairs of a prompt and its answer of 200 tokens at most, token ids. An EOS that ended an
             answer stays
    """
    few = size // 96  # A prompt with its answer has about 96 tokens.
    pool = itertools.islice(mix_examples("train", rng.getrandbits(60)), 4 * few)
    prompts = sample_alike([e.prompt for e in pool], few, rng, len)
    ids = tokenizer(prompts)["input_ids"]
    torch.manual_seed(rng.getrandbits(60))
    return [*zip(ids, answer_all(source, {tokenizer.eos_token_id}, ids, 200, temperature=1.0))]


# -------------------------------------------------------------------------------------- losses

def next_token_loss(model, ids, weights):
    """Return the weighted mean cross-entropy, in nats, of each token given the tokens before it.

    ids, weights  [B, T], as `pad_rows` returns them
    """
    ids, weights = ids.to(model.device), weights.to(model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (loss * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()


def make_distance(target, draft):
    """Return a function that measures the mean KL(target, draft) over the answers of pairs."""
    score_target, score_draft = score_with(target), score_with(draft)
    vocab = len(draft.get_output_embeddings().weight)

    def measure(pairs: list[Pair]) -> torch.Tensor:
        with torch.no_grad():
            target_read, _ = read_answers(target, pairs)
        read, _ = read_answers(draft, pairs)
        return divergence_in_parts("forward-kl", score_target, score_draft, vocab, target_read,
                                   read).mean()
    return measure


# ----------------------------------------------------------------------------------- training

def make_optimizers(model, lr: float) -> list:
    """Make Muon for the matrices of the layers, and AdamW for embeddings, norms and the rest."""
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in trained if p.ndim != 2 or "embed" in n]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def fit(name: str, model, loss_of, held_out_loss, fingerprint: tuple, *, lr: float, steps: int,
        work: Path, models: tuple = ()) -> None:
    """Train all weights that are not frozen; the rate falls linearly to 0 after a warm-up.

    name           the name of the run and of its checkpoints
    loss_of        a function of a random generator that samples examples and gives their loss
    held_out_loss  a function like `loss_of` that samples held-out examples
    fingerprint    what the losses depend on besides the weights that are trained
    lr, steps      the learning rate and the number of updates
    work           the folder of checkpoints
    models         all models that the losses run. Default: the model itself
    """
    models = models or (model,)

    @torch.no_grad()
    def evaluate():
        with low_precision(model.device, *models):
            loss = sum(held_out_loss(random.Random(i)).item() for i in range(4)) / 4
        return {"loss": loss}, f"held-out loss {loss:.4f}"
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    Training(trained, fingerprint, name=name, steps=steps, lr=lr, rate=warm_linear,
             optimizers=make_optimizers(model, lr), folder=work, models=models
             ).train(loss_of, evaluate)


def train_on_tasks(name: str, model, tokenizer, mix: dict[str, float], size: int, *, lr: float,
                   tokens: int, work: Path) -> None:
    """Train a model on examples of the tasks.

    mix         each task's share of the examples
    size        about the number of tokens of a batch
    lr, tokens  the learning rate, and the number of tokens of all batches together
    work        the folder of checkpoints
    """
    def loss_on(split: str):
        return lambda rng: next_token_loss(model, *sample_batch(tokenizer, split, size, mix, rng))
    fit(name, model, loss_on("train"), loss_on("test"), (mix, size), lr=lr, steps=tokens // size,
        work=work)


def distil_on_tasks(name: str, target, draft, tokenizer, *, tokens: int, work: Path,
                    size: int = 4096) -> None:
    """Move the draft towards the target on answers that the target samples (DistillSpec).

    tokens  the number of tokens of all batches
    work    the folder of checkpoints
    size    about the number of tokens of a batch
    """
    measure = make_distance(target, draft)

    def loss_of(rng):
        return measure(sample_answers(target, tokenizer, size, rng))
    fit(name, draft, loss_of, loss_of, (digest(target.state_dict()), size), lr=2e-3,
        steps=tokens // size, work=work, models=(target, draft))


# ----------------------------------------------------------------------------- for any target

def make_draft_of_layers(target, layers: list[int]):
    """Make a draft of some layers of the target, in float32.

    The draft's embeddings and LM head are the target's, and frozen.
    """
    draft = take_layers(target, layers).float().requires_grad_(False)
    draft.get_decoder().requires_grad_(True)  # the LM head is not in it, but embeddings are
    draft.get_input_embeddings().requires_grad_(False)
    return draft


def distil(model, tokenizer, prompts: list[list[int]], *, layers: list[int], out: Path,
           work: Path = None, max_new_tokens: int = 200, steps: int = 4000, batch: int = 2,
           lr: float = 3e-3) -> None:
    """Make a draft for any model out of some of its layers.

    They learn the model's distribution on its own greedy answers. A stopped run goes on.

    layers: which layers of the model, from 0, in ascending order
    lr:     the highest learning rate
    """
    last = depth_of(model) - 1
    require(layers == sorted({*layers} & {*range(last + 1)}), "layers",
            f"different numbers from 0 to {last} in ascending order", " ".join(map(str, layers)))
    work, data, held_out = prepare_training(model, tokenizer, prompts, out, work, seed=0,
                                            max_new_tokens=max_new_tokens)
    draft = make_draft_of_layers(model, layers)
    measure = make_distance(model, draft)

    def loss_on(pairs: list[Pair], rng: random.Random) -> torch.Tensor:
        return measure(rng.sample(pairs, min(batch, len(pairs))))
    fit("distil", draft, lambda rng: loss_on(data, rng), lambda rng: loss_on(held_out, rng),
        (digest(model.state_dict()), layers, batch, data), lr=lr, steps=steps, work=work,
        models=(model, draft))
    guessed, accepted = measure_draft(model, draft, held_out)
    print(f"on {len(held_out)} held-out answers: {guessed:.3f} of the tokens guessed, 1 - TVD "
          f"{accepted:.3f}")
    save_model(out, draft.to(torch.bfloat16), tokenizer)


@torch.inference_mode()
def measure_draft(target, draft, pairs: list[Pair]) -> tuple[float, float]:
    """Measure on the tokens of answers how often two models agree.

    returns  the share of tokens that both choose, and the mean of 1 - TVD
    """
    score_target, score_draft = score_with(target), score_with(draft)
    right = accepted = total = 0
    for pair in pairs:
        p = score_target(read_answers(target, [pair])[0])
        q = score_draft(read_answers(draft, [pair])[0])
        right += (p.argmax(-1) == q.argmax(-1)).sum().item()
        accepted += (1 - divergence("tvd", p, q)).sum().item()
        total += len(p)
    return right / total, accepted / total


# ------------------------------------------------------------------------------------- stages

def make_target(tokenizer, args: argparse.Namespace, name: str = "target") -> None:
    """Train the target, or another model of this name, in two phases of different examples."""
    target = make_model(name, tokenizer, args.device)
    for phase, mix, lr in (name, MIX, 1.5e-3), (f"{name}-later", LATER, 5e-4):
        train_on_tasks(phase, target, tokenizer, mix, 3072, lr=lr, tokens=TOKENS[phase],
                       work=args.work)
    shutil.rmtree(HERE / name, ignore_errors=True)  # the older model
    save_model(HERE / name, target.to(torch.bfloat16), tokenizer)


def make_draft(tokenizer, args: argparse.Namespace) -> None:
    """Train a draft on tasks, then distil it from the target."""
    target, _ = common.load(HERE / "target", args.device, "float32")
    draft = make_model("draft", tokenizer, args.device)
    train_on_tasks("draft", draft, tokenizer, MIX, 4096, lr=4e-3, tokens=TOKENS["draft"],
                   work=args.work)
    distil_on_tasks("distilled", target, draft, tokenizer, tokens=TOKENS["distilled"],
                    work=args.work)
    shutil.rmtree(HERE / "draft", ignore_errors=True)
    save_model(HERE / "draft", draft.to(torch.bfloat16), tokenizer)


STAGES = {"target": make_target, "draft": make_draft,
          "recurrent": partial(make_target, name="recurrent")}


def make_embedded() -> None:
    """Run the stages that the command line asks for."""
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", choices=[*STAGES, "all"], default="all")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="folder of checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    for stage, make in STAGES.items():
        if args.stage in (stage, "all"):
            make(tokenizer, args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["distil"]:
        sys.exit(run_script(lambda: main(sys.argv[1:], methods=[], commands=[distil])))
    sys.exit(run_script(make_embedded))
