"""What the torch operators take. Anyone can call `torch.ops.subquad.*`, so these checks come before both engines.

Every tensor is declared by its kind and the letters of its sizes (those of `blocks.py`, of sparse operators those of
`sparse/torch.py`); a letter stands for one size in all of them, `B|1` for either. Kinds: "input" has the dtype of q,
"float" any, "state" what sums of inputs are kept in; with a question mark it may be None. Sizes that are symbols of a
traced graph are not compared.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad import checks
from subquad.checks import engine as engine_checks
from subquad.checks import favor as favor_checks
from subquad.features.elementwise import ELEMENTWISE
from subquad.kernels.engines import ENGINES
from subquad.kernels.favor.inputs import FavorInputs, FavorOptions
from subquad.kernels.linear.inputs import LinearInputs, LinearOptions

Declared = Mapping[str, str]

QKV = {"q": "input B H T D", "k": "input B K S D", "v": "input B K S Dv"}
FAVOR_MAP = {**QKV, "query": "float maps M D"}  # the sizes that others depend on
FAVOR = {
    **QKV,
    "query": "float maps M D",
    "key": "float maps M D",
    "key_bias": "float maps M",
    "offset_weight": "float? maps D",
    "offset_bias": "float? maps",
    "sink_k": "input? B K sinks D",
    "sink_v": "input? B K sinks Dv",
    "alive": "bool? B|1 S",
    "fold": "bool? B|1 S",
    "sink_seen": "int64? B|1 T",
    "far_max": "state? B K maxima",
    "far_sum": "state? B K M V",
}
LINEAR = {
    **QKV,
    "weight": "float? maps M D",
    "log_weight": "float? B K S",
    "alive": "bool? B|1 S",
    "far_max": "state? B K maxima",
    "far_sum": "state? B K M V",
}
SAVED = {"grad_out": "input B H T Dv", "out": "input B H T Dv"}
FAVOR_SAVED = {
    **SAVED,
    "normaliser": "state B H T 2",
    "low": "low? B H T Dv",
    "borders_max": "state borders B K maxima",
    "borders_sum": "state borders B K M+1 V",
    "grad_far_sum": "state? B K M V",
}
LINEAR_SAVED = {
    **SAVED,
    "normaliser": "state B H T",
    "low": "low? B H T Dv",
    "borders_max": "state borders B K maxima",
    "borders_sum": "state borders B K M+1 V",
    "grad_far_sum": "state? B K M V",
}
BUCKETS = {
    "q": "input B H T D",
    "k": "input B K T D",
    "v": "input B K T Dv",
    "q_code": "int32 R B H T",
    "k_code": "int32 R B K T",
}
BUCKETS_SAVED = {**SAVED, "log_normaliser": "log B H T"}
_SPARSE_QKV = {"q": "input N C D", "k": "input J E D", "v": "input J E Dv", "blocks": "int64 N W"}
SPARSE = {
    **_SPARSE_QKV,
    "q_place": "int32 N C",
    "k_place": "int32 J E",
    "q_code": "int32? N C R",
    "k_code": "int32? J E R",
}
CHOICE = {
    "q": "input B K G T D",
    "high": "state B K P D",
    "low": "state B K P D",
    "candidates": "int64 B|1 T",
}
SPARSE_ALIKE = {**_SPARSE_QKV, "q_place": "int32 C", "k_place": "int32 WE", "alive": "bool? J E"}
SPARSE_SAVED = {
    "grad_out": "input N C Dv",
    "grad_log_normaliser": "log N C",
    "out": "input N C Dv",
    "log_normaliser": "log N C",
}

MAY_BE_EMPTY = ("sinks", "borders")
ONE_MORE = {"M+1": "M", "V": "Dv"}  # sums have a column for the normaliser, borders a row for the centre
RULES = ("none", "norm", "groups")


class Sizes:
    """What the letters turned out to be."""

    def __init__(self, op: str, q: Tensor | None) -> None:
        if q is None:
            raise engine_checks.missing(op, "q")
        self.op, self.q, self.known = op, q, {"1": 1, "2": 2}
        checks.dense_layout(op, "q", q)
        if q.dtype not in checks.FLOAT_DTYPES:
            raise engine_checks.wrong_dtype(op, "q", q, checks.FLOAT_DTYPES)
        state = torch.promote_types(q.dtype, torch.float32)
        self._dtypes = {"input": (q.dtype,), "float": checks.FLOAT_DTYPES, "state": (state,)}
        self._dtypes |= {"log": (torch.float32, torch.float64), "low": (torch.int8,), "bool": (torch.bool,)}
        self._dtypes |= {"int64": (torch.int64,), "int32": (torch.int32,)}

    def __getitem__(self, letter: str) -> int:
        return self.known[letter]

    def check(self, declared: Declared, tensors: Mapping[str, Tensor | None]) -> None:
        for name, words in declared.items():
            tensor = tensors.get(name)
            kind, *letters = words.split()
            if tensor is None:
                if not kind.endswith("?"):
                    raise engine_checks.missing(self.op, name)
                continue
            bound = len(letters) == tensor.dim() and not tensor.is_nested
            shape = [self._size(letter, tensor.shape[i] if bound else letter) for i, letter in enumerate(letters)]
            engine_checks.tensor(self.op, name, tensor, self._dtypes[kind.rstrip("?")], shape)
            engine_checks.device(self.op, name, tensor, self.q)
            for letter in letters if 0 in tensor.shape else ():
                if letter not in MAY_BE_EMPTY and self.known.get(letter) == 0:
                    raise engine_checks.empty(self.op, name, tensor)

    def _size(self, letter: str, found: Any) -> Any:
        """What a letter says the size is: what is `found`, if it has said nothing so far."""
        if letter in ONE_MORE:
            return self.known[ONE_MORE[letter]] + 1
        if "|" in letter:
            return tuple(self.known[other] for other in letter.split("|"))
        if letter == "WE":
            return self.known["W"] * self.known["E"]
        return self.known.get(letter, letter) if found is letter else self.known.setdefault(letter, found)


def favor(op: str, inputs: FavorInputs, options: FavorOptions) -> Sizes:
    sizes, tensors = Sizes(op, inputs.q), inputs._asdict()
    sizes.known["sinks"] = checks.count(op, "sinks", options.sinks, minimum=0)
    sizes.check(FAVOR_MAP, tensors)
    sizes.known["maxima"] = sizes["M"]
    sizes.check(FAVOR, tensors)
    _heads(sizes)
    _together(op, tensors, ("far_max", "far_sum"), ("offset_weight", "offset_bias"), ("sink_k", "sink_v"))
    _past_of(op, inputs.far_sum, options.causal)
    if options.sinks and inputs.sink_seen is None:
        raise engine_checks.missing(op, "sink_seen")
    if inputs.sink_k is None and isinstance(sizes["S"], int) and sizes["S"] < options.sinks:
        raise engine_checks.missing(op, "sink_k")
    checks.choice(op, "rule", options.rule, RULES)
    checks.count(op, "groups", options.groups)
    if sizes["M"] % options.groups:
        raise engine_checks.left_over(op, options.groups, sizes["M"])
    checks.count(op, "near", options.near, minimum=0)
    favor_checks.reach(options.near, checks.count(op, "reach", options.reach))
    favor_checks.far(options.far, options.near, options.sinks)
    if inputs.far_sum is not None and not options.far:
        raise engine_checks.unasked(op, "far_sum", "far=False has no far field")
    if options.backend in ENGINES and (reason := _obstacle(options)):
        raise checks.engine_cannot(op, options.backend, reason)
    _options(sizes, options, options.scale, options.causal or options.near > 0)
    return sizes


def _obstacle(options: FavorOptions) -> str | None:
    """What the engine that was chosen cannot do, of what other engines can."""
    return ENGINES[options.backend].shortcoming(reach=options.reach > 1, without_far=not options.far)


def linear(op: str, inputs: LinearInputs, options: LinearOptions) -> Sizes:
    sizes, tensors = Sizes(op, inputs.q), inputs._asdict()
    sizes.check(QKV, tensors)
    if inputs.weight is None:
        sizes.known["M"] = sizes["D"]
    sizes.known["maxima"] = 1
    sizes.check(LINEAR, tensors)
    sizes.known.setdefault("maps", 1)
    _heads(sizes)
    _together(op, tensors, ("far_max", "far_sum"))
    _past_of(op, inputs.far_sum, options.causal)
    checks.choice(op, "feature_map", options.feature_map, tuple(ELEMENTWISE))
    _options(sizes, options, options.root, options.causal)
    if inputs.log_weight is not None and not ENGINES[options.backend].signed:
        raise engine_checks.unasked(
            op, "log_weight", f"backend={options.backend!r} has no signed (trigonometric) features"
        )
    return sizes


def saved(sizes: Sizes, declared: Declared, borders: int, tensors: Mapping[str, Tensor | None]) -> None:
    """What the forward kept for the backward, and the gradients that come in."""
    sizes.known["borders"] = borders
    sizes.check(declared, tensors)


def buckets(op: str, tensors: Mapping[str, Tensor], scale: float, tile: int) -> Sizes:
    sizes = Sizes(op, tensors["q"])
    sizes.check(BUCKETS, tensors)
    _query_heads(sizes)
    checks.count(op, "tile", tile)
    checks.scale(op, scale, 1)
    return sizes


def sparse(op: str, tensors: Mapping[str, Any], scale: float) -> Sizes:
    sizes, blocks, q_place = Sizes(op, tensors["q"]), tensors["blocks"], tensors["q_place"]
    alike = q_place is not None and q_place.dim() == 1
    sizes.check(SPARSE_ALIKE if alike else SPARSE, tensors)
    _together(op, tensors, ("q_code", "k_code"))
    for name in ("q_code", "k_code") if alike else ("alive",):
        if tensors[name] is not None:
            raise engine_checks.unasked(op, name, f"tiles look {'' if alike else 'un'}alike, as q_place says")
    checks.scale(op, scale, 1)
    if type(blocks) is Tensor and blocks.is_cpu:
        engine_checks.indices(op, "blocks", blocks, sizes["J"])
    return sizes


def choice(op: str, tensors: Mapping[str, Tensor], width: int) -> Sizes:
    sizes = Sizes(op, tensors["q"])
    sizes.check(CHOICE, tensors)
    if isinstance(sizes["P"], int) and isinstance(width, int):
        engine_checks.number(op, "width", width, 1, sizes["P"])
    return sizes


def _together(op: str, tensors: Mapping[str, Tensor | None], *pairs: tuple[str, str]) -> None:
    for one, other in pairs:
        if (tensors[one] is None) != (tensors[other] is None):
            raise engine_checks.missing(op, one if tensors[one] is None else other)


def _past_of(op: str, far_sum: Tensor | None, causal: bool) -> None:
    """A state is what came before; without an order the engines would differ in what that means."""
    if far_sum is not None and not causal:
        raise engine_checks.unasked(op, "far_sum", "a state belongs to causal attention")


def _query_heads(sizes: Sizes) -> None:
    heads, key_heads = sizes["H"], sizes["K"]
    if isinstance(heads, int) and isinstance(key_heads, int) and heads % key_heads:
        raise engine_checks.ungrouped(sizes.op, heads, key_heads)


def _heads(sizes: Sizes) -> None:
    _query_heads(sizes)
    maps, key_heads = sizes["maps"], sizes["K"]
    if isinstance(maps, int) and isinstance(key_heads, int):
        engine_checks.choice(sizes.op, "heads of the map", maps, (1, key_heads))


def _options(sizes: Sizes, options: FavorOptions | LinearOptions, scale: float, same_length: bool) -> None:
    checks.count(sizes.op, "chunk", options.chunk, minimum=0)
    checks.scale(sizes.op, scale, 1)
    checks.choice(sizes.op, "backend", options.backend, tuple(ENGINES))
    queries, keys = sizes["T"], sizes["S"]
    if same_length and isinstance(queries, int) and isinstance(keys, int) and queries != keys:
        raise engine_checks.other_length(sizes.op, queries, keys)
