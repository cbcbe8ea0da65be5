"""`subquad convert`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.checks import cli as checks


def convert(
    model: Annotated[
        Path,
        typer.Argument(
            help="Folder of a model of transformers, with its tokenizer, or its name on the hub, owner/name."
        ),
    ],
    texts: Annotated[list[Path], typer.Argument(help="Text files, or folders of them, of the kind it is to read.")],
    out: Annotated[Path, typer.Option(help="Folder for the converted model; must be new.")],
    budget: Annotated[
        str,
        typer.Option(
            help="constant (no state grows), 'exact 10%' (of the key heads), 'cache 20%' (of the memory of keys and "
            "values), 'loss 1%' (of perplexity)."
        ),
    ] = "constant",
    length: Annotated[int, typer.Option(help="Tokens of each sequence: as many as it is to be used with.")] = 2048,
    num: Annotated[int, typer.Option(help="Sequences; every fifth is held out to judge by.")] = 5,
    window: Annotated[int, typer.Option(help="Tokens attended exactly, a multiple of 32; 0 for none.")] = 256,
    sinks: Annotated[int, typer.Option(help="Leading tokens that are always attended.")] = 4,
    features: Annotated[int, typer.Option(help="Of the far field of each key head.")] = 64,
    kinds: Annotated[
        str, typer.Option(help="What key heads may become, comma-separated: window, features, pages, exact.")
    ] = "",
    copying: Annotated[float, typer.Option(help="Nats of text that a nat is worth where texts are read again.")] = 0.03,
    steps: Annotated[int, typer.Option(help="Of fitting features, in each layer.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the features.")] = 0,
) -> int:
    """Gives a pretrained model sub-quadratic attention: each key head as cheap as the budget asks and its errors allow.

    Interrupted, the same command goes on: what is fitted lies in OUT.unfinished until all is done. The new folder holds
    the model, its tokenizer and conversion.json, which says what every key head became and what that is expected to
    cost; load it with subquad.load.
    """
    import subquad
    from subquad.cli.common import cut_sequences, load_exact_model, say
    from subquad.files import remove, sweep
    from subquad.training import save_model

    checks.new_folder(out)
    sweep(out.parent)
    checks.count("--length", length)
    checks.count("--num", num)
    exact = load_exact_model(model)
    loaded, sequences = exact.model, cut_sequences(exact, texts, length)
    long = [ids[None] for ids in sequences if len(ids) == length]
    checks.long_enough(len(long), texts, length)
    count = min(num, len(long))
    batches = [long[i * len(long) // count] for i in range(count)]  # spread over the texts
    unfinished = out.with_name(out.name + ".unfinished")
    report = subquad.convert(
        loaded,
        batches,
        budget=budget,
        window=window,
        sinks=sinks,
        num_features=features,
        kinds=[kind.strip() for kind in kinds.split(",")] if kinds else None,
        copying=copying,
        steps=steps,
        seed=seed,
        folder=unfinished,
    )
    save_model(loaded, exact.tokenizer, out, notes={"conversion.json": report.as_json()})
    remove(unfinished)
    print(report)
    say(f"the converted model is in {out}")
    return 0
