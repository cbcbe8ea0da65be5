"""What every mechanism does beyond its contract: it learns from real data, decodes, runs from a shell, stays cheap."""

import importlib
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from processes import OPTIONS, quiet_train
from subquad import MECHANISMS, Mechanism, attention
from subquad.cli import main
from subquad.kernels.sparse import bands, bucket_operator, choice, choice_operator, lines, pages
from subquad.kernels.sparse import torch as sparse
from subquad.mechanisms import buckets as bucket_mechanisms
from subquad.models import SubquadForCausalLM
from subquad.testing import assert_close
from tiny_models import NARROW

ROOT = Path(__file__).parents[2]
NAMES = [m.name for m in MECHANISMS]
CAUSAL = [m.name for m in MECHANISMS if m.supports_state]
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"attention": name, "attention_options": NARROW.get(name, {})} for name in NAMES},
    "strided-fixed": {"attention": "strided", "attention_options": {"stride": 8, "pattern": "fixed", "summary": 2}},
    "favor-in-clusters": {
        "attention": "cluster",
        "attention_options": {"num_clusters": 4, "inside": "favor", "num_features": 8},
        "reversible": True,
    },
    "reformer": {"attention": "lsh", "attention_options": NARROW["lsh"], "shared_qk": True, "reversible": True},
}


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_small_model_learns_from_the_embedded_data(name: str, tmp_path: Path) -> None:
    causal = MODELS[name]["attention"] in CAUSAL
    options = replace(OPTIONS, **MODELS[name], objective="causal" if causal else "masked", window=64, dropout=0.0)
    result = quiet_train(
        tmp_path, replace(options, steps=40, eval_every=40, save_every=40, log_every=1, redraw_every=0)
    )
    lines_ = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, *_ = [line["loss"] for line in lines_ if "loss" in line]
    assert result.metrics["eval_loss"] < first - 0.1
    if causal:
        decodes_what_it_computes(SubquadForCausalLM.from_pretrained(tmp_path / "model").double().eval())


@torch.inference_mode()
def decodes_what_it_computes(model: Any) -> None:
    """Cached is uncached: logits token by token and in pieces, and what is generated."""
    ids = torch.randint(4, 24, (2, 50), generator=torch.Generator().manual_seed(0))
    want = model(ids).logits
    for sizes in ([1] * 50, [30, 1, 1, 18]):
        cache, logits = None, []
        for piece in ids.split(sizes, 1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        assert_close(torch.cat(logits, 1), want, 1e-9)
    made = [model.generate(ids[:, :9], max_new_tokens=20, do_sample=False, use_cache=use) for use in (True, False)]
    assert torch.equal(*made)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_takes_every_mechanism_with_its_options(name: str, tmp_path: Path) -> None:
    pairs = [f"--option={key}={json.dumps(value)}" for key, value in NARROW.get(name, {}).items()]
    tiny = ["--window", "64", "--layers", "1", "--hidden", "16", "--heads", "2", "--eval-samples", "2", "--steps", "1"]
    objective = "causal" if name in CAUSAL else "masked"
    command = ["train", "protein", "--attention", name, "--objective", objective, "--out", str(tmp_path / "run")]
    assert main([*command, *pairs, *tiny, "--threads", "1"]) == 0
    if name in CAUSAL:
        model = SubquadForCausalLM.from_pretrained(tmp_path / "run" / "model")
        assert model.config.attention == name
        assert model.config.attention_options == NARROW.get(name, {})
        assert main(["generate", str(tmp_path / "run"), "--length", "5", "--output", str(tmp_path / "new.fasta")]) == 0


def test_benchmarks_have_a_case_of_every_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    cases = importlib.import_module("cases").our_cases()[0]
    names = {case.name.removesuffix(" (torch)") for case in cases}
    assert names >= {"sdpa", *NAMES} - {"softmax"}


# Cost -----------------------------------------------------------------------------------------------------------------

GROWING = {  # options for a length; the exponent of the length that the cost is promised to have
    "window": (lambda _: {"window": 32}, 1.0),
    "window-dilated-global": (lambda _: {"window": 16, "dilation": 4, "global_tokens": 2}, 1.0),
    "linformer": (lambda _: {"rank": 16, "max_length": 4096}, 1.0),
    "lsh": (lambda _: {"num_buckets": 8, "bucket_size": 16, "rounds": 2}, 1.0),
    "cluster": (lambda _: {"num_clusters": 8, "bucket_size": 16}, 1.0),
    "strided": (lambda length: {"stride": round(length**0.5)}, 1.5),
    "pages": (lambda length: {"pages": 2, "page": round(length**0.5), "window": round(length**0.5)}, 1.5),
    "strided-fixed": (lambda length: {"stride": round(length**0.5), "pattern": "fixed", "summary": 1}, 1.5),
}
DIRECTIONS = [case for case in product(GROWING, [False, True]) if case not in (("linformer", True), ("pages", False))]


class Largest(TorchDispatchMode):
    """Remembers the most elements that a result had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return out


@pytest.fixture
def open_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines as plain torch code: torch counts nothing inside an operator. They are called with few pairs at once, as
    what they hold is bounded by that, and only then small lengths tell what long ones would."""

    def in_the_open(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return sparse.forward(sparse.Inputs(q, k, v), *rest)

    def buckets_in_the_open(*args: Any, options: Any) -> Any:
        return bucket_operator._forward(*args, *options)[0]

    def choose_in_the_open(q: Any, high: Any, low: Any, *rest: Any) -> Any:
        return choice.choose(q, choice.Extremes(high, low), *rest)

    for module in (bands, lines, pages):
        monkeypatch.setattr(module, "sparse_attention", in_the_open)
    monkeypatch.setattr(choice_operator, "choose_pages", choose_in_the_open)
    monkeypatch.setattr(choice, "BOUNDS_AT_ONCE", 1 << 12)
    monkeypatch.setattr(bucket_mechanisms, "bucket_attention", buckets_in_the_open)
    monkeypatch.setattr(bucket_mechanisms, "PRODUCTS_AT_ONCE", 1 << 12)
    monkeypatch.setattr(sparse, "PAIRS_AT_ONCE", 1 << 12)


def attended(name: str, length: int) -> tuple[Mechanism, torch.Tensor]:
    make, _ = GROWING[name]
    return attention(name.split("-")[0], head_dim=8, **make(length)), torch.randn(1, 1, length, 8)


@pytest.mark.usefixtures("open_operators")
@pytest.mark.parametrize(("name", "causal"), DIRECTIONS)
def test_products_grow_as_promised(name: str, causal: bool) -> None:
    counts = []
    for length in (1024, 4096):
        mechanism, q = attended(name, length)
        with FlopCounterMode(display=False) as counter:
            mechanism(q, q, q, causal=causal)
        counts.append(counter.get_total_flops())
    assert counts[0] > 0
    assert (
        counts[1] < 1.05 * 4 ** GROWING[name][1] * counts[0]
    )  # borders and blocks that are not full make some percent


@pytest.mark.usefixtures("open_operators")
@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_as_large_as_all_pairs_is_made(name: str, masked: bool) -> None:
    """Neither weights nor masks: the largest tensor grows as the inputs do."""
    sizes = []
    for length in (1024, 4096):
        mechanism, q = attended(name, length)
        mask = torch.arange(length)[None] < length - 7 if masked else None
        with Largest() as largest:
            mechanism(q, q, q, causal=not mechanism.supports_bidirectional, key_mask=mask)
        sizes.append(largest.elements)
    assert sizes[1] < 4096**2 / 16
    assert sizes[1] <= 4.5 * sizes[0]
