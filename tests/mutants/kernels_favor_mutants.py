"""Hand-made bugs of `kernels/favor`, file by file."""

from mutant import Mutant

KERNELS_FAVOR = (
    # kernels/favor/exact.py
    Mutant(
        "a wide window begins one block late",
        "kernels/favor/exact.py",
        "return self.p.keys(start - self.reach * block, block, blocks + around)",
        "return self.p.keys(start - min(self.reach, 2) * block, block, blocks + around)",
        "tests/mechanisms/test_contract.py -k 'favor-reach and forward_equals_reference'",
    ),
    Mutant(
        "near block looks ahead",
        "kernels/favor/exact.py",
        "mask = mask & mask.new_ones(span.block, span.block).tril_()",
        "mask = mask & mask.new_ones(span.block, span.block)",
        "tests/mechanisms/test_contract.py -k 'favor-near and causal_means'",
    ),
    Mutant(
        "previous block forgotten",
        "kernels/favor/exact.py",
        "for shift in self._neighbours(span):\n            y.append",
        "for shift in list(self._neighbours(span))[1:]:\n            y.append",
        "tests/mechanisms/test_contract.py -k 'favor-near and forward_equals_reference'",
    ),
    # kernels/favor/logs.py
    Mutant(
        "norm term of the keys dropped",
        "kernels/favor/logs.py",
        "self.key_norms = self.query_norms + gaussian",
        "self.key_norms = float(gaussian)",
        "tests/mechanisms/test_contract.py -k 'favor-paper and forward_equals_reference'",
    ),
    Mutant(
        "Gaussian kernel without its key weight in the far field",
        "kernels/favor/logs.py",
        "self.key_norms = self.query_norms + gaussian",
        "self.key_norms = self.query_norms",
        "tests/mechanisms/test_contract.py -k 'favor-gaussian and forward_equals_reference'",
    ),
    Mutant(
        "query norm's gradient detached",
        "kernels/favor/logs.py",
        "dx.addcmul_(x, row[..., None], value=-self.query_norms)",
        "pass",
        "tests/mechanisms/test_contract.py -k 'favor-near and gradients_equal'",
    ),
    Mutant(
        "key norm's gradient detached",
        "kernels/favor/logs.py",
        "return dy.addcmul_(y, row[..., None], value=-self.key_norms)",
        "return dy",
        "tests/mechanisms/test_contract.py -k 'favor-paper and gradients_equal'",
    ),
    Mutant(
        "bias gradient after the group correction",
        "kernels/favor/logs.py",
        "by_group.sub_(share * by_group.sum(-1, keepdim=True))",
        "by_group.sub_(share * by_group.mean(-1, keepdim=True))",
        "tests/kernels/test_favor.py -k 'any_feature_map and groups'",
    ),
    Mutant(
        "offset's gradient forgotten",
        "kernels/favor/logs.py",
        "dx += row[..., None] * _per_head(self.offset_weight, x)",
        "pass",
        "tests/kernels/test_favor.py -k 'any_feature_map and norm'",
    ),
    Mutant(
        "decoding makes room for gradients that nobody wants",
        "kernels/favor/logs.py",
        "gaussian: bool, want_gradients: bool = False",
        "gaussian: bool, want_gradients: bool = True",
        "tests/kernels/favor/test_logs.py -k 'room_for_gradients'",
    ),
    # kernels/favor/native.py
    Mutant(
        "gate: negative lengths",
        "kernels/favor/native.py",
        "if not 0 <= before < MOST_TOKENS:",
        "if False:",
        "tests/kernels/cpu/test_gate.py -k 'step_looks'",
    ),
    Mutant(
        "a step writes into the caller's sinks",
        "kernels/favor/native.py",
        "sink = sink or before < options.sinks",
        "sink = before < options.sinks",
        "tests/kernels/cpu/test_plain_step.py -k 'of_their_own'",
    ),
    # kernels/favor/operator.py
    Mutant(
        "gradients of sinks do not reach the keys that they are",
        "kernels/favor/operator.py",
        'gradients["k"][:, :, : options.sinks] += gradients["sink_k"]',
        "pass",
        "tests/kernels/test_cpu.py -k 'favor and gradients_equal'",
    ),
    # kernels/favor/problem.py
    Mutant(
        "Gaussian kernel without its key weight in the exact part",
        "kernels/favor/problem.py",
        "logits -= half_square(y)[..., None, :]",
        "pass",
        "tests/mechanisms/test_contract.py -k 'favor-gaussian and forward_equals_reference'",
    ),
    Mutant(
        "sink gradients dropped",
        "kernels/favor/problem.py",
        'into["sink_v"].add_(dv[..., :-1].sum(2))',
        "pass",
        "tests/mechanisms/test_contract.py -k 'favor-sinks and gradients_equal'",
    ),
    Mutant(
        "masked keys raise the maxima",
        "kernels/favor/problem.py",
        "return None if mask is None else torch.where(mask, 0.0, DEAD).to(self.dtype)",
        "return None",
        "tests/mechanisms/test_contract.py -k 'favor and extreme_logits'",
    ),
    Mutant(
        "rows without keys divide by one weight of their own",
        "kernels/favor/problem.py",
        "torch.where(weight > 0, weight, 1)[..., None], centre)",
        "torch.where(weight >= 0, weight, 1)[..., None], centre)",
        "tests/mechanisms/test_contract.py -k 'favor-paper and rows_without_keys'",
    ),
    Mutant(
        "chunks beyond the sequence take memory",
        "kernels/favor/problem.py",
        "chunk=min(options.chunk, 1 << (length - 1).bit_length())",
        "chunk=options.chunk",
        "tests/kernels/cpu/test_gate.py -k 'beyond_the_sequence and chunk'",
    ),
    # kernels/favor/sweep.py
    Mutant(
        "the reverse sweep folds what a wide window sees exactly",
        "kernels/favor/sweep.py",
        "return self.p.keys(start + self.p.reach * block, block, blocks)",
        "return self.p.keys(start + block, block, blocks)",
        "tests/mechanisms/test_contract.py -k 'favor-reach and forward_equals_reference'",
    ),
    Mutant(
        "epsilon on the keys' features",
        "kernels/favor/sweep.py",
        "weights = key_logs.sub_(after[:, :, :, None]).exp_()",
        "weights = key_logs.sub_(after[:, :, :, None]).exp_().add_(1e-4)",
        "tests/mechanisms/test_contract.py -k 'favor-paper and forward_equals_reference'",
    ),
    Mutant(
        "maxima over features instead of tokens",
        "kernels/favor/sweep.py",
        "running_maxima(key_logs.amax(-2), state.max, self.reverse)",
        (
            "running_maxima(key_logs.amax((-2, -1)).unsqueeze(-1).expand(*state.max.shape[:2], blocks, "
            "state.max.shape[2]), state.max, self.reverse)"
        ),
        "tests/mechanisms/test_contract.py -k 'favor-paper and extreme_logits'",
    ),
    Mutant(
        "no certificate",
        "kernels/favor/sweep.py",
        "doubtful = row_sums < CERTIFICATE",
        "doubtful = row_sums < 0",
        "tests/mechanisms/test_contract.py -k 'favor-paper and extreme_logits'",
    ),
    Mutant(
        "no certificate in the backward",
        "kernels/favor/sweep.py",
        "return bool((tile.logs.amax(-1) - log_normaliser[..., 0] > -math.log(CERTIFICATE)).any())",
        "return False",
        "tests/mechanisms/test_contract.py -k 'favor-paper and extreme_logits'",
    ),
    Mutant(
        "reverse sweep replaces instead of adding",
        "kernels/favor/sweep.py",
        "merged = merged_rows(rows, other, share, other_share)",
        "merged = rows",
        "tests/mechanisms/test_contract.py -k 'favor-near and forward_equals_reference'",
    ),
    Mutant(
        "exact logits rounded by the features' scalar",
        "kernels/favor/sweep.py",
        "self.exact.backward(tile.span, log_normaliser[..., 1:], grad, into)",
        "self.exact.backward(tile.span, log_normaliser[..., :1] + tile.scalar[..., None], grad, into)",
        "tests/mechanisms/test_contract.py -k 'favor and lopsided'",
    ),
    Mutant(
        "sweep back forgets the exact part's normaliser",
        "kernels/favor/sweep.py",
        "torch.cat([both, other_log_normaliser[..., 1:] + grown], -1)",
        "torch.cat([both, other_log_normaliser[..., 1:]], -1)",
        "tests/mechanisms/test_contract.py -k 'favor-near and gradients_equal'",
    ),
    Mutant(
        "states between borders not advanced",
        "kernels/favor/sweep.py",
        "state = self._fold(piece.start, self.block, piece.blocks(self.block), states[-1]).final",
        "state = states[-1]",
        "tests/kernels/test_favor.py -k 'many_tiles and favor'",
    ),
)
