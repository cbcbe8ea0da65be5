"""What an error of a head's output costs the model.

An output that is off by d changes what the model predicts by d'Gd / 2 nats where d is small. G `[Dv, Dv]` is the Fisher
information: the mean over tokens of g g', where g is the gradient of -log p of words that are drawn from what the model
itself predicts. One backward pass over a piece of text gives it for all heads, and any replacement of any head can be
judged by it, without running the model again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.checks import convert as checks
from subquad.recording.calls import Call, Layer
from subquad.recording.hugging_face import observed_attention
from subquad.recording.progress import Tell
from subquad.recording.stream import Batch, evaluating, every

PIECE = 1024  # tokens of a batch that take part at the most: memory of a backward pass grows with them
Sensitivity = Mapping[str, Tensor]  # by the name of the layer: G of each head, float32 `[H, Dv, Dv]`


def sensitivity(
    model: Any, batches: Sequence[Batch], *, seed: int, tell: Tell, second_half: bool = False
) -> Sensitivity:
    """G of every attention layer of a model of transformers, in nats per token.

    A model that predicts no words has no nats: there, d'Gd / 2 is half the squared relative change of its last hidden
    states. second_half: only errors and predictions there count; no padding then.
    """
    sums: dict[str, Tensor] = {}
    tokens, real = 0, torch.ones(0, 0, dtype=torch.bool)

    def observe(layer: Layer, call: Call) -> None:
        nonlocal real
        real = counts = call.real

        def add(grad: Tensor) -> None:  # must not know the call: with a cycle through its output, no graph would go
            rows = slice(grad.shape[2] // 2 if second_half else 0, None)
            g = torch.where(counts[:, None, rows, None], grad[:, :, rows], 0).transpose(0, 1).flatten(1, 2).float()
            sums[layer.name] = sums.get(layer.name, 0) + g.mT @ g

        checks.gradient_begins(model, call.output)
        cast(Tensor, call.output).register_hook(add)

    generator = torch.Generator("cpu").manual_seed(seed)
    with evaluating(model), _gradients_of_activations_only(model), observed_attention(model, every, observe):
        for number, batch in enumerate(batches):
            piece = _piece(batch)
            with torch.inference_mode(False), torch.enable_grad():
                output = _run(model, piece)
                each = _surprise(model, output, generator)
                if each.shape == real.shape:  # a class of a whole sequence has no padding, and no halves
                    each = each[:, each.shape[1] // 2 :] if second_half else each[real]
                each.sum().backward()
            tokens += each.numel()
            tell("asking what errors cost", number + 1, len(batches))
    found = {name: total / max(1, tokens) for name, total in sums.items()}
    checks.useful_gradients(model, found)
    return found


@contextmanager
def _gradients_of_activations_only(model: Any) -> Iterator[None]:
    """Weights get none: the embeddings of the tokens are where gradients begin."""
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hook = model.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_())
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        hook.remove()
        for parameter in frozen:
            parameter.requires_grad_(True)


def _run(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def _piece(batch: Batch) -> Batch:
    """The first sequences, and of these the first tokens that no padding of all stands before; pictures stay whole."""
    if isinstance(batch, Tensor):
        return _cut((batch,), None)[0]
    if isinstance(batch, Mapping):
        return dict(zip(batch, _cut(tuple(batch.values()), batch.get("attention_mask")), strict=True))
    return _cut(batch, None)


def _cut(parts: tuple[Any, ...], mask: Tensor | None) -> tuple[Any, ...]:
    """What begins with the sizes `[B, T]` of the first part with two dimensions is cut."""
    sizes = [x.shape for x in parts if isinstance(x, Tensor) and x.dim() == 2]
    if not sizes:
        return parts
    rows, length = sizes[0]
    first = 0 if mask is None or mask.dim() != 2 else int(mask.bool().any(0).to(torch.uint8).argmax())
    count, columns = max(1, PIECE // min(PIECE, length - first)), slice(first, first + PIECE)
    whole = [not isinstance(x, Tensor) or x.shape[:2] != (rows, length) for x in parts]
    return tuple(x if stays else x[:count, columns] for x, stays in zip(parts, whole, strict=True))


def _surprise(model: Any, output: Any, generator: torch.Generator) -> Tensor:
    """What has gradients with G as their second moment, `[B, T]`, or `[B]` for classes of whole sequences."""
    logits: Any = getattr(output, "logits", None)
    hidden: Any = getattr(output, "last_hidden_state", None)
    checks.words_or_states(model, logits, hidden)
    if logits is None:
        direction = torch.randn(hidden.shape, generator=generator).to(hidden)
        return (direction * hidden).sum(-1) / hidden.detach().norm(dim=-1)
    rows = logits.detach().flatten(0, -2).float().softmax(-1)
    checks.predictions(model, rows)
    drawn = torch.multinomial(rows.cpu(), 1, generator=generator).to(logits.device)[:, 0]
    return F.cross_entropy(logits.flatten(0, -2).float(), drawn, reduction="none").view(logits.shape[:-1])
