"""This file lets a method of this project decode inside transformers' own `generate`.

    model.generate(ids, custom_generate=run_method, method=speculative, draft=small)

transformers prepares the prompt, the settings, and the criteria that end an answer. Then it calls
`run_method` instead of its own loop.
"""
import inspect

import torch

from common import InputError, Sampler, context_length

# transformers prepares these inputs for its own loop. A method makes its cache and positions.
PREPARED = ("attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache")


def run_method(model, input_ids: torch.Tensor, logits_processor, stopping_criteria,
               generation_config, *, method, draft=None, options: dict = {}, **model_kwargs):
    """Decode with a method of this project. `generate` calls this function.

    method    the method. It is an argument of `generate`, and so are the next two
    draft     a small model with the same tokenizer, for a method that needs one
    options   arguments of the method, as {"gamma": 4}
    returns   the tokens of the prompt and of the answer, [1, n]

    The other arguments are made by transformers. Temperature, top-k, top-p and other warpers of the
    logits are honoured, and torch.manual_seed repeats samples. Stopping criteria are asked after
    each token, without scores. A setting that the method cannot honour raises an InputError.
    """
    config, mode = generation_config, generation_config.get_generation_mode()
    kinds = method.__annotations__  # of the models that the method takes, by "target" and "draft"
    # `generate` hands these two to no function, so they are looked up where it keeps them.
    caller = inspect.currentframe().f_back.f_locals
    given = model_kwargs | {name: caller.get(name) for name in ("streamer", "assistant_model")}
    refused = [name for name, x in given.items() if x is not None and name not in PREPARED]
    # A warper reads only the logits of a token. Other processors read the text before it too.
    names = [type(x).__name__ for x in logits_processor]
    refused += [x for x in names if not (config.do_sample and x.endswith("Warper"))]
    mask = model_kwargs.get("attention_mask")  # some versions give one of all tokens
    masked = model.config._attn_implementation in ("eager", "sdpa", "grouped")
    asked = {"several texts": len(input_ids) > 1, "padding": mask is not None and not mask.all(),
             mode: mode not in ("greedy_search", "sample"),
             "return_dict_in_generate": config.return_dict_in_generate,
             "no draft" if draft is None else "a draft": (draft is None) == ("draft" in kinds),
             f"max_length {config.max_length}": config.max_length > context_length(model),
             "attention without masks": not (masked and model._supports_attention_backend)}
    refused += [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise InputError(f"expected what {method.__name__} can honour, got {', '.join(refused)}")
    # Without sampling the temperature is 0, and nothing is warped.
    sample = Sampler(config.temperature * config.do_sample, seed=torch.randint(2 ** 62, ()).item())
    sample.warp = logits_processor
    lms = [kinds[role](lm) for role, lm in (("target", model), ("draft", draft)) if lm is not None]
    for chunk in method(*lms, prompt=input_ids[0], sample=sample, **options):
        for token in chunk:
            input_ids = torch.cat([input_ids, input_ids.new_tensor([[token]])], 1)
            if stopping_criteria(input_ids, None).all():
                return input_ids
