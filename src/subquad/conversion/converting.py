"""A pretrained model becomes sub-quadratic: each key head as cheap as a budget asks and its errors allow."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.calibration.fitting import split
from subquad.checks import convert as checks
from subquad.checks.recording import can_be_recorded, something_recorded
from subquad.conversion.budget import Budget, cheapest
from subquad.conversion.candidates import NEAR, Candidate, Priced, Shape, candidates, priced
from subquad.conversion.generation import CHILD
from subquad.conversion.kept import Kept, Settings
from subquad.conversion.policy import Conversion, layer_mechanisms, layer_policy
from subquad.conversion.sensitivity import sensitivity
from subquad.conversion.swap import (
    attention_modules,
    head_sizes,
    module_scale,
    replaceable_modules,
    swap_attention,
    without_mechanisms,
)
from subquad.features.draws import derived_seed
from subquad.mechanism import Mechanism
from subquad.mechanisms.favor import FavorAttention
from subquad.mechanisms.mixed import MixedAttention
from subquad.recording.calls import Call, Layer
from subquad.recording.progress import Tell, telling
from subquad.recording.record import Recording
from subquad.recording.stream import Batch, stream

WIDTHS = (4, 0.25)  # further windows where memory is what is budgeted, in units of the usual one


def convert(
    model: Any,
    batches: Iterable[Batch],
    *,
    budget: str = "constant",
    window: int = 256,
    sinks: int = 4,
    num_features: int = 64,
    kinds: Sequence[str] | None = None,
    steps: int = 100,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool | Tell = True,
) -> Conversion:
    """Replaces the attention of every layer, in place, key head by key head; all weights of the model stay as they are.

    The model runs over the batches with exact attention. A backward pass over a part of them tells what an error of
    each head costs, in nats per token; features are fitted, layer by layer, to what exact attention makes of the
    batches; every candidate of every key head is priced on batches that were held out; and the budget decides.

    Args:
        model: of transformers; its attention goes through the attention interface (Llama, Qwen, GPT-2, OPT, BERT, ...).
        batches: what the model takes, at the length it is to be used at: what fits 1,024 tokens does harm at 8,192.
            Every fifth is held out; candidates are judged, and the memory of states counted, by these.
        budget: "constant": no state grows, each head takes features or a window, what loses less. "exact 10%": the
            tenth of the key heads that gains most by it stays exact (or gets pages, if `kinds` say so). "cache 20%":
            the states together take a fifth of the memory of keys and values at the length of the batches. "loss 1%":
            as little memory as a perplexity 1 % higher allows.
        window: tokens that are attended exactly, a multiple of 32; 0 for none, and then no sinks beside features.
        sinks: leading tokens that are always attended.
        num_features: of the far field.
        kinds: what a head may become: "window", "features", "pages", "exact"; None: all that the budget can use.
        steps: of fitting features, in each layer.
        folder: where layers are kept as soon as they are fitted; a conversion that was interrupted goes on from there
            if it is given the same model, batches and sizes; with another budget nothing is fitted again. It stays when
            all is done; remove it then.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
        >>> batches = [torch.randint(0, 50, (1, 100)) for _ in range(2)]
        >>> report = convert(model, batches, budget="exact 50%", window=32, num_features=8, steps=2)
        >>> sum(layer.heads.count("exact") for layer in report.layers)
        1
    """
    can_be_recorded("convert", model)
    checks.sizes(window, 2 * NEAR, sinks, num_features, steps, seed)
    wanted = Budget(*checks.budget(budget))
    given, kinds = checks.batches(batches), checks.kinds(kinds, wanted.kinds, str(wanted))
    settings = Settings(Shape(window, sinks, num_features), steps, seed)
    with telling(progress) as tell, without_mechanisms(model):
        kept = Kept(folder, model, given, settings)
        causal, names = _asked(model, given[:1])
        found = _candidates(settings.shape, checks.kinds_of_direction(kinds, causal, wanted.of_memory), wanted)
        checks.some_candidates(found, window)
        layers = _priced(model, given, settings, names, found, kept, tell)
    in_layers = choose(found, layers, wanted)
    _apply(model, names, layers, found, in_layers)
    told = zip(names, layers, in_layers, strict=True)
    policies = tuple(layer_policy(name, found, layer, own) for name, layer, own in told)
    return Conversion(str(wanted), held_out=len(given) > 1, layers=policies)


def _asked(model: Any, batches: Sequence[Batch]) -> tuple[bool, list[str]]:
    """Whether attention is causal, and the names of the layers that are called; all of them can be replaced."""
    causal: list[bool] = []
    sizes: dict[str, tuple[int, int]] = {}

    def observe(layer: Layer, call: Call) -> None:
        causal.append(call.causal)
        sizes[layer.name] = call.q.shape[-1], call.k.shape[1]

    layers = stream(model, batches, observe, op="convert", exact=True)
    something_recorded("convert", model, len(layers))
    checks.one_direction(model, causal)
    replaceable = replaceable_modules(model)
    checks.all_recorded(list(replaceable), sizes)
    checks.like_the_layers(model, {name: head_sizes(module) for name, module in replaceable.items()}, sizes)
    return causal[0], [layer.name for layer in layers]


def _candidates(shape: Shape, kinds: Sequence[str], budget: Budget) -> list[Candidate]:
    widths = [int(shape.window * times) // NEAR * NEAR for times in WIDTHS] if budget.of_memory else []
    return candidates(shape, kinds, widths)


def _priced(
    model: Any,
    batches: Sequence[Batch],
    settings: Settings,
    names: Sequence[str],
    found: Sequence[Candidate],
    kept: Kept,
    tell: Tell,
) -> list[Priced]:
    """What the candidates cost in each layer: as far as it is not known from an earlier try."""
    known = {name: kept.layer(name) for name in names}
    left = {name for name in names if known[name].missing(found)}
    if left:
        cost = kept.tensors("sensitivity", lambda: sensitivity(model, batches, seed=settings.seed, tell=tell))
        recording = Recording(
            model, batches, op="convert", exact=True, wanted=lambda layer: layer.name in left, tell=tell
        )
        modules = dict(attention_modules(model))
        for layer in recording:
            number = names.index(layer.name)
            tell(f"fitting {layer.name}", number, len(names))
            fit, held = _split([_as_swapped(call, modules[layer.name]) for call in layer.calls], len(batches))
            how = {"layer": number, "steps": settings.steps, "seed": derived_seed(settings.seed, number)}
            so_far, dtype = known[layer.name], layer.calls[0].k.dtype
            more = priced(so_far.missing(found), fit, held, cost[layer.name], dtype=dtype, **how)
            checks.finite_prices(layer.name, more.prices)
            known[layer.name] = so_far.joined(more)
            kept.put(layer.name, known[layer.name])
    tell("done", len(names), len(names))
    return list(known.values())


def _as_swapped(call: Call, module: Any) -> Call:
    """In float32 at least, and as a swapped layer gets it: some models scale their queries before attention."""
    call = call.precise()
    scale = module_scale(module, call.q.shape[-1])
    return call if scale == call.scale else call.replace(q=call.q * (call.scale / scale), scale=scale)


def _split(calls: Sequence[Call], batches: int) -> tuple[list[Call], list[Call]]:
    """Those of the batches to fit to, and of those to judge by; a layer may be called several times for each."""
    times = len(calls) // batches
    grouped = [calls[i : i + times] for i in range(0, len(calls), times)]
    fit, held = split(grouped)
    return [call for group in fit for call in group], [call for group in held for call in group]


def choose(found: Sequence[Candidate], layers: Sequence[Priced], budget: Budget) -> list[Tensor]:
    """int64 `[K]` for each layer: the candidates of its key heads."""
    tables = [layer.table(found) for layer in layers]
    nats, nbytes = (torch.cat(column) for column in zip(*tables, strict=True))
    all_nbytes = sum(len(table.nats) * layer.all_nbytes for table, layer in zip(tables, layers, strict=True))
    grows = torch.tensor([float(candidate.grows) for candidate in found], dtype=torch.float64).expand_as(nats)
    value, cost, all_of_it, limit = {
        "loss": (nbytes, nats, 1.0, math.log1p(budget.share)),
        "cache": (nats, nbytes, all_nbytes, budget.share * all_nbytes),
    }.get(budget.what, (nats, grows, len(nats), math.floor(budget.share * len(nats) + 1e-9)))
    if budget.what == "exact":
        checks.some_heads(str(budget), len(nats), int(limit))
    least = cost.amin(1).sum().item()
    if least > limit:
        share = math.expm1(least) if budget.what == "loss" else least / all_of_it
        raise checks.no_choice(str(budget), dict.fromkeys(candidate.kind for candidate in found), share)
    return list(cheapest(value, cost, limit).split([len(table.nats) for table in tables]))


def _apply(
    model: Any, names: Sequence[str], layers: Sequence[Priced], found: Sequence[Candidate], chosen: Sequence[Tensor]
) -> None:
    """Swaps the attention, and gives every part its heads of the fitted features."""
    by_name = {name: layer_mechanisms(found, own) for name, own in zip(names, chosen, strict=True)}
    modules = attention_modules(model)
    attention, options = zip(*(by_name[name] for name, _ in modules), strict=True)
    swap_attention(model, attention, layer_options=options)
    fitted = dict(zip(names, layers, strict=True))
    for name, module in modules:
        _adopt(getattr(module, CHILD), fitted[name].features)


@torch.no_grad()
def _adopt(mechanism: Mechanism, fitted: dict[str, Tensor]) -> None:
    parts: list[tuple[Mechanism, Any]] = [(mechanism, slice(None))]
    if isinstance(mechanism, MixedAttention):
        parts = list(zip(mechanism.mechanisms(), map(list, mechanism.partition.heads), strict=True))
    for part, heads in parts:
        if isinstance(part, FavorAttention):
            for name, parameter in part.features.named_parameters():
                parameter.copy_(fitted[name][heads])
