"""Hand-made bugs of `calibration`, file by file."""

from mutant import Mutant

CALIBRATION = (
    # calibration/fitted.py
    Mutant(
        "learned features start from the offset that they had",
        "calibration/training.py",
        "    features.offset_bias.zero_()\n",
        "",
        "tests/calibration/test_calibration.py -k whatever_their_offset",
    ),
    Mutant(
        "calibrate: half precision is fitted in half precision",
        "calibration/fitted.py",
        "[call.precise() for call in calls]",
        "list(calls)",
        "tests/models/test_calibrated.py -k 'fitted_in_float32'",
    ),
    # calibration/fitting.py
    Mutant(
        "draws that decide on the number of features do not follow from the seed",
        "calibration/fitting.py",
        "derived_seed(seed, draw)",
        "derived_seed(draw, seed)",
        "tests/calibration/test_calibration.py -k 'follow_from_the_seed'",
    ),
    Mutant(
        "a target without a margin",
        "calibration/fitting.py",
        "settings.target / MARGIN",
        "settings.target",
        "tests/calibration/test_calibration.py -k 'enough_features'",
    ),
    Mutant(
        "features taken over before all layers are judged",
        "calibration/fitting.py",
        "    checks.reached(settings, reports)\n",
        "",
        "tests/calibration/test_calibration.py -k 'refused'",
    ),
    Mutant(
        "measured on what was fitted",
        "calibration/fitting.py",
        "return kept, held",
        "return kept, kept",
        "tests/calibration/test_calibration.py -k 'to_fit_and_to_measure'",
    ),
    # calibration/moments.py
    Mutant(
        "moments of near pairs too",
        "calibration/moments.py",
        "(weights * (seen & far_pairs(mechanism, call, chosen)))",
        "(weights * seen)",
        "tests/features/test_proposals.py -k 'pair_by_pair'",
    ),
    Mutant(
        "calibrated proposals around the origin",
        "calibration/moments.py",
        "return shaped(mean, width * spread)",
        "return shaped(0 * mean, width * spread)",
        "tests/features/test_proposals.py -k 'come_from_the_moments'",
    ),
    Mutant(
        "keys turned like queries",
        "calibration/moments.py",
        "return _power(middle, 0.5), _power(middle, -0.5)",
        "return _power(middle, 0.5), _power(middle, 0.5)",
        "tests/features/test_proposals.py -k 'balancing'",
    ),
    Mutant(
        "a ridge that vanishes with the variance",
        "calibration/moments.py",
        "FLOOR * (variance + mean.square().mean(1))",
        "0 * variance",
        "tests/calibration/test_calibration.py -k 'one_key_alone'",
    ),
    Mutant(
        "calibrate: heads that never look far away have means of nothing",
        "calibration/moments.py",
        "if bool(looks.all()):",
        "if True:",
        "tests/diagnostics/test_diagnose.py -k 'never_look_far'",
    ),
    # calibration/note.py
    Mutant(
        "calibrate: a transform of before stays in the config",
        "calibration/note.py",
        '    options = {name: value for name, value in options.items() if name != "transform"}\n',
        "",
        "tests/models/test_calibrated.py -k 'transform'",
    ),
    Mutant(
        "mixed: parts keep their former features in the config",
        "calibration/note.py",
        'return options | {"parts": [_noted(part, given) for part, given in parts]}',
        "return options",
        "tests/models/test_mixed.py -k 'calibrated'",
    ),
    Mutant(
        "mixed: parts are counted as layers in the config",
        "calibration/note.py",
        "enumerate(outermost(model))",
        "enumerate(x for x in model.named_modules() if isinstance(x[1], Mechanism))",
        "tests/models/test_mixed.py -k 'counted_as_layers'",
    ),
    # calibration/training.py
    Mutant(
        "an offset that is not subtracted",
        "calibration/training.py",
        "torch.where(exists, exact - estimate, 0.0)",
        "torch.where(exists, exact, 0.0)",
        "tests/calibration/test_calibration.py -k 'offset'",
    ),
    Mutant(
        "a head without output divides by zero",
        "calibration/training.py",
        "(wrong * torch.where(size > 0, 1 / size, 0.0))",
        "(wrong / size)",
        "tests/calibration/test_calibration.py -k 'without_output'",
    ),
    Mutant(
        "gradients left behind",
        "calibration/training.py",
        "    optimizer.zero_grad(set_to_none=True)  # later training must not start from these gradients\n",
        "",
        "tests/calibration/test_calibration.py -k 'without_output'",
    ),
    Mutant(
        "the Gaussian kernel's keys weigh nothing in the far mass",
        "calibration/training.py",
        "    if call.gaussian:\n        logits, estimate",
        "    if False:\n        logits, estimate",
        "tests/calibration/test_calibration.py -k 'far_mass_of_the_gaussian'",
    ),
)
