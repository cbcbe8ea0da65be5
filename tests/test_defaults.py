"""Defaults are promises: another one changes what the code of others computes. Hence `defaults.txt`, word for word."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from transformers import PretrainedConfig

from subquad.cli import app
from subquad.diagnostics.diagnose import _Settings
from subquad.training import TrainOptions

MODULES = ("functional", "features", "nn", "models", "conversion", "data", "diagnostics", "bench", "training")
PACKAGES = ("subquad", *(f"subquad.{name}" for name in (*MODULES, "kernel_approximation", "testing")))


def shown(defaults: dict[str, Any]) -> str:
    """None is left out: it stands for a choice that is made elsewhere; so are functions and factories."""
    plain = {name: value for name, value in defaults.items() if isinstance(value, (bool, int, float, str, tuple, Path))}
    return " ".join(f"{name}={value}" for name, value in plain.items())


def functions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Public functions and classes, and the defaults that are our own."""
    inherited = set(inspect.signature(PretrainedConfig).parameters)
    for package in PACKAGES:
        module = import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception)):
                parameters = inspect.signature(value).parameters.values()
                theirs = inherited if name == "SubquadConfig" else set()
                yield f"{package}.{name}", {p.name: p.default for p in parameters if p.name not in theirs}


def commands() -> Iterator[tuple[str, dict[str, Any]]]:
    groups: list[tuple[str, Any]] = [("subquad", typer.main.get_command(app))]
    for prefix, group in groups:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                groups.append((f"{prefix} {name}", command))
            else:
                yield f"{prefix} {name}", {option.name: option.default for option in command.params}


def test_defaults_are_frozen() -> None:
    listed = (Path(__file__).parent / "defaults.txt").read_text().splitlines()
    found = [f"{name}: {shown(defaults)}" for name, defaults in (*functions(), *commands()) if shown(defaults)]
    assert found == listed


@pytest.mark.parametrize("domain", ["protein", "text"])
def test_training_by_command_has_the_defaults_of_training(domain: str) -> None:
    options, command = TrainOptions(), dict(commands())[f"subquad train {domain}"]
    shared = {name: value for name, value in command.items() if hasattr(options, name)}
    assert {"steps", "learning_rate", "window", "seed"} < set(shared)
    assert shared == {name: getattr(options, name) for name in shared}


def test_exact_layers_are_diagnosed_by_the_features_they_would_get() -> None:
    settings = _Settings(rows=1, tolerance=1.0, seed=0)
    favor = dict(functions())["subquad.FavorAttention"]
    for name in ("num_features", "near", "sinks", "estimator"):
        assert getattr(settings, name) == favor[name]
