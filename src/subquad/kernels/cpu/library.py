"""Finds and loads the compiled engine, and mirrors the structures of `api.hpp`."""

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch

from subquad import checks
from subquad.kernels.cpu import large_pages
from subquad.kernels.cpu.build import fingerprint

FOLDER = Path(__file__).parent
OVERRIDE = "SUBQUAD_CPU"  # names an engine or a library file, for comparison; "off" for none
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Array(Structure):
    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("token", c_int64)]


class Problem(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("dtype", "kind", "rule", "rule_groups")),
        *((name, c_int32) for name in ("batch", "key_heads", "groups", "map_heads")),
        *((name, c_int32) for name in ("head_dim", "value_dim", "num_features", "sinks")),
        *((name, c_int32) for name in ("causal", "gaussian", "near_blocks", "mask_batch")),
        *((name, c_int32) for name in ("block", "blocks_per_segment", "threads", "slices", "stretches")),
        *((name, c_int32) for name in ("near", "reach", "far")),
        *((name, c_int64) for name in ("tile", "length", "key_length")),
        ("root", c_float),
        *((name, Array) for name in ("q", "k", "v", "sink_k", "sink_v")),
        *((name, c_void_p) for name in ("query", "key", "key_bias", "offset_weight", "offset_bias")),
        *((name, c_void_p) for name in ("alive", "fold", "sink_seen", "far_max", "far_sum")),
    ]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names]


class Forward(Structure):
    _fields_ = _pointers("out", "normaliser", "low", "borders_max", "borders_sum", "far_max", "far_sum")


class Backward(Structure):
    _fields_ = [
        ("grad_out", Array),
        ("out", Array),
        *_pointers("normaliser", "low", "borders_max", "borders_sum", "dq", "dk", "dv", "dsink_k", "dsink_v"),
        *_pointers("dquery", "dkey", "dkey_bias", "doffset_weight", "doffset_bias", "grad_last_far_sum", "dfar_sum"),
    ]


KEPT = ("sink_k", "sink_v", "block_k", "block_v", "far_max", "far_sum", "far_low")  # of a state, in its order


class Step(Structure):
    _fields_ = _pointers("real", "length", *KEPT, *(f"new_{name}" for name in KEPT), "out")


class Convolution(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("threads", "width", "causal", "part")),
        *((name, c_int64) for name in ("batch", "length", "channels")),
        *_pointers("x", "taps", "grad", "out", "dtaps"),
    ]


class ConvolutionStep(Structure):
    _fields_ = [
        ("width", c_int32),
        ("rate", c_float),
        *((name, c_int64) for name in ("batch", "first", "second")),
        *_pointers("weight", "recent", "x", "y", "out_x", "out_y", "new_recent"),
    ]


class Sparse(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("threads", "alike", "rounds", "round", "skip_self")),
        *((name, c_int32) for name in ("place_low", "place_high", "code_low", "code_high")),
        ("scale", c_float),
        *((name, c_int64) for name in ("tiles", "rows", "blocks", "keys", "met", "head_dim", "value_dim")),
        *_pointers("q", "k", "v", "meets", "q_place", "k_place", "q_code", "k_code", "alive"),
        *_pointers("out", "log_normaliser", "grad_out", "shift", "dq", "dk", "dv"),
    ]


class Choice(Structure):
    _fields_ = [
        ("threads", c_int32),
        *((name, c_int64) for name in ("rows", "lines", "groups", "length", "pages", "head_dim", "width")),
        *_pointers("q", "high", "low", "candidates", "chosen"),
    ]


class Library(NamedTuple):
    machine: str
    forward: Any
    backward: Any
    step: Any
    convolve: Any
    convolve_step: Any
    sparse: Any
    choose: Any
    use_large_pages: Any


def wanted_machine() -> str:
    """The engine for this processor, by what torch found out about it."""
    if override := os.environ.get(OVERRIDE):
        return override
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX2": "x86_64_v3", "AVX512": "x86_64_v4"}.get(capability, "generic")


def _load() -> Library | str:
    """The library, or why there is none."""
    machine = wanted_machine()
    if machine == "off":
        return f"switched off by {OVERRIDE}"
    path = Path(machine) if machine.endswith(".so") else FOLDER / f"engine_{machine}.so"
    if not path.exists():
        return _missing(machine)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} does not load: {error}"
    return _bind(machine, loaded)


def _missing(machine: str) -> str:
    built = sorted(path.stem.removeprefix("engine_") for path in FOLDER.glob("engine_*.so"))
    if machine == os.environ.get(OVERRIDE) and built:
        return f"{OVERRIDE}={machine} names no engine; there are {', '.join(built)}, off"
    return f"engine_{machine}.so was not built: install a C++ compiler, then subquad again"


def _bind(machine: str, loaded: Any) -> Library | str:
    loaded.subquad_sources.restype = c_char_p
    if loaded.subquad_sources().decode() != fingerprint(FOLDER):
        return f"engine_{machine}.so was made from other sources: install subquad again"
    loaded.subquad_sizes.restype = c_int64
    structures = (Problem, Forward, Backward, Step, Convolution, ConvolutionStep, Sparse, Choice)
    if [loaded.subquad_sizes(i) for i in range(len(structures))] != [ctypes.sizeof(s) for s in structures]:
        return f"engine_{machine}.so has other structures than this file"
    taken = {"forward": (Problem, Forward), "backward": (Problem, Backward), "step": (Problem, Step)}
    taken |= {"convolve": (Convolution,), "convolve_step": (ConvolutionStep,), "sparse": (Sparse,), "choose": (Choice,)}
    functions = {name: getattr(loaded, f"subquad_{name}") for name in taken}
    for name, function in functions.items():
        function.argtypes, function.restype = [POINTER(structure) for structure in taken[name]], c_int32
        function.errcheck = _raise_failure
    use_large_pages = loaded.subquad_use_large_pages
    use_large_pages.argtypes, use_large_pages.restype = [c_int32], None
    use_large_pages(not large_pages.why_not())
    return Library(machine, **functions, use_large_pages=use_large_pages)


def _raise_failure(status: int, *_: Any) -> None:
    if status:
        raise checks.engine_failed(no_memory=status == 1)


LOADED = _load()
AVAILABLE = isinstance(LOADED, Library)
WHY_MISSING = "" if isinstance(LOADED, Library) else LOADED
