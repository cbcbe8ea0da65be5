"""Draw digits pixel by pixel: scikit-learn's 8x8 images, quality in bits per dimension.

python examples/digits.py [--steps 400] [--output digits.png]
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

from subquad.data import images_corpus
from subquad.models import SubquadForCausalLM
from subquad.training import TrainOptions, train

LEVELS, SIDE, FIRST = 17, 8, 4  # grey levels, pixels, id of grey level 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on 8x8 digits and draw new ones.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=Path("digits.png"))
    arguments = parser.parse_args()
    corpus = images_corpus(load_digits(return_X_y=True)[0].reshape(-1, SIDE, SIDE).astype(np.int64), levels=LEVELS)
    options = TrainOptions(
        attention="favor",
        attention_options={"num_features": 64, "near": 16},
        layers=3,
        hidden=96,
        positions="learned",
        batch_size=32,
        steps=arguments.steps,
        eval_every=100,
        eval_samples=64,
        window=SIDE * SIDE + 1,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = train(corpus, folder, options)
        model = SubquadForCausalLM.from_pretrained(Path(folder) / "model").eval()
    unigram = result.unigram_loss / np.log(2)
    print(
        f"{result.metrics['eval_bits']:.3f} bits per dimension; knowing only how often each grey occurs: {unigram:.3f}"
    )
    draw(model, arguments.output)
    print(f"64 new digits: {arguments.output}")


def draw(model: SubquadForCausalLM, output: Path) -> None:
    torch.manual_seed(0)
    start = torch.full((64, 1), model.config.bos_token_id or 0)
    made = model.generate(
        start,
        attention_mask=torch.ones_like(start),
        max_new_tokens=SIDE * SIDE,
        do_sample=True,
        suppress_tokens=list(range(FIRST)),
        eos_token_id=None,
    )
    images = (made[:, 1:] - FIRST).numpy().reshape(8, 8, SIDE, SIDE)
    grid = images.transpose(0, 2, 1, 3).reshape(8 * SIDE, 8 * SIDE)
    Image.fromarray((grid * 255 // (LEVELS - 1)).astype(np.uint8)).resize((512, 512), Image.Resampling.NEAREST).save(
        output
    )


if __name__ == "__main__":
    main()
