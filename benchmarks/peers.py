"""Other packages' attention, each behind one small adapter from `[B, H, T, D]` to `[B, H, T, D]`.

A package that does not import is left out. Gradients are taken of q, k and v only, as everywhere in the benchmark.
"""

import contextlib
import copy
import importlib.util
import io
import math
import re
import sys
import warnings
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import FEATURES, Case, Shape
from torch import Tensor, nn

import subquad
from subquad.mechanism import masked_softmax, normalised

WINDOW = 64  # of local attention, and buckets of LSH: the near blocks of `favor`
FLA = "fla/ops/linear_attn/naive.py"  # by its file: the package itself asks for Triton


def load(module: str) -> Any:
    """Imports quietly: old packages print, and warn of deprecations, and neither says anything about speed."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _load_file(module) if module.endswith(".py") else importlib.import_module(module)


def _load_file(path: str) -> Any:
    """A file of an installed package, without the package."""
    for folder in sys.path:
        file = Path(folder) / path
        spec = importlib.util.spec_from_file_location(file.stem, file) if file.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ModuleNotFoundError(path)


def quietly(make: Any, *args: object, **options: object) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **options)


def seen(length: int, causal: bool) -> Tensor:
    everything = torch.ones(length, length, dtype=torch.bool)
    return everything.tril() if causal else everything


def swap(*tensors: Tensor) -> list[Tensor]:
    """`[B, H, T, D]` to `[B, T, H, D]` and back, without a copy."""
    return [t.transpose(1, 2) for t in tensors]


class Peer(ABC):
    """What adapters share; those that are gated have a `reference` too."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        self.shape, self.causal = shape, causal

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Performer(Peer):
    """performer-pytorch: FAVOR+ with its own draw. Without its CUDA code, causal means its slow way, cumulative sums of
    all outer products, unless fast-transformers is there to do that product on the CPU."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__(shape, causal)
        self.package = load("performer_pytorch.performer_pytorch")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.attention = quietly(self.package.FastAttention, shape.head_dim, nb_features=FEATURES, causal=causal)
        if causal:
            with contextlib.suppress(ImportError):
                load("fast_transformers.causal_product")
                self.attention.causal_linear_fn = self.package.causal_linear_attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi = partial(self.package.softmax_kernel, projection_matrix=self.attention.projection_matrix)
        phi_q, phi_k = phi(q, is_query=True), phi(k, is_query=False)
        weights = (phi_q @ phi_k.mT) * seen(q.shape[2], self.causal)
        # its causal ways add 1e-6 to every sum of key features, which are small enough for that to show
        epsilon = 1e-6 * phi_q.sum(-1, keepdim=True) if self.causal else 0
        return weights @ v / (weights.sum(-1, keepdim=True) + epsilon)


class FastTransformers(Peer):
    """pytorch-fast-transformers: linear attention with elu + 1, its C++ product where causal."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__(shape, causal)
        package, masking = load("fast_transformers.attention"), load("fast_transformers.masking")
        make = package.CausalLinearAttention if causal else package.LinearAttention
        mask = masking.TriangularCausalMask if causal else masking.FullMask
        self.attention = quietly(make, shape.head_dim, feature_map=self.feature_map())
        lengths = masking.LengthMask(torch.tensor([shape.length]))
        self.masks = mask(shape.length), lengths, lengths

    def feature_map(self) -> Any:
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(*swap(q, k, v), *self.masks).transpose(1, 2)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return subquad.attention("linear", head_dim=self.shape.head_dim).reference(q, k, v, causal=self.causal)


class FastTransformersFavor(FastTransformers):
    """The same with its Favor features, drawn once."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__(shape, causal)
        phi = self.attention.feature_map
        with torch.random.fork_rng():
            torch.manual_seed(0)
            quietly(phi.new_feature_map, "cpu")
        phi.new_feature_map = lambda _: None  # else a new draw is part of every call

    def feature_map(self) -> Any:
        return load("fast_transformers.feature_maps").Favor.factory(n_dims=FEATURES)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi = copy.deepcopy(self.attention.feature_map).double()
        weights = phi.forward_queries(q) @ phi.forward_keys(k).mT
        return normalised(weights * seen(q.shape[2], self.causal)) @ v


class Fla(Peer):
    """flash-linear-attention: its chunked torch path, as its kernels need a GPU; elu + 1 is applied here."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__(shape, causal)
        self.attention = load(FLA).naive_chunk_linear_attn

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(*swap(F.elu(q) + 1, F.elu(k) + 1, v), scale=1.0, normalize=True).transpose(1, 2)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return subquad.attention("linear", head_dim=self.shape.head_dim).reference(q, k, v, causal=True)


class Local(Peer):
    """local-attention: exact attention to the own window and its neighbours, nothing else."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__(shape, causal)
        self.attention = load("local_attention").LocalAttention(WINDOW, causal=causal)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = torch.arange(q.shape[2]) // WINDOW
        near = (window[:, None] - window).abs() <= 1
        return masked_softmax(q @ k.mT / math.sqrt(q.shape[3]), near & seen(q.shape[2], self.causal)) @ v


class Linformer(Peer):
    """linformer: its layer without the four linear maps around it, so that attention alone is timed."""

    class Given(nn.Module):
        """Stands where the layer would compute the values."""

        def __init__(self) -> None:
            super().__init__()
            self.value = torch.empty(0)

        def forward(self, _: Tensor) -> Tensor:
            return self.value

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__(shape, causal)
        make = load("linformer.linformer").LinformerSelfAttention
        self.attention = make(shape.heads * shape.head_dim, shape.length, k=FEATURES, heads=shape.heads)
        self.attention.to_q = self.attention.to_k = self.attention.to_out = nn.Identity()
        self.attention.to_v = self.values = Linformer.Given()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, self.values.value = (t.flatten(2) for t in swap(q, k, v))
        out = self.attention(q, context=k)
        return out.unflatten(2, (self.shape.heads, self.shape.head_dim)).transpose(1, 2)


class Reformer(Peer):
    """reformer-pytorch: LSH attention, four rounds. Queries are its keys, so k is not used."""

    duplicates = False  # a key that is met in several rounds counts once, as with us

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__(shape, causal)
        make = load("reformer_pytorch.reformer_pytorch").LSHAttention
        options = {"bucket_size": WINDOW, "n_hashes": 4, "allow_duplicate_attention": self.duplicates}
        # eval: in training it keeps every round's buckets, for reversible networks
        self.attention = make(causal=causal, **options).eval()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q.flatten(0, 1), v.flatten(0, 1))[0].unflatten(0, q.shape[:2])


class ReformerWithDuplicates(Reformer):
    """Its default."""

    duplicates = True


PEERS = {
    "performer_pytorch.performer_pytorch": [Case("performer-pytorch", Performer, peer=True)],
    "fast_transformers.attention": [
        Case("fast-transformers elu", FastTransformers, peer=True),
        Case("fast-transformers favor", FastTransformersFavor, peer=True),
    ],
    FLA: [Case("fla naive", Fla, directions=(True,), multiple=64, peer=True, about="chunked torch path, elu + 1")],
    "local_attention": [
        Case("local-attention", Local, multiple=WINDOW, peer=True, about=f"exact, windows of {WINDOW}")
    ],
    "linformer.linformer": [
        Case(
            "lucidrains linformer",
            Linformer,
            directions=(False,),
            gated=False,
            peer=True,
            about="without its linear maps",
        )
    ],
    "reformer_pytorch.reformer_pytorch": [
        Case(name, kind, gated=False, multiple=2 * WINDOW, peer=True, about="k is not used")
        for name, kind in (("reformer-pytorch", Reformer), ("reformer-pytorch (duplicates)", ReformerWithDuplicates))
    ],
}


def peer_cases() -> tuple[list[Case], list[str]]:
    """Those that import, and a line about those that do not."""
    cases, missing = [], []
    for module, found in PEERS.items():
        try:
            load(module)
        except Exception as error:  # whatever an old package fails with, the others are measured
            missing.append(f"{re.split('[./]', module)[0]} ({type(error).__name__})")
            continue
        cases += found
    return cases, [f"peers that do not import: {', '.join(missing)}"] if missing else []
