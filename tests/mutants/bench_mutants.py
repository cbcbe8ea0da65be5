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
    # bench/bill
    Mutant(
        "bill: far fields alone keep near blocks",
        "bench/bill/rows.py",
        '| {"near": 0, "sinks": 0}',
        '| {"near": options["near"], "sinks": 0}',
        "tests/bench/test_bill.py -k off_and_alone",
    ),
    Mutant(
        "bill: far fields alone are not the fitted ones",
        "bench/bill/rows.py",
        "                _give_features(new, old)\n",
        "                pass\n",
        "tests/bench/test_bill.py -k off_and_alone",
    ),
    Mutant(
        "bill: far fields stay on",
        "bench/bill/rows.py",
        "            stack.enter_context(without_far_field(layer))\n",
        "            pass\n",
        "tests/bench/test_bill.py -k off_and_alone",
    ),
    Mutant(
        "bill: exact attention is not exact",
        "bench/bill/rows.py",
        "    with without_mechanisms(model):\n        yield",
        "    yield",
        "tests/bench/test_bill.py -k exact_and_converted",
    ),
    Mutant(
        "bill: the window has more memory",
        "bench/bill/bill.py",
        "self.length * sizes[1] // sizes[0]",
        "2 * self.length * sizes[1] // sizes[0]",
        "tests/bench/test_bill.py -k controls",
    ),
    Mutant(
        "bill: errors are over tokens",
        "bench/bill/texts.py",
        ".view(-1, BLOCK).mean(1)",
        ".view(-1)",
        "tests/bench/test_bill.py -k logarithms",
    ),
    Mutant(
        "bill: copies are judged as a whole",
        "bench/bill/texts.py",
        "[distance:][:COPIED]",
        "[:COPIED]",
        "tests/bench/test_bill.py -k come_again",
    ),
    Mutant(
        "bill: what changes logits afterwards is passed over",
        "bench/bill/texts.py",
        "return bool(behind) and torch.equal(model.get_output_embeddings()(behind[0][:, -1:]), last)",
        "return True",
        "tests/bench/test_bill.py -k losses",
    ),
    Mutant(
        "bill: a number stands elsewhere",
        "bench/bill/texts.py",
        "distance - told.shape[1] - asked.shape[1]",
        "distance - told.shape[1]",
        "tests/bench/test_bill.py -k told_and_asked",
    ),
    Mutant(
        "bill: a bill of other texts is gone on with",
        "bench/bill/bill.py",
        'found["plan"] == plan and',
        "",
        "tests/bench/test_bill.py -k measured_again",
    ),
    Mutant(
        "bill: what is known is measured again",
        "bench/bill/bill.py",
        "if row not in self.bill.rows and has_parts(self.model, row):",
        "if has_parts(self.model, row):",
        "tests/bench/test_bill.py -k measured_again",
    ),
    Mutant(
        "bill: what has nothing beside its features is asked without them",
        "bench/bill/rows.py",
        "return [layer for layer in favor if layer.options.near or layer.options.sinks]",
        "return favor",
        "tests/bench/test_bill.py -k nothing_beside",
    ),
    Mutant(
        "bill: the slowest token",
        "bench/bill/speed.py",
        "min(times), times",
        "max(times), times",
        "tests/bench/test_bill.py -k lengths",
    ),
    Mutant(
        "bill: means of padding",
        "bench/bill/masked.py",
        "(hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True)",
        "hidden.mean(1)",
        "tests/bench/test_bill.py -k encoders",
    ),
    Mutant(
        "bill: special tokens are guessed, too",
        "bench/bill/masked.py",
        "chosen &= ~torch.isin(",
        "chosen |= torch.isin(",
        "tests/bench/test_bill.py -k guessed",
    ),
    Mutant(
        "bill: a number that is nearer than said",
        "bench/bill/texts.py",
        "if told.shape[1] + asked.shape[1] > distance:",
        "if told.shape[1] > distance + 1000:",
        "tests/bench/test_bill.py -k told_and_asked",
    ),
    Mutant(
        "bill: a sequence is its own neighbour",
        "bench/bill/masked.py",
        ".fill_diagonal_(-2)",
        "",
        "tests/bench/test_bill.py -k guessed",
    ),
)
