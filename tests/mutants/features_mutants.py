"""Hand-made bugs of `features`, file by file."""

from mutant import Mutant

FEATURES = (
    # features/buffers.py
    Mutant(
        "half precision rounds the features",
        "features/buffers.py",
        "self._buffers[name] = before.to(after.device)",
        "pass",
        "tests/mechanisms/test_contract.py -k 'favor and half_keeps'",
    ),
    Mutant(
        "random features cast with the model",
        "features/buffers.py",
        "self._buffers[name] = before.to(after.device)",
        "pass",
        "tests/models/test_models.py -k 'stay_float32'",
    ),
    # features/drawn.py
    Mutant(
        "redraw replaces the buffer",
        "features/drawn.py",
        "self.weight.copy_(weight)",
        "self.weight = weight",
        "tests/features/test_features.py -k 'redraw'",
    ),
    Mutant(
        "redraw forgets what was found",
        "features/drawn.py",
        "weight, log_weight = self._draw(seed, self.proposal)",
        "weight, log_weight = self._draw(seed, None)",
        "tests/calibration/test_calibration.py -k 'redraw'",
    ),
    # features/draws.py
    Mutant(
        "hadamard blocks are made of four products",
        "features/draws.py",
        "for _ in range(3):",
        "for _ in range(4):",
        "tests/features/test_proposals.py -k 'always_gave'",
    ),
    Mutant(
        "QR without the sign fix",
        "features/draws.py",
        "return q * torch.where(r.diagonal() < 0, -1.0, 1.0)",
        "return q",
        "tests/features/test_features.py -k 'test_unbiased and positive and orthogonal'",
    ),
    Mutant(
        "all rows with norm sqrt(d)",
        "features/draws.py",
        "torch.cat(blocks)[:rows] * norms",
        "torch.cat(blocks)[:rows] * dim**0.5",
        "tests/features/test_features.py -k 'chi_norms or orthogonal_variance'",
    ),
    Mutant(
        "simplex corners not centred",
        "features/draws.py",
        "(rotation - rotation.mean(0))",
        "(rotation - 0 * rotation.mean(0))",
        "tests/features/test_proposals.py -k 'simplex'",
    ),
    Mutant(
        "a Walsh transform with a wrong sign",
        "features/draws.py",
        "pairs[:, 0] - pairs[:, 1]",
        "pairs[:, 1] - pairs[:, 0]",
        "tests/features/test_proposals.py -k 'hadamard'",
    ),
    # features/elementwise.py
    Mutant(
        "elu + 1 that cancels",
        "features/elementwise.py",
        "torch.where(x < 0, x.clamp(max=0).exp(), x + 1)",
        "F.elu(x) + 1",
        "tests/features/test_features.py -k 'elu_does_not_cancel'",
    ),
    Mutant(
        "relu2 with half its slope",
        "features/elementwise.py",
        "lambda x, phi: 2 * F.relu(x)",
        "lambda x, phi: F.relu(x)",
        "tests/mechanisms/test_contract.py -k 'linear-relu2 and gradients_equal'",
    ),
    Mutant(
        "tiny features count in the torch engine",
        "features/elementwise.py",
        "return phi.masked_fill(phi.abs() < smallest(phi.dtype), 0)",
        "return phi",
        "tests/kernels/test_linear.py -k torch",
    ),
    # features/learned.py
    Mutant(
        "no mirrored map",
        "features/learned.py",
        "torch.cat([w, -w], dim=1)",
        "torch.cat([w, w], dim=1)",
        "tests/calibration/test_calibration.py -k 'hedgehog_features or better_on or offset or lowers'",
    ),
    # features/names.py
    Mutant(
        "a warning for every layer",
        "features/names.py",
        "@functools.cache  #",
        "#",
        "tests/features/test_names.py -k 'per_layer or a_layer'",
    ),
    Mutant(
        "mixed: parts keep former names of estimators",
        "features/names.py",
        'if isinstance(options, dict) and "parts" in options:',
        "if not isinstance(options, dict | list):",
        "tests/models/test_mixed.py -k 'current_names'",
    ),
    # features/positive.py
    Mutant(
        "one draw for all heads",
        "features/positive.py",
        "coupling, generator) for _ in range(heads)])",
        "coupling, generator)] * heads)",
        "tests/features/test_features.py -k 'per_head'",
    ),
    Mutant(
        "hyperbolic without the mirrored rows",
        "features/positive.py",
        "torch.cat([noise, -noise], dim=1)",
        "torch.cat([noise, noise], dim=1)",
        "tests/features/test_features.py -k 'mechanism_uses'",
    ),
    Mutant(
        "1/M dropped: far and exact parts on different scales",
        "features/positive.py",
        "-math.log(num_features)",
        "0.0 * math.log(num_features)",
        "tests/features/test_features.py -k 'far_pairs'",
    ),
    # features/proposals.py
    Mutant(
        "the density ratio without its determinant",
        "features/proposals.py",
        " + torch.linalg.slogdet(root).logabsdet[:, None]",
        "",
        "tests/features/test_proposals.py -k 'test_unbiased and iid'",
    ),
    Mutant(
        "the density ratio upside down",
        "features/proposals.py",
        "(noise.square().sum(-1) - rows.square().sum(-1)) / 2",
        "(rows.square().sum(-1) - noise.square().sum(-1)) / 2",
        "tests/features/test_proposals.py -k 'test_unbiased and iid'",
    ),
    Mutant(
        "the widening of another root",
        "features/proposals.py",
        "(a + (a * a + 8 * moment).sqrt()) / 2",
        "(a + (a * a + 4 * moment).sqrt()) / 2",
        "tests/features/test_proposals.py -k 'widening'",
    ),
)
