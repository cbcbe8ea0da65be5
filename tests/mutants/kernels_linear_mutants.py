"""Hand-made bugs of `kernels/linear`, file by file."""

from mutant import Mutant

KERNELS_LINEAR = (
    # kernels/linear/torch.py
    Mutant(
        "linear slope without the row's factor",
        "kernels/linear/torch.py",
        "dprojected = dweights.mul_(self.map.slope(projected, phi) / size)",
        "dprojected = dweights.mul_(self.map.slope(projected, phi))",
        "tests/mechanisms/test_contract.py -k 'linear and gradients_equal'",
    ),
    Mutant(
        "one reference per block for weighted keys",
        "kernels/linear/torch.py",
        "seen = torch.maximum(own.log_weight.cummax(-1).values, own.before)",
        "seen = torch.maximum(own.log_weight.amax(-1, keepdim=True).expand_as(own.log_weight), own.before)",
        "tests/mechanisms/test_contract.py -k 'favor-trigonometric and causal_means'",
    ),
    Mutant(
        "chunks of linear beyond the sequence take memory",
        "kernels/linear/torch.py",
        "min(options.chunk, max(self.p.length, self.p.key_length))",
        "options.chunk",
        "tests/kernels/cpu/test_gate.py -k 'beyond_the_sequence and chunk'",
    ),
)
