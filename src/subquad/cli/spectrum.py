"""`subquad spectrum`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.checks import cli as checks
from subquad.checks import diagnostics
from subquad.cli.common import FILES, MODEL
from subquad.errors import printable


def spectrum(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    sequences: Annotated[list[Path], typer.Argument(help=FILES)],
    output: Annotated[Path, typer.Option(help="Picture .png or .svg; the numbers go to a .json beside it.")] = Path(
        "spectrum.png"
    ),
    length: Annotated[int, typer.Option(help="Tokens of each sequence; shorter ones are left out.")] = 256,
    num: Annotated[int, typer.Option(help="Sequences, at most.")] = 8,
    control: Annotated[bool, typer.Option("--control", help="Also with the weights of each row shuffled.")] = False,
) -> int:
    """How close attention is to low rank: singular values of its matrices, by layer and head."""
    import torch

    from subquad import diagnostics as measure
    from subquad.cli.common import load_with_sequences, prepare_output, progress_bar, say

    prepare_output(output, (".png", ".svg"))
    checks.count("--length", length)
    checks.count("--num", num)
    loaded, found = load_with_sequences(model, sequences, length)
    chosen = [ids for ids in found if len(ids) == length][:num]
    diagnostics.enough_tokens(len(chosen), len(found), length)
    with progress_bar("singular values", len(chosen) * (1 + control)) as progress:
        kinds = (False, True) if control else (False,)
        results = [measure.spectrum(loaded, torch.stack(chosen), shuffle=kind, progress=progress) for kind in kinds]
    results[0].save(output.with_suffix(".json"))
    results[0].plot(output, title=printable(model.name), control=results[1] if control else None)
    quarter = max(1, length // 4)
    share = [f"{100 * float(result.captured(quarter).mean()):.1f} %" for result in results]
    also = f" ({share[1]} with shuffled rows)" if control else ""
    say(f"the first {quarter} of {length} singular values hold {share[0]}{also}: {output}")
    return 0
