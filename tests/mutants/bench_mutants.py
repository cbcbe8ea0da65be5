"""Hand-made bugs of `bench`, file by file."""

from mutant import Mutant

BENCH = (
    # bench/decoding.py
    Mutant(
        "decoding counts its warm-up",
        "bench/decoding.py",
        "            if repeat:\n",
        "            if True:\n",
        "tests/test_measure.py -k 'one_more_token'",
    ),
    # bench/fidelity_plots.py
    Mutant(
        "small ticks crowd the scale of errors",
        "bench/fidelity_plots.py",
        "    axes.minorticks_off()\n",
        "",
        "tests/test_pictures.py -k 'show'",
    ),
    # bench/inputs.py
    Mutant(
        "heavy-tailed inputs are larger than they should be",
        "bench/inputs.py",
        "(dim / spectrum.square().sum()) ** 0.5",
        "(dim * spectrum.square().sum()) ** 0.5",
        "tests/bench/test_fidelity.py -k 'sizes_of_synthetic'",
    ),
    # bench/real_heads.py
    Mutant(
        "a benchmark has longer sequences",
        "bench/real_heads.py",
        "Sizes(8, 1, 1024)",
        "Sizes(8, 1, 1025)",
        "tests/test_defaults.py -k 'frozen'",
    ),
)
