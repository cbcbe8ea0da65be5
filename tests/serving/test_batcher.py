"""Sequences that join and leave a batch get the tokens that they get alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from subquad import errors
from subquad.conversion import swap_attention
from subquad.serving import Batcher, Request, read
from subquad.serving.sampling import Sampling, chosen, probabilities
from tiny_heads import SIZES
from tiny_served import MODELS, NO_END, alone, ours, prompt, swapped

LENGTHS = (3, 17, 1, 9, 6, 30, 2)
NEW = (5, 12, 20, 1, 9, 15, 16)
DRAWN: dict[str, Any] = {"temperature": 1.5, "top_k": 9, "top_p": 0.9}


def prompts() -> list[Tensor]:
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def submitted(batcher: Batcher, **options: Any) -> list[Request]:
    return [batcher.submit(ids, new, **options) for ids, new in zip(prompts(), NEW, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_each_sequence_gets_what_generate_gives_it_alone(name: str) -> None:
    """Three rows for seven requests: rows join at every position, and leave."""
    model = MODELS[name]()
    want = [alone(model, ids, new) for ids, new in zip(prompts(), NEW, strict=True)]
    assert len({token for tokens in want for token in tokens}) > 3
    batcher = Batcher(model, rows=3, prefill=7)
    requests = submitted(batcher)
    batcher.run()
    assert [request.tokens for request in requests] == want
    assert {request.reason for request in requests} == {"length"}


@pytest.mark.parametrize("name", ["favor", "linear", "short_conv", "llama favor"])
def test_in_single_precision_by_the_native_engine(name: str) -> None:
    model = MODELS[name]().float()
    batcher = Batcher(model, rows=3, prefill=7)
    requests = submitted(batcher)
    batcher.run()
    assert [r.tokens for r in requests] == [alone(model, ids, new) for ids, new in zip(prompts(), NEW, strict=True)]


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("prefill", [1, 5, 512])
def test_rows_and_chunks_change_no_token(rows: int, prefill: int) -> None:
    model = ours("mixed", short_conv=3)
    batcher = Batcher(model, rows=rows, prefill=prefill)
    requests = submitted(batcher)
    batcher.run()
    assert [r.tokens for r in requests] == [alone(model, ids, new) for ids, new in zip(prompts(), NEW, strict=True)]


@pytest.mark.parametrize("name", ["favor", "softmax", "llama mixed", "gpt2 pages"])
def test_samples_are_those_of_the_request_alone(name: str) -> None:
    model = MODELS[name]()
    batcher, singles = Batcher(model, rows=3, prefill=4), []
    requests = [batcher.submit(ids, 12, **DRAWN, seed=seed) for seed, ids in enumerate(prompts())]
    batcher.run()
    for seed, ids in enumerate(prompts()):
        single = Batcher(model)
        singles.append(single.submit(ids, 12, **DRAWN, seed=seed))
        single.run()
    assert [request.tokens for request in requests] == [request.tokens for request in singles]
    other = Batcher(model)
    again = other.submit(prompts()[1], 12, **DRAWN, seed=99)
    other.run()
    assert again.tokens != singles[1].tokens


def test_without_a_seed_torch_draws_one() -> None:
    batcher = Batcher(ours("linear"))
    torch.manual_seed(3)
    requests = [batcher.submit(prompt(4), 12, temperature=2.0) for _ in range(2)]
    torch.manual_seed(3)
    requests.append(batcher.submit(prompt(4), 12, temperature=2.0))
    batcher.run()
    assert requests[0].tokens == requests[2].tokens != requests[1].tokens


def test_probabilities_are_those_of_generate() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for temperature, top_k, top_p in ((0.7, 9, 0.8), (1.0, None, 0.5), (2.0, 60, None), (1.0, 1, 1.0), (1.0, 5, 0.01)):
        warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
        warpers += [] if top_k is None else [TopKLogitsWarper(top_k)]
        warpers += [] if top_p is None else [TopPLogitsWarper(top_p)]
        want = logits[None]
        for warper in warpers:
            want = warper(None, want)
        got = probabilities(logits, temperature, Sampling(temperature, top_k, top_p))
        torch.testing.assert_close(got, want[0].softmax(-1))


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits, generator = torch.tensor([0.0, 1.0, 2.0]), torch.Generator().manual_seed(0)
    sampling = Sampling(0.5)
    drawn = [chosen(logits, sampling, generator) for _ in range(4000)]
    found = torch.tensor(drawn).bincount(minlength=3) / len(drawn)
    torch.testing.assert_close(found, (logits / 0.5).softmax(-1), atol=0.03, rtol=0)
    assert chosen(logits, Sampling(), None) == 2


# How it ends ----------------------------------------------------------------------------------------------------------


def test_a_sequence_ends_at_its_own_tokens() -> None:
    model = ours("favor")
    whole = alone(model, prompt(5), 12)
    end = whole[4]
    cut = whole[: whole.index(end) + 1]
    batcher = Batcher(model)
    one = batcher.submit(prompt(5), 12, eos_token_id=end)
    several = batcher.submit(prompt(5), 12, eos_token_id=[22, end])
    neither = batcher.submit(prompt(5), 12)
    batcher.run()
    assert (one.tokens, one.reason) == (several.tokens, several.reason) == (cut, "eos")
    assert (neither.tokens, neither.reason) == (whole, "length")
    model.generation_config.eos_token_id = end
    the_models = batcher.submit(prompt(5), 12)
    none = batcher.submit(prompt(5), 12, eos_token_id=())
    batcher.run()
    assert (the_models.tokens, none.tokens) == (cut, whole) == (alone(model, prompt(5), 12), whole)


def test_tokens_come_as_they_are_made() -> None:
    batcher = Batcher(ours("favor"), rows=2, prefill=4)
    first, second = batcher.submit(prompt(3), 3), batcher.submit(prompt(6), 2)
    third = batcher.submit(prompt(2), 1)
    steps = [[token.request for token in batcher.step()] for _ in range(5)]
    assert steps == [[first], [first], [first, second, third], [second], []]
    assert not batcher.busy


def test_rows_are_never_more_than_asked_for() -> None:
    batcher = Batcher(ours("favor"), rows=2)
    requests = [batcher.submit(prompt(3, seed), 4) for seed in range(5)]
    at_once = []
    for _ in range(12):
        batcher.step()
        at_once.append(sum(bool(request.tokens) and not request.finished for request in requests))
    assert max(at_once) == 2
    assert all(request.finished for request in requests)


def test_requests_come_in_the_order_in_which_they_end() -> None:
    batcher = Batcher(ours("linear"), rows=2)
    long, short, next_one, never = (batcher.submit(prompt(3), new) for new in (9, 2, 4, 4))
    never.cancel()
    assert batcher.run() == [never, short, next_one, long]
    assert batcher.run() == []


def test_more_requests_may_come_while_it_runs() -> None:
    model = ours("softmax")
    batcher = Batcher(model)
    requests = [batcher.submit(prompt(4), 5)]
    for token in batcher.stream():
        if len(requests) < 4 and token.request is requests[0]:
            requests.append(batcher.submit(prompt(4 + len(requests)), 5))
    assert [r.tokens for r in requests] == [alone(model, prompt(4 + more), 5) for more in range(4)]


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelled_requests_leave_the_others_alone(steps: int) -> None:
    """Before anything was read, in the middle of the prompt, and in the batch."""
    model = ours("mixed")
    batcher = Batcher(model, prefill=4)
    kept, gone, last = batcher.submit(prompt(3), 9), batcher.submit(prompt(7, 1), 30), batcher.submit(prompt(5, 2), 9)
    for _ in range(steps):
        batcher.step()
    gone.cancel()
    made = len(gone.tokens)
    batcher.run()
    assert (gone.reason, len(gone.tokens)) == ("cancelled", made)
    assert (kept.tokens, last.tokens) == (alone(model, prompt(3), 9), alone(model, prompt(5, 2), 9))
    kept.cancel()
    assert kept.reason == "length"


def failing(monkeypatch: pytest.MonkeyPatch, when: Callable[[Tensor], bool]) -> None:
    """The second layer of favor attention fails, and the first one has read the tokens already."""
    from subquad import FavorAttention

    extend, calls = FavorAttention.extend, [0]

    def fails(self: Any, q: Tensor, *args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] % 2 == 0 and when(q):
            raise RuntimeError("out of memory")
        return extend(self, q, *args, **options)

    monkeypatch.setattr(FavorAttention, "extend", fails)


@pytest.mark.parametrize("make", [lambda: ours("favor"), lambda: swapped("llama", "favor")], ids=["ours", "swapped"])
def test_a_step_that_fails_is_repeated(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    batcher = Batcher(model)
    requests = [batcher.submit(prompt(4, seed), 8) for seed in range(3)]
    batcher.step()
    batcher.step()
    with monkeypatch.context() as patch:
        failing(patch, lambda _: True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                batcher.step()
    batcher.run()
    assert [request.tokens for request in requests] == [alone(model, prompt(4, seed), 8) for seed in range(3)]


def test_a_prompt_that_cannot_be_read_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("favor")
    batcher = Batcher(model)
    good = batcher.submit(prompt(4), 8)
    batcher.step()
    bad, next_one = batcher.submit(prompt(11), 8), batcher.submit(prompt(5), 8)
    with monkeypatch.context() as patch:
        failing(patch, lambda q: q.shape[2] == 11)
        with pytest.raises(RuntimeError, match="out of memory"):
            batcher.step()
        assert bad.reason == "error"
        streamed = [token.id for token in batcher.stream() if token.request is good]
    assert (good.tokens, next_one.tokens) == (alone(model, prompt(4), 8), alone(model, prompt(5), 8))
    assert streamed == good.tokens[1:]  # the token of the step that failed was not lost
    assert bad.tokens == []


def test_a_model_without_numbers_ends_that_sequence_only() -> None:
    model = ours("favor")
    batcher = Batcher(model)
    good, bad = batcher.submit(prompt(4), 8), batcher.submit(torch.tensor([22, 22]), 8)
    want = alone(model, prompt(4), 8)
    assert 22 not in [*prompt(4).tolist(), *want]
    with torch.no_grad():
        model.model.embed_tokens.weight[22] = torch.nan
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num())
    news = list(batcher.stream())
    assert (good.tokens, good.reason, bad.tokens, bad.reason) == (want, "length", [], "nan")
    assert [token.id for token in news if token.request is bad] == [None]


def mistral() -> Any:
    """Exact attention within a window of 24 tokens, which is all the same for so many."""
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 16, "num_key_value_heads": 2, "initializer_range": 0.5, "sliding_window": 24}
    return swap_attention(MistralForCausalLM(MistralConfig(**sizes, **NO_END)).double().eval(), "softmax")


def test_a_batch_is_as_long_as_its_longest_sequence_however_long_it_runs() -> None:
    model = mistral()
    batcher = Batcher(model, rows=2)
    requests = [batcher.submit(prompt(4 + seed % 4, seed), 12 + seed % 5) for seed in range(9)]
    batcher.run()
    assert [r.tokens for r in requests] == [
        alone(model, prompt(4 + seed % 4, seed), 12 + seed % 5) for seed in range(9)
    ]
    with pytest.raises(errors.ConfigError) as caught:
        batcher.submit(prompt(20), 6)
    assert str(caught.value) == (
        "submit: the model reads at most 24 tokens, but there are 20 of the prompt and 6 new ones; ask for fewer"
    )


# Prefixes and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_many_requests_begin_with_one_prefix(name: str) -> None:
    model, system = MODELS[name](), prompt(11, 50)
    prefix = read(model, system, chunk=4)
    before = [tensor.clone() for tensor in flat(prefix.layers[1].state)]
    batcher = Batcher(model, rows=2, prefill=5)
    requests = [batcher.submit(ids, 6, prefix=prefix) for ids in prompts()[:4]]
    plain = batcher.submit(prompt(8), 6)
    batcher.run()
    assert [r.tokens for r in requests] == [alone(model, torch.cat([system, ids]), 6) for ids in prompts()[:4]]
    assert plain.tokens == alone(model, prompt(8), 6)
    assert all(torch.equal(a, b) for a, b in zip(before, flat(prefix.layers[1].state), strict=True))
    assert prefix.get_seq_length() == 11


def flat(state: Any) -> Iterator[Tensor]:
    for part in state:
        yield from [part] if isinstance(part, Tensor) else flat(part)


@pytest.mark.parametrize("name", ["favor", "llama favor"])
def test_a_prefix_with_padding_counts_its_real_tokens(name: str) -> None:
    """A row of a padded batch that `generate` has read."""
    model = MODELS[name]()
    ids, mask = torch.stack([prompt(6), prompt(6, 1)]), torch.ones(2, 6, dtype=torch.long)
    mask[0, :4] = 0
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=mask, **options)
    real = torch.cat([out.sequences[0, 4:-1], prompt(5, 2)])
    batcher = Batcher(model)
    request = batcher.submit(prompt(5, 2), 7, prefix=out.past_key_values.select([0]))
    batcher.run()
    assert request.tokens == alone(model, real, 7)


@pytest.mark.parametrize("name", ["favor", "linear", "window", "llama favor"])
def test_constant_states_stay_as_small_whatever_the_lengths(name: str) -> None:
    batcher = Batcher(MODELS[name](), rows=3)
    sizes = set()
    for length in (5, 40, 9):
        batcher.submit(prompt(length), 20)
    batcher.step()
    for _ in range(15):
        batcher.step()
        sizes.add(batcher.nbytes())
    assert len(sizes) == 1


@pytest.mark.parametrize("name", ["softmax", "strided", "pages", "mixed", "gpt2 softmax"])
def test_growing_states_shrink_when_the_longest_leaves(name: str) -> None:
    model = MODELS[name]()
    batcher = Batcher(model, rows=2)
    batcher.submit(prompt(40), 4)
    short = batcher.submit(prompt(2), 9)
    while len(short.tokens) < 3:
        batcher.step()
    large = batcher.nbytes() / 2
    batcher.step()
    batcher.step()
    assert batcher.nbytes() < large / 2
    batcher.run()
    assert batcher.nbytes() == 0
    assert short.tokens == alone(model, prompt(2), 9)
