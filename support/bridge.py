"""This file lets a method of this project decode inside transformers' own `generate`.

    model.generate(ids, custom_generate=run_method, method=speculative, draft=small)

transformers prepares the prompt, the settings, and the criteria that end an answer. Then it calls
`run_method` instead of its own loop, or a function of yours that calls `run_method`.

`generate` does not pass on its argument `tokenizer`, so it refuses `stop_strings` and token healing
itself. A StopStringCriteria that you make, and give as `stopping_criteria`, works.
"""
import inspect

import torch
import torch.nn.functional as F
from transformers import GenerationMixin

from common import CachedLM, InputError, Sampler, context_length

GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
# transformers prepares these inputs for its own loop. A method makes its cache and positions.
PREPARED = ("attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache")
PADDING = 512  # models with one tokenizer have tables of embeddings whose rows differ by up to this


class Padded(CachedLM):
    """A draft that has no embeddings of the last tokens of the target, and never guesses them."""

    def run_model(self, inputs: torch.Tensor, *how) -> torch.Tensor:
        # A text that has such a token is another text to the draft, with its own last token there.
        logits = super().run_model(inputs.clamp(max=len(self.weight) - 1), *how)
        return F.pad(logits, (0, self.vocab - logits.shape[-1]), value=-torch.inf)


def find_generate() -> dict:
    """Return the local names of the `generate` that runs: what the user gave, not yet prepared."""
    frame = inspect.currentframe()
    while frame and frame.f_code is not GENERATE:
        frame = frame.f_back
    if frame is None:
        raise InputError("expected to be called by `generate`, as its `custom_generate`")
    return frame.f_locals


def run_method(model, input_ids: torch.Tensor, logits_processor, stopping_criteria,
               generation_config, *, method, draft=None, options: dict = {}, **model_kwargs):
    """Decode with a method of this project. `generate` calls this function.

    method    the method. It is an argument of `generate`, and so are the next two
    draft     a small model with the same tokenizer, for a method that needs one
    options   arguments of the method, as {"gamma": 4}
    returns   the tokens of the prompt and of the answer, [1, n]

    The other arguments are made by transformers. Temperature, top-k, top-p and other warpers of the
    logits are honoured, and torch.manual_seed repeats samples. Stopping criteria are asked after
    each token, without scores, and then a streamer gets it. A setting that the method cannot honour
    raises an InputError.
    """
    config, takes = generation_config, inspect.signature(method).parameters
    kinds = {name: x.annotation for name, x in takes.items() if x.kind is x.POSITIONAL_OR_KEYWORD}
    caller = find_generate()
    streamer = caller["streamer"]
    given = {name: x for name, x in model_kwargs.items() if name not in PREPARED}
    given |= {name: caller["kwargs"].get(name) for name in ("position_ids", "past_key_values")}
    given["assistant_model"] = caller["assistant_model"]
    refused = [name for name, x in given.items() if x is not None]
    # A warper reads only the logits of a token. Other processors read the text before it too.
    names = [type(x).__name__ for x in logits_processor]
    refused += [x for x in names if not (config.do_sample and x.endswith("Warper"))]
    mask = model_kwargs.get("attention_mask")  # some versions give one of all tokens
    masked = model.config._attn_implementation in ("eager", "sdpa", "grouped", "invariant")
    mode, prepare = config.get_generation_mode(), model.prepare_inputs_for_generation
    asked = {"several texts": len(input_ids) > 1, "padding": mask is not None and not mask.all(),
             mode: mode not in ("greedy_search", "sample"),
             # PEFT puts them before the text with a function of its own.
             "tuned prompts": getattr(prepare, "__self__", None) is not model,
             "return_dict_in_generate": config.return_dict_in_generate,
             "no draft" if draft is None else "a draft": (draft is None) == ("draft" in kinds),
             f"max_length {config.max_length}": config.max_length > context_length(model),
             "attention without masks": not (masked and model._supports_attention_backend)}
    refused += [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise InputError(f"expected what the method can honour, got {', '.join(refused)}")
    # Without sampling the temperature is 0, and nothing is warped.
    sample = Sampler(1.0 if config.do_sample else 0.0, seed=torch.randint(2 ** 62, ()).item())
    sample.warp = logits_processor
    if "eos" in takes and config.eos_token_id is not None:
        options = {"eos": {*torch.tensor([config.eos_token_id]).flatten().tolist()}} | options
    lms = [kinds[role](lm) for role, lm in (("target", model), ("draft", draft)) if lm is not None]
    if draft is not None and 0 < lms[0].vocab - lms[1].vocab <= PADDING:
        lms[1] = type("Padded", (Padded, kinds["draft"]), {})(draft)
        lms[1].vocab = lms[1].full_vocab = lms[0].vocab
    for chunk in method(*lms, prompt=input_ids[0], sample=sample, **options):
        for token in chunk:
            input_ids = torch.cat([input_ids, input_ids.new_tensor([[token]])], 1)
            if streamer is not None:
                streamer.put(input_ids[0, -1:].cpu())
            if stopping_criteria(input_ids, None).all():
                if streamer is not None:
                    streamer.end()
                return input_ids
