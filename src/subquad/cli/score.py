"""`subquad score`."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad import files
from subquad.checks import cli as checks
from subquad.cli.common import FILES, MODEL
from subquad.errors import printable
from subquad.tables import csv_table


def score(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    sequences: Annotated[list[Path], typer.Argument(help=FILES)],
    output: Annotated[Path | None, typer.Option(help="CSV file; without it, the table goes to the terminal.")] = None,
    passes: Annotated[
        int | None,
        typer.Option(help="Masked models: forward passes per sequence, each hiding 1/passes; 8 unless given."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Masked models: hide one token at a time (slow).")] = False,
) -> int:
    """Log-likelihood and perplexity of sequences (pseudo-log-likelihood for masked models), in nats.

    The first token of a sequence is judged after the start token of the model. Models of transformers: after what the
    tokenizer puts in front of a text (Llama, OPT), or, where it puts nothing there (GPT-2, SmolLM2), after its start
    token, or else its end token; which one it was is said at the end. Special tokens have no score.

    Our models take sequences of any length, those of transformers what they were made for; longer ones are refused.
    """
    from subquad.cli.common import load_model, prepare_output, progress_bar, say
    from subquad.models import log_likelihoods, pseudo_log_likelihoods

    if output is not None:
        prepare_output(output, (".csv",))
    checks.count("--passes", passes or 8 if passes != 0 else 0)
    loaded = load_model(model)
    loaded.check_predicts()
    checks.only_for_masked(exact, passes, loaded.causal)
    named = loaded.read(sequences)
    checks.something_to_read(len(named), sequences)
    loaded.check_lengths(named)
    ids = [item.ids for item in named]
    with progress_bar("scoring", sum(map(len, ids))) as progress:
        if loaded.causal:
            scores = log_likelihoods(loaded.model, ids, start=loaded.context, progress=progress)
        else:
            around: dict[str, Any] = {"start": loaded.before, "end": loaded.after, "mask": loaded.mask}
            count = None if exact else passes or 8
            scores = pseudo_log_likelihoods(loaded.model, ids, **around, passes=count, progress=progress)
    kind = "log_likelihood" if loaded.causal else "pseudo_log_likelihood"
    rows = [
        (item.name, len(item.ids), f"{float(s.double().sum()):.6f}", f"{math.exp(-float(s.double().mean())):.6f}")
        for item, s in zip(named, scores, strict=True)
    ]
    _write(output, ("name", "length", kind, "perplexity"), rows)
    if loaded.causal and not loaded.before:
        token = loaded.tokenizer.convert_ids_to_tokens(loaded.start)
        say(f"the tokenizer puts nothing in front of a text: the first token was judged after {token}")
    return 0


def _write(output: Path | None, header: tuple[str, ...], rows: list[tuple[str, int, str, str]]) -> None:
    from subquad.cli.common import say

    if output is None:
        print(csv_table(header, [(printable(name), *numbers) for name, *numbers in rows]), end="")
        return
    with checks.output_file(output):
        files.write_text(output, csv_table(header, rows))
    say(f"{len(rows)} scores written to {output}")
