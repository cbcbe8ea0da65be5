"""Hand-made bugs of `nn`, file by file."""

from mutant import Mutant

NN = (
    # nn/multihead.py
    Mutant(
        "torch's fused path bypasses the mechanism",
        "nn/multihead.py",
        "_qkv_same_embed_dim = False",
        "_qkv_same_embed_dim = True",
        "tests/nn/test_nn.py -k 'fused_path'",
    ),
    # nn/positions.py
    Mutant(
        "rotation by the wrong sign",
        "nn/positions.py",
        "second * self.cos + first * self.sin",
        "second * self.cos - first * self.sin",
        "tests/nn/test_nn.py -k 'rotation'",
    ),
    Mutant(
        "low frequencies turn, high ones do not",
        "nn/positions.py",
        "angles[..., int(share * angles.shape[-1] + 0.5) :] = 0",
        "angles[..., : angles.shape[-1] - int(share * angles.shape[-1] + 0.5)] = 0",
        "tests/nn/test_nn.py -k 'share_of_the_pairs'",
    ),
    # nn/reversible.py
    Mutant(
        "dropout falls elsewhere when a reversible branch runs again",
        "nn/reversible.py",
        "torch.set_rng_state(self.cpu)",
        "pass",
        "tests/nn/test_nn.py -k 'reversible_gradients'",
    ),
    Mutant(
        "gradients of parameters in the order of recomputation",
        "nn/reversible.py",
        "for a, b in zip(of_attend, of_transform, strict=True)] + parameter_grads",
        "for a, b in zip(of_attend, of_transform, strict=True)][::-1] + parameter_grads",
        "tests/nn/test_nn.py -k 'reversible_gradients'",
    ),
    # nn/self_attention.py
    Mutant(
        "all layers share their features",
        "nn/self_attention.py",
        "return derived_seed(seed, layer)",
        "return derived_seed(seed)",
        "tests/models/test_models.py -k 'features_of_their_own'",
    ),
    Mutant(
        "the state of a layer loses what its convolutions remember",
        "nn/self_attention.py",
        "extend_parts(qk, recent, key_mask",
        "extend_parts(qk, None, key_mask",
        "tests/models/test_models.py -k 'piece_by_piece'",
    ),
    Mutant(
        "normalised keys keep the size of the queries",
        "nn/self_attention.py",
        "(k, self.k_size))",
        "(k, self.q_size))",
        "tests/nn/test_short_convolution.py -k 'root_mean_squares'",
    ),
    Mutant(
        "shared keys are not normalised",
        "nn/self_attention.py",
        "F.rms_norm(q, (self.head_dim,))",
        "q",
        "tests/mechanisms/test_buckets.py tests/models/test_buckets.py -k 'shared_keys'",
    ),
    Mutant(
        "calibrate: learned features of a layer are one map for all heads",
        "nn/self_attention.py",
        "if not drawn and not isinstance(mechanism, FavorAttention):",
        "if not drawn:",
        "tests/models/test_calibrated.py -k 'come_back and hedgehog or fresh'",
    ),
    Mutant(
        "mixed: parts of a layer draw alike",
        "nn/self_attention.py",
        "(*place, number)",
        "place",
        "tests/mechanisms/test_mixed.py -k 'draw_of_its_own'",
    ),
    Mutant(
        "mixed: a part draws for all heads of the layer",
        "nn/self_attention.py",
        'len(given["heads"]), (',
        "key_heads, (",
        "tests/mechanisms/test_mixed.py -k 'draw_of_its_own'",
    ),
    # nn/short_convolution.py
    Mutant(
        "one token takes the engine's way though it is masked",
        "nn/short_convolution.py",
        "if key_mask is None and type(recent) is Tensor and parts[0].shape[1] == 1:",
        "if type(recent) is Tensor and parts[0].shape[1] == 1:",
        "tests/nn/test_short_convolution.py -k 'engines_way'",
    ),
    Mutant(
        "short convolutions are added up in half precision",
        "kernels/convolution.py",
        "    dtype = torch.promote_types(x.dtype, torch.float32)\n    for first",
        "    dtype = x.dtype\n    for first",
        "tests/nn/test_short_convolution.py -k half_precision",
    ),
    Mutant(
        "a token's convolution forgets its gradients",
        "kernels/convolution.py",
        "if torch.is_grad_enabled() or parts[0].dtype",
        "if parts[0].dtype",
        "tests/nn/test_short_convolution.py -k 'engines_way'",
    ),
    Mutant(
        "a short convolution takes padding for a neighbour",
        "nn/short_convolution.py",
        "        if key_mask is None:\n            return tuple(",
        "        if True:\n            return tuple(",
        "tests/nn/test_short_convolution.py -k 'padding_is_no_neighbour'",
    ),
    Mutant(
        "a short convolution within a layer takes any mask",
        "nn/short_convolution.py",
        '        checks.key_mask("short convolution", key_mask, parts[0][:, None])\n',
        "",
        "tests/nn/test_short_convolution.py -k 'errors'",
    ),
    Mutant(
        "a short convolution forgets the wrong tokens",
        "nn/short_convolution.py",
        "last = key_mask.sum(-1)[:, None] +",
        "last = key_mask.sum(-1)[:, None].clamp(min=1) - 1 +",
        "tests/nn/test_short_convolution.py -k 'pieces_with_padding'",
    ),
    Mutant(
        "a bidirectional convolution looks back only",
        "kernels/convolution.py",
        "-i if causal else",
        "-i if True else",
        "tests/nn/test_short_convolution.py -k 'is_its_definition or looks_further_back'",
    ),
    Mutant(
        "gradients of taps come from one tile",
        "kernels/convolution.py",
        "dtaps[i] += ",
        "dtaps[i] = ",
        "tests/nn/test_short_convolution.py -k 'is_its_definition'",
    ),
)
