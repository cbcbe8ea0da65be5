"""What serving refuses, word for word."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from subquad import LinformerAttention, SoftmaxAttention, errors
from subquad.conversion import swap_attention
from subquad.conversion.generation import StateCache
from subquad.mechanism import Mechanism
from subquad.models import SubquadCache, SubquadForMaskedLM
from subquad.serving import Batcher, join, read, save_cache
from tiny_heads import bert, gpt2, llama
from tiny_models import make
from tiny_served import ours, prompt, swapped


class Unjoined(SoftmaxAttention):
    """As somebody else writes a mechanism with a growing state."""

    name = "unjoined"

    join_states = Mechanism.join_states  # pyright: ignore[reportAssignmentType]


def unjoined() -> Any:
    model = swapped("llama", "softmax")
    model.model.layers[1].self_attn.subquad_attention = Unjoined(head_dim=4)
    return model


def unjoined_part() -> Any:
    model = swapped("gpt2", "mixed")
    model.transformer.h[1].attn.subquad_attention.parts["softmax1"] = Unjoined(head_dim=4)
    return model


def positionless() -> Any:
    model = swapped("llama", "favor")

    class Positionless(type(model)):
        def forward(self, input_ids: Any = None, past_key_values: Any = None) -> Any: ...

    model.__class__ = Positionless
    return model


def submit(*args: Any, **options: Any) -> Any:
    return lambda: Batcher(ours("favor")).submit(*args, **options)


IDS = [3, 4, 5]
STATELESS = "keeps no state, so its model reads every sequence anew for each token; use another attention, or"
ERRORS = {
    "no mechanisms": (
        lambda: Batcher(llama()),
        "Batcher: LlamaForCausalLM does not generate with states; give a SubquadForCausalLM, or a causal model of "
        "transformers after swap_attention",
    ),
    "not causal": (
        lambda: Batcher(make(SubquadForMaskedLM)),
        "Batcher: SubquadForMaskedLM does not generate with states; give a SubquadForCausalLM, or a causal model of "
        "transformers after swap_attention",
    ),
    "an encoder": (
        lambda: read(swap_attention(bert(), "softmax"), IDS),
        "read: BertForMaskedLM does not generate with states; give a SubquadForCausalLM, or a causal model of "
        "transformers after swap_attention",
    ),
    "no model": (
        lambda: Batcher(None),
        "Batcher: NoneType does not generate with states; give a SubquadForCausalLM, or a causal model of transformers "
        "after swap_attention",
    ),
    "training": (
        lambda: Batcher(ours("favor").train()),
        "Batcher: SubquadForCausalLM is in training mode; call model.eval() first",
    ),
    "no state": (
        lambda: Batcher(swap_attention(gpt2(), "linformer", max_length=64)),
        f"Batcher: linformer (layer 0) {STATELESS} model.generate(..., use_cache=False)",
    ),
    "no positions": (
        lambda: Batcher(positionless()),
        "Batcher: Positionless takes no position_ids, so sequences of one batch cannot be at different positions; use "
        "model.generate",
    ),
    "no join": (
        lambda: Batcher(unjoined()),
        "Batcher: unjoined (layer 1) cannot join the states of sequences of different lengths; give it a join_states, "
        "or use model.generate",
    ),
    "no join of a mixed part": (
        lambda: Batcher(unjoined_part()),
        "Batcher: mixed (layer 1) cannot join the states of sequences of different lengths; give it a join_states, or "
        "use model.generate",
    ),
    "join of what grows": (
        lambda: Unjoined(4).join_states([]),
        "unjoined: cannot join states, they grow with the length and the mechanism has no join_states of its own; "
        "write one, or give every sequence a state of its own",
    ),
    "join without states": (
        lambda: LinformerAttention(4, num_heads=2, max_length=64).join_states([]),
        "linformer: cannot join states, it has none; use forward on the whole",
    ),
    "no rows": (lambda: Batcher(ours("favor"), rows=0), "Batcher: rows must be a whole number of at least 1, got 0"),
    "no prefill": (
        lambda: Batcher(ours("favor"), prefill=0.5),  # pyright: ignore[reportArgumentType]
        "Batcher: prefill must be a whole number of at least 1, got 0.5",
    ),
    "text": (submit("hello", 3), "submit: a prompt must be token ids, got 'hello'"),
    "empty": (submit([], 3), "submit: a prompt must be token ids [T], at least one, got [1, 0]"),
    "several": (
        submit(torch.ones(2, 3, dtype=torch.long), 3),
        "submit: a prompt must be token ids [T], at least one, got [2, 3]",
    ),
    "several for read": (
        lambda: read(ours("favor"), torch.ones(2, 3, 1, dtype=torch.long)),
        "read: a prompt must be token ids [T] or [B, T], at least one, got [2, 3, 1]",
    ),
    "floats": (submit([0.5], 3), "submit: token ids must be whole numbers, got torch.float32"),
    "beyond the vocabulary": (submit([3, 23], 3), "submit: token ids must lie between 0 and 22, got 23"),
    "below it": (submit([3, -1], 3), "submit: token ids must lie between 0 and 22, got -1"),
    "no new tokens": (submit(IDS, 0), "submit: max_new_tokens must be a whole number of at least 1, got 0"),
    "greedy top_k": (
        submit(IDS, 3, top_k=5),
        "submit: top_k=5 is for sampling; give a temperature, too, or leave it out",
    ),
    "greedy seed": (
        submit(IDS, 3, seed=0),
        "submit: seed=0 is for sampling; give a temperature, too, or leave it out",
    ),
    "temperature": (
        submit(IDS, 3, temperature=0),
        "submit: temperature must lie between 0.01 and 100, got 0; leave it out for the likeliest token",
    ),
    "top_k": (submit(IDS, 3, temperature=1.0, top_k=0), "submit: top_k must be a whole number of at least 1, got 0"),
    "top_p": (
        submit(IDS, 3, temperature=1.0, top_p=1.5),
        "submit: top_p must lie above 0 and at most at 1, got 1.5",
    ),
    "seed": (
        submit(IDS, 3, temperature=1.0, seed=-1),
        "submit: seed must be a whole number of at least 0, got -1",
    ),
    "end": (
        submit(IDS, 3, eos_token_id="</s>"),
        "submit: every eos_token_id must be a whole number of at least 0, got '</s>'",
    ),
    "too long": (
        lambda: Batcher(swapped("gpt2", "favor")).submit(prompt(30), 36),
        "submit: the model reads at most 64 tokens, but there are 30 of the prompt and 36 new ones; ask for fewer",
    ),
    "too long behind a prefix": (
        lambda: Batcher(model := swapped("gpt2", "favor")).submit(prompt(30), 6, prefix=read(model, prompt(30))),
        "submit: the model reads at most 64 tokens, but there are 30 of the prefix, 30 of the prompt and 6 new ones; "
        "ask for fewer",
    ),
    "too long to read": (
        lambda: read(ours("linear", positions="learned", max_position_embeddings=8), prompt(9)),
        "read: the model reads at most 8 tokens, got 9; give a shorter prompt",
    ),
    "a prefix of keys": (
        submit(IDS, 3, prefix=DynamicCache()),
        "submit: prefix: cache must be a SubquadCache, as this model has, got DynamicCache",
    ),
    "a prefix of the other kind": (
        lambda: Batcher(swapped("llama", "favor")).submit(IDS, 3, prefix=read(ours("favor"), IDS)),
        "submit: prefix: cache must be a StateCache, as this model has, got SubquadCache",
    ),
    "an empty prefix": (
        submit(IDS, 3, prefix=SubquadCache(2)),
        "submit: prefix: the cache is empty; read(model, ids) makes one that is not",
    ),
    "a prefix of another depth": (
        submit(IDS, 3, prefix=SubquadCache(3)),
        "submit: prefix: the cache has 3 layers, the model 2",
    ),
    "a prefix of several": (
        lambda: Batcher(model := ours("favor")).submit(IDS, 3, prefix=read(model, IDS).fork(2)),
        "submit: prefix must be a cache of one sequence, got 2; cache.select([row]) takes one",
    ),
    "nothing to join": (lambda: join(ours("favor"), []), "join: caches must be a list of at least one, got []"),
    "another kind to join": (
        lambda: join(ours("favor"), [StateCache(2)]),
        "join: cache must be a SubquadCache, as this model has, got StateCache",
    ),
    "nothing to save": (
        lambda: save_cache(ours("favor"), SubquadCache(2), "nowhere"),
        "save_cache: the cache is empty; read(model, ids) makes one that is not",
    ),
    "no chunk": (lambda: read(ours("favor"), IDS, chunk=0), "read: chunk must be a whole number of at least 1, got 0"),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(errors.SubquadError) as caught:
        call()
    assert str(caught.value) == message


def test_exactly_as_many_tokens_as_the_model_reads() -> None:
    batcher = Batcher(swapped("gpt2", "favor"))
    request = batcher.submit(prompt(30), 35)
    batcher.run()
    assert len(request.tokens) == 35
