"""Everything that defines a run, apart from its data. Stored with it, and compared when it is resumed."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from subquad import checks
from subquad.checks import runs
from subquad.data import OBJECTIVES
from subquad.features.names import current_options
from subquad.models import SubquadConfig
from subquad.training.files import read_record, write_record

LAYOUTS = ("windows", "crops")
PRECISIONS = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("muon", "adamw")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class TrainOptions:
    """Defaults train a small protein model on a laptop.

    Args:
        window: tokens per sample; for images, always one image.
        layout: "windows" joins sequences into full windows (as the Performer paper does), "crops" gives each sequence
            a row of its own, padded, or a random stretch of it.
        batch_size, accumulate: samples per process and forward pass; forward passes per step.
        redraw_every: steps between fresh random features; 0 never.
        update_every: steps between moves of centroids (cluster); 0 never.
        keep: checkpoints to keep.
        init: a run or model folder whose weights to begin with (fine-tuning); its shape must be this one's.
        threads: of torch; results are equal bit for bit only with as many.
    """

    attention: str | list[str] = "favor"
    attention_options: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
    objective: str = "causal"
    window: int = 4096
    layout: str = "windows"
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    key_value_heads: int | None = None
    intermediate: int | None = None
    positions: str = "rotary"
    mlp: str = "gated"
    dropout: float = 0.0
    reversible: bool = False
    shared_qk: bool = False
    gradient_checkpointing: bool = False
    initializer_range: float = 0.05
    optimizer: str = "muon"
    steps: int = 500
    batch_size: int = 1
    accumulate: int = 1
    learning_rate: float = 0.01
    warmup: int = 20
    schedule: str = "linear"
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: str = "float32"
    validation: float = 0.05
    eval_every: int = 100
    eval_samples: int = 16
    save_every: int = 100
    keep: int = 2
    log_every: int = 10
    redraw_every: int = 0
    update_every: int = 1
    init: str | None = None
    seed: int = 0
    threads: int | None = None

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

    def config(self, *, length: int, **tokens: Any) -> SubquadConfig:
        """The model's configuration for samples of `length`; `tokens`: vocabulary size, special tokens, domain."""
        return SubquadConfig(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            intermediate_size=self.intermediate,
            attention=self.attention,
            attention_options=self.attention_options,
            positions=self.positions,
            max_position_embeddings=length,
            mlp=self.mlp,
            dropout=self.dropout,
            reversible=self.reversible,
            shared_qk=self.shared_qk,
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

    def save(self, path: Path) -> None:
        write_record(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        stored = read_record(path)
        with runs.readable_record(path):
            return cls(**{**stored, "options": TrainOptions(**stored["options"])})

    def differences(self, other: "RunRecord") -> list[str]:
        """`name: ours -> theirs` for everything that must be equal to continue a run."""
        pairs = [
            (option.name, getattr(self.options, option.name), getattr(other.options, option.name))
            for option in fields(TrainOptions)
        ]
        names = ("fingerprint", "domain", "processes")
        pairs += [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name}: {ours!r} -> {theirs!r}" for name, ours, theirs in pairs if ours != theirs]
