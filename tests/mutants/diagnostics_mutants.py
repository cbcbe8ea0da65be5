"""Hand-made bugs of `diagnostics`, file by file."""

from mutant import Mutant

DIAGNOSTICS = (
    # diagnostics/diagnose.py
    Mutant(
        "the table of diagnose is padded",
        "diagnostics/diagnosis.py",
        '"padding": 0,',
        '"padding": 1,',
        "tests/diagnostics/test_diagnose.py -k table",
    ),
    Mutant(
        "diagnose: layers are asked what an exact model would ask them",
        "diagnostics/diagnose.py",
        'op="diagnose", exact=False',
        'op="diagnose", exact=True',
        "tests/diagnostics/test_diagnose.py -k 'really_asked'",
    ),
    Mutant(
        "diagnose: a trial is measured on what it was fitted to",
        "diagnostics/diagnose.py",
        "found[1::2] or found",
        "found[::2]",
        "tests/diagnostics/test_diagnose.py -k 'other_half'",
    ),
    Mutant(
        "diagnose: calibrated features are tried again",
        "diagnostics/diagnose.py",
        "if all(fine) or settled(mechanism) else",
        "if all(fine) else",
        "tests/diagnostics/test_diagnose.py -k 'not_told_to_calibrate'",
    ),
    Mutant(
        "exact layers are diagnosed by other features than they would get",
        "diagnostics/diagnose.py",
        "    num_features: int = 256",
        "    num_features: int = 257",
        "tests/test_defaults.py -k 'exact_layers'",
    ),
    # diagnostics/diagnosis.py
    Mutant(
        "narrow tables break the verdict within a word",
        "diagnostics/diagnosis.py",
        "min_width=max(map(len, CALIBRATE.split()))",
        "min_width=min(map(len, CALIBRATE.split()))",
        "tests/diagnostics/test_diagnose.py -k 'test_table'",
    ),
    # diagnostics/heat_maps.py
    Mutant(
        "colours of a strict diagnosis end at small errors",
        "diagnostics/heat_maps.py",
        "top = max(1.0, 2 * result.tolerance)",
        "top = max(0.0, 2 * result.tolerance)",
        "tests/test_pictures.py -k 'diagnosis'",
    ),
    # diagnostics/far_field.py
    Mutant(
        "far field: a layer stays without one",
        "diagnostics/far_field.py",
        "        mechanism.far = before\n",
        "        pass\n",
        "tests/diagnostics/test_far_field.py",
    ),
    Mutant(
        "far field: padding counts in its share",
        "diagnostics/far_field.py",
        "        real = call.real[:, None, :, None]\n",
        "        real = torch.ones_like(call.real)[:, None, :, None]\n",
        "tests/diagnostics/test_far_field.py",
    ),
    Mutant(
        "far field: padding counts in the loss",
        "diagnostics/far_field.py",
        "labels = ids if mask is None else ids.masked_fill(~mask.bool(), -100)",
        "labels = ids",
        "tests/diagnostics/test_far_field.py",
    ),
    # diagnostics/probes.py
    Mutant(
        "diagnose: shares of features are not squared",
        "diagnostics/probes.py",
        "torch.stack(shares).square().sum(-1)",
        "torch.stack(shares).sum(-1)",
        "tests/diagnostics/test_diagnose.py -k 'written_down and blocks and False-False'",
    ),
    Mutant(
        "diagnose: features are summed over near keys too",
        "diagnostics/probes.py",
        "far = (sample.seen & far_pairs(mechanism, call, sample.rows))[0, 0]",
        "far = (sample.seen & (far_pairs(mechanism, call, sample.rows) | True))[0, 0]",
        "tests/diagnostics/test_diagnose.py -k 'written_down and blocks and False-False'",
    ),
    Mutant(
        "diagnose: features that vanish beside others stay lost",
        "diagnostics/probes.py",
        "        out[row] = log_psi[far[row]].logsumexp(0)",
        "        pass",
        "tests/diagnostics/test_diagnose.py -k 'any_size'",
    ),
    Mutant(
        "diagnose: the transform is forgotten",
        "diagnostics/probes.py",
        "features.query_transform is not None:",
        "features.query_transform is not None and False:",
        "tests/diagnostics/test_diagnose.py -k 'written_down and transform and False-False'",
    ),
    # diagnostics/uniform.py
    Mutant(
        "training: models that do not look at anything yet are warned of",
        "diagnostics/uniform.py",
        "if error > LARGE and error >= USELESS * uniform:",
        "if error > LARGE or error >= USELESS * uniform:",
        "tests/training/test_training.py -k 'no_use or watching'",
    ),
    # diagnostics/verdicts.py
    Mutant(
        "diagnose: one baseline that does better is enough to blame features",
        "diagnostics/verdicts.py",
        "CLEARLY * max(baselines)",
        "CLEARLY * min(baselines)",
        "tests/diagnostics/test_diagnose.py -k 'what_is_good'",
    ),
    Mutant(
        "diagnose: fresh features count as fitted",
        "diagnostics/verdicts.py",
        "    fresh.reset_parameters()\n",
        "    fresh.reset_parameters()\n    return True\n",
        "tests/diagnostics/test_diagnose.py -k 'settled'",
    ),
)
