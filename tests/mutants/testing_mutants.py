"""Hand-made bugs of `testing`, file by file."""

from mutant import Mutant

TESTING = (
    # testing/contract.py
    Mutant(
        "any gradient passes the check by differences",
        "testing/contract.py",
        "assert torch.autograd.gradcheck(lambda *x, causal=causal: mechanism(*x, causal=causal), tuple(inputs))",
        "assert mechanism(*inputs, causal=causal).requires_grad",
        "tests/testing/test_testing.py -k 'one_percent'",
    ),
    Mutant(
        "the contract lets a matrix look one token ahead",
        "testing/contract.py",
        "matrix.triu(1).any()",
        "matrix.triu(2).any()",
        "tests/testing/test_testing.py -k 'noticed'",
    ),
    Mutant(
        "the contract has another length",
        "testing/contract.py",
        '(40, "left"), (40, "holes"))',
        '(40, "left"), (41, "holes"))',
        "tests/testing/test_testing.py -k 'frozen'",
    ),
)
