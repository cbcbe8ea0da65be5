"""The bill: what a conversion costs, what it saves, and what became of every head; kept as soon as it is known."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad import files
from subquad.bench.bill.masked import Encoded, Vocabulary, accuracy, cosines, encoded, neighbours_kept
from subquad.bench.bill.rows import CONVERTED, EXACT, ROWS, SINKS, WINDOW, has_parts
from subquad.bench.bill.speed import cache_bytes, costs
from subquad.bench.bill.texts import (
    compared,
    continuation,
    copy_distances,
    copying,
    last_words,
    losses,
    passkey,
    perplexity,
)
from subquad.bench.records import machine
from subquad.checks import diagnostics as checks
from subquad.conversion.swap import attention_modules
from subquad.models import digests
from subquad.recording.progress import Tell, telling

PROMPT, SAID = 256, 40  # tokens of the text that is gone on with, and of what is said
Record = dict[str, Any]


@dataclass
class Bill:
    """plan: what was asked about. rows: figures by the name of the row. speed: exact and converted, by length. policy:
    what every key head of every layer is. `subquad bill --help` says what the figures are."""

    plan: Record
    rows: dict[str, Record]
    speed: list[Record]
    policy: dict[str, list[str]]

    def as_json(self) -> str:
        return json.dumps({"machine": machine(), **asdict(self)}, indent=1) + "\n"


class Biller:
    """Measures one model, and keeps what is known so far in a file.

    Args:
        model: converted (`subquad.convert`) or swapped (`swap_attention`); it is left as it is.
        path: JSON file. What an earlier run of the same plan left there is not measured again; None: nothing is kept.
    """

    def __init__(self, model: Any, plan: Record, path: Path | None) -> None:
        self.model, self.path = model, path
        self.bill = _kept(path, plan) or Bill(plan, {}, [], policy(model))

    def texts(self, texts: Sequence[Tensor], tokenizer: Any, lengths: Sequence[int], progress: bool | Tell) -> Bill:
        """Of a causal language model. texts `[1, T]`, all of one length; lengths: at which time is taken."""
        asked = Asked(self.model, texts, tokenizer)
        timed = [length for length in lengths if length not in {cost["length"] for cost in self.bill.speed}]
        with telling(progress) as tell:
            for row in self._rows(tell):
                self.bill.rows[row] = asked.row(row)
                self._keep()
            for cost in costs(self.model, texts[0], timed, lambda *done: tell("taking the time", *done)):
                self.bill.speed.append(cost._asdict())
                if cost.row == CONVERTED:
                    self._keep()
        return self.bill

    def sequences(self, batches: Sequence[dict[str, Tensor]], vocabulary: Vocabulary, progress: bool | Tell) -> Bill:
        """Of a model that looks both ways."""
        with ROWS[EXACT](self.model, 0):
            exact = encoded(self.model, batches, vocabulary)
        with telling(progress) as tell:
            for row in self._rows(tell):
                if row != WINDOW:  # there is no state whose memory could be equal
                    with ROWS[row](self.model, 0):
                        self.bill.rows[row] = _encoded_row(encoded(self.model, batches, vocabulary), exact)
                    self._keep()
        return self.bill

    def _rows(self, tell: Tell) -> Iterator[str]:
        """Those that are not known yet and that mean something."""
        for number, row in enumerate(ROWS):
            tell(row, number, len(ROWS))
            if row not in self.bill.rows and has_parts(self.model, row):
                yield row

    def _keep(self) -> None:
        if self.path is not None:
            with checks.writable(self.path):
                files.write_text(self.path, self.bill.as_json())


class Asked:
    """What a causal model is asked about."""

    def __init__(self, model: Any, texts: Sequence[Tensor], tokenizer: Any) -> None:
        self.model, self.texts, self.tokenizer = model, texts, tokenizer
        self.length = texts[0].shape[1]
        self._exact: list[Tensor] = []
        self._nbytes: dict[str, int] = {}

    def row(self, row: str) -> Record:
        window = self.equal_window() if row == WINDOW else 0
        exact = self.exact_losses()
        with ROWS[row](self.model, window):
            now = [losses(self.model, text) for text in self.texts]
            distances = copy_distances(self.length)
            prompt = self.texts[0][:, : min(PROMPT, self.length)]
            found = {"perplexity": perplexity(now)} | compared(now, exact)._asdict()
            found["copy"] = {str(distance): copying(self.model, self.texts, distance) for distance in distances}
            found["passkey"] = {
                str(distance): passkey(self.model, self.tokenizer, self.texts[0], distance) for distance in distances
            }
            found["nbytes"] = self.nbytes(row)
            found["says"] = continuation(self.model, self.tokenizer, prompt, SAID)
        return found | ({"window": window} if window else {})

    def exact_losses(self) -> list[Tensor]:
        if not self._exact:
            with ROWS[EXACT](self.model, 0):
                self._exact = [losses(self.model, text) for text in self.texts]
        return self._exact

    @torch.inference_mode()
    def nbytes(self, row: str) -> int:
        """Of the cache behind a text; the model is as the row has it."""
        if row not in self._nbytes:
            with last_words(self.model, 1):
                self._nbytes[row] = cache_bytes(self.model(self.texts[0], use_cache=True).past_key_values)
        return self._nbytes[row]

    def equal_window(self) -> int:
        """Tokens of a window whose states are no larger than those of the converted model."""
        sizes = []
        for row in (EXACT, CONVERTED):
            with ROWS[row](self.model, 0):
                sizes.append(self.nbytes(row))
        return max(2, (self.length * sizes[1] // sizes[0] - SINKS) // 2 * 2)


def _encoded_row(now: Encoded, exact: Encoded) -> Record:
    found = cosines(now, exact)
    return {
        "accuracy": accuracy(now),
        "cosine": found.mean().item(),
        "smallest_cosine": found.min().item(),
        "neighbours_kept": neighbours_kept(now, exact),
    }


def policy(model: Any) -> dict[str, list[str]]:
    """The mechanism of every key head, by the name of the layer."""
    found = {}
    for layer, (name, module) in enumerate(attention_modules(model)):
        attention, options = model.config.layer_attention(layer)
        heads = {head: part for part in options.get("parts", ()) for head in part["heads"]}
        count = getattr(module.config, "num_key_value_heads", None) or module.config.num_attention_heads
        found[name] = [_words(heads.get(head, {"attention": attention, **options})) for head in range(count)]
    return found


def _words(part: Record) -> str:
    return f"window {part['window']}" if part["attention"] == "window" else part["attention"]


def plan_of(model: Any, texts: Sequence[Tensor]) -> Record:
    """What makes two bills the same: weights, mechanisms and texts."""
    read = digests.of_tensors({str(number): text for number, text in enumerate(texts)})
    sizes = [list(text.shape) for text in texts]
    return {"model": digests.of_model(model), "texts": read, "sizes": sizes}


def _kept(path: Path | None, plan: Record) -> Bill | None:
    """A file that holds another bill, or is damaged, holds nothing."""
    try:
        found = json.loads(path.read_text()) if path is not None else {}
        same = found["plan"] == plan and found["machine"]["commit"] == machine()["commit"]
        return Bill(plan, found["rows"], found["speed"], found["policy"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
