"""Markdown tables of the records that `attention.py` saved: `python benchmarks/tables.py FILE.json [FILE.json ...]`."""

import json
import sys
from pathlib import Path

TITLES = {
    ("forward+backward", True): "Causal, forward and backward",
    ("forward+backward", False): "Bidirectional, forward and backward",
    ("forward", True): "Causal, forward",
    ("forward", False): "Bidirectional, forward",
}


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    records = [record for path in sys.argv[1:] for record in json.loads(Path(path).read_text())["records"]]
    for (mode, causal), title in TITLES.items():
        chosen = [r for r in records if (r["mode"], r["causal"]) == (mode, causal)]
        if chosen:
            print(f"### {title}\n\n{table(chosen)}\n")
    decoded = [r for r in records if r["mode"] == "decode"]
    if decoded:
        print(f"### Decoding, milliseconds per token after a context\n\n{table(decoded)}\n")


def table(records: list[dict]) -> str:
    """A row for each case, a column for each length: milliseconds, times faster than exact, share of the GEMM rate."""
    lengths = sorted({r["length"] for r in records})
    names = dict.fromkeys(r["mechanism"] if r["gated"] else f"{r['mechanism']} *" for r in records)
    cells = {(r["mechanism"], r["length"]): cell(r) for r in records}
    lines = ["| | " + " | ".join(f"{length:,}" for length in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    for name in names:
        row = (cells.get((name.removesuffix(" *"), length), "") for length in lengths)
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def cell(record: dict) -> str:
    text = milliseconds(1e3 * record["best"])
    if record["times_exact"] is not None and record["mechanism"] != "sdpa":
        text += f", {times(record['times_exact'])}x"
    if record["gemm_share"] is not None:
        text += f", {100 * record['gemm_share']:.0f} %"
    return text


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def times(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
