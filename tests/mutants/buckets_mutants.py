"""Hand-made bugs of attention within buckets, of `lsh` and of `cluster`."""

from mutant import Mutant


def buckets(words: str) -> str:
    return f"tests/test_buckets.py tests/test_bucket_models.py -k '{words}'"


SPARSE, GROUPS, KERNEL = "kernels/sparse/torch.py", "kernels/sparse/groups.py", "kernels/sparse/buckets.py"
CENSUS, STATE, SHARED = "mechanisms/census.py", "mechanisms/bucket_state.py", "mechanisms/buckets.py"
LSH, CLUSTER = "mechanisms/lsh.py", "mechanisms/cluster.py"

BUCKETS = (
    # what both stand on
    Mutant(
        "lsh: pairs count in every round they meet in",
        SPARSE,
        "hidden |= outside if r == rule.round else outside.logical_not_()",
        "hidden |= outside if r == rule.round else False",
        buckets("count_once"),
    ),
    Mutant(
        "buckets: the own token is counted by its bucket too",
        KERNEL,
        "code_high=1, round=r, skip_self=True)",
        "code_high=1, round=r)",
        buckets("cluster and forward_equals_reference"),
    ),
    Mutant(
        "buckets: a query looks ahead within its block",
        KERNEL,
        "low, code_low = (1, 0) if options.causal else (-UNLIMITED, -1)",
        "low, code_low = (-UNLIMITED, 0) if options.causal else (-UNLIMITED, -1)",
        buckets("lsh and causal_means_causal"),
    ),
    Mutant(
        "buckets: the block before is not met",
        KERNEL,
        "blocks, 1, 0 if options.causal else 1)",
        "blocks, 0, 0 if options.causal else 1)",
        buckets("cluster and forward_equals_reference"),
    ),
    Mutant(
        "buckets: sequences share their codes",
        KERNEL,
        "code + owner * apart",
        "code + 0 * owner",
        buckets("lsh and batches_are_independent"),
    ),
    Mutant(
        "buckets: gradients of earlier rounds are forgotten",
        KERNEL,
        "        dk += blocks.scatter(part.k)\n",
        "        dk = blocks.scatter(part.k)\n",
        buckets("lsh and gradients_equal"),
    ),
    Mutant(
        "buckets: the first of all shares wins",
        KERNEL,
        "out, log_normaliser = out.lerp_(part, share[:, None]), both",
        "out, log_normaliser = out.lerp_(part, share[:, None]), log_normaliser",
        buckets("lsh and forward_equals_reference"),
    ),
    Mutant(
        "buckets: padding has a number in its bucket",
        CENSUS,
        "address = address.masked_fill(~real[:, None], num_buckets * length)",
        "pass",
        buckets("padding_changes"),
    ),
    Mutant(
        "buckets: the last block touches the next bucket",
        CENSUS,
        "(self.counts + bucket_size - 1) // bucket_size + 2",
        "(self.counts + bucket_size - 1) // bucket_size",
        buckets("never_touch"),
    ),
    Mutant(
        "buckets: a tile that is not full ends its code",
        GROUPS,
        "(per_run.cumsum(0) - per_run)[run] * size + within",
        "(per_run.cumsum(0) - per_run)[run] * size + within % size",
        buckets("groups_hold"),
    ),
    # decoding
    Mutant(
        "lsh: decoding counts a key in every round",
        STATE,
        "first = meets & (meets.cumsum(-1) == 1)",
        "first = meets",
        buckets("lsh and extend_equals"),
    ),
    Mutant(
        "buckets: rings of one block",
        STATE,
        "        return 2 * self.bucket_size\n",
        "        return self.bucket_size\n",
        buckets("long_decoding"),
    ),
    Mutant(
        "buckets: padding enters the rings",
        STATE,
        "return names if real is None else names.masked_fill(~real[:, None, :, None], ABSENT)",
        "return names",
        buckets("masked_extend"),
    ),
    Mutant(
        "buckets: a new token sees those after it",
        STATE,
        "seen = (seen & (place < own[:, None])) | (place == own[:, None])",
        "seen = seen | (place == own[:, None])",
        buckets("long_decoding"),
    ),
    # lsh
    Mutant(
        "lsh: opposite directions share a bucket",
        LSH,
        "opposite = products.gather(-1, direction) < 0",
        "opposite = products.gather(-1, direction) < -torch.inf",
        buckets("opposites"),
    ),
    Mutant(
        "lsh: hashing in the dtype of the inputs",
        SHARED,
        "return (some.float() for some in x.split(tokens, 2))",
        "return (some.double() for some in x.split(tokens, 2))",
        buckets("those_of_float32"),
    ),
    Mutant(
        "lsh: one rotation for all rounds",
        LSH,
        "for turns in rotations.unbind(1)] for some",
        "for turns in [rotations[:, 0]] * rotations.shape[1]] for some",
        buckets("error_falls"),
    ),
    Mutant(
        "lsh: one rotation for all heads",
        LSH,
        'heads = checks.optional_count("lsh", "num_heads", num_heads) or 1\n',
        "heads = 1\n",
        buckets("one_bucket_for_all"),
    ),
    # cluster
    Mutant(
        "cluster: forward moves centroids",
        CLUSTER,
        "        return assigned(x, self.centroids)\n\n    def redraw",
        "        self.centroids.mul_(0.999).add_(0.001)\n        return assigned(x, self.centroids)\n\n    def redraw",
        buckets("only_update"),
    ),
    Mutant(
        "cluster: long vectors count for more",
        CLUSTER,
        "F.normalize(x.float(), dim=-1).flatten(0, 2)",
        "x.float().flatten(0, 2)",
        buckets("only_update"),
    ),
    Mutant(
        "cluster: an empty cluster is pulled to nowhere",
        CLUSTER,
        "torch.where(has_vectors, moved, self.centroids)",
        "self.decay * self.centroids + (1 - self.decay) * mean",
        buckets("empty_clusters"),
    ),
    Mutant(
        "cluster: update replaces the buffer",
        CLUSTER,
        "self.centroids.copy_(torch.where(has_vectors, moved, self.centroids))",
        "self.centroids = torch.where(has_vectors, moved, self.centroids)",
        buckets("only_update"),
    ),
    Mutant(
        "cluster: features see other clusters",
        "mechanisms/cluster_features.py",
        "row = owner.view(*cluster.shape[:2], 1) * (self.starts.shape[-1] - 1) + cluster",
        "row = owner.view(*cluster.shape[:2], 1) * (self.starts.shape[-1] - 1) + 0 * cluster",
        buckets("cluster-favor and forward_equals_reference"),
    ),
    Mutant(
        "cluster: masked keys are alive in their cluster",
        "mechanisms/cluster_features.py",
        "alive[self.k_row[self.real], self.k_slot[self.real]] = True",
        "alive[:] = True",
        buckets("cluster-favor and masked_forward"),
    ),
    Mutant(
        "cluster: redraw forgets what was learned",
        CLUSTER,
        "        self.weight.copy_(self._draw_features(seed))\n",
        "        self.weight.copy_(self._draw_features(seed))\n        self.centroids.neg_()\n",
        buckets("one_cluster_of_features"),
    ),
    Mutant(
        "cluster: every rank has centroids of its own",
        CLUSTER,
        "            dist.all_reduce(total)\n",
        "            pass\n",
        buckets("ranks_update"),
    ),
    Mutant(
        "cluster: hooks stay after their step",
        "training/callbacks.py",
        "            hook.remove()\n",
        "            pass\n",
        buckets("the_callback"),
    ),
    # layers
    Mutant(
        "shared keys are not normalised",
        "nn/self_attention.py",
        "F.rms_norm(q, (self.head_dim,))",
        "q",
        buckets("shared_keys"),
    ),
)
