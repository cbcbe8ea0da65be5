"""Hand-made bugs of `checks`, file by file."""

from mutant import Mutant

CHECKS = (
    # checks/calibration.py
    Mutant(
        "calibrate: sequences with sinks beyond the near blocks are thought to have a far field",
        "checks/calibration.py",
        "return (sinks // near + reach + 1) * near if causal else",
        "return max((reach + 1) * near, sinks) if causal else",
        "tests/models/test_calibrated.py -k 'all_exact'",
    ),
    # checks/data.py
    Mutant(
        "hostile: a picture may be of any size",
        "checks/data.py",
        "if width * height > MOST_PIXELS:",
        "if False:",
        "tests/test_hostile_files.py -k 'claim_too_much'",
    ),
    # checks/engine.py
    Mutant(
        "forward mode is not refused",
        "checks/engine.py",
        "forward_ad.unpack_dual(tensor).tangent is not None",
        "False",
        "tests/checks/test_checks.py -k 'transforms and dual'",
    ),
    Mutant(
        "operators: sizes are not compared",
        "checks/engine.py",
        "not all(map(_fits, tensor.shape, shape))",
        "False",
        "tests/kernels/cpu/test_gate.py -k 'called_directly'",
    ),
    Mutant(
        "operators: any dtype",
        "checks/engine.py",
        "if tensor.dtype not in dtypes:",
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'called_directly'",
    ),
    Mutant(
        "operators: blocks that do not exist",
        "checks/engine.py",
        "if low < 0 or high > most:",
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'blocks_that_do_not'",
    ),
    # checks/extras.py
    Mutant(
        "a missing module of ours is called a missing extra",
        "checks/extras.py",
        '        if package == "subquad":\n            raise  # ',
        "        if False:\n            raise  # ",
        "tests/test_package.py -k 'our_own'",
    ),
    # checks/features.py
    Mutant(
        "states: features of another function",
        "checks/features.py",
        "if far_sum.shape[2] != features:",
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'another_function'",
    ),
    Mutant(
        "proposals of any shape",
        "checks/features.py",
        '        if tensor.shape != shape:\n            raise ShapeError(f"favor: {name} of the proposal',
        '        if False:\n            raise ShapeError(f"favor: {name} of the proposal',
        "tests/features/test_proposals.py -k 'do_not_fit'",
    ),
    # checks/layers.py
    Mutant(
        "padding mask not inverted",
        "checks/layers.py",
        "return ~padding",
        "return padding",
        "tests/nn/test_nn.py -k 'multihead_is_torchs or encoder_layer'",
    ),
    Mutant(
        "any mask passes for causal",
        "checks/layers.py",
        "if mask.shape != causal.shape or not plain or not torch.equal(hidden, causal):",
        "if mask.shape != causal.shape:",
        "tests/nn/test_nn.py -k 'test_errors'",
    ),
    Mutant(
        "zeros of a padding mask hide what they should show",
        "checks/layers.py",
        "return padding == 0",
        "return padding != 0",
        "tests/nn/test_nn.py -k 'mask_of_floats'",
    ),
    # checks/mixed.py
    Mutant(
        "mixed: a head may be in two parts",
        "checks/mixed.py",
        '    _each_once([part["heads"] for part in given])\n',
        "",
        "tests/mechanisms/test_mixed.py -k 'errors'",
    ),
    Mutant(
        "mixed: True is head 1",
        "checks/mixed.py",
        "type(head) is int and head >= 0",
        "isinstance(head, int) and head >= 0",
        "tests/mechanisms/test_mixed.py -k 'errors'",
    ),
    # checks/models.py
    Mutant(
        "the mask of the past is taken for that of the new tokens",
        "checks/models.py",
        "mask = mask[:, -new:].bool()",
        "mask = mask[:, :new].bool()",
        "tests/models/test_models.py -k 'generation_with_cache or piece_by_piece'",
    ),
    Mutant(
        "pages: a masked model may have them",
        "checks/models.py",
        "        if not mechanism.supports_bidirectional:\n",
        "        if False:\n",
        "tests/mechanisms/test_pages.py -k errors",
    ),
    # checks/pages.py
    Mutant(
        "pages: the window ends within a page",
        "checks/pages.py",
        'if count("pages", "window", value, minimum=0) % page:',
        'if count("pages", "window", value, minimum=0) % 1:',
        "tests/mechanisms/test_pages.py -k errors",
    ),
    Mutant(
        "pages: a state may say that more waits than there is room",
        "checks/pages.py",
        "if not 0 <= waiting <= room:",
        "if not 0 <= waiting:",
        "tests/kernels/cpu/test_gate.py -k contradict",
    ),
    # checks/runs.py
    Mutant(
        "records: a changed run.json is believed",
        "checks/runs.py",
        '    if found != wanted:\n        raise CheckpointError(\n            f"{path}: is not what was written, its',
        '    if False:\n        raise CheckpointError(\n            f"{path}: is not what was written, its',
        "tests/training/test_training.py -k 'a_damaged_record_is_seen'",
    ),
    Mutant(
        "hostile: a damaged run.json is a traceback",
        "checks/runs.py",
        "(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)",
        "(OSError, TypeError, KeyError)",
        "tests/training/test_damages.py -k 'test_damages'",
    ),
    Mutant(
        "a checkpoint that cannot be loaded says nothing",
        "checks/runs.py",
        'str(error).strip().partition("\\n")[0] or type(error).__name__',
        'str(error).strip().partition("\\n")[1] or type(error).__name__',
        "tests/training/test_trainer.py -k 'why_a_checkpoint'",
    ),
    # checks/states.py
    Mutant(
        "states: of another precision, as they are",
        "checks/states.py",
        "return tensor.to(wanted)",
        "return tensor",
        "tests/kernels/cpu/test_gate.py -k 'another_precision'",
    ),
    Mutant(
        "states: the maximum of no key is -inf after half precision",
        "checks/states.py",
        "_converted(op, name, tensor, wanted, k).clamp(min=field.least)",
        "_converted(op, name, tensor, wanted, k)",
        "tests/kernels/cpu/test_gate.py -k 'another_precision'",
    ),
    Mutant(
        "states: whole numbers of any dtype are converted",
        "checks/states.py",
        "if not wanted.is_floating_point or tensor.dtype not in checks.FLOAT_DTYPES:",
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'field_is_wrong'",
    ),
    Mutant(
        "states: counts without bounds",
        "checks/states.py",
        "_check_values(op, name, fitting, field)",
        "pass",
        "tests/kernels/cpu/test_gate.py -k 'lengths_out or buckets_have'",
    ),
    Mutant(
        "states: free sizes that differ",
        "checks/states.py",
        "sizes.setdefault(want, got) if isinstance(want, str)",
        "got if isinstance(want, str)",
        "tests/kernels/cpu/test_gate.py -k 'contradict'",
    ),
    Mutant(
        "states: tails of several lengths",
        "checks/states.py",
        "if min(values) != max(values):",
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'contradict'",
    ),
    Mutant(
        "states: more tokens than are kept",
        "checks/states.py",
        "if value > most:",
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'contradict'",
    ),
    # checks/tensors.py
    Mutant(
        "linformer: padding on the left is let through",
        "checks/tensors.py",
        "late = mask[:, 1:] & ~mask[:, :-1]",
        "late = mask[:, 1:] & ~mask[:, 1:]",
        "tests/mechanisms/test_linformer.py -k 'word_for_word and (left or holes)'",
    ),
)
