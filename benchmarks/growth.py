"""How time and memory grow with the length: tables and a picture of the records that `attention.py` saved.

    python benchmarks/attention.py --modes forward+backward --lengths 2048 4096 8192 16384 32768 --output growth.json
    python benchmarks/growth.py growth.json --plot growth.png

"power" is the slope of a straight line through the logarithms: 1 is linear, 1.5 grows as L sqrt(L), 2 is quadratic.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from tables import milliseconds

from subquad.files import save_figure

MEASURES = {
    "best": ("time, ms", lambda x: milliseconds(1e3 * x)),
    "peak_bytes": ("memory, MB", lambda x: f"{x / 1e6:,.0f}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="JSON file of attention.py")
    parser.add_argument("--plot", type=Path, help="picture to write, such as growth.png")
    options = parser.parse_args()
    curves = read(json.loads(options.records.read_text())["records"])
    if not curves:
        parser.error(f"{options.records}: holds no mechanism at two lengths or more")
    for (title, measure), rows in curves.items():
        print(f"### {title}: {MEASURES[measure][0]}\n\n{table(rows, measure)}\n")
    if options.plot:
        draw(curves, options.plot)


def read(records: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """By direction and measure: what each mechanism took at each length. Decoding has contexts, not lengths."""
    curves: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for record in (r for r in records if r["mode"] != "decode"):
        title = f"{'Causal' if record['causal'] else 'Bidirectional'}, {record['mode']}"
        for measure in (m for m in MEASURES if record.get(m)):
            curve = curves.setdefault((title, measure), {}).setdefault(record["mechanism"], {})
            curve[record["length"]] = record[measure]
    long = {key: {name: c for name, c in rows.items() if len(c) > 1} for key, rows in curves.items()}
    return {key: rows for key, rows in long.items() if rows}


def power(curve: dict[int, float]) -> float:
    return float(np.polyfit(np.log(list(curve)), np.log(list(curve.values())), 1)[0])


def table(rows: dict[str, dict[int, float]], measure: str) -> str:
    lengths = sorted({length for curve in rows.values() for length in curve})
    lines = ["| | " + " | ".join(f"{length:,}" for length in lengths) + " | power |", "|---" * (len(lengths) + 2) + "|"]
    for name, curve in rows.items():
        cells = (MEASURES[measure][1](curve[length]) if length in curve else "" for length in lengths)
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {power(curve):.2f} |")
    return "\n".join(lines)


def draw(curves: dict[tuple[str, str], dict[str, dict[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = 4.6 * len(curves) + 2.4
    figure, axes = plt.subplots(1, len(curves), figsize=(width, 4.2), squeeze=False, layout="constrained")
    names = dict.fromkeys(name for rows in curves.values() for name in rows)  # one colour each, in all panels
    for axis, ((title, measure), rows) in zip(axes[0], curves.items(), strict=True):
        unit, factor = ("seconds", 1.0) if measure == "best" else ("MB above the inputs", 1e-6)
        for number, name in enumerate(names):
            if name in rows:
                style = "k" if name == "sdpa" else f"C{number % 10}"
                values = [factor * value for value in rows[name].values()]
                axis.plot(list(rows[name]), values, "o-", color=style, label=name, markersize=3)
        axis.set(title=title, xlabel="tokens", ylabel=unit, xscale="log", yscale="log")
        lengths = sorted({length for curve in rows.values() for length in curve})
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    lines = [line for line in axes[0][0].get_lines() if line.get_label() in names]
    figure.legend(handles=lines, loc="outside right center", fontsize=8)
    save_figure(figure, path, dpi=120)


if __name__ == "__main__":
    main()
