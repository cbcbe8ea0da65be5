"""Hand-made bugs of `recording`, file by file."""

from mutant import Mutant

RECORDING = (
    # recording/baselines.py
    Mutant(
        "diagnose: the mean of all values, visible or not",
        "recording/baselines.py",
        "normalised(sample.seen.to(sample.values.dtype))",
        "normalised(torch.ones_like(sample.seen).to(sample.values.dtype))",
        "tests/diagnostics/test_diagnose.py -k 'written_down and blocks and True'",
    ),
    Mutant(
        "diagnose: the near baseline is the far field",
        "recording/baselines.py",
        "sample.seen & ~far_pairs(",
        "sample.seen & far_pairs(",
        "tests/diagnostics/test_diagnose.py -k 'written_down and blocks and False-False'",
    ),
    # recording/calls.py
    Mutant(
        "other inputs keep the output of the old ones",
        "recording/calls.py",
        "dataclasses.replace(self, **inputs, output=None, output_is_exact=False)",
        "dataclasses.replace(self, **inputs)",
        "tests/recording/test_recording.py -k 'other_inputs'",
    ),
    Mutant(
        "any output is taken for that of exact attention",
        "recording/calls.py",
        "if self.output is not None and self.output_is_exact:",
        "if self.output is not None:",
        "tests/recording/test_recording.py -k 'taken_for_exact'",
    ),
    Mutant(
        "exact outputs are computed again",
        "recording/calls.py",
        "if self.output is not None and self.output_is_exact:",
        "if self.output is None and self.output_is_exact:",
        "tests/recording/test_recording.py -k 'computed_once'",
    ),
    # recording/fidelity.py
    Mutant(
        "errors over padded rows too",
        "recording/fidelity.py",
        "keep = real[:, None, :, None]",
        "keep = torch.ones_like(real)[:, None, :, None]",
        "tests/calibration/test_calibration.py -k 'error_is_that'",
    ),
    Mutant(
        "what is no number counts as no error",
        "recording/fidelity.py",
        "torch.where(self.wrong == 0, 0.0, self.wrong / self.size)",
        "torch.where(self.wrong > 0, self.wrong / self.size, 0.0)",
        "tests/calibration/test_calibration.py -k 'no_number_is_no_small'",
    ),
    # recording/hugging_face.py
    Mutant(
        "heads of Hugging Face without a scale get a wrong one",
        "recording/hugging_face.py",
        "q.shape[-1] ** -0.5 if scaling is None",
        "q.shape[-1] * -0.5 if scaling is None",
        "tests/recording/test_recording.py -k usual_one",
    ),
    Mutant(
        "the function that transformers keeps holds the model",
        "recording/hugging_face.py",
        "        _recorder.reset(token)\n",
        "        pass\n",
        "tests/recording/test_recording.py -k 'can_go'",
    ),
    Mutant(
        "causality given by call is ignored",
        "recording/hugging_face.py",
        "bool(module.is_causal if given is None else given)",
        "bool(module.is_causal)",
        "tests/conversion/test_conversion.py -k causal_by_call",
    ),
    # recording/layers.py
    Mutant(
        "recorded layers answer with their own features",
        "recording/layers.py",
        "output = call.exact() if output is None else output",
        "output = original(q, k, v, causal=causal, key_mask=key_mask)",
        "tests/recording/test_recording.py -k 'run_exactly'",
    ),
    Mutant(
        "what is thrown away is computed",
        "recording/layers.py",
        "mechanism.check_forward(q, k, v, causal, key_mask)  # as",
        "original(q, k, v, causal=causal, key_mask=key_mask)  # as",
        "tests/recording/test_recording.py -k 'never_compute'",
    ),
    Mutant(
        "layers that nobody asked for answer with their own features",
        "recording/layers.py",
        "            elif exact:\n",
        "            elif False:\n",
        "tests/recording/test_recording.py -k 'not_wanted_answer'",
    ),
    Mutant(
        "a forward of another library is lost",
        "recording/layers.py",
        "        if before is None:\n",
        "        if True:\n",
        "tests/recording/test_recording.py -k 'another_library'",
    ),
    # recording/progress.py
    Mutant(
        "progress: a bar that nobody wanted",
        "recording/progress.py",
        "progress and sys.stderr.isatty() and",
        "sys.stderr.isatty() and",
        "tests/diagnostics/test_diagnose.py -k 'progress'",
    ),
    # recording/record.py
    Mutant(
        "nothing is dropped, whatever the budget",
        "recording/record.py",
        "while self.nbytes > self.memory and len(self.calls) > 1:",
        "while False:",
        "tests/recording/test_recording.py -k 'budget'",
    ),
    Mutant(
        "layers come back to a recording that dropped them",
        "recording/record.py",
        "            self.dropped.add(last)\n",
        "",
        "tests/recording/test_recording.py -k 'small_budget'",
    ),
    Mutant(
        "the layer that is needed is dropped",
        "recording/record.py",
        "if name != self.needed)",
        "if True)",
        "tests/recording/test_recording.py -k 'another_order'",
    ),
    Mutant(
        "mixed: calls of a part keep all heads in memory",
        "recording/record.py",
        "append(call.alone())",
        "append(call)",
        "tests/models/test_mixed.py -k 'holds_no_other_heads'",
    ),
    # recording/samples.py
    Mutant(
        "diagnose: rows of padding are sampled",
        "recording/samples.py",
        "places = call.real[0].nonzero()[:, 0]",
        "places = torch.arange(call.q.shape[2])",
        "tests/diagnostics/test_diagnose.py -k 'rows_are_real'",
    ),
    # recording/stream.py
    Mutant(
        "all modules in one mode after recording",
        "recording/stream.py",
        "module.training = training",
        "module.training = model.training",
        "tests/recording/test_recording.py -k 'modes_alone'",
    ),
    # recording/stream.py
    Mutant(
        "folders: a model of windows is judged as an exact one",
        "recording/stream.py",
        "    checks.no_other_mechanism(op, model, len(own_layers(model, Mechanism)))\n",
        "",
        "tests/cli/test_diagnose.py -k 'no_estimates'",
    ),
)
