"""`subquad calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.checks import cli as checks


def calibrate(
    model: Annotated[Path, typer.Argument(help="Run or model folder.")],
    sequences: Annotated[list[Path], typer.Argument(help="FASTA, text or image files, as the model takes them.")],
    out: Annotated[Path, typer.Option(help="Folder for the calibrated model; must be new.")],
    estimator: Annotated[
        str,
        typer.Option(help="Drawn: calibrated, sharp or optimal. Learned, better and slower: hedgehog or exponential."),
    ] = "calibrated",
    features: Annotated[
        str | None, typer.Option(help="Per layer: a number, or auto for as few as do; as it is unless given.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Learned features: steps of training, per layer; 200 unless given.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Of --features auto: mean error of a layer's heads; 0.3 unless given.")
    ] = None,
    cap: Annotated[int | None, typer.Option(help="Of --features auto: the most features; 1,024 unless given.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of each sequence, at most.")] = 1024,
    num: Annotated[int, typer.Option(help="Sequences, at most.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> int:
    """Fits the features of a FAVOR model to data, and saves the model that comes out."""
    import subquad
    from subquad.cli.common import batched, cut_sequences, load_own_model, say
    from subquad.files import sweep
    from subquad.training import save_model

    checks.new_folder(out)
    sweep(out.parent)
    checks.count("--length", length)
    checks.count("--num", num)
    count = checks.feature_count(features)
    loaded = load_own_model(model, "subquad calibrate")
    found = cut_sequences(loaded, sequences, length)[:num]
    options = {"estimator": estimator, "num_features": count, "steps": steps, "target": target, "cap": cap}
    report = subquad.calibrate(loaded.model, batched(found), **options, seed=seed)
    save_model(loaded.model, loaded.tokenizer, out)
    print(report)
    say(f"the calibrated model is in {out}")
    return 0
