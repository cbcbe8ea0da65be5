"""Whether a rearrangement left every result as it was, to the bit.

    python tests/same_bits.py record before     # before the first change
    python tests/same_bits.py compare before    # after the last one: names every result that is another

A call is one mechanism, engine, dtype, direction and mask: output, gradients of inputs and parameters; or decoding in
pieces, with its states. Models that were saved before must load and say the same. Bits depend on the
machine and on torch: a recording is made where it is compared, and not kept.
"""

import argparse
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

import subquad
from fitted import fitted
from subquad import FavorAttention, LinearAttention, Mechanism
from subquad.kernels.cpu import library
from subquad.models import SubquadConfig, SubquadForCausalLM, SubquadForMaskedLM
from subquad.testing import make_inputs
from subquad.testing.judging import directions
from tiny_models import NARROW, SMALL, favor_and_softmax, random_ids

D, LENGTH, LONG = 8, 150, 2100  # long: tokens from which on far fields have centres
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PIECES = (70, 1, 1, 1, 30, 1, 46)  # of LENGTH, while decoding

Make = Callable[[], Mechanism]


def one_engine() -> dict[str, Make]:
    """Mechanisms of torch operations alone."""
    make = functools.partial(functools.partial, subquad.attention)
    return {
        "softmax": make("softmax", head_dim=D),
        "identity": make("identity", head_dim=D),
        "window": make("window", head_dim=D, window=10, global_tokens=2),
        "window, dilated": make("window", head_dim=D, window=6, dilation=3),
        "lsh": make("lsh", head_dim=D, num_buckets=8, bucket_size=8, rounds=2),
        "cluster": make("cluster", head_dim=D, num_clusters=4, bucket_size=8, num_heads=2),
        "cluster of favor": make("cluster", head_dim=D, num_clusters=4, inside="favor", num_features=8, num_heads=2),
        "strided": make("strided", head_dim=D, stride=6),
        "strided, fixed": make("strided", head_dim=D, stride=8, pattern="fixed", summary=2),
        "pages": make("pages", head_dim=D, pages=3, page=4, window=8, sinks=2),
        "linformer": make("linformer", head_dim=D, rank=6, max_length=LENGTH, num_heads=2),
        "mixed": make("mixed", head_dim=D, **favor_and_softmax(3)),
    }


def two_engines(backend: str) -> dict[str, Make]:
    """Mechanisms that the C++ engine knows, too."""
    favor = functools.partial(FavorAttention, D, 16, backend=backend)
    learned = functools.partial(fitted, FavorAttention, D, 16, backend=backend)
    linear = functools.partial(LinearAttention, D, backend=backend)
    return {
        "favor": functools.partial(favor, near=16, sinks=3),
        "favor, near=0": functools.partial(favor, near=0, sinks=0),
        "favor, gaussian": functools.partial(favor, near=16, kernel="gaussian", num_heads=2),
        "favor, hyperbolic": functools.partial(favor, near=0, sinks=4, estimator="hyperbolic"),
        "favor, calibrated": functools.partial(learned, near=16, estimator="calibrated", transform=True, num_heads=2),
        "favor, hedgehog": functools.partial(learned, near=16, estimator="hedgehog", num_heads=2),
        "favor, exponential": functools.partial(learned, near=0, sinks=0, estimator="exponential"),
        "linear": linear,
        "linear, softplus": functools.partial(linear, feature_map="softplus"),
        "linear, projected": functools.partial(linear, feature_map="relu", num_features=12, num_heads=2),
        "linear, exp": functools.partial(linear, feature_map="exp"),
    }


def mechanisms() -> dict[str, Make]:
    trigonometric = functools.partial(FavorAttention, D, 16, near=0, sinks=0, estimator="trigonometric")
    found = {**one_engine(), "favor, trigonometric": trigonometric}
    for backend in ("torch", "cpu") if library.AVAILABLE else ("torch",):
        found |= {f"{name}, {backend}": make for name, make in two_engines(backend).items()}
    return found


def calls() -> Iterator[tuple[str, Callable[[], dict[str, Tensor]]]]:
    """Names, and what makes the tensors to compare."""
    for name, make in mechanisms().items():
        for dtype in DTYPES[::2] if ", cpu" in name else DTYPES:  # C++ knows no float64, and float16 as bfloat16
            kinds = [None, *(kind for kind in ("right", "left") if kind in make().mask_kinds)]
            for causal in directions(make()):
                for kind in kinds:
                    how = f"{name}, {str(dtype)[6:]}, {'causal' if causal else 'bidirectional'}, padded {kind}"
                    yield how, functools.partial(attend, make, dtype, causal, kind)
                if dtype == torch.float32 and name.startswith(("favor", "linear")):
                    how = f"{name}, {'causal' if causal else 'bidirectional'}, long"
                    yield how, functools.partial(attend, make, dtype, causal, None, LONG)
            if make().supports_state:
                yield f"{name}, {str(dtype)[6:]}, decoding", functools.partial(decode, make, dtype)


def mask_of(kind: str | None) -> Tensor | None:
    if kind is None:
        return None
    mask = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 61]])
    return mask if kind == "right" else mask.flip(1)


def made(make: Make, dtype: torch.dtype) -> Mechanism:
    torch.manual_seed(0)  # projections of linformer are drawn like any layer's
    mechanism = make()
    return mechanism.double() if dtype == torch.float64 else mechanism


def attend(make: Make, dtype: torch.dtype, causal: bool, kind: str | None, length: int = LENGTH) -> dict[str, Tensor]:
    mechanism = made(make, dtype)
    inputs = make_inputs(mechanism, length).to(dtype).leaves()
    out = mechanism(*inputs, causal=causal, key_mask=mask_of(kind))
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    found = {"out": out, **{f"d{name}": t.grad for name, t in zip("qkv", inputs, strict=True)}}
    found |= {name: parameter.grad for name, parameter in mechanism.named_parameters()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@torch.no_grad()
def decode(make: Make, dtype: torch.dtype) -> dict[str, Tensor]:
    mechanism, state, found, start = made(make, dtype), None, {}, 0
    inputs = make_inputs(mechanism, LENGTH).to(dtype)
    for piece in PIECES:
        out, state = mechanism.extend(*inputs.tokens(start, start + piece), state)
        found[f"tokens from {start}"] = out
        found |= {f"state {i} at {start + piece}": tensor for i, tensor in enumerate(state)}
        start += piece
    return found


# Models ---------------------------------------------------------------------------------------------------------------


def kind_of(name: str) -> Any:
    causal = next(m for m in subquad.MECHANISMS if m.name == name).supports_causal
    return SubquadForCausalLM if causal else SubquadForMaskedLM


def save_models(folder: Path) -> None:
    for name in (m.name for m in subquad.MECHANISMS):
        torch.manual_seed(0)
        options = {"attention": name, "attention_options": NARROW.get(name, {}), "num_hidden_layers": 2}
        kind_of(name)(SubquadConfig(**SMALL | options)).eval().save_pretrained(folder / name)


def logits_of(folder: Path) -> dict[str, Tensor]:
    """Of a saved model, which is loaded as it was saved."""
    with torch.no_grad():
        return {"logits": kind_of(folder.name).from_pretrained(folder).eval()(random_ids(2, 40)).logits}


# Recordings -----------------------------------------------------------------------------------------------------------


def digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:24]}"


def results(folder: Path) -> dict[str, str]:
    """A line for every tensor of every call."""
    every = [*calls(), *((f"model {f.name}", functools.partial(logits_of, f)) for f in sorted(folder.iterdir()))]
    found = {}
    for name, call in track(every, f"{len(every)} calls"):
        found |= {f"{name}: {what}": digest(tensor) for what, tensor in call().items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    recording, models = args.folder / "results.json", args.folder / "models"
    torch.set_num_threads(2)
    if args.action == "record":
        if recording.exists():
            parser.error(f"{recording} is there already; compare with it, or choose another folder")
        save_models(models)
        recording.write_text(json.dumps(results(models), indent=0))
        return 0
    if not recording.exists():
        parser.error(f"there is no {recording}; record before you change anything")
    before, now = json.loads(recording.read_text()), results(models)
    other = [name for name in before if now.get(name) != before[name]]
    for name in other:
        print(f"{name}: {before[name]} became {now.get(name, 'nothing')}")
    new = len(now.keys() - before.keys())
    print(
        f"{len(before) - len(other)} of {len(before)} results are the same to the bit" + f", {new} are new" * bool(new)
    )
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
