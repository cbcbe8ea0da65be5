"""The configuration of a model whose layers use any mechanism."""

from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from subquad import checks, files
from subquad.checks import layers, models
from subquad.features.names import current_options
from subquad.mechanisms import MECHANISMS
from subquad.nn.block import ACTIVATIONS

POSITIONS = ("rotary", "sinusoidal", "learned", "none")
MLPS = ("gated", "plain")

SHIM = Path(__file__).with_name("modeling_subquad.py")
AUTO_MAP = {  # the classes of the shim by which transformers' Auto classes load a model
    "AutoConfig": "SubquadConfig",
    "AutoModel": "SubquadModel",
    "AutoModelForCausalLM": "SubquadForCausalLM",
    "AutoModelForMaskedLM": "SubquadForMaskedLM",
    "AutoModelForSequenceClassification": "SubquadForSequenceClassification",
    "AutoModelForTokenClassification": "SubquadForTokenClassification",
}


class SubquadConfig(PreTrainedConfig):
    """Layers, heads, positions, and a mechanism for all layers or one for each.

    Args:
        attention: name of a mechanism, or a list with one for each layer.
        attention_options: options of the mechanism; for a list of mechanisms, a list of as many.
        num_key_value_heads: fewer than `num_attention_heads` for grouped-query attention; None for as many.
        positions: "rotary" (queries and keys are rotated before any feature map), "sinusoidal", "learned" (up to
            `max_position_embeddings`, an error beyond) or "none".
        rotary_share: of the pairs of numbers that rotary positions turn, those of the highest frequencies; the others
            compare tokens wherever they stand, also at lengths that were never trained on.
        max_position_embeddings: the longest sequence, for learned positions and for attention bound to a length
            (`max_length` of linformer).
        mlp: "gated" or "plain".
        causal: None lets the head decide: True for `SubquadForCausalLM`, False elsewhere.
        domain, image_shape: "protein", "text" or "image", and its shape; how to read and show tokens.
        reversible: two residual streams whose activations are rebuilt in backward instead of kept.
        shared_qk: keys are the normalised queries; with attention="lsh" and reversible=True, a Reformer.
        short_conv: taps of convolutions over neighbouring tokens, on queries and keys of every layer, which make it
            easy to learn what followed a token the last time; 0 for none.
        qk_norm: queries and keys of each head get a root mean square that is learned.

    Example:
        >>> SubquadConfig(num_hidden_layers=2, attention=["softmax", "favor"]).layer_attention(1)
        ('favor', {})
    """

    model_type = "subquad"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 32
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    attention: str | list[str] = "favor"
    attention_options: dict[str, Any] | list[dict[str, Any]] | None = None
    positions: str = "rotary"
    rope_theta: float = 10_000.0
    rotary_share: float = 1.0
    max_position_embeddings: int = 8192
    mlp: str = "gated"
    hidden_act: str = "silu"
    dropout: float = 0.0
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    causal: bool | None = None
    reversible: bool = False
    shared_qk: bool = False
    short_conv: int = 4
    qk_norm: bool = False
    domain: str | None = None
    image_shape: list[int] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        op = "SubquadConfig"
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            checks.count(op, name, getattr(self, name))
        for name in ("num_key_value_heads", "head_dim", "intermediate_size"):
            checks.optional_count(op, name, getattr(self, name))
        layers.heads(self.hidden_size, self.num_attention_heads, self.key_heads, self.head_dim)
        layers.shared_heads(self.shared_qk, self.num_attention_heads, self.key_heads)
        checks.count(op, "short_conv", self.short_conv, minimum=0)
        layers.qk_norm(self.qk_norm, self.shared_qk)
        checks.choice(op, "positions", self.positions, POSITIONS)
        checks.choice(op, "mlp", self.mlp, MLPS)
        checks.choice(op, "hidden_act", self.hidden_act, tuple(ACTIVATIONS))
        checks.probability(op, "dropout", self.dropout)
        checks.share(op, "rotary_share", self.rotary_share)
        models.position_settings(self.positions, self.hidden_size, self.rope_theta, self.norm_eps)
        models.even_head_dim(self.positions, self.head_size)
        models.layer_lists(self.attention, self.attention_options, self.num_hidden_layers)
        self.attention_options = current_options(self.attention_options)
        for name in {self.layer_attention(layer)[0] for layer in range(self.num_hidden_layers)}:
            checks.mechanism_name(name, tuple(mechanism.name for mechanism in MECHANISMS))
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Models saved before there were short convolutions have none; files always say it since."""
        return super().from_dict({"short_conv": 0, **config_dict}, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to config.json: what differs from the defaults, and `short_conv`."""
        return {**super().to_diff_dict(), "short_conv": self.short_conv}

    @property
    def name(self) -> str:
        """The mechanisms in use, for titles and tables."""
        return self.attention if isinstance(self.attention, str) else "+".join(dict.fromkeys(self.attention))

    @property
    def key_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    def layer_attention(self, layer: int) -> tuple[str, dict[str, Any]]:
        """Name and options of a layer's mechanism."""
        name = self.attention if isinstance(self.attention, str) else self.attention[layer]
        options = self.attention_options or {}
        options = dict(options[layer] if isinstance(options, list) else options)
        return name, options

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Also of every model: the shim is written with it, and named in `auto_map` whatever a loaded file said there.

        Configurations derived from this one are left to transformers: the shim does not know them.
        """
        if type(self) is SubquadConfig:
            self.auto_map = {auto: f"{SHIM.stem}.{name}" for auto, name in AUTO_MAP.items()}
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            files.write_text(Path(save_directory) / SHIM.name, SHIM.read_text())
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """transformers' mark of classes whose source is to be copied beside weights; for this one there is the shim."""
        if cls is not SubquadConfig:
            super().register_for_auto_class(auto_class)
