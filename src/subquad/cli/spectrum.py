"""`subquad spectrum`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.checks import cli as checks
from subquad.checks import diagnostics

if TYPE_CHECKING:
    from torch import Tensor


def spectrum(
    model: Annotated[Path, typer.Argument(help="Run, model folder, or folder of a Hugging Face model.")],
    sequences: Annotated[list[Path], typer.Argument(help="FASTA, text or image files; text for Hugging Face models.")],
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
    from subquad.cli.common import progress_bar

    checks.output_suffix(output, (".png", ".svg"))
    checks.output_folder(output)
    checks.positive_count("--length", length)
    checks.positive_count("--num", num)
    loaded, found = _load(model, sequences, length)
    chosen = [ids for ids in found if len(ids) == length][:num]
    diagnostics.enough_tokens(len(chosen), len(found), length)
    with progress_bar("singular values", len(chosen) * (1 + control)) as progress:
        kinds = (False, True) if control else (False,)
        results = [measure.spectrum(loaded, torch.stack(chosen), shuffle=kind, progress=progress) for kind in kinds]
    results[0].save(output.with_suffix(".json"))
    results[0].plot(output, title=model.name, control=results[1] if control else None)
    quarter = max(1, length // 4)
    share = [f"{100 * float(result.captured(quarter).mean()):.1f} %" for result in results]
    also = f" ({share[1]} with shuffled rows)" if control else ""
    print(f"the first {quarter} of {length} singular values hold {share[0]}{also}: {output}", file=sys.stderr)
    return 0


def _load(path: Path, sequences: list[Path], length: int) -> "tuple[Any, list[Tensor]]":
    """The model and its sequences, cut to `length` tokens."""
    import torch
    from transformers import AutoConfig

    import subquad.models  # noqa: F401 - registers our models
    from subquad.cli.common import load_model, quiet, read_sequences
    from subquad.training import model_folder

    quiet()
    folder = model_folder(path)
    with checks.loadable(folder):
        config = AutoConfig.from_pretrained(folder)
    if config.model_type != "subquad":
        return _load_hugging_face(folder, sequences, length)
    loaded = load_model(path, head=False)
    named = read_sequences(loaded, sequences)
    checks.something_to_read(len(named), sequences)
    start = torch.tensor([loaded.start])
    pieces = [item.ids for item in named]
    if loaded.domain == "text":  # a file is many windows
        pieces = [piece for ids in pieces for piece in ids.split(max(1, length - 1))]
    return loaded.model, [torch.cat([start, ids])[:length] for ids in pieces]


def _load_hugging_face(folder: Path, paths: list[Path], length: int) -> "tuple[Any, list[Tensor]]":
    import torch
    from transformers import AutoModel, AutoTokenizer

    from subquad.checks.data import readable
    from subquad.data.text import text_files

    with checks.loadable(folder):
        model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    windows = {"truncation": True, "max_length": length, "return_overflowing_tokens": True}
    found = []
    for file in text_files(paths):
        with readable(file):
            text = file.read_text(encoding="utf-8")
        found += [torch.tensor(ids) for ids in tokenizer(text, **windows)["input_ids"]]
    return model, found
