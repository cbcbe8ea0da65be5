"""The picture of a memory benchmark. Needs matplotlib."""

import math
from collections.abc import Sequence
from pathlib import Path

from subquad import files
from subquad.bench.recall.measure import FAR, Mean, Plan, Result
from subquad.bench.recall.rows import EXACT, NARROW, NOTHING, WINDOW
from subquad.checks import diagnostics as checks
from subquad.checks import needs

CONTROLS = (NOTHING, NARROW, WINDOW, EXACT)


def plot_recall(plan: Plan, results: Sequence[Result], path: Path) -> None:
    """Accuracy of each row, far and near, with standard errors over seeds; controls are grey."""
    with needs("matplotlib", "bench recall"):
        from matplotlib.figure import Figure

    names = list(dict.fromkeys(result.row for result in results))
    task = plan.make_task()
    figure = Figure(figsize=(7.5, 1.6 + 0.36 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        far = Mean.of([r.far for r in results if r.row == name])
        near = Mean.of([r.near for r in results if r.row == name])
        color = "tab:gray" if name in CONTROLS else "tab:blue"
        axes.barh(place, far.value, xerr=0 if math.isnan(far.error) else far.error, color=color, height=0.62)
        axes.plot(near.value, place, marker="|", color="black", markersize=13, linestyle="none")
        axes.text(1.02, place, f"{far.value:.2f}", va="center", fontsize="small")
    axes.axvline(task.chance, color="tab:red", linestyle=":", label="chance")
    axes.plot([], [], marker="|", color="black", linestyle="none", label=f"answers at most {FAR} tokens back")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.12), xlabel=f"accuracy on answers more than {FAR} tokens back")
    axes.set_title(f"{task.about}: {plan.keys} keys, {plan.length:,} tokens, {plan.steps} steps", fontsize="medium")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    with checks.writable(path):
        files.save_figure(figure, path)
