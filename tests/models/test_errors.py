"""What models refuse, word for word."""

import pytest
import torch
from transformers import DynamicCache

from subquad import MECHANISMS, errors
from subquad.models import SubquadCache, SubquadConfig, SubquadForMaskedLM, SubquadModel, log_likelihoods
from tiny_models import SMALL, make, random_ids

ERRORS = {
    "causal masked model": (
        lambda: SubquadForMaskedLM(SubquadConfig(**SMALL, causal=True)),
        "SubquadForMaskedLM: needs causal=False, got causal=True in the config; leave it out",
    ),
    "list of attentions": (
        lambda: SubquadConfig(attention=["favor"], num_hidden_layers=2),
        "SubquadConfig: attention must have one entry for each of 2 layers, got 1",
    ),
    "attention of another type": (
        lambda: make(attention=3),
        "SubquadConfig: attention must be one value or a list of 2, got 3",
    ),
    "options for a mixture": (
        lambda: SubquadConfig(attention=["favor", "linear"], attention_options={"near": 4}, num_hidden_layers=2),
        "SubquadConfig: layers with different mechanisms need a list of attention_options, one for each layer; "
        "got {'near': 4} for all",
    ),
    "unknown attention": (
        lambda: SubquadConfig(attention="favour"),
        f"unknown attention 'favour' (did you mean 'favor'?); known: {', '.join(m.name for m in MECHANISMS)}",
    ),
    "odd heads": (
        lambda: SubquadConfig(hidden_size=12, num_attention_heads=4),
        "SubquadConfig: positions='rotary' turns pairs, so the head dim must be even, got 3",
    ),
    "positions": (
        lambda: SubquadConfig(positions="rotari"),
        "SubquadConfig: positions must be one of rotary, sinusoidal, learned, none, got 'rotari' "
        "(did you mean 'rotary'?)",
    ),
    "odd width": (
        lambda: SubquadConfig(hidden_size=15, num_attention_heads=3, positions="sinusoidal"),
        "SubquadConfig: positions='sinusoidal' needs an even hidden_size, got 15",
    ),
    "theta": (lambda: SubquadConfig(rope_theta=0.0), "SubquadConfig: rope_theta must be positive, got 0.0"),
    "rotary share": (
        lambda: SubquadConfig(rotary_share=1.5),
        "SubquadConfig: rotary_share must be from 0 (nothing) to 1 (all), got 1.5",
    ),
    "options that are no dict": (
        lambda: make(attention_options=[1, 2]),
        "SubquadConfig: each of attention_options must be a dict, got 1",
    ),
    "head_dim among the options": (
        lambda: make(attention_options={"head_dim": 3}),
        "favor: head_dim is settled by the layer; leave it out of the options",
    ),
    "option of the layer": (
        lambda: make(attention="linear", attention_options={"layer": 3}),
        "linear: unknown option 'layer'; options: feature_map, num_features, coupling, num_heads, scale, seed, "
        "backend, chunk",
    ),
    "no tokens": (
        lambda: log_likelihoods(make(), [torch.zeros(0, dtype=torch.long)], start=1),
        "sequence 0: must be a vector of at least one token id, got [0]",
    ),
    "dropout": (
        lambda: SubquadConfig(dropout=1.0),
        "SubquadConfig: dropout must be at least 0 and below 1, got 1.0",
    ),
    "no input": (make(), "subquad model: give input_ids or inputs_embeds, got neither"),
    "empty input": (
        lambda: make()(torch.zeros(1, 0, dtype=torch.long)),
        "subquad model: wants input_ids [batch, length], none of them empty, got [1, 0]",
    ),
    "attentions": (
        lambda: make()(random_ids(1, 3), output_attentions=True),
        "subquad model: output_attentions=True is not supported, weights are quadratic; "
        "look at chosen rows with mechanism.attention_matrix(q, k, rows=...)",
    ),
    "mask": (
        lambda: make()(random_ids(2, 3), attention_mask=torch.ones(2, 4)),
        "subquad model: attention_mask must be [2, 3], got [2, 4]",
    ),
    "additive mask": (
        lambda: make()(random_ids(2, 3), attention_mask=torch.full((2, 3), -1e4)),
        "subquad model: attention_mask must hold 1 for real tokens and 0 for padding",
    ),
    "learned positions": (
        lambda: make(positions="learned", max_position_embeddings=4)(random_ids(1, 6)),
        "subquad model: position 5 is beyond the 4 learned ones; use positions='rotary' for lengths never trained on",
    ),
    "cache of a masked model": (
        lambda: make(SubquadModel)(random_ids(1, 3), use_cache=True),
        "subquad model: only a causal model can continue a sequence; use_cache needs causal=True",
    ),
    "cache of another kind": (
        lambda: make()(random_ids(1, 3), past_key_values=DynamicCache()),
        "subquad model: past_key_values must be a SubquadCache, got DynamicCache",
    ),
    "cache of another depth": (
        lambda: make()(random_ids(1, 3), past_key_values=SubquadCache(5)),
        "subquad model: the cache has 5 layers, the model 2",
    ),
    "crop": (
        lambda: make()(random_ids(1, 3), use_cache=True).past_key_values.crop(1),
        "SubquadCache: holds the states of whole sequences, so crop is impossible; "
        "assisted and contrastive decoding need it, other kinds of generate() do not",
    ),
    "cache implementation": (
        lambda: make().generate(random_ids(1, 3), cache_implementation="static", max_new_tokens=1),
        "generate: cache_implementation='static' holds keys and values, subquad models keep states; leave it out",
    ),
    "reversible checkpointing": (
        lambda: make(reversible=True).gradient_checkpointing_enable(),
        "gradient checkpointing: reversible layers keep no activations already; use one of the two",
    ),
    "reversible hidden states": (
        lambda: make(reversible=True)(random_ids(1, 3), output_hidden_states=True),
        "subquad model: reversible layers keep no hidden states; output_hidden_states needs reversible=False",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert str(caught.value) == message
