"""Pictures of spectra. Needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from subquad import files
from subquad.checks import diagnostics as checks
from subquad.checks import needs

if TYPE_CHECKING:
    from subquad.diagnostics.spectrum import SpectrumResult


def plot_spectrum(result: "SpectrumResult", path: Path, title: str, control: "SpectrumResult | None") -> None:
    """Left: a curve for each layer, the mean of its heads. Right: what a quarter of the values hold, head by head."""
    with needs("matplotlib", "SpectrumResult.plot"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, heads = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_curves(curves, result, control)
    quarter = max(1, result.length // 4)
    shares = result.captured(quarter).numpy()
    image = heads.imshow(shares, vmin=0.25, vmax=1, cmap="viridis", aspect="auto", origin="lower")
    heads.set(xlabel="head", ylabel="layer", title=f"share of the first {quarter} of {result.length}")
    heads.set_yticks(range(result.cumulative.shape[0]))
    figure.colorbar(image, ax=heads)
    figure.suptitle(title)
    with checks.writable(path):
        files.save_figure(figure, path)


def _draw_curves(axes: Any, result: "SpectrumResult", control: "SpectrumResult | None") -> None:
    from matplotlib import colormaps

    ranks, layers = range(1, result.length + 1), result.cumulative.shape[0]
    for layer, share in enumerate(result.cumulative.mean(1).numpy()):
        color = colormaps["plasma"](0.9 * layer / max(1, layers - 1))
        axes.plot(ranks, share, color=color, label=f"layer {layer}")
    if control is not None:
        axes.plot(
            ranks, control.cumulative.mean((0, 1)).numpy(), color="black", linestyle="--", label="rows shuffled, all"
        )
    axes.plot([0, result.length], [0, 1], color="grey", linestyle=":", label="all values equal")
    axes.set(xlabel="singular values", ylabel="share of their sum", ylim=(0, 1.02))
    axes.legend(fontsize="small", ncols=2)
