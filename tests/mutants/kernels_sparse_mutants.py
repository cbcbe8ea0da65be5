"""Hand-made bugs of `kernels/sparse`, file by file."""

from mutant import Mutant

KERNELS_SPARSE = (
    # kernels/sparse/bands.py
    Mutant(
        "window: blocks one too few on the left",
        "kernels/sparse/bands.py",
        "before, after = (-(-steps // block) for steps in (band.back, band.ahead))",
        "before, after = (steps // block for steps in (band.back, band.ahead))",
        "tests/mechanisms/test_window.py -k 'forward_equals_reference'",
    ),
    Mutant(
        "window: all blocks are met, most of them in vain",
        "kernels/sparse/bands.py",
        "before, after = (-(-steps // block) for steps in (band.back, band.ahead))",
        "before, after = (max(line, -(-steps // block)) for steps in (band.back, band.ahead))",
        "tests/mechanisms/test_every_mechanism.py -k 'products_grow and window'",
    ),
    Mutant(
        "window: padding is seen by the last windows",
        "kernels/sparse/bands.py",
        "        alive = F.pad(alive, (left, right))\n",
        "        alive = F.pad(alive, (left, right), value=True)\n",
        "tests/mechanisms/test_window.py -k 'forward_equals_reference'",
    ),
    Mutant(
        "a dilation beyond the sequence takes memory",
        "kernels/sparse/bands.py",
        "    band = band.within(k.shape[2])\n",
        "",
        "tests/kernels/cpu/test_gate.py -k 'beyond_the_sequence and dilation'",
    ),
    # kernels/sparse/bucket_operator.py
    Mutant(
        "compilers are told that buckets give gradients like codes",
        "kernels/sparse/bucket_operator.py",
        "for t in args[3:6])",
        "for t in args[5:8])",
        "tests/kernels/test_operator.py -k 'cluster'",
    ),
    # kernels/sparse/buckets.py
    Mutant(
        "buckets: the own token is counted by its bucket too",
        "kernels/sparse/buckets.py",
        "code_high=1, round=r, skip_self=True)",
        "code_high=1, round=r)",
        "tests/mechanisms/test_buckets.py tests/models/test_buckets.py -k 'cluster and forward_equals_reference'",
    ),
    Mutant(
        "buckets: a query looks ahead within its block",
        "kernels/sparse/buckets.py",
        "low, code_low = (1, 0) if options.causal else (-UNLIMITED, -1)",
        "low, code_low = (-UNLIMITED, 0) if options.causal else (-UNLIMITED, -1)",
        "tests/mechanisms/test_buckets.py tests/models/test_buckets.py -k 'lsh and causal_means_causal'",
    ),
    Mutant(
        "buckets: the block before is not met",
        "kernels/sparse/buckets.py",
        "blocks, 1, 0 if options.causal else 1)",
        "blocks, 0, 0 if options.causal else 1)",
        "tests/mechanisms/test_buckets.py tests/models/test_buckets.py -k 'cluster and forward_equals_reference'",
    ),
    Mutant(
        "buckets: sequences share their codes",
        "kernels/sparse/buckets.py",
        "code + owner * apart",
        "code + 0 * owner",
        "tests/mechanisms/test_buckets.py tests/models/test_buckets.py -k 'lsh and batches_are_independent'",
    ),
    Mutant(
        "buckets: gradients of earlier rounds are forgotten",
        "kernels/sparse/buckets.py",
        "        dk += blocks.scatter(part.k)\n",
        "        dk = blocks.scatter(part.k)\n",
        "tests/mechanisms/test_buckets.py tests/models/test_buckets.py -k 'lsh and gradients_equal'",
    ),
    Mutant(
        "buckets: the first of all shares wins",
        "kernels/sparse/buckets.py",
        "out, log_normaliser = out.lerp_(part, share[:, None]), both",
        "out, log_normaliser = out.lerp_(part, share[:, None]), log_normaliser",
        "tests/mechanisms/test_buckets.py tests/models/test_buckets.py -k 'lsh and forward_equals_reference'",
    ),
    Mutant(
        "tiles beyond the sequence take memory",
        "kernels/sparse/buckets.py",
        "options._replace(tile=min(options.tile, q.shape[2]))",
        "options",
        "tests/kernels/cpu/test_gate.py -k 'tiles_beyond'",
    ),
    # kernels/sparse/choice.py
    Mutant(
        "pages: bounds are summed in float32",
        "kernels/sparse/choice.py",
        "count, dtype = extremes.high.shape[2], log_dtype(q)",
        "count, dtype = extremes.high.shape[2], q.dtype",
        "tests/kernels/test_choice.py -k near_ties",
    ),
    Mutant(
        "pages: the smallest keys do not count in a bound",
        "kernels/sparse/choice.py",
        "halves = torch.cat([q.relu(), (-q).relu()], -1)",
        "halves = torch.cat([q.relu(), 0 * q], -1)",
        "tests/mechanisms/test_pages.py -k 'definition_says or upper_bounds'",
    ),
    Mutant(
        "pages: ties go where topk sends them",
        "kernels/sparse/choice.py",
        "if bool(((last == next_one) & (next_one > -torch.inf)).any()):",
        "if False:",
        "tests/kernels/test_choice.py -k 'ties_go or many'",
    ),
    Mutant(
        "pages: all pages are candidates",
        "kernels/sparse/choice.py",
        "bounds = bounds.masked_fill_(place >= candidates, -torch.inf)",
        "pass",
        "tests/mechanisms/test_pages.py -k 'definition_says'",
    ),
    Mutant(
        "pages: a choice has a gradient",
        "kernels/sparse/choice.py",
        "@torch.no_grad()\ndef extremes",
        "def extremes",
        "tests/mechanisms/test_pages.py -k no_gradient",
    ),
    # kernels/sparse/groups.py
    Mutant(
        "buckets: a tile that is not full ends its code",
        "kernels/sparse/groups.py",
        "(per_run.cumsum(0) - per_run)[run] * size + within",
        "(per_run.cumsum(0) - per_run)[run] * size + within % size",
        "tests/mechanisms/test_buckets.py tests/models/test_buckets.py -k 'groups_hold'",
    ),
    # kernels/sparse/lines.py
    Mutant(
        "strided: a window's last block is not met",
        "kernels/sparse/lines.py",
        "torch.arange(min(tiles - 1, -(-high // tile)) + 1,",
        "torch.arange(min(tiles - 1, high // tile) + 1,",
        "tests/mechanisms/test_strided.py -k 'many_tiles'",
    ),
    Mutant(
        "strided: a symmetric window misses its first block",
        "kernels/sparse/lines.py",
        "- back).clamp(0, tiles - width)",
        "- back + 1).clamp(0, tiles - width)",
        "tests/mechanisms/test_strided.py -k 'many_tiles'",
    ),
    # kernels/sparse/pages.py
    Mutant(
        "pages: sinks that there are not are seen",
        "kernels/sparse/pages.py",
        "torch.where(sink < sinks, 0, ABSENT_KEY)",
        "torch.zeros_like(sink)",
        "tests/mechanisms/test_contract.py -k 'pages and forward_equals'",
    ),
    Mutant(
        "pages: chosen pages are counted from the sinks",
        "kernels/sparse/pages.py",
        "behind_sinks = chosen.flatten(2, 3) + -(-sinks // page)",
        "behind_sinks = chosen.flatten(2, 3)",
        "tests/mechanisms/test_pages.py -k definition_says",
    ),
    Mutant(
        "pages: a page before the first is the last of another head",
        "kernels/sparse/pages.py",
        "torch.where(before >= 0, front + before, count)",
        "front + before",
        "tests/mechanisms/test_contract.py -k 'pages and forward_equals'",
    ),
    # kernels/sparse/torch.py
    Mutant(
        "window: the normaliser has no gradient",
        "kernels/sparse/torch.py",
        "    shift = grad_log_normaliser.to(q.dtype)\n",
        "    shift = torch.zeros_like(grad_log_normaliser, dtype=q.dtype)\n",
        "tests/mechanisms/test_window.py -k 'one_by_one or can_be_global'",
    ),
    Mutant(
        "window: parts are averaged",
        "kernels/sparse/torch.py",
        "    shares = (log_normaliser - top.masked_fill(top == -torch.inf, 0)).exp()\n",
        "    shares = torch.ones_like(log_normaliser)\n",
        "tests/mechanisms/test_window.py -k 'can_be_global'",
    ),
    Mutant(
        "lsh: pairs count in every round they meet in",
        "kernels/sparse/torch.py",
        "hidden |= outside if r == bounds.round else outside.logical_not_()",
        "hidden |= outside if r == bounds.round else False",
        "tests/mechanisms/test_buckets.py tests/models/test_buckets.py -k 'count_once'",
    ),
    Mutant(
        "tokens see themselves in tiles that look alike",
        "kernels/sparse/torch.py",
        "        hidden |= pairs.q_place[:, None] == pairs.k_place\n",
        "        pass\n",
        "tests/mechanisms/test_window.py -k 'look_alike'",
    ),
)
