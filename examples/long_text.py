"""A language model of a folder of text, byte by byte, in windows of many thousand bytes.

python examples/long_text.py books/ [--window 8192]
"""

import argparse
import tempfile
from pathlib import Path

import torch

from subquad.data import byte_tokenizer, load_text
from subquad.models import SubquadForCausalLM
from subquad.training import TrainOptions, train


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a folder of text and continue a sentence.")
    parser.add_argument("folder", type=Path, help="where .txt, .md and .rst files are")
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompt", default="The ")
    arguments = parser.parse_args()
    files = [p for p in sorted(arguments.folder.rglob("*")) if p.suffix in (".txt", ".md", ".rst")]
    options = TrainOptions(
        attention=["linear", "favor"],  # layers may differ: a cheap one first, a sharper one on top
        attention_options=[{}, {"num_features": 64}],
        layers=2,
        window=arguments.window,
        steps=arguments.steps,
        eval_every=50,
        eval_samples=4,
        redraw_every=100,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = train(load_text(files), folder, options)
        model = SubquadForCausalLM.from_pretrained(Path(folder) / "model").eval()
    print(f"{result.metrics['eval_bits']:.3f} bits per byte, unigram {result.unigram_loss / 0.6931:.3f}")
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    prompt = tokenizer(arguments.prompt, return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=200, do_sample=True, temperature=0.8, top_p=0.95)
    print(tokenizer.decode(made[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
