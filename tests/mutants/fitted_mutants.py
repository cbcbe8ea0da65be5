"""Hand-made bugs of fitted and learned features."""

from mutant import Mutant

DRAWS, PROPOSALS, LEARNED = "features/draws.py", "features/proposals.py", "features/learned.py"
MOMENTS, TRAINING = "calibration/moments.py", "calibration/training.py"
FITTING, FAVOR = "calibration/fitting.py", "mechanisms/favor.py"


def proposals(words: str) -> str:
    return f"tests/test_proposals.py -k '{words}'"


def calibration(words: str) -> str:
    return f"tests/test_calibration.py -k '{words}'"


FITTED = (
    Mutant(
        "the density ratio without its determinant",
        PROPOSALS,
        " + torch.linalg.slogdet(root).logabsdet[:, None]",
        "",
        proposals("test_unbiased and iid"),
    ),
    Mutant(
        "the density ratio upside down",
        PROPOSALS,
        "(noise.square().sum(-1) - rows.square().sum(-1)) / 2",
        "(rows.square().sum(-1) - noise.square().sum(-1)) / 2",
        proposals("test_unbiased and iid"),
    ),
    Mutant(
        "the widening of another root",
        PROPOSALS,
        "(a + (a * a + 8 * moment).sqrt()) / 2",
        "(a + (a * a + 4 * moment).sqrt()) / 2",
        proposals("widening"),
    ),
    Mutant(
        "simplex corners not centred",
        DRAWS,
        "(rotation - rotation.mean(0))",
        "(rotation - 0 * rotation.mean(0))",
        proposals("simplex"),
    ),
    Mutant(
        "a Walsh transform with a wrong sign",
        DRAWS,
        "pairs[:, 0] - pairs[:, 1]",
        "pairs[:, 1] - pairs[:, 0]",
        proposals("hadamard"),
    ),
    Mutant(
        "moments of near pairs too",
        MOMENTS,
        "(weights * (seen & far_pairs(mechanism, call, chosen)))",
        "(weights * seen)",
        proposals("pair_by_pair"),
    ),
    Mutant(
        "calibrated proposals around the origin",
        MOMENTS,
        "return shaped(mean, width * spread)",
        "return shaped(0 * mean, width * spread)",
        proposals("come_from_the_moments"),
    ),
    Mutant(
        "keys turned like queries",
        MOMENTS,
        "return _power(middle, 0.5), _power(middle, -0.5)",
        "return _power(middle, 0.5), _power(middle, 0.5)",
        proposals("balancing"),
    ),
    Mutant(
        "errors over padded rows too",
        "recording/fidelity.py",
        "keep = real[:, None, :, None]",
        "keep = torch.ones_like(real)[:, None, :, None]",
        calibration("error_is_that"),
    ),
    Mutant(
        "a target without a margin",
        FITTING,
        "settings.target / MARGIN",
        "settings.target",
        calibration("enough_features"),
    ),
    Mutant(
        "features taken over before all layers are judged",
        FITTING,
        "    checks.reached(settings, reports)\n",
        "",
        calibration("refused"),
    ),
    Mutant(
        "measured on what was fitted",
        FITTING,
        "return kept, held",
        "return kept, kept",
        calibration("to_fit_and_to_measure"),
    ),
    Mutant(
        "a config that keeps a former name",
        "models/configuration.py",
        "self.attention_options = current_options(self.attention_options)",
        "pass",
        "tests/test_former_names.py -k 'config or saved_before'",
    ),
    Mutant(
        "runs keep a former name",
        "training/options.py",
        "current_options(self.attention_options)",
        "self.attention_options",
        "tests/test_former_names.py -k begun_before",
    ),
    Mutant(
        "a warning for every layer",
        "features/names.py",
        "@functools.cache  #",
        "#",
        "tests/test_former_names.py -k 'per_layer or a_layer'",
    ),
    Mutant(
        "no mirrored map",
        LEARNED,
        "torch.cat([w, -w], dim=1)",
        "torch.cat([w, w], dim=1)",
        calibration("hedgehog_features or better_on or offset or lowers"),
    ),
    Mutant(
        "an offset that is not subtracted",
        TRAINING,
        "torch.where(exists, exact - estimate, 0.0)",
        "torch.where(exists, exact, 0.0)",
        calibration("offset"),
    ),
    Mutant(
        "redraw forgets what was found",
        "features/drawn.py",
        "weight, log_weight = self._draw(seed, self.proposal)",
        "weight, log_weight = self._draw(seed, None)",
        calibration("redraw"),
    ),
    Mutant(
        "what is no number counts as no error",
        "recording/fidelity.py",
        "torch.where(self.wrong == 0, 0.0, self.wrong / self.size)",
        "torch.where(self.wrong > 0, self.wrong / self.size, 0.0)",
        calibration("no_number_is_no_small"),
    ),
    Mutant(
        "a head without output divides by zero",
        TRAINING,
        "(wrong * torch.where(size > 0, 1 / size, 0.0))",
        "(wrong / size)",
        calibration("without_output"),
    ),
    Mutant(
        "gradients left behind",
        TRAINING,
        "    optimizer.zero_grad(set_to_none=True)  # later training must not start from these gradients\n",
        "",
        calibration("without_output"),
    ),
    Mutant(
        "a ridge that vanishes with the variance",
        MOMENTS,
        "FLOOR * (variance + mean.square().mean(1))",
        "0 * variance",
        calibration("one_key_alone"),
    ),
    Mutant(
        "queries scaled twice",
        "conversion/swap.py",
        "q = q * (asked / usual)",
        "pass",
        "tests/test_conversion.py -k 'changes_nothing and opt'",
    ),
    Mutant(
        "features changed by halves",
        FAVOR,
        '        checks.count(self.name, "num_features", num_features)\n        common',
        "        self.num_features = num_features\n        common",
        calibration("whole_or_not"),
    ),
)
