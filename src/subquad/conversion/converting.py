"""A pretrained model becomes sub-quadratic: each key head as cheap as a budget asks and its errors allow."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from subquad.checks import convert as checks
from subquad.checks.recording import can_be_recorded, something_recorded
from subquad.conversion.budget import Budget
from subquad.conversion.candidates import NEAR, Candidate, Shape, candidates
from subquad.conversion.choosing import Chosen, best, proposals
from subquad.conversion.convertible import Layers
from subquad.conversion.kept import Kept, Settings
from subquad.conversion.measured import Judge
from subquad.conversion.policy import Conversion
from subquad.conversion.pricing import Texts, priced_layers
from subquad.conversion.swap import head_sizes, replaceable_modules, without_mechanisms
from subquad.recording.calls import Call, Layer
from subquad.recording.progress import Tell, telling
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
    copying: float = 0.03,
    steps: int = 100,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool | Tell = True,
) -> Conversion:
    """Replaces the attention of every layer, in place, key head by key head; all weights of the model stay as they are.

    The model runs over the batches with exact attention. A backward pass over a part of them tells what an error of
    each head costs, in nats per token; features are fitted, layer by layer, to what exact attention makes of the
    batches; every candidate of every key head is priced on batches that were held out. What several views of these
    prices propose within the budget is measured as a whole, windows alone among it, and the best of them is taken.

    Args:
        model: of transformers; its attention goes through the attention interface (Llama, Qwen, GPT-2, OPT, BERT, ...).
        batches: what the model takes, at the length it is to be used at: what fits 1,024 tokens does harm at 8,192.
            Every fifth is held out; candidates are judged, and the memory of states counted, by these.
        budget: "constant": no state grows, each head takes features or a window, what loses less. "exact 10%": the
            tenth of the key heads that gains most by it stays exact (or gets pages, if `kinds` say so). "cache 20%":
            the states together take a fifth of the memory of keys and values at the length of the batches. "loss 1%":
            as little memory as a perplexity allows that is 1 % higher, by the divergence that is measured.
        window: tokens that are attended exactly, a multiple of 32; 0 for none, and then no sinks beside features.
        sinks: leading tokens that are always attended.
        num_features: of the far field.
        kinds: what a head may become: "window", "features", "pages", "exact"; None: all that the budget can use.
        copying: how much a choice may lose on text to copy better what was read before: nats of text for each nat where
            held-out batches are read a second time; 0: copying does not count. It does not in models that look both
            ways, either.
        steps: of fitting features, in each layer.
        folder: where layers are kept as soon as they are fitted; a conversion that was interrupted goes on from there
            if it is given the same model, batches and sizes; with another budget nothing is fitted again. It stays when
            all is done; remove it then.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
        >>> batches = [torch.randint(0, 50, (1, 100)) for _ in range(2)]
        >>> report = convert(model, batches, budget="exact 50%", window=32, num_features=8, steps=2)
        >>> [len(layer.heads) for layer in report.layers]
        [2]
    """
    can_be_recorded("convert", model)
    checks.sizes(window, 2 * NEAR, sinks, num_features, steps, seed)
    copying = checks.weight(copying)
    wanted = Budget(*checks.budget(budget))
    given, kinds = checks.batches(batches), checks.kinds(kinds, wanted.kinds, str(wanted))
    settings = Settings(Shape(window, sinks, num_features), steps, seed)
    with telling(progress) as tell, without_mechanisms(model):
        kept = Kept(folder, model, given, settings)
        causal, names = _asked(model, given[:1])
        found = _candidates(settings.shape, checks.kinds_of_direction(kinds, causal, wanted.of_memory), wanted)
        checks.some_candidates(found, window)
        texts = Texts(given, causal=causal)
        layers = Layers(model, found, priced_layers(model, texts, settings, names, found, kept, tell))
        chosen = _best(layers, texts, wanted, copying, tell)
    return Conversion(str(wanted), len(given) > 1, chosen.measured, layers.become(chosen.choice))


def _best(layers: Layers, texts: Texts, budget: Budget, copying: float, tell: Tell) -> Chosen:
    """Of the choices that are proposed, by what they cost as a whole."""
    priced = list(layers.priced.values())
    proposed = list(proposals(layers.found, priced, budget, copying))
    judge = Judge(layers.model, texts.held, texts.copies)
    tried = []
    for number, choice in enumerate(proposed):
        tell("measuring what is proposed", number, len(proposed))
        tried.append(Chosen(choice, layers.measured(choice, judge)))
    tell("done", len(proposed), len(proposed))
    return best(layers.found, tried, budget, copying)


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
