"""How `attention.py` measures: what would take too long, rounds in which all take turns, memory in a child process."""

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from cases import Case, Prepared, Shape, inputs, our_cases, prepare
from peers import peer_cases

from subquad.bench import Timing, peak_memory

GEMM = "gemm"
SIDE = 2048
PILOTS = (512, 2048)  # lengths to learn from where the first one asked for is longer


class Limits(NamedTuple):
    """Of one call."""

    seconds: float
    bytes: float


class Group(NamedTuple):
    """What is timed together; in mode "decode", shape.length is the context."""

    mode: str
    causal: bool
    shape: Shape

    def __str__(self) -> str:
        if self.mode == "decode":
            return f"decode, context {self.shape.length:,}"
        return f"{self.mode}, {'causal' if self.causal else 'bidirectional'}, {self.shape.length:,} tokens"


class Point(NamedTuple):
    length: int
    seconds: float
    bytes: float


def predict(points: list[Point], length: int, quadratic: bool) -> tuple[float, float]:
    """Seconds and bytes of a call, by what the last lengths took: linear, or quadratic where they grew like that."""
    last = points[-1]
    before = points[-2] if len(points) > 1 else last

    def grown(old: float, new: float, power: int) -> float:
        if old > 0 and new / old > (last.length / before.length) ** 1.5:
            power = 2
        return new * (length / last.length) ** power

    seconds = grown(before.seconds, last.seconds, 2 if quadratic else 1)
    return seconds, grown(before.bytes, last.bytes, 1)


class SkippedError(Exception):
    """A case that is not measured in some group, and why."""


class Forecast:
    """Remembers what calls took, to refuse those that would take too long or too much memory."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.points: dict[tuple[str, str, bool], list[Point]] = {}

    def check(self, case: Case, group: Group) -> None:
        """Raises SkippedError; tries shorter lengths first if nothing is known yet."""
        length = group.shape.length
        if group.mode != "decode" and length % case.multiple:
            raise SkippedError(f"takes multiples of {case.multiple} tokens only")
        points = self.points.setdefault((case.name, group.mode, group.causal), [])
        if not points:
            for pilot in (p for p in PILOTS if p < length):
                smaller = group._replace(shape=group.shape._replace(length=pilot))
                if points:
                    self._refuse(points, smaller, case)
                self.add(case, smaller, *warm_up(prepare_group_case(case, smaller)))
        if points:
            self._refuse(points, group, case)

    def _refuse(self, points: list[Point], group: Group, case: Case) -> None:
        quadratic = case.quadratic and group.mode != "decode"
        seconds, size = predict(points, group.shape.length, quadratic)
        if seconds > self.limits.seconds:
            raise SkippedError(f"a call would take about {seconds:,.0f} s")
        if size > self.limits.bytes:
            raise SkippedError(f"would need about {size / 1e9:,.0f} GB")

    def add(self, case: Case, group: Group, seconds: float, size: float) -> None:
        points = self.points.setdefault((case.name, group.mode, group.causal), [])
        if points and points[-1].length == group.shape.length:
            points.pop()  # the warm-up's, which a better one replaces
        points.append(Point(group.shape.length, seconds, size))


def prepare_group_case(case: Case, group: Group) -> Prepared:
    tensors = [] if group.mode == "decode" else inputs(group.shape)
    return prepare(case, group.mode, group.causal, group.shape, tensors)


def warm_up(prepared: Prepared) -> tuple[float, float]:
    """Seconds and bytes of the first call."""
    begun = time.perf_counter()
    peak = peak_memory(prepared.call) or 0
    return time.perf_counter() - begun, max(peak, prepared.state_bytes)


def measure_group(
    cases: list[Case], group: Group, repeats: int, forecast: Forecast, tell: Callable[[str], None]
) -> tuple[dict[str, Timing], dict[str, int], dict[str, str]]:
    """Timings of all cases and of the matrix product, bytes of the states that decode, and why others were skipped."""
    tensors = [] if group.mode == "decode" else inputs(group.shape)
    a = torch.randn(SIDE, SIDE)
    ready: dict[str, Prepared] = {GEMM: Prepared(lambda: a @ a)}
    sizes, skipped = {}, {}
    for case in cases:
        tell(f"{case.name} once")
        try:
            forecast.check(case, group)
            ready[case.name] = prepare(case, group.mode, group.causal, group.shape, tensors)
            seconds, sizes[case.name] = warm_up(ready[case.name])
        except SkippedError as reason:
            skipped[case.name] = str(reason)
        except RuntimeError as error:
            if not case.peer:
                raise
            ready.pop(case.name, None)
            skipped[case.name] = f"failed: {str(error).splitlines()[0]}"
        else:
            forecast.add(case, group, seconds, sizes[case.name])
    ready[GEMM].call()
    timings = rounds(ready, repeats, tell)
    for case in cases:
        if case.name in timings:
            call_seconds = timings[case.name].best * ready[case.name].results
            forecast.add(case, group, call_seconds, sizes[case.name])
    return timings, {name: prepared.state_bytes for name, prepared in ready.items()}, skipped


def rounds(ready: Mapping[str, Prepared], repeats: int, tell: Callable[[str], None]) -> dict[str, Timing]:
    """All of them in turn, warm already, so that a slow spell of the machine hits everyone. Seconds per result."""
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(1, repeats + 1):
        for name, prepared in ready.items():
            tell(f"round {number} of {repeats}, {name}")
            begun = time.perf_counter()
            prepared.call()
            samples[name].append((time.perf_counter() - begun) / prepared.results)
    return {name: Timing(tuple(times)) for name, times in samples.items()}


def gemm_rate(timing: Timing) -> float:
    """FLOP/s of the matrix product."""
    return 2 * SIDE**3 / timing.best


def peak_in_child(name: str, group: Group) -> int | None:
    """Peak memory of one call above its inputs, in a process of its own; None if that died or /proc is not there."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_peak, name, group).result()
        except concurrent.futures.process.BrokenProcessPool:
            return None


def _peak(name: str, group: Group) -> int | None:
    case = next(case for case in all_cases()[0] if case.name == name)
    small = min(512, group.shape.length) // case.multiple * case.multiple or group.shape.length
    prepare_group_case(case, group._replace(shape=group.shape._replace(length=small))).call()  # loads what stays
    return peak_memory(prepare_group_case(case, group).call)


def all_cases() -> tuple[list[Case], list[str]]:
    """Ours and the peers that import, and a line about each that cannot be measured."""
    (ours, why), (peers, missing) = our_cases(), peer_cases()
    cases = [*ours, *peers]
    assert len({case.name for case in cases}) == len(cases), "two cases have one name"
    return cases, [*why, *missing]
