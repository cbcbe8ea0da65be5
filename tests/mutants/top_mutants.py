"""Hand-made bugs of files at the top of the package, file by file."""

from mutant import Mutant

TOP = (
    # __init__.py
    Mutant(
        "the command leaves waiting to torch",
        "__init__.py",
        "if waiting.is_command():",
        "if False:",
        "tests/test_waiting.py",
    ),
    # errors.py
    Mutant(
        "hostile: errors steer the terminal",
        "errors.py",
        '"\\n".join(map(printable, message.split("\\n")))',
        "message",
        "tests/test_hostile_files.py -k 'control_characters'",
    ),
    # files.py
    Mutant(
        "files: written in place",
        "files.py",
        "    try:\n        yield staging\n        _sync(staging)",
        "    try:\n        yield place\n        _sync(place)",
        "tests/test_files.py -k 'appears_when or failed_write'",
    ),
    Mutant(
        "files: not brought to disk",
        "files.py",
        "        yield staging\n        _sync(staging)\n",
        "        yield staging\n",
        "tests/test_files.py -k 'failed_write'",
    ),
    Mutant(
        "files: a failure leaves its staging",
        "files.py",
        "        staging.unlink(missing_ok=True)\n        raise",
        "        raise",
        "tests/test_files.py -k 'failed_write'",
    ),
    Mutant(
        "files: a link is replaced instead of what it points to",
        "files.py",
        "Path(os.path.realpath(path))",
        "Path(path)",
        "tests/test_files.py -k 'links_modes'",
    ),
    Mutant(
        "files: a private file becomes public",
        "files.py",
        "            shutil.copymode(place, staging)",
        "            pass",
        "tests/test_files.py -k 'links_modes'",
    ),
    Mutant(
        "files: a protected file is replaced",
        "files.py",
        "    _refuse_read_only(place)\n    sweep",
        "    sweep",
        "tests/test_files.py -k 'links_modes'",
    ),
    Mutant(
        "files: the living are swept",
        "files.py",
        "fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/test_files.py -k 'the_dead_are_swept'",
    ),
    Mutant(
        "files: files of others are swept",
        "files.py",
        "_OURS.fullmatch(path.name)",
        "path.name.startswith(STAGING)",
        "tests/test_files.py -k 'only_our_names'",
    ),
    Mutant(
        "files: a folder that was being replaced is lost",
        "files.py",
        "                old.rename(place)\n        shutil",
        "                pass\n        shutil",
        "tests/test_files.py -k 'comes_back'",
    ),
    Mutant(
        "files: a failed rename loses the old folder",
        "files.py",
        "            old.rename(path)\n        raise",
        "            pass\n        raise",
        "tests/test_files.py -k 'failed_rename'",
    ),
    Mutant(
        "files: what is swept before it is locked is written to",
        "files.py",
        "            if staging.exists():\n",
        "            if True:\n",
        "tests/test_files.py -k 'comes_between'",
    ),
    # kernel_approximation.py
    Mutant(
        "sampler: gamma without its factor of two",
        "kernel_approximation.py",
        'return (2 * self.gamma_ if self.kernel == "rbf" else self.gamma_) ** 0.5',
        "return self.gamma_**0.5",
        "tests/test_kernel_approximation.py -k 'test_unbiased and rbf and iid'",
    ),
    Mutant(
        "sampler: positive features of the wrong norm",
        "kernel_approximation.py",
        'of_features = half if self.features == "trigonometric" else -half',
        'of_features = half if self.features == "trigonometric" else 0 * half',
        "tests/test_kernel_approximation.py -k 'test_unbiased and positive and iid'",
    ),
    Mutant(
        "sampler: the mean is taken off and not given back",
        "kernel_approximation.py",
        "u @ mean + mean @ mean / 2",
        "u @ mean",
        "tests/test_kernel_approximation.py -k 'test_unbiased and softmax and iid or own_kernel'",
    ),
    Mutant(
        "sampler: data are not centred",
        "kernel_approximation.py",
        "self.mean_ = x.mean(axis=0)",
        "self.mean_ = 0 * x.mean(axis=0)",
        "tests/test_kernel_approximation.py -k 'moving_all_data'",
    ),
    Mutant(
        "sampler: Hadamard rows of too few dimensions",
        "kernel_approximation.py",
        "drawn = max(HADAMARD_DIM, 1 << (dim - 1).bit_length())",
        "drawn = 1 << (dim - 1).bit_length()",
        "tests/test_kernel_approximation.py -k 'few_dimensions'",
    ),
    Mutant(
        "sampler: weights of the proposal count twice",
        "kernel_approximation.py",
        "(self.random_log_weights_ / 2)",
        "self.random_log_weights_",
        "tests/test_kernel_approximation.py -k 'closed_form and fitted'",
    ),
    Mutant(
        "sampler: the lonely cosine has no phase",
        "kernel_approximation.py",
        "phase[:, -1] += u.dtype.type(self.random_offset_)",
        "phase[:, -1] += 0",
        "tests/test_kernel_approximation.py -k 'if_odd'",
    ),
    Mutant(
        "sampler: the lonely cosine counts half",
        "kernel_approximation.py",
        "*= u.dtype.type(math.sqrt(2))",
        "*= 1",
        "tests/test_kernel_approximation.py -k 'if_odd'",
    ),
    Mutant(
        "sampler: independent rows whatever was asked for",
        "kernel_approximation.py",
        "gaussian_rows(count, drawn, coupling, generator)",
        'gaussian_rows(count, drawn, "iid", generator)',
        "tests/test_kernel_approximation.py -k 'vary_less'",
    ),
    Mutant(
        "sampler: float32 becomes float64",
        "kernel_approximation.py",
        "self.mean_.astype(x.dtype)) * x.dtype.type(self._scale())",
        "self.mean_) * self._scale()",
        "tests/test_kernel_approximation.py -k 'float32'",
    ),
    Mutant(
        "sampler: scale of the softmax kernel from the variance",
        "kernel_approximation.py",
        'x.var() if self.kernel == "rbf" else np.square(x).mean()',
        "x.var()",
        "tests/test_kernel_approximation.py -k 'gamma_follows'",
    ),
    Mutant(
        "sampler: infinite features are returned",
        "kernel_approximation.py",
        "if not np.isfinite(features).all():",
        "if np.isnan(features).any():",
        "tests/test_kernel_approximation.py -k 'test_errors and overflow'",
    ),
    Mutant(
        "sampler: exponentials before sums",
        "kernel_approximation.py",
        (
            "phase += log_size  # before the exponential, so that large terms cancel\n"
            "            return np.exp(phase, out=phase)"
        ),
        "return np.exp(phase) * np.exp(log_size)",
        "tests/test_kernel_approximation.py -k 'large_terms'",
    ),
    Mutant(
        "hadamard rows are cut from more dimensions than needed",
        "kernel_approximation.py",
        "1 << (dim - 1).bit_length()",
        "1 << (dim + 1).bit_length()",
        "tests/test_kernel_approximation.py -k power_of_two",
    ),
    # mechanism.py
    Mutant(
        "pages: bidirectional calls pass",
        "mechanism.py",
        "        if not causal and not self.supports_bidirectional:\n",
        "        if False:\n",
        "tests/mechanisms/test_pages.py -k errors",
    ),
    # measure.py
    Mutant(
        "calls are timed with their warm-up",
        "measure.py",
        "    for call in calls.values():\n        call()\n",
        "",
        "tests/test_measure.py -k 'take_turns'",
    ),
    # mechanism.py
    Mutant(
        "mixed: parts are found beside the whole",
        "mechanism.py",
        " and not inside:",
        ":",
        "tests/mechanisms/test_mixed.py tests/models/test_mixed.py -k 'no_mechanisms_of_the_model or one_matrix'",
    ),
    # tables.py
    Mutant(
        "hostile: formulas in CSV",
        "tables.py",
        'return f"\'{value}"',
        "return value",
        "tests/test_hostile_files.py -k 'formulas or names_of_sequences'",
    ),
    Mutant(
        "hostile: numbers are taken for formulas",
        "tables.py",
        " and not _NUMBER.fullmatch(value)",
        "",
        "tests/test_hostile_files.py -k 'formulas'",
    ),
    # waiting.py
    Mutant(
        "the command overrules the user",
        "waiting.py",
        "os.environ.setdefault(VARIABLE, POLICY)",
        "os.environ[VARIABLE] = POLICY",
        "tests/test_waiting.py",
    ),
)
