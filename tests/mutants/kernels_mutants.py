"""Hand-made bugs of `kernels`, file by file."""

from mutant import Mutant

KERNELS = (
    # kernels/arguments.py
    Mutant(
        "operators: tensors that are missing",
        "kernels/arguments.py",
        'if not kind.endswith("?"):',
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'called_directly'",
    ),
    Mutant(
        "operators: a state without an order",
        "kernels/arguments.py",
        "if far_sum is not None and not causal:",
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'called_directly'",
    ),
    Mutant(
        "operators: no empty dimension is refused",
        "kernels/arguments.py",
        "if letter not in MAY_BE_EMPTY and self.known.get(letter) == 0:",
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'called_directly'",
    ),
    Mutant(
        "operators: saved states of another number",
        "kernels/arguments.py",
        '    sizes.known["borders"] = borders\n',
        "",
        "tests/kernels/cpu/test_gate.py -k 'backwards_called'",
    ),
    # kernels/centre.py
    Mutant(
        "the far field has no centre in the torch engine",
        "kernels/centre.py",
        "return torch.where(square < (1 + AGREEMENT) * mean.square(), mean, 0)",
        "return torch.zeros_like(mean)",
        "tests/kernels/test_long_sequences.py -k 'test_gradients and torch and linear'",
    ),
    Mutant(
        "a centre is chosen before anything is folded",
        "kernels/centre.py",
        "return now >= FIRST and now // unit * unit > before",
        "return now // unit * unit > before",
        "tests/kernels/test_long_sequences.py -k ever_more_rarely",
    ),
    Mutant(
        "the first tile is not cut",
        "kernels/centre.py",
        "for part in [tokens] if number else _doubling_parts(tokens, block, reverse):",
        "for part in [tokens]:",
        "tests/kernels/test_long_sequences.py -k 'test_gradients and torch'",
    ),
    Mutant(
        "states are handed on about their centre in the torch engine",
        "kernels/centre.py",
        "return torch.addcmul(self.sum, self.sum[..., -1:], self.centre)",
        "return self.sum",
        "tests/kernels/test_long_sequences.py -k 'have_no_centre and torch'",
    ),
    Mutant(
        "a row that sees little of the far field is the centre in the torch engine",
        "kernels/centre.py",
        "mostly_far = far_share >= 0.5",
        "mostly_far = far_share >= 0",
        "tests/kernels/test_long_sequences.py -k 'hardly_see and torch'",
    ),
    # kernels/compensated.py
    Mutant(
        "long sums of torch are one product",
        "kernels/compensated.py",
        "count = a.shape[-2] // PIECE",
        "count = 0",
        "tests/kernels/test_long_sequences.py -k 'cancel and torch'",
    ),
    Mutant(
        "a step of torch forgets what rounding left out",
        "kernels/compensated.py",
        "low - (result - rounded).detach()",
        "low * 0",
        "tests/kernels/test_long_sequences.py -k 'still_grows and torch'",
    ),
    # kernels/operator.py
    Mutant(
        "state's gradient lost between pieces",
        "kernels/operator.py",
        "return getattr(inputs, name) is not None and (",
        'return getattr(inputs, name) is not None and name != "far_sum" and (',
        "tests/mechanisms/test_contract.py -k 'favor-paper and extend_equals'",
    ),
    # kernels/precision.py
    Mutant(
        "autocast rounds the engine's products",
        "kernels/precision.py",
        "with torch.autocast(device, enabled=False):",
        "with torch.autocast(device, enabled=True, dtype=torch.bfloat16):",
        "tests/kernels/test_favor.py -k 'autocast_rounds'",
    ),
    Mutant(
        "products of huge queries and keys are infinite",
        "kernels/precision.py",
        "return x.clamp_(-limit, limit)",
        "return x",
        "tests/test_promises.py -k 'large_enough and not linear'",
    ),
    # kernels/problem.py
    Mutant(
        "state in half precision",
        "kernels/problem.py",
        "self.dtype = torch.promote_types(q.dtype, torch.float32)",
        "self.dtype = q.dtype",
        "tests/mechanisms/test_contract.py -k 'linear and low_precision'",
    ),
    Mutant(
        "float32 sums for float64 inputs",
        "kernels/problem.py",
        "self.dtype = torch.promote_types(q.dtype, torch.float32)",
        "self.dtype = torch.float32",
        "tests/mechanisms/test_contract.py -k 'favor and forward_equals_reference'",
    ),
    Mutant(
        "own block causal off by one",
        "kernels/problem.py",
        "scores.unflatten(3, (self.groups, block)).tril_()",
        "scores.unflatten(3, (self.groups, block)).tril_(1)",
        "tests/mechanisms/test_contract.py -k 'favor-paper and causal_means'",
    ),
    Mutant(
        "own block without itself",
        "kernels/problem.py",
        "scores.unflatten(3, (self.groups, block)).tril_()",
        "scores.unflatten(3, (self.groups, block)).tril_(-1)",
        "tests/mechanisms/test_contract.py -k 'linear and forward_equals_reference'",
    ),
    Mutant(
        "dead keys keep what they hold",
        "kernels/problem.py",
        "y = y.masked_fill_(~alive[..., None], 0)",
        "pass",
        "tests/mechanisms/test_contract.py -k 'favor-paper and padding_changes'",
    ),
    Mutant(
        "normaliser's gradient detached",
        "kernels/problem.py",
        "dot = (grad_out * centred).sum(-1, keepdim=True)",
        "dot = 0 * (grad_out * centred).sum(-1, keepdim=True)",
        "tests/mechanisms/test_contract.py -k 'linear and gradients_equal'",
    ),
    Mutant(
        "outputs are rounded before the backward",
        "kernels/problem.py",
        "return borders and q.shape[2] >= LOW_FROM and",
        "return False and borders and q.shape[2] >= LOW_FROM and",
        "tests/kernels/test_long_sequences.py -k 'test_gradients and linear'",
    ),
    # kernels/scan.py
    Mutant(
        "state not rescaled when the maximum grows",
        "kernels/scan.py",
        "state = torch.addcmul(updates[:, :, b], state, decay[:, :, b, :, None])",
        "state = updates[:, :, b] + state",
        "tests/mechanisms/test_contract.py -k 'favor and forward_equals_reference'",
    ),
    Mutant(
        "the state before a tile is not rescaled",
        "kernels/scan.py",
        "before.addcmul_(initial.high[:, :, None], remaining[..., None])",
        "before += initial.high[:, :, None]",
        "tests/mechanisms/test_contract.py -k 'favor and chunk'",
    ),
    Mutant(
        "state's gradient not rescaled",
        "kernels/scan.py",
        "return scan(reads, decay, final, not reverse)",
        "return scan(reads, torch.ones_like(decay), final, not reverse)",
        "tests/mechanisms/test_contract.py -k 'favor and gradients_equal'",
    ),
)
