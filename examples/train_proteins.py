"""Train on your FASTA in Python, then score, embed and sample.

python examples/train_proteins.py [my.fasta] [--steps 200]
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from subquad.data import encode, load_proteins, protein_tokenizer
from subquad.models import SubquadForCausalLM, embeddings, log_likelihoods
from subquad.training import TrainOptions, train


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, score, embed and sample proteins.")
    parser.add_argument("fasta", nargs="*", type=Path, help="your sequences; none: a sample of UniProt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=2048)
    arguments = parser.parse_args()
    options = TrainOptions(
        attention="favor",
        attention_options={"num_features": 64},
        layers=2,
        window=arguments.window,
        steps=arguments.steps,
        eval_every=50,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = train(load_proteins(arguments.fasta), folder, options)
        print(f"perplexity {result.metrics['eval_perplexity']:.3f}, unigram {result.unigram_perplexity:.3f}")
        model = SubquadForCausalLM.from_pretrained(Path(folder) / "model").eval()
    proteins = ["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ", "MMMMMMMMWWWWWWWWCCCCCCCC"]
    ids = [torch.from_numpy(encode(protein).astype(np.int64)) for protein in proteins]
    for protein, scores in zip(proteins, log_likelihoods(model, ids, start=1), strict=True):
        print(f"{protein[:12]}...: log-likelihood per residue {scores.mean():.3f}")
    print("embeddings:", torch.stack(embeddings(model.model, ids, start=1)).shape)
    tokenizer = protein_tokenizer()
    prompt = tokenizer("MKT", return_tensors="pt")
    torch.manual_seed(0)
    made = model.generate(**prompt, max_new_tokens=100, do_sample=True, top_p=0.95)
    print("sample:", tokenizer.decode(made[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
