"""A tour of subquad in the terminal, about half a minute on two cores: `make tour`."""

import time
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import subquad
from subquad.bench import peak_memory, time_side_by_side

HEADS, HEAD_DIM = 4, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384)
console = Console()


def main() -> None:
    torch.manual_seed(0)
    console.rule("[bold]1. How close to exact attention?")
    console.print(accuracy())
    console.print(
        "Random features alone lose to averaging all values as soon as logits are not tiny. Exact blocks and sinks "
        "make them useful where attention stays near or goes to the first tokens, as it mostly does in trained "
        "models.\n",
        style="dim",
    )
    console.rule("[bold]2. What does it cost? Causal, forward and backward")
    console.print(cost())
    console.print(
        "Exact attention wins on short sequences and on memory, which is linear for both; favor wins on time beyond a "
        "few thousand tokens, by a factor that doubles with the length.\n",
        style="dim",
    )
    console.rule("[bold]3. Decoding: one token at a time")
    console.print(decoding())
    console.print(
        "The state of favor neither grows nor slows down; the cache of exact attention does both.", style="dim"
    )


def numbers(first: str, *others: str) -> Table:
    """A table whose columns after the first are right-aligned."""
    table = Table(first)
    for other in others:
        table.add_column(other, justify="right")
    return table


# 1 --------------------------------------------------------------------------------------------------------------------


def accuracy() -> Table:
    inputs = {
        "small logits": random_inputs(0.25),
        "N(0, 1)": random_inputs(1.0),
        "near + sinks": structured_inputs(),
    }
    rows = {
        "average of all values": None,
        "favor, paper: near=0, sinks=0": subquad.FavorAttention(HEAD_DIM, near=0, sinks=0),
        "favor, default: near=64, sinks=4": subquad.FavorAttention(HEAD_DIM),
        "the same, 1,024 features": subquad.FavorAttention(HEAD_DIM, 1024),
    }
    table = numbers("relative error, 1,024 tokens, causal", *inputs)
    exact = {name: subquad.SoftmaxAttention(HEAD_DIM)(*x, causal=True) for name, x in inputs.items()}
    for label, attention in rows.items():
        cells = []
        for name, (q, k, v) in inputs.items():
            out = running_mean(v) if attention is None else attention(q, k, v, causal=True)
            cells.append(f"{((out - exact[name]).norm() / exact[name].norm()).item():.3f}")
        table.add_row(label, *cells)
    return table


def running_mean(v: Tensor) -> Tensor:
    return v.cumsum(2) / torch.arange(1, v.shape[2] + 1)[:, None]


def random_inputs(size: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, HEADS, 1024, HEAD_DIM)
    return size * q, size * k, v


def structured_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Keys that drift, so that neighbours resemble each other, and four first tokens that all queries look at."""
    drift = torch.randn(1, HEADS, 1024, HEAD_DIM).cumsum(2)
    drift = HEAD_DIM**0.5 * drift / drift.norm(dim=-1, keepdim=True)
    common = torch.randn(1, HEADS, 1, HEAD_DIM)
    q, k = drift + common, drift + 0.2 * torch.randn_like(drift)
    k[:, :, :4] = 1.2 * common
    return q, k, torch.randn(1, HEADS, 1024, HEAD_DIM)


# 2 --------------------------------------------------------------------------------------------------------------------


def cost() -> Table:
    names = ("softmax", "favor", "linear")
    table = numbers(
        "tokens", *(f"{name}\nms" for name in names), "favor is\nfaster by", *(f"{n}\npeak MB" for n in names)
    )
    for length in track(LENGTHS, description="measuring", console=console, transient=True):
        tensors = [t.requires_grad_() for t in torch.randn(3, 1, HEADS, length, HEAD_DIM).unbind()]
        calls = {name: gradients(subquad.attention(name, head_dim=HEAD_DIM), tensors) for name in names}
        times = time_side_by_side(calls, repeats=1 if length > 8000 else 3)
        peaks = [peak_memory(call) for call in calls.values()]
        table.add_row(
            f"{length:,}",
            *(f"{1e3 * times[name].best:,.0f}" for name in names),
            f"{times['softmax'].best / times['favor'].best:.1f}x",
            *("-" if peak is None else f"{peak / 1e6:.0f}" for peak in peaks),
        )
    return table


def gradients(attention: subquad.Mechanism, tensors: list[Tensor]):
    return lambda: torch.autograd.grad(attention(*tensors, causal=True).sum(), tensors)


# 3 --------------------------------------------------------------------------------------------------------------------


def decoding() -> Table:
    table = numbers("tokens so far", "softmax\nstate", "softmax\nms/token", "favor\nstate", "favor\nms/token")
    progress = {name: decode(subquad.attention(name, head_dim=HEAD_DIM)) for name in ("softmax", "favor")}
    steps = track(LENGTHS, description="decoding", console=console, transient=True)
    for length in steps:
        cells = []
        for run in progress.values():
            size, milliseconds = next(run)
            cells += [f"{size / 1e6:.2f} MB", f"{milliseconds:.2f}"]
        table.add_row(f"{length:,}", *cells)
    return table


@torch.no_grad()
def decode(attention: subquad.Mechanism) -> Iterator[tuple[int, float]]:
    """Prefills up to each length, then decodes 64 tokens one by one: bytes of state, milliseconds per token."""
    state, done = None, 0
    for length in LENGTHS:
        prompt = torch.randn(3, 1, HEADS, length - done, HEAD_DIM)
        _, state = attention.extend(*prompt, state=state)
        start = time.perf_counter()
        for _ in range(64):
            _, state = attention.extend(*torch.randn(3, 1, HEADS, 1, HEAD_DIM), state=state)
        done = length + 64
        yield subquad.state_bytes(state), (time.perf_counter() - start) / 64 * 1e3


if __name__ == "__main__":
    main()
