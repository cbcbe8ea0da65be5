"""`subquad doctor`."""

import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

OPTIONAL = ("transformers", "accelerate", "biopython", "matplotlib", "pillow", "datasets", "pyarrow", "tensorboard")
TOLERANCE = 1e-5  # the engines compute in the same precision, in another order


class Comparison(NamedTuple):
    """The two engines on one problem: relative difference, and how many times faster the native one is."""

    name: str
    difference: float
    speedup: float

    @property
    def agrees(self) -> bool:
        return self.difference <= TOLERANCE  # NaN does not


def doctor() -> int:
    """What this installation can do, and whether its native CPU engine computes what torch computes.

    Exit code 1 if it does not; a missing engine is only reported, since torch takes over.
    """
    from rich.console import Console
    from rich.table import Table

    from subquad.kernels.cpu import library

    console = Console()
    table = Table(show_header=False, box=None)
    for name, value in _facts().items():
        table.add_row(name, value)
    console.print(table)
    console.print()
    console.print(_engines())
    if not library.AVAILABLE:
        console.print(f"\nThe native CPU engine is missing: {library.WHY_MISSING}.", style="yellow", highlight=False)
        console.print("Everything works without it, several times slower on CPUs.", highlight=False)
        return 0
    comparisons = [_compare(name) for name in ("favor", "linear")]
    console.print()
    for c in comparisons:
        verdict = "agrees with torch" if c.agrees else "DIFFERS from torch"
        console.print(
            f"{c.name}: native engine {verdict} ({c.difference:.0e}), {c.speedup:.1f}x as fast", highlight=False
        )
    if all(c.agrees for c in comparisons):
        return 0
    print("the native engine is wrong on this machine: set SUBQUAD_CPU=off and please report it", file=sys.stderr)
    return 1


def _engines() -> Any:
    """What each engine can do, in the order in which backend="auto" tries them."""
    from rich import box
    from rich.table import Table

    from subquad import checks
    from subquad.kernels.engines import ENGINES, Engine

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("backend")
    for engine in ENGINES.values():
        table.add_column(engine.name)
    rows: dict[str, Callable[[Engine], str]] = {
        "devices": lambda engine: "any" if engine.devices is None else ", ".join(engine.devices),
        "dtypes": lambda engine: ", ".join(map(checks.dtype_name, engine.dtypes)),
        "near blocks": lambda engine: _yes(engine.near),
        "reach beyond neighbours": lambda engine: _yes(engine.reach),
        "without a far field": lambda engine: _yes(engine.without_far),
        "signed features": lambda engine: _yes(engine.signed),
        "gradients": lambda engine: _yes(engine.gradients),
        "here": lambda engine: f"no: {engine.missing}" if engine.missing else "yes",
    }
    for name, tell in rows.items():
        table.add_row(name, *map(tell, ENGINES.values()))
    return table


def _yes(can: bool) -> str:
    return "yes" if can else "no"


def _facts() -> dict[str, str]:
    import torch

    from subquad import waiting
    from subquad.kernels.cpu import large_pages, library
    from subquad.kernels.cpu.library import Library

    native = library.LOADED
    threads = f"{torch.get_num_threads()} threads"
    engine = f"{native.machine}, {threads}" if isinstance(native, Library) else "none"
    facts = {
        "subquad": version("subquad"),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {threads}, {torch.backends.cpu.get_cpu_capability()}",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "native CPU engine": engine,
        "large pages": f"no: {why_not}" if (why_not := large_pages.why_not()) else "yes, where Linux gives them",
        "idle threads": waiting.policy(),
    }
    return facts | {name: _version_of(name) for name in OPTIONAL}


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _compare(name: str) -> Comparison:
    import torch

    from subquad.bench import time_side_by_side
    from subquad.mechanisms import attention

    q, k, v = (torch.randn(1, 4, 2048, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    engines = {backend: attention(name, head_dim=64, backend=backend) for backend in ("torch", "cpu")}
    with torch.no_grad():
        outputs = {backend: engine(q, k, v, causal=True) for backend, engine in engines.items()}
        calls = {b: lambda engine=engine: engine(q, k, v, causal=True) for b, engine in engines.items()}
        times = time_side_by_side(calls, repeats=3)
    difference = (outputs["cpu"] - outputs["torch"]).norm() / outputs["torch"].norm()
    return Comparison(name, float(difference), times["torch"].best / times["cpu"].best)
