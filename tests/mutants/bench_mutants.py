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
    # bench/recall/measure.py
    Mutant(
        "features are drawn anew before anything was learned, too",
        "bench/recall/measure.py",
        "plan.redraw_every and step and step % plan.redraw_every == 0",
        "plan.redraw_every and step % plan.redraw_every == 0",
        "tests/bench/test_recall.py -k 'drawn_anew'",
    ),
    Mutant(
        "what the far field is worth is measured from nothing",
        "bench/recall/measure.py",
        "return (found[row].value - found[WINDOW].value) / gap",
        "return found[row].value / gap",
        "tests/bench/test_recall.py -k 'worth'",
    ),
    # cli/bench_recall.py
    Mutant(
        "seeds that were measured are measured again when more are asked for",
        "cli/bench_recall.py",
        ' | {"seeds": report["plan"]["seeds"]}',
        "",
        "tests/bench/test_recall.py -k 'measured_again'",
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
