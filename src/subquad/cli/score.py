"""`subquad score`."""

import math
from pathlib import Path
from typing import Annotated

import typer

from subquad import files
from subquad.checks import cli as checks
from subquad.errors import printable
from subquad.tables import csv_table


def score(
    model: Annotated[Path, typer.Argument(help="Run or model folder.")],
    sequences: Annotated[list[Path], typer.Argument(help="FASTA, text or image files, as the model takes them.")],
    output: Annotated[Path | None, typer.Option(help="CSV file; without it, the table goes to the terminal.")] = None,
    passes: Annotated[
        int | None,
        typer.Option(help="Masked models: forward passes per sequence, each hiding 1/passes; 8 unless given."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Masked models: hide one token at a time (slow).")] = False,
) -> int:
    """Log-likelihood and perplexity of sequences of any length (pseudo-log-likelihood for masked models)."""
    from subquad.cli.common import load_model, prepare_output, progress_bar, read_sequences
    from subquad.models import log_likelihoods, pseudo_log_likelihoods

    if output is not None:
        prepare_output(output, (".csv",))
    checks.count("--passes", passes or 8 if passes != 0 else 0)
    loaded = load_model(model)
    checks.only_for_masked(exact, passes, bool(loaded.model.config.causal))
    named = read_sequences(loaded, sequences)
    checks.something_to_read(len(named), sequences)
    ids = [item.ids for item in named]
    with progress_bar("scoring", sum(map(len, ids))) as progress:
        if loaded.model.config.causal:
            scores = log_likelihoods(loaded.model, ids, start=loaded.start, progress=progress)
        else:
            mask = 2 if loaded.tokenizer is None else loaded.tokenizer.mask_token_id
            scores = pseudo_log_likelihoods(
                loaded.model,
                ids,
                start=loaded.start,
                mask=mask,
                passes=None if exact else passes or 8,
                progress=progress,
            )
    kind = "log_likelihood" if loaded.model.config.causal else "pseudo_log_likelihood"
    rows = [
        (item.name, len(item.ids), f"{float(s.double().sum()):.6f}", f"{math.exp(-float(s.double().mean())):.6f}")
        for item, s in zip(named, scores, strict=True)
    ]
    _write(output, ("name", "length", kind, "perplexity"), rows)
    return 0


def _write(output: Path | None, header: tuple[str, ...], rows: list[tuple[str, int, str, str]]) -> None:
    from subquad.cli.common import say

    if output is None:
        print(csv_table(header, [(printable(name), *numbers) for name, *numbers in rows]), end="")
        return
    with checks.output_file(output):
        files.write_text(output, csv_table(header, rows))
    say(f"{len(rows)} scores written to {output}")
