"""Hand-made bugs of window attention and of the engine for some of the keys."""

from mutant import Mutant


def window(words: str) -> str:
    return f"tests/test_window.py -k '{words}'"


SPARSE, BANDS, WINDOW_FILE = "kernels/sparse/torch.py", "kernels/sparse/bands.py", "mechanisms/window.py"

WINDOW = (
    Mutant(
        "window: the window is one key too wide",
        WINDOW_FILE,
        "return Band(self.window - 1, 0, dilation) if causal",
        "return Band(self.window, 0, dilation) if causal",
        window("contract and window-narrow and extend_equals or longformer or memory"),
    ),
    Mutant(
        "window: blocks one too few on the left",
        BANDS,
        "before, after = (-(-steps // block) for steps in (band.back, band.ahead))",
        "before, after = (steps // block for steps in (band.back, band.ahead))",
        window("forward_equals_reference"),
    ),
    Mutant(
        "window: all blocks are met, most of them in vain",
        BANDS,
        "before, after = (-(-steps // block) for steps in (band.back, band.ahead))",
        "before, after = (max(line, -(-steps // block)) for steps in (band.back, band.ahead))",
        "tests/test_every_mechanism.py -k 'products_grow and window'",
    ),
    Mutant(
        "window: a mask of all pairs is made",
        WINDOW_FILE,
        "    q, k, v, *own = tensors\n",
        "    q, k, v, *own = tensors\n    torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)\n",
        "tests/test_every_mechanism.py -k 'all_pairs and window'",
    ),
    Mutant(
        "window: global tokens count twice inside a window",
        WINDOW_FILE,
        "there = ~global_mask if alive is None else alive & ~global_mask",
        "there = torch.ones_like(global_mask) if alive is None else alive",
        window("forward_equals_reference or can_be_global"),
    ),
    Mutant(
        "window: a global row stays a window",
        WINDOW_FILE,
        "return put(out, rows, torch.where(places < 0, q.shape[2], slots))",
        "return out",
        window("can_be_global or longformer"),
    ),
    Mutant(
        "window: padding is seen by the last windows",
        BANDS,
        "        alive = F.pad(alive, (left, right))\n",
        "        alive = F.pad(alive, (left, right), value=True)\n",
        window("forward_equals_reference"),
    ),
    Mutant(
        "window: the state forgets its oldest token",
        WINDOW_FILE,
        "return (self.window - 1) * max(self.dilation)",
        "return (self.window - 1) * max(self.dilation) - 1",
        window("extend_equals or memory"),
    ),
    Mutant(
        "window: the normaliser has no gradient",
        SPARSE,
        "shift = (grad_log_normaliser.to(q.dtype) - (grad_out * out).sum(-1))[..., None]",
        "shift = -(grad_out * out).sum(-1)[..., None]",
        window("one_by_one or can_be_global"),
    ),
    Mutant(
        "window: parts are averaged",
        SPARSE,
        "    shares = (log_normaliser - top.masked_fill(top == -torch.inf, 0)).exp()\n",
        "    shares = torch.ones_like(log_normaliser)\n",
        window("can_be_global"),
    ),
)
