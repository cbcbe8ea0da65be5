"""Swap the attention of an existing torch model: same weights, another mechanism.

python examples/swap_attention.py [--length 4096]
"""

import argparse
import time
import warnings

import torch
from torch import nn

from subquad.nn import MultiheadAttention


def swap(model: nn.Module, attention: str, **options: object) -> int:
    """Replaces every nn.MultiheadAttention below `model`; how many."""
    found = [(parent, name) for parent in model.modules() for name, child in parent.named_children()
             if isinstance(child, nn.MultiheadAttention)]  # fmt: skip
    for layer, (parent, name) in enumerate(found):
        ours = MultiheadAttention.from_torch(getattr(parent, name), attention, layer=layer, **options)
        setattr(parent, name, ours)
    return len(found)


def seconds(model: nn.Module, x: torch.Tensor) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        model(x)
        times.append(time.perf_counter() - begun)
    return min(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Swap the attention of a torch encoder.")
    parser.add_argument("--length", type=int, default=4096)
    length = parser.parse_args().length
    torch.manual_seed(0)
    warnings.simplefilter("ignore", UserWarning)  # torch advertises nested tensors, which we do not use
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(1, length, 128)
    exact, took = model(x), {}
    print(f"torch: {seconds(model, x):.3f} s for {length:,} tokens")
    for attention, options in (("softmax", {}), ("favor", {"num_features": 128}), ("linear", {})):
        swapped = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        swapped.load_state_dict(model.state_dict())
        count = swap(swapped, attention, **options)
        error = float((swapped(x) - exact).norm() / exact.norm())
        took[attention] = seconds(swapped, x)
        gain = took["softmax"] / took[attention]
        print(f"{count} layers -> {attention}: output differs by {100 * error:.2f} %, {gain:.1f}x as fast as softmax")


if __name__ == "__main__":
    main()
