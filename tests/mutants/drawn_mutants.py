"""Bugs that random draws (`draw.py`) showed no test to notice, and the tests written since."""

from mutant import Mutant


def tests(name: str, words: str) -> str:
    return f"tests/test_{name}.py -k '{words}'"


DRAWN = (
    Mutant(
        "the cache forgets past tokens when a mask is made",
        "models/cache.py",
        "return self.tokens + query_length, 0",
        "return query_length, 0",
        tests("models", "how_long_a_mask"),
    ),
    Mutant(
        "the cache says that masks begin at the second token",
        "models/cache.py",
        "return self.tokens + query_length, 0",
        "return self.tokens + query_length, 1",
        tests("models", "how_long_a_mask"),
    ),
    Mutant(
        "cross-attention in clusters is not refused by the function",
        "mechanisms/cluster.py",
        '    checks.self_attention("cluster", q, k)\n',
        "",
        tests("buckets", "test_errors"),
    ),
    Mutant(
        "centroids move by more queries than keys",
        "mechanisms/cluster.py",
        "        checks.self_attention(self.name, q, k)\n",
        "",
        tests("buckets", "test_errors"),
    ),
    Mutant(
        "speed counts the last step alone",
        "training/callbacks.py",
        "self.seconds += time.perf_counter() - self._begun",
        "self.seconds = time.perf_counter() - self._begun",
        tests("callbacks", "speed_counts"),
    ),
    Mutant(
        "time per step times steps",
        "training/callbacks.py",
        "return self.seconds / self.steps if self.steps else None",
        "return self.seconds * self.steps if self.steps else None",
        tests("callbacks", "speed_counts"),
    ),
    Mutant(
        "speed counts steps instead of tokens",
        "training/callbacks.py",
        "return self.steps * self.tokens_per_step / max(self.seconds, 1e-9)",
        "return self.steps / max(self.seconds, 1e-9)",
        tests("callbacks", "speed or progress or record"),
    ),
    Mutant(
        "a record's epoch counts steps instead of samples",
        "training/callbacks.py",
        "round(step * self.samples_per_step / self.per_epoch, 4)",
        "round(step / self.per_epoch, 4)",
        tests("callbacks", "records_hold"),
    ),
    Mutant(
        "the progress line without a terminal says only where it is",
        "training/callbacks.py",
        'self._line(f"step {state.global_step}/{state.max_steps}  {self.shown}")',
        'self._line(f"step {state.global_step}/{state.max_steps}  ")',
        tests("callbacks", "a_line_for_each"),
    ),
    Mutant(
        "the bar stands still",
        "training/callbacks.py",
        "self.bar.update(self.task, completed=state.global_step)",
        "pass",
        tests("callbacks", "a_bar_in_a_terminal"),
    ),
    Mutant(
        "any objective is an objective until samples are made",
        "training/options.py",
        '        checks.choice(op, "objective", self.objective, OBJECTIVES)\n',
        "",
        tests("options", "refused and objective"),
    ),
    Mutant(
        "heads are not cut though threads have fewer than four",
        "kernels/cpu/problem.py",
        "return 1 if heads >= 4 * threads",
        "return 1 if heads >= 3 * threads",
        tests("problem", "as_much_to_do"),
    ),
    Mutant(
        "exact layers are diagnosed by other features than they would get",
        "diagnostics/diagnose.py",
        "    num_features: int = 256",
        "    num_features: int = 257",
        tests("defaults", "exact_layers"),
    ),
    Mutant(
        "another default of a command",
        "cli/train.py",
        "steps: Steps = 500",
        "steps: Steps = 501",
        tests("defaults", "frozen"),
    ),
    Mutant(
        "the Trainer stays in the folder of a checkpoint that was moved away",
        "training/trainer.py",
        "        self._staging = None\n",
        "",
        tests("trainer", "after_a_checkpoint"),
    ),
    Mutant(
        "small ticks crowd the scale of errors",
        "bench/fidelity_plots.py",
        "    axes.minorticks_off()\n",
        "",
        tests("pictures", "show"),
    ),
)
