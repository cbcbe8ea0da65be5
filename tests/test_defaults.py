"""Defaults are promises: another one changes what the code of others computes. Hence `defaults.txt`, word for word.

So are constants, in `constants.txt`: sizes of samples, limits, tiles. `python tests/test_defaults.py` writes both anew.
"""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from transformers import PretrainedConfig

import subquad
from subquad.cli import app
from subquad.diagnostics.diagnose import _Settings

MODULES = (
    "functional",
    "features",
    "nn",
    "models",
    "conversion",
    "serving",
    "data",
    "diagnostics",
    "bench",
    "training",
)
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


def constants() -> Iterator[tuple[str, list[Any]]]:
    """Names in capitals that a module or a class of it sets, and the numbers in their values."""
    package = Path(subquad.__file__).parent
    for path in sorted(package.rglob("*.py")):
        name = ".".join(["subquad", *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        if name.endswith("__main__"):
            continue
        module = import_module(name)
        for where, body in [(module, tree.body), *_classes(module, tree)]:
            for found in _capitals(body):
                label = name if where is module else f"{name}.{where.__name__}"
                yield f"{label}.{found}", list(_numbers(getattr(where, found)))


def _classes(module: Any, tree: ast.Module) -> list[tuple[Any, list[ast.stmt]]]:
    nodes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [(getattr(module, node.name), node.body) for node in nodes]


def _capitals(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for node in (node for target in targets if target is not None for node in ast.walk(target)):
            if isinstance(node, ast.Name) and node.id.isupper():
                yield node.id


def _numbers(value: Any) -> Iterator[Any]:
    """However deep they are; not those of enumerations, which are names."""
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _numbers(each)
    elif type(value) in (int, float):
        yield value


def lines_of_defaults() -> list[str]:
    return [f"{name}: {shown(defaults)}" for name, defaults in (*functions(), *commands()) if shown(defaults)]


def lines_of_constants() -> list[str]:
    return [f"{name}: {' '.join(map(repr, numbers))}" for name, numbers in constants() if numbers]


FROZEN = {"defaults.txt": lines_of_defaults, "constants.txt": lines_of_constants}


@pytest.mark.parametrize("file", FROZEN)
def test_they_are_frozen(file: str) -> None:
    assert FROZEN[file]() == (Path(__file__).parent / file).read_text().splitlines()


def test_exact_layers_are_diagnosed_by_the_features_they_would_get() -> None:
    settings = _Settings(rows=1, tolerance=1.0, seed=0)
    favor = dict(functions())["subquad.FavorAttention"]
    for name in ("num_features", "near", "sinks", "estimator"):
        assert getattr(settings, name) == favor[name]


if __name__ == "__main__":
    for file, lines in FROZEN.items():
        (Path(__file__).parent / file).write_text("\n".join(lines()) + "\n")
