"""Hand-made bugs of the features for scikit-learn."""

from mutant import Mutant


def sampler(words: str) -> str:
    return f"tests/test_kernel_approximation.py -k '{words}'"


PATH = "kernel_approximation.py"

KERNEL_APPROXIMATION = (
    Mutant(
        "sampler: gamma without its factor of two",
        PATH,
        'return (2 * self.gamma_ if self.kernel == "rbf" else self.gamma_) ** 0.5',
        "return self.gamma_**0.5",
        sampler("test_unbiased and rbf and iid"),
    ),
    Mutant(
        "sampler: positive features of the wrong norm",
        PATH,
        'of_features = half if self.features == "trigonometric" else -half',
        'of_features = half if self.features == "trigonometric" else 0 * half',
        sampler("test_unbiased and positive and iid"),
    ),
    Mutant(
        "sampler: the mean is taken off and not given back",
        PATH,
        "u @ mean + mean @ mean / 2",
        "u @ mean",
        sampler("test_unbiased and softmax and iid or own_kernel"),
    ),
    Mutant(
        "sampler: data are not centred",
        PATH,
        "self.mean_ = x.mean(axis=0)",
        "self.mean_ = 0 * x.mean(axis=0)",
        sampler("moving_all_data"),
    ),
    Mutant(
        "sampler: Hadamard rows of too few dimensions",
        PATH,
        "drawn = max(HADAMARD_DIM, 1 << (dim - 1).bit_length())",
        "drawn = 1 << (dim - 1).bit_length()",
        sampler("few_dimensions"),
    ),
    Mutant(
        "sampler: weights of the proposal count twice",
        PATH,
        "(self.random_log_weights_ / 2)",
        "self.random_log_weights_",
        sampler("closed_form and fitted"),
    ),
    Mutant(
        "sampler: the lonely cosine has no phase",
        PATH,
        "phase[:, -1] += u.dtype.type(self.random_offset_)",
        "phase[:, -1] += 0",
        sampler("if_odd"),
    ),
    Mutant(
        "sampler: the lonely cosine counts half",
        PATH,
        "*= u.dtype.type(math.sqrt(2))",
        "*= 1",
        sampler("if_odd"),
    ),
    Mutant(
        "sampler: independent rows whatever was asked for",
        PATH,
        "gaussian_rows(count, drawn, coupling, generator)",
        'gaussian_rows(count, drawn, "iid", generator)',
        sampler("vary_less"),
    ),
    Mutant(
        "sampler: float32 becomes float64",
        PATH,
        "self.mean_.astype(x.dtype)) * x.dtype.type(self._scale())",
        "self.mean_) * self._scale()",
        sampler("float32"),
    ),
    Mutant(
        "sampler: scale of the softmax kernel from the variance",
        PATH,
        'x.var() if self.kernel == "rbf" else np.square(x).mean()',
        "x.var()",
        sampler("gamma_follows"),
    ),
    Mutant(
        "sampler: infinite features are returned",
        PATH,
        "if not np.isfinite(features).all():",
        "if np.isnan(features).any():",
        sampler("test_errors and overflow"),
    ),
    Mutant(
        "sampler: exponentials before sums",
        PATH,
        """phase += log_size  # before the exponential, so that large terms cancel
            return np.exp(phase, out=phase)""",
        "return np.exp(phase) * np.exp(log_size)",
        sampler("large_terms"),
    ),
)
