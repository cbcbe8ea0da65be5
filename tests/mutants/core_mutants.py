"""Hand-made bugs of features, kernels and mechanisms."""

from mutant import Mutant


def contract(words: str) -> str:
    return f"tests/test_contract.py -k '{words}'"


def estimators(words: str) -> str:
    return f"tests/test_estimators.py -k '{words}'"


def engine(words: str) -> str:
    return f"tests/test_engine.py -k '{words}'"


DRAWS, POSITIVE, ELEMENTWISE = "features/draws.py", "features/positive.py", "features/elementwise.py"
LOGS, SCAN, PROBLEM = "kernels/favor/logs.py", "kernels/scan.py", "kernels/problem.py"
SWEEP, FULL, FAVOR_PROBLEM = "kernels/favor/sweep.py", "kernels/favor/full.py", "kernels/favor/problem.py"
LINEAR, OPS = "kernels/linear/torch.py", "kernels/operator.py"
STATE, ATTEND = "mechanisms/favor_state.py", "mechanisms/favor_attend.py"
EXACT = "kernels/favor/exact.py"

CORE = (
    # random features
    Mutant(
        "QR without the sign fix",
        DRAWS,
        "return q * torch.where(r.diagonal() < 0, -1.0, 1.0)",
        "return q",
        estimators("test_unbiased and positive and orthogonal"),
    ),
    Mutant(
        "all rows with norm sqrt(d)",
        DRAWS,
        "torch.cat(blocks)[:rows] * norms",
        "torch.cat(blocks)[:rows] * dim**0.5",
        estimators("chi_norms or orthogonal_variance"),
    ),
    Mutant(
        "one draw for all heads",
        POSITIVE,
        "coupling, generator) for _ in range(heads)])",
        "coupling, generator)] * heads)",
        estimators("per_head"),
    ),
    Mutant(
        "hyperbolic without the mirrored rows",
        POSITIVE,
        "torch.cat([noise, -noise], dim=1)",
        "torch.cat([noise, noise], dim=1)",
        estimators("mechanism_uses"),
    ),
    Mutant(
        "1/M dropped: far and exact parts on different scales",
        POSITIVE,
        "-math.log(num_features)",
        "0.0 * math.log(num_features)",
        estimators("far_pairs"),
    ),
    Mutant(
        "redraw replaces the buffer",
        "features/drawn.py",
        "self.weight.copy_(weight)",
        "self.weight = weight",
        estimators("redraw"),
    ),
    Mutant(
        "elu + 1 that cancels",
        ELEMENTWISE,
        "torch.where(x < 0, x.clamp(max=0).exp(), x + 1)",
        "F.elu(x) + 1",
        estimators("elu_does_not_cancel"),
    ),
    Mutant(
        "relu2 with half its slope",
        ELEMENTWISE,
        "lambda x, phi: 2 * F.relu(x)",
        "lambda x, phi: F.relu(x)",
        contract("linear-relu2 and gradients_equal"),
    ),
    # log-features
    Mutant(
        "norm term of the keys dropped",
        LOGS,
        "self.key_norms = self.query_norms + gaussian",
        "self.key_norms = float(gaussian)",
        contract("favor-paper and forward_equals_reference"),
    ),
    Mutant(
        "Gaussian kernel without its key weight in the far field",
        LOGS,
        "self.key_norms = self.query_norms + gaussian",
        "self.key_norms = self.query_norms",
        contract("favor-gaussian and forward_equals_reference"),
    ),
    Mutant(
        "Gaussian kernel without its key weight in the exact part",
        FAVOR_PROBLEM,
        "logits -= half_square(y)[..., None, :]",
        "pass",
        contract("favor-gaussian and forward_equals_reference"),
    ),
    Mutant(
        "epsilon on the keys' features",
        SWEEP,
        "weights = key_logs.sub_(after[:, :, :, None]).exp_()",
        "weights = key_logs.sub_(after[:, :, :, None]).exp_().add_(1e-4)",
        contract("favor-paper and forward_equals_reference"),
    ),
    Mutant(
        "query norm's gradient detached",
        LOGS,
        "dx.addcmul_(x, row[..., None], value=-self.query_norms)",
        "pass",
        contract("favor-near and gradients_equal"),
    ),
    Mutant(
        "key norm's gradient detached",
        LOGS,
        "return dy.addcmul_(y, row[..., None], value=-self.key_norms)",
        "return dy",
        contract("favor-paper and gradients_equal"),
    ),
    Mutant(
        "bias gradient after the group correction",
        LOGS,
        "by_group.sub_(share * by_group.sum(-1, keepdim=True))",
        "by_group.sub_(share * by_group.mean(-1, keepdim=True))",
        engine("any_feature_map and groups"),
    ),
    Mutant(
        "offset's gradient forgotten",
        LOGS,
        "dx += row[..., None] * _per_head(self.offset_weight, x)",
        "pass",
        engine("any_feature_map and norm"),
    ),
    # state and maxima
    Mutant(
        "maxima over features instead of tokens",
        SWEEP,
        "running_maxima(key_logs.amax(-2), state.max, self.reverse)",
        "running_maxima(key_logs.amax((-2, -1)).unsqueeze(-1).expand(*state.max.shape[:2], blocks, "
        "state.max.shape[2]), state.max, self.reverse)",
        contract("favor-paper and extreme_logits"),
    ),
    Mutant(
        "state not rescaled when the maximum grows",
        SCAN,
        "state = torch.addcmul(updates[:, :, b], state, decay[:, :, b, :, None])",
        "state = updates[:, :, b] + state",
        contract("favor and forward_equals_reference"),
    ),
    Mutant(
        "the state before a tile is not rescaled",
        SCAN,
        "before.addcmul_(initial.high[:, :, None], remaining[..., None])",
        "before += initial.high[:, :, None]",
        contract("favor and chunk"),
    ),
    Mutant(
        "state's gradient not rescaled",
        SCAN,
        "return scan(reads, decay, final, not reverse)",
        "return scan(reads, torch.ones_like(decay), final, not reverse)",
        contract("favor and gradients_equal"),
    ),
    Mutant(
        "no certificate",
        SWEEP,
        "doubtful = row_sums < CERTIFICATE",
        "doubtful = row_sums < 0",
        contract("favor-paper and extreme_logits"),
    ),
    Mutant(
        "no certificate in the backward",
        SWEEP,
        "return bool((tile.logs.amax(-1) - log_normaliser[..., 0] > -math.log(CERTIFICATE)).any())",
        "return False",
        contract("favor-paper and extreme_logits"),
    ),
    Mutant(
        "state in half precision",
        PROBLEM,
        "self.dtype = torch.promote_types(q.dtype, torch.float32)",
        "self.dtype = q.dtype",
        contract("linear and low_precision"),
    ),
    Mutant(
        "float32 sums for float64 inputs",
        PROBLEM,
        "self.dtype = torch.promote_types(q.dtype, torch.float32)",
        "self.dtype = torch.float32",
        contract("favor and forward_equals_reference"),
    ),
    Mutant(
        "reverse sweep replaces instead of adding",
        SWEEP,
        "merged = merged_rows(rows, other, share, other_share)",
        "merged = rows",
        contract("favor-near and forward_equals_reference"),
    ),
    # blocks, causality
    Mutant(
        "own block causal off by one",
        PROBLEM,
        "scores.unflatten(3, (self.groups, block)).tril_()",
        "scores.unflatten(3, (self.groups, block)).tril_(1)",
        contract("favor-paper and causal_means"),
    ),
    Mutant(
        "own block without itself",
        PROBLEM,
        "scores.unflatten(3, (self.groups, block)).tril_()",
        "scores.unflatten(3, (self.groups, block)).tril_(-1)",
        contract("linear and forward_equals_reference"),
    ),
    Mutant(
        "near block looks ahead",
        EXACT,
        "mask = mask & mask.new_ones(span.block, span.block).tril_()",
        "mask = mask & mask.new_ones(span.block, span.block)",
        contract("favor-near and causal_means"),
    ),
    Mutant(
        "previous block forgotten",
        EXACT,
        "for shift in self._neighbours(span):\n            y.append",
        "for shift in list(self._neighbours(span))[1:]:\n            y.append",
        contract("favor-near and forward_equals_reference"),
    ),
    Mutant(
        "sinks counted in the far field too",
        ATTEND,
        "alive = None if lengths is None and not sinks else (index >= sinks) & (index < total)",
        "alive = None if lengths is None and not sinks else (index >= 0) & (index < total)",
        contract("favor and forward_equals_reference"),
    ),
    Mutant(
        "sinks seen before they exist",
        ATTEND,
        "seen = (index + 1 if causal else total.expand(-1, length)).clamp(max=sinks) if sinks else None",
        "seen = total.expand(-1, length).clamp(max=sinks) if sinks else None",
        contract("favor and causal_means"),
    ),
    Mutant(
        "sink gradients dropped",
        FAVOR_PROBLEM,
        'into["sink_v"].add_(dv[..., :-1].sum(2))',
        "pass",
        contract("favor-sinks and gradients_equal"),
    ),
    # masks
    Mutant(
        "masked keys raise the maxima",
        FAVOR_PROBLEM,
        "return None if mask is None else torch.where(mask, 0.0, DEAD).to(self.dtype)",
        "return None",
        contract("favor and extreme_logits"),
    ),
    Mutant(
        "dead keys keep what they hold",
        PROBLEM,
        "y = y.masked_fill_(~alive[..., None], 0)",
        "pass",
        contract("favor-paper and padding_changes"),
    ),
    Mutant(
        "blocks counted in positions, not real tokens",
        ATTEND,
        "slots = slots_of(real_index(key_mask, k), key_mask, q.shape[2])",
        "slots = slots_of(torch.arange(k.shape[2])[None], key_mask, q.shape[2])",
        contract("favor-near and padding_changes"),
    ),
    Mutant(
        "rows without keys divide by one weight of their own",
        FAVOR_PROBLEM,
        "torch.where(weight > 0, weight, 1)[..., None], centre)",
        "torch.where(weight >= 0, weight, 1)[..., None], centre)",
        contract("favor-paper and rows_without_keys"),
    ),
    # linear engine
    Mutant(
        "normaliser's gradient detached",
        PROBLEM,
        "dot = (grad_out * centred).sum(-1, keepdim=True)",
        "dot = 0 * (grad_out * centred).sum(-1, keepdim=True)",
        contract("linear and gradients_equal"),
    ),
    Mutant(
        "linear slope without the row's factor",
        LINEAR,
        "dprojected = dweights.mul_(self.map.slope(projected, phi) / size)",
        "dprojected = dweights.mul_(self.map.slope(projected, phi))",
        contract("linear and gradients_equal"),
    ),
    Mutant(
        "one reference per block for weighted keys",
        LINEAR,
        "seen = torch.maximum(own.log_weight.cummax(-1).values, own.before)",
        "seen = torch.maximum(own.log_weight.amax(-1, keepdim=True).expand_as(own.log_weight), own.before)",
        contract("favor-trigonometric and causal_means"),
    ),
    # decoding
    Mutant(
        "the unfinished block is folded too",
        STATE,
        "fold = alive & (slot // block < current[:, None] - reach)",
        "fold = alive & (slot // block <= current[:, None] - reach)",
        contract("favor-near and extend_equals"),
    ),
    Mutant(
        "a full block is never folded",
        STATE,
        "full = self.real & (count % near == 0)",
        "full = self.real & (count % near == -1)",
        contract("favor-near and extend_equals"),
    ),
    Mutant(
        "padding counts as a token",
        STATE,
        "count = state.length + self.real",
        "count = state.length + 1",
        contract("favor-near and masked_extend"),
    ),
    Mutant(
        "decoding forgets the gradient of the row scalar",
        STATE,
        "unit = (scalar - scalar.detach())[..., None]",
        "unit = 0 * scalar[..., None]",
        contract("favor-near and extend_equals"),
    ),
    Mutant(
        "exact logits rounded by the features' scalar",
        SWEEP,
        "self.exact.backward(tile.span, log_normaliser[..., 1:], grad, into)",
        "self.exact.backward(tile.span, log_normaliser[..., :1] + tile.scalar[..., None], grad, into)",
        contract("favor and lopsided"),
    ),
    Mutant(
        "sweep back forgets the exact part's normaliser",
        SWEEP,
        "torch.cat([both, other_log_normaliser[..., 1:] + grown], -1)",
        "torch.cat([both, other_log_normaliser[..., 1:]], -1)",
        contract("favor-near and gradients_equal"),
    ),
    Mutant(
        "states between borders not advanced",
        SWEEP,
        "state = self._fold(piece.start, self.block, piece.blocks(self.block), states[-1]).final",
        "state = states[-1]",
        engine("many_tiles and favor"),
    ),
    Mutant(
        "forward mode is not refused",
        "checks/engine.py",
        "forward_ad.unpack_dual(tensor).tangent is not None",
        "False",
        "tests/test_errors.py -k 'transforms and dual'",
    ),
    Mutant(
        "state's gradient lost between pieces",
        OPS,
        "return getattr(inputs, name) is not None and (",
        'return getattr(inputs, name) is not None and name != "far_sum" and (',
        contract("favor-paper and extend_equals"),
    ),
    Mutant(
        "autocast rounds the engine's products",
        "kernels/precision.py",
        "with torch.autocast(device, enabled=False):",
        "with torch.autocast(device, enabled=True, dtype=torch.bfloat16):",
        engine("autocast_rounds"),
    ),
    Mutant(
        "half precision rounds the features",
        "features/buffers.py",
        "self._buffers[name] = before.to(after.device)",
        "pass",
        contract("favor and half_keeps"),
    ),
)
