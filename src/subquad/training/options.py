"""Everything that defines a run, apart from its data. Stored with it, and compared when it is resumed.

The fields of `TrainOptions` are the options of `subquad train`; hence this file loads nothing heavy, so that `--help`
comes at once.
"""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from subquad import checks
from subquad.checks import runs
from subquad.data import OBJECTIVES
from subquad.features.names import current_options
from subquad.mechanisms import MECHANISMS
from subquad.training.checksums import read_record, write_record

if TYPE_CHECKING:
    from subquad.models import SubquadConfig

LAYOUTS = ("windows", "crops")
PRECISIONS = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("muon", "adamw")
SCHEDULES = ("cosine", "linear", "constant")
RECORD = "run.json"

DATA, MODEL, OPTIMISATION, RUN = "Data", "Model", "Optimisation", "Run"  # panels of `subquad train --help`


class Option(NamedTuple):
    """Makes a field an option of `subquad train`: its help text, and the panel that shows it.

    flag: what is typed, if not the name of the field. typed: its type there, if not that of the field.
    """

    help: str
    panel: str
    flag: str | None = None
    typed: Any = None


@dataclass(frozen=True)
class TrainOptions:
    """Defaults train a small protein model on a laptop. What the help texts of the fields leave out:

    Args:
        window: for images, always one image.
        layout: "windows" joins sequences into full windows (as the Performer paper does), "crops" gives each sequence
            a row of its own, padded, or a random stretch of it.
        init: the shape of that model must be this one's.
        threads: results are equal bit for bit only with as many.
    """

    attention: Annotated[
        str | list[str],
        Option(
            f"{', '.join(m.name for m in MECHANISMS)}; or one for each layer: favor,favor,softmax.", MODEL, typed=str
        ),
    ] = "favor"
    attention_options: Annotated[
        dict[str, Any] | list[dict[str, Any]],
        Option(
            "NAME=VALUE of the mechanism, such as num_features=128; may be repeated.",
            MODEL,
            flag="--option",
            typed=list[str] | None,
        ),
    ] = field(default_factory=dict)
    objective: Annotated[str, Option("causal (next token) or masked (15 %, as BERT).", OPTIMISATION)] = "causal"
    window: Annotated[int, Option("Tokens per sample.", DATA)] = 4096
    layout: Annotated[str, Option("windows (sequences joined by separators) or crops (one sequence each).", DATA)] = (
        "windows"
    )
    layers: Annotated[int, Option("Layers.", MODEL)] = 4
    hidden: Annotated[int, Option("Width.", MODEL)] = 128
    heads: Annotated[int, Option("Attention heads.", MODEL)] = 4
    key_value_heads: Annotated[int | None, Option("Fewer key heads than heads (grouped-query attention).", MODEL)] = (
        None
    )
    intermediate: Annotated[int | None, Option("Width inside the MLP; four times the width unless given.", MODEL)] = (
        None
    )
    positions: Annotated[str, Option("rotary, sinusoidal, learned or none.", MODEL)] = "rotary"
    rotary_share: Annotated[float, Option("Share of the numbers that rotary positions turn.", MODEL)] = 1.0
    mlp: str = "gated"
    dropout: Annotated[float, Option("Dropout of residual branches.", MODEL)] = 0.0
    reversible: Annotated[bool, Option("Rebuild activations in backward instead of keeping them.", MODEL)] = False
    shared_qk: Annotated[bool, Option("Keys are the normalised queries, as in a Reformer.", MODEL)] = False
    short_conv: Annotated[int, Option("Taps of convolutions over neighbouring tokens; 0 for none.", MODEL)] = 4
    qk_norm: Annotated[bool, Option("Queries and keys get a learned size, one per head.", MODEL)] = False
    gradient_checkpointing: Annotated[bool, Option("Recompute each layer in backward to save memory.", MODEL)] = False
    initializer_range: float = 0.05
    optimizer: Annotated[str, Option("muon (with AdamW for vectors) or adamw.", OPTIMISATION)] = "muon"
    steps: Annotated[int, Option("Optimiser steps.", OPTIMISATION)] = 500
    batch_size: Annotated[int, Option("Windows per process and forward pass.", OPTIMISATION)] = 1
    accumulate: Annotated[int, Option("Forward passes per step.", OPTIMISATION)] = 1
    learning_rate: Annotated[float, Option("Peak learning rate.", OPTIMISATION)] = 0.01
    warmup: Annotated[int, Option("Steps until the peak.", OPTIMISATION)] = 20
    schedule: Annotated[str, Option("cosine, linear or constant.", OPTIMISATION)] = "linear"
    weight_decay: Annotated[float, Option("Of matrices.", OPTIMISATION)] = 0.0
    clip: float = 1.0
    precision: Annotated[str, Option("float32, bfloat16 or float16 (mixed).", OPTIMISATION)] = "float32"
    validation: Annotated[
        float, Option("Share of sequences held out; copies of one never end up on both sides.", DATA)
    ] = 0.05
    eval_every: Annotated[int, Option("Steps between evaluations.", DATA)] = 100
    eval_samples: Annotated[int, Option("Held-out samples to evaluate.", DATA)] = 16
    save_every: Annotated[int, Option("Steps between checkpoints.", RUN)] = 100
    keep: Annotated[int, Option("Checkpoints to keep.", RUN)] = 2
    log_every: Annotated[int, Option("Steps between records.", RUN)] = 10
    redraw_every: Annotated[int, Option("Steps between fresh random features; 0 never.", MODEL)] = 0
    update_every: Annotated[int, Option("Steps between moves of centroids (cluster); 0 never.", MODEL)] = 1
    init: Annotated[str | None, Option("Begin with the weights of this run or model (fine-tuning).", MODEL)] = None
    seed: Annotated[int, Option("Of weights, features, order, crops and masks.", RUN)] = 0
    threads: Annotated[int | None, Option("Of torch; as many as there are cores unless given.", RUN)] = None

    def __post_init__(self) -> None:
        op = "train"
        for name in (
            "steps",
            "batch_size",
            "accumulate",
            "eval_every",
            "eval_samples",
            "save_every",
            "keep",
            "log_every",
        ):
            checks.count(op, name, getattr(self, name))
        for name in ("warmup", "redraw_every", "update_every"):
            checks.count(op, name, getattr(self, name), minimum=0)
        checks.optional_count(op, "threads", self.threads)
        for name in ("learning_rate", "clip"):
            runs.positive(op, name, getattr(self, name))
        runs.positive(op, "weight_decay", self.weight_decay, zero=True)
        runs.threads(self.threads)
        checks.seed(op, self.seed)
        checks.choice(op, "objective", self.objective, OBJECTIVES)
        checks.choice(op, "layout", self.layout, LAYOUTS)
        checks.choice(op, "precision", self.precision, PRECISIONS)
        checks.choice(op, "optimizer", self.optimizer, OPTIMIZERS)
        checks.choice(op, "schedule", self.schedule, SCHEDULES)
        object.__setattr__(self, "attention_options", current_options(self.attention_options))  # frozen otherwise

    def config(self, *, length: int, **tokens: Any) -> "SubquadConfig":
        """The model's configuration for samples of `length`; `tokens`: vocabulary size, special tokens, domain."""
        from subquad.models import SubquadConfig

        return SubquadConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            intermediate_size=self.intermediate,
            attention=self.attention,
            attention_options=self.attention_options,
            positions=self.positions,
            rotary_share=self.rotary_share,
            max_position_embeddings=length,
            mlp=self.mlp,
            dropout=self.dropout,
            reversible=self.reversible,
            shared_qk=self.shared_qk,
            short_conv=self.short_conv,
            qk_norm=self.qk_norm,
            initializer_range=self.initializer_range,
            **tokens,
        )


@dataclass(frozen=True)
class RunRecord:
    """`run.json`: what a run is, so that nothing else can be continued by mistake."""

    options: TrainOptions
    domain: str
    fingerprint: str
    processes: int
    versions: dict[str, str]

    def save(self, folder: Path) -> None:
        write_record(folder / RECORD, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "RunRecord | None":
        """That of the run in the folder, if there is one."""
        path = folder / RECORD
        if not path.exists():
            return None
        stored = read_record(path)
        with runs.readable_record(path):
            options = {"short_conv": 0, **stored["options"]}  # runs begun before there were short convolutions
            return cls(**{**stored, "options": TrainOptions(**options)})

    def differences(self, other: "RunRecord") -> list[str]:
        """`name: ours -> theirs` for everything that must be equal to continue a run."""
        pairs = [
            (option.name, getattr(self.options, option.name), getattr(other.options, option.name))
            for option in fields(TrainOptions)
        ]
        names = ("fingerprint", "domain", "processes")
        pairs += [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name}: {ours!r} -> {theirs!r}" for name, ours, theirs in pairs if ours != theirs]
