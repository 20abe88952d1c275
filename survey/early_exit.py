"""Kangaroo: a model drafts with its first layers and a trained adapter, and stops when unsure.

Liu et al., "Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting", arXiv
2404.18911, with released code in Equationliu/Kangaroo. The model stays as it is, and so does its
output, since the other layers verify what the adapter guesses. The loop is LayerSkip's
(layerskip.py).

    python -m survey.early_exit --prompt "..."
    python -m survey.early_exit train --prompts FILE --out my.safetensors
    python -m survey.early_exit --exit my.safetensors --prompt "..."

    layers 1 … E ── x ──┬── layers E + 1 … L ── norm ── LM head      p, the model's own distribution
                        └── adapter ── norm_2 ── LM head             q, from which a guess is drawn

    adapter(x) = x + Attention(norm_1(x))
    loss       = - Σ_v p(v) log q(v), the cross-entropy of q with p

The LM head is the same in both lines. The adapter is a decoder layer without its MLP, so it reads
the context. It stands after the first E layers as one more layer, and their cache holds its keys
and values too. Only norm_1, the attention and norm_2 are trained.

The two early exits of the paper's title are these. The first one is that a guess is made after E
layers. The second one ends a draft when the adapter is unsure of a guess.

Departures:
- Beginning. Released code: all weights are random, and norm_2 begins with ones. Here: norm_2 begins
  as a copy of the model's last norm, and the output matrix of the attention as 0. Why: at first q
  is what LayerSkip's exit would say, so fewer steps are needed.
- Sampling. Released code: only greedy decoding. Here: sampling too, exactly. Why: LayerSkip's loop
  has the rule of speculative sampling already.
- Training. Paper: ShareGPT, and a rate of 5e-5 in the released code. Here: the model's own greedy
  answers, and 2e-3 with a cosine. Why: the adapter guesses these answers, and small models need a
  higher rate.
"""
import copy
from pathlib import Path
from typing import Callable, Iterator

from common import Sampler, greedy
from support.engine import MODELS, EngineLM, depth_of, run_as_program
from support.layers import make_config, name_norm, split_layers
from support.parts import Part, load_trained, match_type, score_with, seeded
from survey.layerskip import self_speculate
from training.loop import divergence_in_parts, fit_on_texts, report_right
from training.texts import Text, pad_texts, prepare_training

import torch
from transformers.models.llama import modeling_llama as llama

EXIT = f"{MODELS}/exit.safetensors"


# --------------------------------------------------------------------- the exit and its loss

class Exit(Part):
    """Be the layer after the first E layers of a model: the adapter, an attention without an MLP.

    model  the model that the exit is for. The exit begins with a copy of its last norm
    E      how many layers stand before the exit
    norm   norm_2, which stands between the adapter and the LM head
    vocab  None, since it can guess all tokens of the model
    """
    title = "an early exit"
    vocab = None

    def __init__(self, model, E: int):
        super().__init__()
        config = make_config(model)
        config._attn_implementation = "grouped"  # the attention of support/engine.py
        decoder = model.get_decoder()
        self.E = E
        self.before = llama.LlamaRMSNorm(config.hidden_size)  # norm_1
        self.attention = llama.LlamaAttention(config, E)
        self.rotary = llama.LlamaRotaryEmbedding(config)
        self.norm = copy.deepcopy(decoder._modules[name_norm(decoder)]).float()  # norm_2
        # At first the attention adds nothing, so training begins with the exit that the model has.
        torch.nn.init.zeros_(self.attention.o_proj.weight)
        self.requires_grad_(True).to(model.device)

    def header(self) -> dict:
        return {"E": self.E}

    def forward(self, hidden_states: torch.Tensor, *, position_ids, attention_mask=None,
                past_key_values=None, layer_past=None, **_) -> torch.Tensor:
        """Run the adapter as the models of transformers run their layers.

        hidden_states    x, [B, n, d]
        position_ids     [1, n]. Granite 4 does not hand them to its layers, and so is refused
        attention_mask   as `attention_mask` of common.py makes it. None: each row sees those before
        past_key_values  the cache, which some families call layer_past. None: there is no context
        returns          [B, n, d], what norm_2 reads
        """
        cache = layer_past if past_key_values is None else past_key_values
        x = self.before(hidden_states)
        added, _ = self.attention(x, self.rotary(x, position_ids), attention_mask, cache)
        return hidden_states + added


def read_exit(network: Exit, batch: list[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an exit over whole texts, and take the rows from which tokens of answers are guessed.

    network  the exit
    batch    texts, whose features are the states after layer E and those after the last norm
    returns  what the LM head reads in these rows, of the exit and of the model, [N, d] each
    """
    _, features, learns = pad_texts(batch)
    early, last = features[:, :-1].float().chunk(2, -1)  # [B, T - 1, d] each
    places = torch.arange(early.shape[1], device=early.device)[None]
    # Padding comes after a text, so no row of the text sees it.
    read = network.norm(network(early, position_ids=places))
    return read[learns], last[learns]


def exit_loss(score: Callable, network: Exit, batch: list[Text], vocab: int) -> torch.Tensor:
    """Compute the cross-entropy of an exit's distribution q with the model's own distribution p.

    score    turns what the LM head reads into logits (parts.score_with)
    network  the exit
    batch    texts, as `read_exit` takes them
    vocab    the number of logits
    returns  the mean over the tokens of the answers, in nats
    """
    read, last = read_exit(network, batch)
    return divergence_in_parts("cross-entropy", score, score, vocab, last, read).mean()


# ---------------------------------------------------------------------------------- decoding

def early_exit(target: EngineLM, prompt: list[int], *, gamma: int = 6, threshold: float = 0.6,
               exit: str = EXIT, trained: Exit | None = None, sample: Sampler = greedy,
               log: list | None = None) -> Iterator[list[int]]:
    """Draft with the first layers and a trained exit, and verify with the other layers.

    The exit stands before the frozen LM head. The output is the model's own, exactly.

    gamma:     the most tokens that are drafted in a round, 1 or more
    threshold: a draft ends after a guess that had a smaller draft probability than this number, by
               the exit's distribution before temperature, top-k and top-p, 0 or more
    exit:      the file of an exit, made by `python -m survey.early_exit train`

    Yields chunks of 1 to gamma + 1 tokens; logs {"guessed", "accepted", "layers"} a round.

    In the log "layers" is how many layers ran one after the other, where the adapter counts as
    half a layer. In Python, `trained` may be an Exit, which takes the place of the file.
    """
    trained = trained or target.once(load_exit, exit, target.model)
    early, late = target.once(split_layers, target, trained.E, trained)
    yield from self_speculate(target, early, late, prompt, gamma, threshold, sample, log)


# ------------------------------------------------------------------------------------ training

@torch.inference_mode()
def evaluate(score: Callable, network: Exit, texts: list[Text]) -> tuple[dict, str]:
    """Measure how often an exit's likeliest token is the model's, as `Training.train` asks for it.

    The arguments are those of `exit_loss`.
    """
    both = [read_exit(network, [text]) for text in texts]
    return report_right([score(read).argmax(-1) == score(last).argmax(-1) for read, last in both])


def train(model, tokenizer, prompts: list[list[int]], *, out: Path, work: Path = None, E: int = 2,
          max_new_tokens: int = 200, steps: int = 2000, batch: int = 16, lr: float = 2e-3,
          seed: int = 0) -> None:
    """Train an exit for a frozen model, on the model's own answers to prompts.

    A stopped run goes on where it was.

    E:     how many layers stand before the exit, 1 or more
    lr:    the learning rate at the beginning, which falls along a cosine. 2e-3 was tried on 10M
           parameters, and no other rate
    """
    with seeded(seed):
        network = Exit(model, E)
    # Refuse an E or a model that does not fit. What is trained stays float32, so a copy is checked.
    split_layers(EngineLM(model), E, match_type(copy.deepcopy(network), model))
    lessons = prepare_training(model, tokenizer, prompts, out, work, max_new_tokens, seed)
    model.requires_grad_(False)
    score, V = score_with(model), len(model.get_output_embeddings().weight)
    fit_on_texts(network, model, [E, depth_of(model)], (), lessons,
                 lambda texts, _: exit_loss(score, network, texts, V),
                 lambda texts: evaluate(score, network, texts), name="exit", batch=batch, out=out,
                 steps=steps, lr=lr, seed=seed)


# ------------------------------------------------------------------------------------- its file

def load_exit(path: str | Path, model) -> Exit:
    """Load an exit that `train` made for this model.

    path     the file
    model    the model
    returns  the exit. InputError if the file is damaged, or for another model
    """
    return load_trained(path, Exit.title, model, lambda header: Exit(model, header["E"]))


COMMAND_LINE = dict(methods=[early_exit], commands=[train], ranges={"gamma": (1, 2, 3, 4, 5, 6, 8)})

if __name__ == "__main__":
    run_as_program(__file__)
