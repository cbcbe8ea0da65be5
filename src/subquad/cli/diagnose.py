"""`subquad diagnose`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.checks import cli as checks
from subquad.cli.common import FILES, MODEL
from subquad.errors import printable

WIDE = 140  # columns of a table that goes to a file or a pipe


def diagnose(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    sequences: Annotated[list[Path], typer.Argument(help=FILES)],
    length: Annotated[int, typer.Option(help="Tokens of each sequence, at most.")] = 512,
    num: Annotated[int, typer.Option(help="Sequences, at most.")] = 8,
    rows: Annotated[int, typer.Option(help="Queries of each sequence to compare with exact attention.")] = 64,
    tolerance: Annotated[float, typer.Option(help="Relative error of a head that is good enough.")] = 0.3,
    features: Annotated[
        int | None, typer.Option(help="Exact layers: features to judge them with; 256 unless given.")
    ] = None,
    near: Annotated[int | None, typer.Option(help="Exact layers: tokens per exact block; 64 unless given.")] = None,
    sinks: Annotated[int | None, typer.Option(help="Exact layers: exact first tokens; 4 unless given.")] = None,
    estimator: Annotated[
        str | None, typer.Option(help="Exact layers: positive (unless given), hyperbolic or trigonometric.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Heat map, .png or .svg.")] = None,
    json: Annotated[Path | None, typer.Option(help="All numbers, .json.")] = None,
) -> int:
    """Whether features can do what attention does, head by head: sizes, sharpness, errors, verdicts.

    A model of transformers is judged as if features stood in the place of its attention. One that was converted is
    judged by the features that it has, and its exact heads as those of any other model; its windows and pages are no
    estimates, and have no rows. The mechanisms of its layers, and what its far fields contribute, stand below.
    """
    from rich.console import Console

    import subquad
    from subquad.cli.common import batched, load_with_sequences, prepare_json, prepare_output, say
    from subquad.conversion.layers import layers_in_words
    from subquad.conversion.saved import is_swapped

    if output is not None:
        prepare_output(output, (".png", ".svg"))
    if json is not None:
        prepare_json(json)
    checks.count("--length", length)
    checks.count("--num", num)
    loaded, found = load_with_sequences(model, sequences, length)
    options = {"num_features": features, "near": near, "sinks": sinks, "estimator": estimator}
    result = subquad.diagnose(loaded, batched(found[:num]), rows=rows, tolerance=tolerance, **options)
    console = Console()
    Console(width=console.width if console.is_terminal else WIDE).print(result.table())
    if result.far_field:
        console.print(result.far_field, soft_wrap=True, highlight=False, markup=False)
    if is_swapped(loaded.config):
        console.print(layers_in_words(loaded.config), soft_wrap=True, highlight=False, markup=False)
    if json is not None:
        result.save(json)
    if output is not None:
        result.plot(output, title=printable(model.name))
    for path in (output, json):
        if path is not None:
            say(f"written to {path}")
    return 0
