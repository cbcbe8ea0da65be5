"""Reversible residual layers (Gomez et al. 2017): backward rebuilds each layer's input from its output.

    y1 = x1 + attend(x2)        x2 = y2 - transform(y1)
    y2 = x2 + transform(y1)     x1 = y1 - attend(x2)

Activations of one layer live at a time, whatever the depth; the price is one more forward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from subquad.nn.block import Block
from subquad.nn.self_attention import Context


def reversible(x1: Tensor, x2: Tensor, blocks: Sequence[Block], context: Context) -> tuple[Tensor, Tensor]:
    """The two streams after all blocks; gradients equal those of the plain computation, dropout included."""
    parameters = [p for block in blocks for p in block.parameters() if p.requires_grad]
    return _Reversible.apply(blocks, context, x1, x2, *parameters)


class _Randomness:
    """The generator states at one point, so that dropout falls alike when a branch runs again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng([] if self.cuda is None else [self.device]):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield


class _Reversible(torch.autograd.Function):
    """Takes the parameters as inputs, so that DDP sees their gradients arrive as those of any other layer."""

    @staticmethod
    def forward(
        ctx: Any, blocks: Sequence[Block], context: Context, x1: Tensor, x2: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor]:
        kind = x1.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.blocks, ctx.context, ctx.randomness = blocks, context, []
        for block in blocks:
            before_attend = _Randomness(x1.device)
            x1 = x1 + block.attend(x2, context)
            before_transform = _Randomness(x1.device)
            x2 = x2 + block.transform(x1)
            ctx.randomness.append((before_attend, before_transform))
        ctx.save_for_backward(x1, x2)
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad1, grad2 = grad_outputs
        x1, x2 = ctx.saved_tensors
        parameter_grads: list[Tensor | None] = []
        kind, dtype, enabled = ctx.autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            for block, (before_attend, before_transform) in zip(
                reversed(ctx.blocks), reversed(ctx.randomness), strict=True
            ):
                with before_transform.again():
                    out, grad, of_transform = _differentiate(block, block.transform, x1, grad2)
                x2, grad1 = x2 - out, grad1 + grad
                with before_attend.again():
                    out, grad, of_attend = _differentiate(block, lambda x, b=block: b.attend(x, ctx.context), x2, grad1)
                x1, grad2 = x1 - out, grad2 + grad
                parameter_grads = [_sum(a, b) for a, b in zip(of_attend, of_transform, strict=True)] + parameter_grads
        return None, None, grad1, grad2, *parameter_grads


def _differentiate(
    block: Block, branch: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Output of a branch, and the gradients of its input and of all of the block's parameters."""
    parameters = [p for p in block.parameters() if p.requires_grad]
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = branch(x)
        grads = torch.autograd.grad(out, [x, *parameters], grad.to(out.dtype), allow_unused=True)
    return out.detach(), grads[0], list(grads[1:])


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
