"""Hand-made bugs of `conversion`, file by file."""

from mutant import Mutant

CONVERSION = (
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
)
