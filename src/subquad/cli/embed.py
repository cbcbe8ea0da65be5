"""`subquad embed`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad import files
from subquad.checks import cli as checks
from subquad.checks import needs
from subquad.cli.common import FILES, MODEL

if TYPE_CHECKING:
    from torch import Tensor

    from subquad.cli.common import Named


def embed(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    sequences: Annotated[list[Path], typer.Argument(help=FILES)],
    output: Annotated[Path, typer.Option(help="File .npz or .parquet.")] = Path("embeddings.npz"),
    per_token: Annotated[
        bool, typer.Option("--per-token", "--per-residue", help="A vector for each token instead of their mean.")
    ] = False,
) -> int:
    """Vectors of sequences: the mean of the last layer's hidden states over all tokens, or one for each token.

    Special tokens, such as the start token of our models or [CLS] and [SEP] of BERT, are read by the model, but are
    neither in the mean nor among the vectors. A model of transformers is given what its tokenizer makes of a text;
    texts longer than what it was made for are refused.

    npz: names, embeddings (N x E); per token: names, lengths, embeddings (sum of lengths x E), one after another.
    parquet: columns name, embedding; per token: name, position (from 1), embedding.
    """
    from subquad.cli.common import load_model, prepare_output, progress_bar, say
    from subquad.models import embeddings

    prepare_output(output, (".npz", ".parquet"))
    loaded = load_model(model, head=False)
    named = loaded.read(sequences)
    checks.something_to_read(len(named), sequences)
    loaded.check_lengths(named)
    ids = [item.ids for item in named]
    with progress_bar("embedding", sum(map(len, ids))) as progress:
        around: dict[str, Any] = {"start": loaded.before, "end": loaded.after}
        vectors = embeddings(loaded.model, ids, **around, mean=not per_token, progress=progress)
    with checks.output_file(output), files.written(output) as staging:
        write = _write_npz if output.suffix == ".npz" else _write_parquet
        write(staging, named, vectors, per_token)
    say(f"{len(named)} sequences embedded in {vectors[0].shape[-1]} dimensions: {output}")
    return 0


def _write_npz(output: Path, named: "list[Named]", vectors: "list[Tensor]", per_token: bool) -> None:
    import numpy as np
    import torch

    arrays: dict[str, Any] = {"names": np.array([item.name for item in named])}
    if per_token:
        arrays["lengths"] = np.array([len(item.ids) for item in named])
    arrays["embeddings"] = (torch.cat(vectors) if per_token else torch.stack(vectors)).numpy()
    np.savez_compressed(output, **arrays)


def _write_parquet(output: Path, named: "list[Named]", vectors: "list[Tensor]", per_token: bool) -> None:
    with needs("pyarrow", "--output with .parquet"):
        import pyarrow as pa
        from pyarrow import parquet

    def rows(matrix: "Tensor") -> pa.Array:
        return pa.FixedSizeListArray.from_arrays(pa.array(matrix.flatten().numpy()), matrix.shape[1])

    if not per_token:
        import torch

        table = pa.table({"name": [item.name for item in named], "embedding": rows(torch.stack(vectors))})
        parquet.write_table(table, output)
        return
    schema = pa.schema({"name": pa.string(), "position": pa.int64(), "embedding": rows(vectors[0]).type})
    with parquet.ParquetWriter(output, schema) as writer:
        for item, matrix in zip(named, vectors, strict=True):
            columns = {"name": [item.name] * len(matrix), "position": range(1, len(matrix) + 1)}
            writer.write_table(pa.table({**columns, "embedding": rows(matrix)}, schema))
