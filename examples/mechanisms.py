"""The same small protein model with every mechanism: what it learns, what a step costs, and decoding with a state.

python examples/mechanisms.py [--steps 100] [--window 1024] [--only favor window]
"""

import argparse
import tempfile
from pathlib import Path

import torch

from subquad import MECHANISMS
from subquad.data import load_proteins
from subquad.models import SubquadForCausalLM
from subquad.training import TrainOptions, train

FAVOR = {"attention": "favor", "heads": [0, 2, 3], "num_features": 64}
MODELS = {
    "favor": {"attention_options": {"num_features": 64}},
    "window": {"attention_options": {"window": 64, "global_tokens": 1}},
    "linformer": {"attention_options": {"rank": 64}, "objective": "masked"},
    "lsh": {"attention_options": {"num_buckets": 16, "bucket_size": 32, "rounds": 2}},
    "cluster": {"attention_options": {"num_clusters": 16, "bucket_size": 32}},
    "strided": {"attention_options": {"stride": 32}},
    "mixed": {"attention_options": {"parts": [FAVOR, {"attention": "softmax", "heads": [1]}]}},
    "pages": {"attention_options": {"pages": 4, "page": 16, "window": 32}},
    # The paper's claim about FAVOR+: it goes with clusters and with reversible layers. And a Reformer.
    "favor in clusters": {
        "attention": "cluster",
        "attention_options": {"num_clusters": 4, "inside": "favor", "num_features": 64},
        "reversible": True,
    },
    "reformer": {
        "attention": "lsh",
        "attention_options": {"num_buckets": 16, "bucket_size": 32, "rounds": 2},
        "shared_qk": True,
        "reversible": True,
    },
}
NAMES = [*(m.name for m in MECHANISMS), "favor in clusters", "reformer"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small protein model with every mechanism.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    given = parser.parse_args()
    data, sizes = load_proteins([]), {"layers": 2, "hidden": 64, "window": given.window}
    print(f"{'':17}  objective  perplexity  unigram  s/step  cached - uncached")
    for name in given.only:
        model = {"attention": name, **MODELS.get(name, {})}
        options = TrainOptions(**model, **sizes, steps=given.steps, eval_every=given.steps)
        with tempfile.TemporaryDirectory() as folder:
            result = train(data, folder, options)
            decoded = difference(Path(folder) / "model") if options.objective == "causal" else "no state"
        perplexities = f"{result.metrics['eval_perplexity']:10.3f}  {result.unigram_perplexity:7.3f}"
        print(f"{name:17}  {options.objective:9}  {perplexities}  {result.seconds_per_step or 0:6.3f}  {decoded}")


@torch.inference_mode()
def difference(folder: Path) -> str:
    """Logits of 60 tokens, one at a time with the cache, against all at once."""
    model = SubquadForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(4, 24, (1, 60), generator=torch.Generator().manual_seed(0))
    whole, cache, steps = model(ids).logits, None, []
    for t in range(60):
        out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    return f"{(torch.cat(steps, 1) - whole).abs().max():.1e}"


if __name__ == "__main__":
    main()
