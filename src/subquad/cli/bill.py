"""`subquad bill`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.checks import bench as bench_checks
from subquad.checks import cli as checks
from subquad.errors import printable

if TYPE_CHECKING:
    from rich.table import Table

    from subquad.bench.bill import Bill


def bill(
    model: Annotated[
        Path, typer.Argument(help="Folder of a converted model, with its tokenizer, or its name on the hub.")
    ],
    texts: Annotated[list[Path], typer.Argument(help="Text files, or folders of them, that it was not fitted to.")],
    length: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 2048,
    num: Annotated[int, typer.Option(help="Sequences, spread over the texts.")] = 3,
    speed: Annotated[
        str, typer.Option(help="Prompts to take the time at, in tokens, comma-separated; '' for none.")
    ] = "1024,2048,4096",
    output: Annotated[Path, typer.Option(help="JSON file for all figures.")] = Path("bill.json"),
) -> int:
    """What a conversion costs and what it saves, with controls, on texts of your own.

    Rows: exact attention, the converted model, the same with its far fields off, its far fields alone, a window whose
    states are as large, no attention.

    Of a causal model: the perplexity divided by the exact one's (±: standard error of its logarithm over blocks of 64
    tokens), and by position; copy: the perplexity where a text comes again after so many tokens; key: a number of five
    digits that is told in the text so many tokens before it is asked for, and the share of its tokens that are right;
    bytes of the states; how each goes on with the first text; time of prompts and of one more token.

    Of a model that looks both ways: masked tokens that are guessed, the cosine of mean hidden states with the exact
    ones, and nearest neighbours kept. Interrupted, the same command goes on.
    """
    from rich.console import Console

    from subquad.bench.bill import Biller, Vocabulary, plan_of
    from subquad.cli.common import batched, cut_sequences, load_model, prepare_json, say
    from subquad.conversion.saved import is_swapped

    prepare_json(output)
    checks.count("--length", length)
    checks.count("--num", num)
    lengths = bench_checks.numbers("--speed", speed) if speed else ()
    loaded = load_model(model)
    checks.converted_model(model, is_swapped(loaded.model.config))
    sequences = cut_sequences(loaded, texts, length)
    if loaded.causal:
        long = [ids[None] for ids in sequences if len(ids) == length]
        checks.long_enough(len(long), texts, length)
        some = _spread(long, num)
        biller = Biller(loaded.model, plan_of(loaded.model, some), output)
        found = biller.texts(some, loaded.tokenizer, lengths, progress=True)
    else:
        some = _spread(sequences, num)
        biller = Biller(loaded.model, plan_of(loaded.model, some), output)
        found = biller.sequences(
            batched(some),
            Vocabulary(loaded.tokenizer.mask_token_id, tuple(loaded.tokenizer.all_special_ids)),
            progress=True,
        )
    console = Console()
    for table in tables(found, causal=loaded.causal):
        console.print(table)
    say(f"numbers: {output}")
    return 0


def _spread(some: list[Any], num: int) -> list[Any]:
    count = min(num, len(some))
    return [some[i * len(some) // count] for i in range(count)]


def tables(found: "Bill", *, causal: bool) -> "list[Table]":
    if not causal:
        return [_encoder(found), _policy(found)]
    return [_quality(found), _memory(found), *([_speed(found)] if found.speed else []), _says(found), _policy(found)]


def _table(title: str, *columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    return table


def _quality(found: "Bill") -> "Table":
    first = next(iter(found.rows.values()))
    places = list(first["by_place"]) if len(first["by_place"]) > 1 else []
    table = _table("What it costs", "", "perplexity, ratio", *places, "states, MB")
    for name, row in found.rows.items():
        window = f" ({row['window']})" if "window" in row else ""
        cells = [f"{_ratio(row['ratio'])} ±{row['error']:.4f}", *(_ratio(row["by_place"][place]) for place in places)]
        table.add_row(name + window, *cells, f"{row['nbytes'] / 1e6:.1f}")
    return table


def _memory(found: "Bill") -> "Table":
    distances = list(next(iter(found.rows.values()))["copy"])
    columns = [f"{what} {distance}" for what in ("copy", "key") for distance in distances]
    table = _table("What it remembers, by the tokens since then", "", *columns)
    for name, row in found.rows.items():
        copies = [_number(x) for x in row["copy"].values()]
        table.add_row(name, *copies, *("-" if x is None else f"{100 * x:.0f} %" for x in row["passkey"].values()))
    return table


def _ratio(value: float) -> str:
    return f"{value:.4f}" if value < 10 else _number(value)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1e}"


def _speed(found: "Bill") -> "Table":
    table = _table(
        "What it saves",
        "tokens before",
        "prompt, s",
        "exact",
        "token, ms",
        "exact",
        "times as fast",
        "states, MB",
        "exact",
    )
    by_length: dict[int, dict[str, Any]] = {}
    for cost in found.speed:
        by_length.setdefault(cost["length"], {})[cost["row"]] = cost
    for length, both in sorted(by_length.items()):
        if len(both) == 2:
            new, old = both["converted"], both["exact"]
            table.add_row(
                f"{length:,}",
                *(f"{cost['prefill']:.2f}" for cost in (new, old)),
                *(f"{1000 * cost['token']:.1f}" for cost in (new, old)),
                f"{old['token'] / new['token']:.2f}",
                *(f"{cost['nbytes'] / 1e6:.1f}" for cost in (new, old)),
            )
    return table


def _says(found: "Bill") -> "Table":
    table = _table("How they go on with the first text", "", "says")
    table.columns[1].justify = "left"
    for name, row in found.rows.items():
        table.add_row(name, printable(row["says"].replace("\n", " ")))
    return table


def _encoder(found: "Bill") -> "Table":
    table = _table("What it costs", "", "masked tokens guessed", "cosine, mean", "smallest", "neighbours kept")
    for name, row in found.rows.items():
        shares = ["-" if row[key] is None else f"{100 * row[key]:.1f} %" for key in ("accuracy", "neighbours_kept")]
        table.add_row(name, shares[0], f"{row['cosine']:.4f}", f"{row['smallest_cosine']:.4f}", shares[1])
    return table


def _policy(found: "Bill") -> "Table":
    table = _table("What every key head is", "", "key heads")
    table.columns[1].justify = "left"
    for name, heads in found.policy.items():
        table.add_row(name, ", ".join(heads))
    return table
