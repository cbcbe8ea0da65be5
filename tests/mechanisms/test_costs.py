"""What the torch engines do, counted: operations and multiplications of every mechanism, frozen in `costs.txt`.

Tiles, blocks and what is read twice change no result, so no other test notices them.
`python tests/mechanisms/test_costs.py` writes the file anew; look at the difference before you commit it.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from subquad import Mechanism, attention
from subquad.testing.judging import directions

COSTS = Path(__file__).parent / "costs.txt"
TORCH = "2.13"  # others do the same in other operations
D, LENGTH = 8, 300

Make = Callable[[], Mechanism]
MECHANISMS: dict[str, Make] = {
    "favor": lambda: attention("favor", head_dim=D, num_features=16, near=32, backend="torch"),
    "favor, near=0": lambda: attention("favor", head_dim=D, num_features=16, near=0, sinks=3, backend="torch"),
    "favor, learned": lambda: attention("favor", head_dim=D, num_features=16, near=32, estimator="exponential"),
    "linear": lambda: attention("linear", head_dim=D, backend="torch"),
    "linear, projected": lambda: attention("linear", head_dim=D, num_features=24, feature_map="relu", backend="torch"),
    "linformer": lambda: attention("linformer", head_dim=D, rank=6, max_length=LENGTH, num_heads=2),
    "window": lambda: attention("window", head_dim=D, window=40, global_tokens=2),
    "window, dilated": lambda: attention("window", head_dim=D, window=20, dilation=3),
    "lsh": lambda: attention("lsh", head_dim=D, num_buckets=8, bucket_size=16, rounds=2),
    "cluster": lambda: attention("cluster", head_dim=D, num_clusters=4, bucket_size=16, num_heads=2),
    "strided": lambda: attention("strided", head_dim=D, stride=16),
    "mixed": lambda: attention(
        "mixed",
        head_dim=D,
        parts=[
            {"attention": "favor", "heads": [1], "num_features": 16, "near": 32, "backend": "torch"},
            {"attention": "linear", "heads": [0], "backend": "torch"},
        ],
    ),
    "pages": lambda: attention("pages", head_dim=D, pages=3, page=8, window=16, sinks=2),
    "strided, fixed": lambda: attention("strided", head_dim=D, stride=16, pattern="fixed", summary=2),
}


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, LENGTH, D), (1, 2, LENGTH, D), (1, 2, LENGTH, D))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def cost(run: Callable[[], object]) -> str:
    """Operations of torch, those inside of others included, and floating point operations of products."""
    with torch.profiler.profile(with_flops=True) as profile:
        run()
    events = [event for event in profile.events() or () if event.name.startswith("aten::")]
    return f"{len(events)} operations, {sum(event.flops or 0 for event in events)} flops"


def costs(name: str) -> list[str]:
    mechanism, tensors = MECHANISMS[name](), inputs()
    lines = []
    for causal in directions(mechanism):
        direction = "causal" if causal else "bidirectional"
        mechanism(*tensors, causal=causal).sum().backward()  # what is made once
        out = mechanism(*tensors, causal=causal)
        lines.append(f"{name}; {direction}; forward: {cost(lambda c=causal: mechanism(*tensors, causal=c))}")
        grad = torch.ones_like(out)
        lines.append(f"{name}; {direction}; backward: {cost(lambda o=out, g=grad: torch.autograd.grad(o, tensors, g))}")
    return lines


@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"counted with torch {TORCH}")
@pytest.mark.parametrize("name", MECHANISMS)
def test_they_are_frozen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # filling empty tensors with NaN counts too
    frozen = [line for line in COSTS.read_text().splitlines() if line.split(";")[0] == name]
    assert costs(name) == frozen


if __name__ == "__main__":
    COSTS.write_text("".join(f"{line}\n" for name in MECHANISMS for line in costs(name)))
    sys.exit(0)
