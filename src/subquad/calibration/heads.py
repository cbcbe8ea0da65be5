"""The queries, keys and values that the attention of a model is given."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad.checks import calibration as checks
from subquad.mechanism import Mechanism, repeat_heads
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.softmax import SoftmaxAttention, softmax_attention

Batch = Tensor | Mapping[str, Any] | tuple[Any, ...]
Listener = Callable[["Heads"], None]
IMPLEMENTATION = "subquad_heads"  # our name among the attention functions of transformers


class Heads(NamedTuple):
    """What one layer was asked for one batch: q `[B, H, T, D]`, k `[B, K, S, D]`, v `[B, K, S, Dv]`, and how."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    key_mask: Tensor | None
    scale: float
    gaussian: bool = False

    @property
    def real(self) -> Tensor:
        """bool `[B, T]`: rows that count."""
        if self.key_mask is None or self.q.shape[2] != self.k.shape[2]:
            return self.q.new_ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool)
        return self.key_mask

    def exact(self) -> Tensor:
        """The output of exact attention, `[B, H, T, Dv]`."""
        q, k, scale = self._as_softmax()
        return softmax_attention(q, k, self.v, causal=self.causal, key_mask=self.key_mask, scale=scale)

    def exact_weights(self, rows: Tensor) -> Tensor:
        """Exact attention of the queries `rows`, `[B, H, len(rows), S]`."""
        q, k, scale = self._as_softmax()
        exact = SoftmaxAttention(q.shape[-1], scale=scale)
        return exact.attention_matrix(q, k, causal=self.causal, key_mask=self.key_mask, rows=rows)

    def logits(self, rows: Tensor) -> Tensor:
        """Of the queries `rows` with all keys, visible or not, `[B, H, len(rows), S]`."""
        q, k, scale = self._as_softmax()
        return scale * q[:, :, rows] @ repeat_heads(k, q.shape[1]).mT

    def attend(self, mechanism: Mechanism) -> Tensor:
        """What `mechanism` makes of it."""
        return mechanism(self.q, self.k, self.v, causal=self.causal, key_mask=self.key_mask)

    def _as_softmax(self) -> tuple[Tensor, Tensor, float]:
        """The Gaussian kernel is the softmax kernel with one more dimension: x.y - |y|^2 / 2 = [x, 1].[y, -|y|^2/2]."""
        if not self.gaussian:
            return self.q, self.k, self.scale
        x, y = (t * self.scale**0.5 for t in (self.q, self.k))
        ones, norms = torch.ones_like(x[..., :1]), -y.square().sum(-1, keepdim=True) / 2
        return torch.cat([x, ones], -1), torch.cat([y, norms], -1), 1.0

    def precise(self) -> "Heads":
        """In float32 at least."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        return self._replace(q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def sequences(self, index: Tensor) -> "Heads":
        """Some of the sequences of the batch."""
        mask = None if self.key_mask is None else self.key_mask[index]
        return self._replace(q=self.q[index], k=self.k[index], v=self.v[index], key_mask=mask)


class Layer(NamedTuple):
    """One attention layer of a model, and what it was asked, batch by batch."""

    name: str
    mechanism: Mechanism | None  # None: attention of Hugging Face
    heads: list[Heads]


@torch.no_grad()
def collect(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    op: str,
    exact: bool,
    progress: Callable[[int], None] | None = None,
) -> list[Layer]:
    """Runs the model and listens to every FAVOR and softmax layer, or to every attention of a Hugging Face model.

    exact: layers answer with exact attention, so that each is asked what it would be asked in an exact model.
    """
    with _listening(model, op, exact) as layers:
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            for batch in checks.batches(op, batches):
                _run(model, batch)
                if progress is not None:
                    progress(1)
        finally:
            for module, training in modes.items():
                module.training = training
    found = [layer for layer in layers if layer.heads]
    checks.something_heard(op, model, len(found))
    return found


def _run(model: nn.Module, batch: Batch) -> None:
    if isinstance(batch, Tensor):
        model(batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    else:
        model(*batch)


@contextmanager
def _listening(model: nn.Module, op: str, exact: bool) -> Iterator[list[Layer]]:
    """The layers of the model in their order; their heads fill up while it runs."""
    kinds = (FavorAttention, SoftmaxAttention)
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    if named:
        with ExitStack() as stack:
            layers = [Layer(name or module.name, module, []) for name, module in named]
            for layer in layers:
                stack.callback(_hook(layer, exact).remove)
            yield layers
    else:
        checks.can_be_heard(op, model)
        with _hugging_face(model) as layers:
            yield layers


def _hook(layer: Layer, exact: bool) -> Any:
    def listen(mechanism: Any, given: tuple[Tensor, ...], options: dict[str, Any], out: Tensor) -> Tensor:
        q, k, v = (*given, *(options[name] for name in "qkv" if name in options))
        how = {"causal": bool(options.get("causal", False)), "key_mask": options.get("key_mask")}
        if isinstance(mechanism, FavorAttention):
            how |= {"scale": mechanism.options.scale, "gaussian": mechanism.options.gaussian}
        else:
            how["scale"] = mechanism.scale
        heads = Heads(q.detach(), k.detach(), v.detach(), **how)
        layer.heads.append(heads)
        return heads.exact() if exact else out

    assert layer.mechanism is not None
    return layer.mechanism.register_forward_hook(listen, with_kwargs=True)


def is_causal(module: Any, options: Mapping[str, Any]) -> bool:
    """What transformers told the attention function, or else what the module says of itself."""
    told = options.get("is_causal")
    return bool(module.is_causal if told is None else told)


@contextmanager
def _hugging_face(model: Any) -> Iterator[list[Layer]]:
    """Puts a function of ours in the place of the model's attention: exact, and all ears."""
    from transformers import AttentionInterface, AttentionMaskInterface

    layers: dict[nn.Module, Layer] = {}
    names = {module: name for name, module in model.named_modules()}

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        checks.whole_attention(names[module], q, k, options)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        heads = Heads(q, k, v, is_causal(module, options), None if mask is None else mask.bool(), scale)
        layers.setdefault(module, Layer(names[module], None, [])).heads.append(heads)
        return heads.exact().transpose(1, 2), None

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, attention_mask=None, **__: attention_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    heard: list[Layer] = []
    try:
        yield heard
    finally:
        model.set_attn_implementation(before)
        heard += layers.values()
        layers.clear()  # transformers keeps our function, and with it whatever that knows
        names.clear()
