"""Hand-made bugs of `conversion`, file by file."""

from mutant import Mutant

CONVERSION = (
    # conversion/saved.py
    Mutant(
        "states of swapped models: padding of the first tokens for that of the new ones",
        "conversion/generation.py",
        "mask[:, -new:]",
        "mask[:, :new]",
        "tests/conversion/test_generation.py -k 'token_by_token and llama'",
    ),
    Mutant(
        "states of swapped models: arguments by place are not looked at",
        "conversion/generation.py",
        "if len(args) > 1:",
        "if len(args) > 9:",
        "tests/conversion/test_generation.py -k 'by_place'",
    ),
    Mutant(
        "states of swapped models: keys that get lost are not noticed",
        "conversion/generation.py",
        "self.awaited += keys.shape[2]",
        "self.awaited += 0",
        "tests/conversion/test_generation.py -k 'do_not_arrive'",
    ),
    Mutant(
        "states of swapped models: the cache of generate() is kept",
        "conversion/generation.py",
        "wanted = empty or ",
        "wanted = ",
        "tests/conversion/test_generation.py -k 'second_turn'",
    ),
    Mutant(
        "states of swapped models: mechanisms without one are asked all the same",
        "conversion/generation.py",
        " or not _all_have_states(model)",
        "",
        "tests/conversion/test_generation.py -k 'without_a_state'",
    ),
    Mutant(
        "states of swapped models: also where the attention is exact again",
        "conversion/generation.py",
        "model.config._attn_implementation != IMPLEMENTATION or ",
        "",
        "tests/conversion/test_generation.py -k 'exact_models'",
    ),
    Mutant(
        "states of swapped models: a model's window counts new tokens alone",
        "conversion/swap.py",
        "past=0 if layer is None else layer.tokens",
        "past=0",
        "tests/conversion/test_generation.py -k 'window_of_a_model'",
    ),
    Mutant(
        "a swapped model is saved as the exact one",
        "conversion/saved.py",
        "        config.__class__ = _swapped(type(config))\n",
        "        pass\n",
        "tests/conversion/test_saved.py -k 'comes_back_as_itself and llama'",
    ),
    Mutant(
        "transformers finds its own model_type in a converted folder",
        "conversion/saved.py",
        'base_type = base.pop("model_type")',
        'base_type = base["model_type"]',
        "tests/conversion/test_saved.py -k 'refuses_the_folder and llama'",
    ),
    Mutant(
        "a loaded model forgets the options of its layers",
        "conversion/saved.py",
        "swap_attention(self, config.attention, layer_options=config.attention_options)",
        "swap_attention(self, config.attention)",
        "tests/conversion/test_saved.py -k 'comes_back_as_itself and llama'",
    ),
    Mutant(
        "padding looks like another sequence in the row",
        "checks/models.py",
        "again = (positions[:, 1:] <= positions[:, :-1]) & real",
        "again = positions[:, 1:] <= positions[:, :-1]",
        "tests/conversion/test_conversion.py -k 'positions_of_padding'",
    ),
    # conversion/swap.py
    Mutant(
        "queries scaled twice",
        "conversion/swap.py",
        "q = q * (asked / usual)",
        "pass",
        "tests/conversion/test_conversion.py -k 'changes_nothing and opt'",
    ),
    Mutant(
        "swap: a module without weights fails",
        "conversion/swap.py",
        "itertools.chain(module.parameters(), module.buffers(), model.parameters(), model.buffers())",
        "itertools.chain(module.parameters())",
        "tests/conversion/test_conversion.py -k 'without_weights'",
    ),
    Mutant(
        "swap: a model from GGUF cannot be saved",
        "conversion/swap.py",
        "    _forget_gguf(model)\n",
        "",
        "tests/conversion/test_conversion.py -k 'gguf'",
    ),
    Mutant(
        "swap: packed weights are taken for floats",
        "conversion/swap.py",
        " and not quantizer.packed_modules",
        "",
        "tests/conversion/test_conversion.py -k 'stay_packed'",
    ),
    Mutant(
        "the usual scale is another",
        "conversion/swap.py",
        'return getattr(module, "scaling", None) or head_dim**-0.5',
        'return getattr(module, "scaling", None) or head_dim**-1.5',
        "tests/conversion/test_conversion.py -k 'usual_scale'",
    ),
    Mutant(
        "mixed: parts of swapped layers have no scale of the model",
        "conversion/swap.py",
        'return options | {"parts": [with_scale(part["attention"], part, scale) for part in parts]}',
        'return options | {"parts": parts}',
        "tests/models/test_mixed.py -k 'scale or change_nothing'",
    ),
)
