"""What a conversion has finished, on disk: a layer that was fitted is not fitted again after an interruption."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad import files
from subquad.checks import convert as checks
from subquad.conversion.candidates import NOTHING, Price, Priced, Shape
from subquad.conversion.swap import attention_modules
from subquad.models import digests
from subquad.recording.stream import Batch

FORMAT = 2  # of the files; another one when what is fitted changes
FEATURE, PRICE = "feature.", "price."  # before the names of fitted parameters, and of candidates


class Settings(NamedTuple):
    """What decides how features are fitted. Budget and kinds do not: other ones choose anew from what is known."""

    shape: Shape
    steps: int
    seed: int


class Kept:
    """Files of one conversion in `folder`; None: nothing is kept.

    Each carries the fingerprint of model, batches and settings, and a digest of itself: what belongs to another
    conversion, or was changed, is refused.
    """

    def __init__(self, folder: str | Path | None, model: Any, batches: Sequence[Batch], settings: Settings) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is None:
            return
        with checks.folder_usable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            files.sweep(self.folder)
        self.fingerprint = _fingerprint(model, batches, settings)

    def tensors(self, name: str, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Those of an earlier try, or new ones."""
        found = self._read(name)
        if found is None:
            found = make()
            self._write(name, found)
        return found

    def layer(self, name: str) -> Priced:
        """What is known of a layer so far."""
        found = self._read(name)
        if found is None:
            return NOTHING
        features = {key.removeprefix(FEATURE): x for key, x in found.items() if key.startswith(FEATURE)}
        prices = {key.removeprefix(PRICE): Price(*x) for key, x in found.items() if key.startswith(PRICE)}
        return Priced(prices, found["all_nbytes"].item(), features)

    def put(self, name: str, known: Priced) -> None:
        """What is known of a layer now."""
        all_nbytes = torch.tensor(known.all_nbytes, dtype=torch.float64)
        features = {FEATURE + key: x for key, x in known.features.items()}
        prices = {PRICE + key: torch.stack(price) for key, price in known.prices.items()}
        self._write(name, {"all_nbytes": all_nbytes, **features, **prices})

    def _read(self, name: str) -> dict[str, Tensor] | None:
        if self.folder is None or not (path := self.folder / f"{name}.safetensors").exists():
            return None
        from safetensors import safe_open

        with checks.kept_file(path), safe_open(path, "pt") as file:
            said = file.metadata() or {}
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
            checks.same_conversion(self.folder, said.get("fingerprint"), self.fingerprint)
            checks.same_digest(path, said.get("digest"), digests.of_tensors(found))
        return found

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        if self.folder is None:
            return
        from safetensors.torch import save_file

        path = self.folder / f"{name}.safetensors"
        dense = {key: x.contiguous() for key, x in tensors.items()}
        said = {"fingerprint": self.fingerprint, "digest": digests.of_tensors(dense)}
        with checks.folder_usable(self.folder), files.written(path) as staging:
            save_file(dense, staging, said)


def _fingerprint(model: Any, batches: Sequence[Batch], settings: Settings) -> str:
    """Of all that decides what comes out: weights, what the configuration says beside them, batches and sizes."""
    config = {key: x for key, x in model.config.to_dict().items() if key not in ("attention", "attention_options")}
    said = [FORMAT, type(model).__name__, config, settings]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode())
    for name, module in attention_modules(model):
        digests.update(digest, name, [getattr(module, key, None) for key in ("scaling", "head_dim", "is_causal")])
    digests.add_tensors(digest, model)
    for batch in batches:
        parts = (batch,) if isinstance(batch, Tensor) else batch
        for name, tensor in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
            digests.update(digest, str(name), tensor)
    return digest.hexdigest()
