"""Hand-made bugs of recording: what is taken out of a model, what it leaves behind, how much is kept."""

from mutant import Mutant

LAYERS, HUGGING_FACE = "recording/layers.py", "recording/hugging_face.py"
CALLS, RECORD, STREAM = "recording/calls.py", "recording/record.py", "recording/stream.py"


def recording(words: str) -> str:
    return f"tests/test_recording.py -k '{words}'"


RECORDING = (
    Mutant(
        "recorded layers answer with their own features",
        LAYERS,
        "output = call.exact() if output is None else output",
        "output = original(q, k, v, causal=causal, key_mask=key_mask)",
        recording("run_exactly"),
    ),
    Mutant(
        "what is thrown away is computed",
        LAYERS,
        "mechanism.check_forward(q, k, v, causal, key_mask)  # as",
        "original(q, k, v, causal=causal, key_mask=key_mask)  # as",
        recording("never_compute"),
    ),
    Mutant(
        "layers that nobody asked for answer with their own features",
        LAYERS,
        "            elif exact:\n",
        "            elif False:\n",
        recording("not_wanted_answer"),
    ),
    Mutant(
        "a forward of another library is lost",
        LAYERS,
        "        if before is None:\n",
        "        if True:\n",
        recording("another_library"),
    ),
    Mutant(
        "other inputs keep the output of the old ones",
        CALLS,
        "dataclasses.replace(self, **inputs, output=None, output_is_exact=False)",
        "dataclasses.replace(self, **inputs)",
        recording("other_inputs"),
    ),
    Mutant(
        "any output is taken for that of exact attention",
        CALLS,
        "if self.output is not None and self.output_is_exact:",
        "if self.output is not None:",
        recording("taken_for_exact"),
    ),
    Mutant(
        "exact outputs are computed again",
        CALLS,
        "if self.output is not None and self.output_is_exact:",
        "if self.output is None and self.output_is_exact:",
        recording("computed_once"),
    ),
    Mutant(
        "nothing is dropped, whatever the budget",
        RECORD,
        "while self.nbytes > self.memory and len(self.calls) > 1:",
        "while False:",
        recording("budget"),
    ),
    Mutant(
        "layers come back to a recording that dropped them",
        RECORD,
        "            self.dropped.add(last)\n",
        "",
        recording("small_budget"),
    ),
    Mutant(
        "the layer that is needed is dropped",
        RECORD,
        "if name != self.needed)",
        "if True)",
        recording("another_order"),
    ),
    Mutant(
        "the function that transformers keeps holds the model",
        HUGGING_FACE,
        "        _recorder.reset(token)\n",
        "        pass\n",
        recording("can_go"),
    ),
    Mutant(
        "all modules in one mode after recording",
        STREAM,
        "module.training = training",
        "module.training = model.training",
        recording("modes_alone"),
    ),
    Mutant(
        "causality given by call is ignored",
        HUGGING_FACE,
        "bool(module.is_causal if given is None else given)",
        "bool(module.is_causal)",
        "tests/test_conversion.py -k causal_by_call",
    ),
)
