"""Hand-made bugs of `diagnose`, of the commands around calibration, and of the warning in training."""

from mutant import Mutant

PROBES, DIAGNOSIS, VERDICTS = "diagnostics/probes.py", "diagnostics/diagnose.py", "diagnostics/verdicts.py"
BASELINES, COMMON, CALLBACKS = "recording/baselines.py", "cli/common.py", "training/callbacks.py"


def diagnose(words: str) -> str:
    return f"tests/test_diagnose.py -k '{words}'"


def saved(words: str) -> str:
    return f"tests/test_calibrated_models.py -k '{words}'"


DIAGNOSE = (
    Mutant(
        "diagnose: the mean of all values, visible or not",
        BASELINES,
        "normalised(sample.seen.to(sample.values.dtype))",
        "normalised(torch.ones_like(sample.seen).to(sample.values.dtype))",
        diagnose("written_down and blocks and True"),
    ),
    Mutant(
        "diagnose: the near baseline is the far field",
        BASELINES,
        "sample.seen & ~far_pairs(",
        "sample.seen & far_pairs(",
        diagnose("written_down and blocks and False-False"),
    ),
    Mutant(
        "diagnose: shares of features are not squared",
        PROBES,
        "torch.stack(shares).square().sum(-1)",
        "torch.stack(shares).sum(-1)",
        diagnose("written_down and blocks and False-False"),
    ),
    Mutant(
        "diagnose: features are summed over near keys too",
        PROBES,
        "far = (sample.seen & far_pairs(mechanism, call, sample.rows))[0, 0]",
        "far = (sample.seen & (far_pairs(mechanism, call, sample.rows) | True))[0, 0]",
        diagnose("written_down and blocks and False-False"),
    ),
    Mutant(
        "diagnose: features that vanish beside others stay lost",
        PROBES,
        "        out[row] = log_psi[far[row]].logsumexp(0)",
        "        pass",
        diagnose("any_size"),
    ),
    Mutant(
        "diagnose: rows of padding are sampled",
        "recording/samples.py",
        "places = call.real[0].nonzero()[:, 0]",
        "places = torch.arange(call.q.shape[2])",
        diagnose("rows_are_real"),
    ),
    Mutant(
        "diagnose: the transform is forgotten",
        PROBES,
        "features.query_transform is not None:",
        "features.query_transform is not None and False:",
        diagnose("written_down and transform and False-False"),
    ),
    Mutant(
        "diagnose: layers are asked what an exact model would ask them",
        DIAGNOSIS,
        'op="diagnose", exact=False',
        'op="diagnose", exact=True',
        diagnose("really_asked"),
    ),
    Mutant(
        "diagnose: a trial is measured on what it was fitted to",
        DIAGNOSIS,
        "found[1::2] or found",
        "found[::2]",
        diagnose("other_half"),
    ),
    Mutant(
        "diagnose: calibrated features are tried again",
        DIAGNOSIS,
        "if all(fine) or settled(mechanism) else",
        "if all(fine) else",
        diagnose("not_told_to_calibrate"),
    ),
    Mutant(
        "diagnose: one baseline that does better is enough to blame features",
        VERDICTS,
        "CLEARLY * max(baselines)",
        "CLEARLY * min(baselines)",
        diagnose("what_is_good"),
    ),
    Mutant(
        "diagnose: fresh features count as fitted",
        VERDICTS,
        "    fresh.reset_parameters()\n",
        "    fresh.reset_parameters()\n    return True\n",
        diagnose("settled"),
    ),
    Mutant(
        "calibrate: heads that never look far away have means of nothing",
        "calibration/moments.py",
        "if bool(looks.all()):",
        "if True:",
        diagnose("never_look_far"),
    ),
    Mutant(
        "calibrate: a transform of before stays in the config",
        "calibration/note.py",
        '            chosen.pop("transform", None)\n',
        "",
        saved("transform"),
    ),
    Mutant(
        "calibrate: half precision is fitted in half precision",
        "calibration/fitted.py",
        "[call.precise() for call in calls]",
        "list(calls)",
        saved("fitted_in_float32"),
    ),
    Mutant(
        "calibrate: learned features of a layer are one map for all heads",
        "nn/self_attention.py",
        "if not drawn and not isinstance(mechanism, FavorAttention):",
        "if not drawn:",
        saved("come_back and hedgehog or fresh"),
    ),
    Mutant(
        "calibrate: sequences with sinks beyond the near blocks are thought to have a far field",
        "checks/calibration.py",
        "return (sinks // near + reach + 1) * near if causal else",
        "return max((reach + 1) * near, sinks) if causal else",
        saved("all_exact"),
    ),
    Mutant(
        "command: calibrate overwrites",
        "cli/calibrate.py",
        "    checks.new_folder(out)\n",
        "",
        saved("stays"),
    ),
    Mutant(
        "command: padding counts as tokens",
        COMMON,
        "pad_sequence([torch.ones_like(ids) for ids in some], batch_first=True)",
        "torch.ones_like(pad_sequence(some, batch_first=True))",
        diagnose("is_the_function"),
    ),
    Mutant(
        "progress: a bar that nobody wanted",
        "recording/progress.py",
        "progress and sys.stderr.isatty() and",
        "sys.stderr.isatty() and",
        diagnose("progress"),
    ),
    Mutant(
        "training: features of no use are told at every evaluation",
        CALLBACKS,
        "            self.warned = True\n",
        "",
        "tests/test_training.py -k told_once",
    ),
    Mutant(
        "training: models that do not look at anything yet are warned of",
        "diagnostics/uniform.py",
        "if error > LARGE and error >= USELESS * uniform:",
        "if error > LARGE or error >= USELESS * uniform:",
        "tests/test_training.py -k 'no_use or watching'",
    ),
)
