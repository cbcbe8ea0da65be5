"""Hand-made bugs of layers, models, data and training."""

from mutant import Mutant


def tests(name: str, words: str) -> str:
    return f"tests/test_{name}.py -k '{words}'"


MODELS = (
    # layers
    Mutant(
        "torch's fused path bypasses the mechanism",
        "nn/multihead.py",
        "_qkv_same_embed_dim = False",
        "_qkv_same_embed_dim = True",
        tests("layers", "fused_path"),
    ),
    Mutant(
        "padding mask not inverted",
        "checks/layers.py",
        "return ~padding",
        "return padding",
        tests("layers", "multihead_is_torchs or encoder_layer"),
    ),
    Mutant(
        "any mask passes for causal",
        "checks/layers.py",
        "if mask.shape != causal.shape or not plain or not torch.equal(hidden, causal):",
        "if mask.shape != causal.shape:",
        tests("layers", "test_errors"),
    ),
    Mutant(
        "rotation by the wrong sign",
        "nn/positions.py",
        "second * self.cos + first * self.sin",
        "second * self.cos - first * self.sin",
        tests("layers", "rotation"),
    ),
    Mutant(
        "dropout falls elsewhere when a reversible branch runs again",
        "nn/reversible.py",
        "torch.set_rng_state(self.cpu)",
        "pass",
        tests("layers", "reversible_gradients"),
    ),
    Mutant(
        "gradients of parameters in the order of recomputation",
        "nn/reversible.py",
        "for a, b in zip(of_attend, of_transform, strict=True)] + parameter_grads",
        "for a, b in zip(of_attend, of_transform, strict=True)][::-1] + parameter_grads",
        tests("layers", "reversible_gradients"),
    ),
    # models
    Mutant(
        "positions count padding",
        "models/modeling.py",
        "return (key_mask.cumsum(-1) - 1).clamp(min=0)",
        "return torch.arange(x.shape[1], device=x.device)[None]",
        tests("models", "padding_anywhere and (sinusoidal or learned)"),
    ),
    Mutant(
        "cached positions count padding",
        "models/cache.py",
        "self.length = before + real.sum(-1)",
        "self.length = before + new",
        tests("models", "generation_with_cache or piece_by_piece"),
    ),
    Mutant(
        "beams are not reordered",
        "models/cache.py",
        "self.state = reorder_state(self.state, beam_idx.to(self.state[0].device))",
        "pass",
        tests("models", "generation_with_cache or repeats_and_selects"),
    ),
    Mutant(
        "the mask of the past is taken for that of the new tokens",
        "checks/models.py",
        "mask = mask[:, -new:].bool()",
        "mask = mask[:, :new].bool()",
        tests("models", "generation_with_cache or piece_by_piece"),
    ),
    Mutant(
        "random features cast with the model",
        "features/buffers.py",
        "self._buffers[name] = before.to(after.device)",
        "pass",
        tests("models", "stay_float32"),
    ),
    Mutant(
        "all layers share their features",
        "nn/self_attention.py",
        "return derived_seed(seed, layer)",
        "return derived_seed(seed)",
        tests("models", "features_of_their_own"),
    ),
    Mutant(
        "the mean counts padding",
        "models/heads.py",
        "hidden.masked_fill(~real[..., None], 0).sum(1) / real.sum(-1, keepdim=True).clamp(min=1)",
        "hidden.mean(1)",
        tests("models", "classification_ignores"),
    ),
    Mutant(
        "scores shifted by one",
        "models/scoring.py",
        "targets = ids[:, begin + 1 : end + 1, None]",
        "targets = ids[:, begin:end, None]",
        tests("models", "log_likelihoods"),
    ),
    # data
    Mutant(
        "copies on both sides of the split",
        "data/corpus.py",
        "held_out = self.keys < np.uint64(int(fraction * 2**64))",
        "held_out = np.arange(len(self)) < fraction * len(self)",
        tests("data", "split_is_by_content"),
    ),
    Mutant(
        "masks from a global generator",
        "data/samples.py",
        "np.random.default_rng([self.seed, 1, index])",
        "np.random.default_rng(np.random.randint(1 << 30))",
        tests("data", "functions_of_seed"),
    ),
    Mutant(
        "every epoch in the same order",
        "data/samples.py",
        "np.random.default_rng([self.seed, 0, epoch])",
        "np.random.default_rng([self.seed, 0, 0])",
        tests("data", "cover_every_epoch"),
    ),
    Mutant(
        "windows lose the separators",
        "data/samples.py",
        "filled += len(piece) + 1",
        "filled += len(piece)",
        tests("data", "cover_every_epoch"),
    ),
    Mutant(
        "separators are masked",
        "data/samples.py",
        "(tokens == vocabulary.pad) | (tokens == vocabulary.sep) | (tokens == vocabulary.mask)",
        "tokens == vocabulary.pad",
        tests("data", "berts"),
    ),
    # training
    Mutant(
        "options of the command have no defaults",
        "cli/train.py",
        "default = None if field.default is MISSING else field.default",
        "default = None",
        tests("defaults", "frozen"),
    ),
    Mutant(
        "run.json is read again",
        "cli/train.py",
        'resume=stored or given["resume"],',
        'resume=given["resume"],',
        tests("cli", "read_once"),
    ),
    Mutant(
        "the command waits for the Trainer",
        "cli/train.py",
        "from subquad.training.options import DATA,",
        "from subquad.training.run import train as _\nfrom subquad.training.options import DATA,",
        tests("package", "at_once"),
    ),
    Mutant(
        "checkpoints written in place",
        "training/trainer.py",
        "return super()._get_output_dir(trial) if self._staging is None else str(self._staging)",
        "return super()._get_output_dir(trial)",
        tests("training", "interrupted_and_resumed and favor or promises"),
    ),
    Mutant(
        "damage goes unseen",
        "training/checkpoints.py",
        "if (what := damage(checkpoint)) is not None:",
        "if (what := None) is not None:",
        tests("training", "damaged_checkpoints"),
    ),
    Mutant(
        "redrawn features are always the same",
        "training/callbacks.py",
        "return derived_seed(seed, step)",
        "return derived_seed(seed)",
        tests("training", "redraw_happens"),
    ),
    Mutant(
        "signals are ignored",
        "training/callbacks.py",
        "control.should_save = control.should_training_stop = True",
        "pass",
        tests("training", "sigint"),
    ),
    Mutant(
        "a loss that is no number goes on",
        "training/trainer.py",
        "if not bool(torch.isfinite(loss)):",
        "if False:",
        tests("training", "no_number"),
    ),
    Mutant(
        "evaluation averages over samples",
        "training/metrics.py",
        'loss = float(totals[0] / totals[2])',
        'loss = float(totals[0] / (totals[2] + 1))',
        tests("training", "promises"),
    ),
    Mutant(
        "metrics of a discarded future stay",
        "training/metrics.py",
        'if record["step"] <= step]',
        'if record["step"] <= step + 1]',
        tests("training", "forget"),
    ),
)  # fmt: skip
