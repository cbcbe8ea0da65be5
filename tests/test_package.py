"""The package as an installer, an importer and a reader of its imports sees it."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import metadata, version
from pathlib import Path

import pytest
import torch

import subquad
from subquad.checks.extras import extra

SOURCE = Path(subquad.__file__).parent
HEAVY = (
    "transformers",
    "sklearn",
    "accelerate",
    "Bio",
    "matplotlib",
    "typer",
    "rich",
    "PIL",
    "pytest",
    "numpy.testing",
    "sympy.testing",
    "torch._inductor",
)

# Each may import from itself and from what stands before it.
LAYERS = (
    "waiting",
    "errors",
    "measure",
    "files",
    "tables",
    "checks",
    "features",
    "kernel_approximation",
    "kernels",
    "mechanism",
    "mechanisms",
    "functional",
    "nn",
    "recording",
    "calibration",
    "models",
    "conversion",
    "serving",
    "data",
    "diagnostics",
    "training",
    "bench",
    "cli",
    "__main__",
    "testing",
)

# What `import subquad` loads; all else waits until it is used.
EAGER = {"waiting", "errors", "checks", "features", "kernels", "mechanism", "mechanisms", "functional"}

PUBLIC = {
    "MECHANISMS ClusterAttention FavorAttention FeatureMap IdentityAttention LinearAttention "
    "LinformerAttention LshAttention Mechanism MixedAttention PagesAttention SoftmaxAttention State StridedAttention "
    "SubquadError WindowAttention attention calibrate convert diagnose draw_feature_map errors features functional "
    "load reorder_state state_bytes"
}


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_public_names_are_frozen() -> None:
    assert {" ".join(subquad.__all__)} == PUBLIC
    assert all(hasattr(subquad, name) for name in subquad.__all__)


def test_version_is_that_of_the_package() -> None:
    assert subquad.__version__ == version("subquad") == metadata("subquad")["Version"]
    assert (SOURCE / "py.typed").exists()


def test_import_is_light() -> None:
    program = "import torch, sys; before = set(sys.modules); {}; print(*(set(sys.modules) - before))"
    loaded = run(program.format("import subquad")).split()
    assert [name for name in loaded if name.startswith(HEAVY)] == []
    assert "rich" in run(program.format("import subquad, rich")).split(), "this test cannot fail"


def test_the_command_shows_its_options_at_once() -> None:
    """They are those of `subquad.training`, which takes seconds to import as a whole."""
    loaded = run("import subquad.cli, sys; print(*sys.modules)").split()
    assert "subquad.training.options" in loaded
    assert {"transformers", "accelerate", "matplotlib", "Bio", "subquad.training.run"}.isdisjoint(loaded)


def test_layers_need_torch_alone() -> None:
    """`subquad.nn` works without any extra."""
    program = "import torch, sys; before = set(sys.modules); import subquad.nn; print(*(set(sys.modules) - before))"
    assert [name for name in run(program).split() if name.startswith(HEAVY)] == []


def loads(tree: ast.AST) -> list[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in LOADERS]


def refuses_code(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    value = given.get("trust_remote_code")
    return isinstance(value, ast.Constant) and value.value is False


LOADERS = ("from_pretrained", "load_dataset")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_whatever_is_loaded_runs_no_code(path: Path) -> None:
    assert all(refuses_code(call) for call in loads(ast.parse(path.read_text())))


def test_trust_would_be_seen() -> None:
    trusting = "A.from_pretrained(x)", "A.from_pretrained(x, trust_remote_code=True)", "load_dataset(x)"
    for program in trusting:
        assert not any(refuses_code(call) for call in loads(ast.parse(program)))
        assert loads(ast.parse(program))


def test_the_command_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SOURCE.parent)])}
    command = [sys.executable, "-m", "subquad", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (
        2,
        "subquad: error: the command line needs typer; pip install 'subquad[cli]'\n",
    )


@pytest.mark.parametrize(
    ("package", "program", "advice"),
    [
        ("transformers", "import subquad.models", "subquad.models needs transformers; pip install 'subquad[models]'"),
        ("rich", "from subquad.training import train", "subquad.training needs rich; pip install 'subquad[cli]'"),
    ],
)
def test_parts_say_what_they_need(package: str, program: str, advice: str) -> None:
    told = run(f"""
import sys
sys.modules[{package!r}] = None  # as if it were not installed
try:
    {program}
except ImportError as error:
    print(type(error).__name__, error)
""")
    assert told == f"MissingPackageError {advice}\n"


def test_what_is_missing_of_our_own_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError) as caught, extra("subquad.models", "models"):
        import_module("subquad.no_such_module")
    assert not isinstance(caught.value, subquad.SubquadError)


def test_import_brings_what_it_needs_alone() -> None:
    """What takes time is what is imported: these parts of subquad, nothing of other packages, few modules of torch."""
    program = "import torch, sys; before = set(sys.modules); import subquad; print(*(set(sys.modules) - before))"
    loaded = [name.split(".") for name in run(program).split()]
    others = {parts[0] for parts in loaded} - set(sys.stdlib_module_names) - {"torch", "subquad"}
    assert others == set()
    assert {parts[1] for parts in loaded if parts[0] == "subquad" and len(parts) > 1} == EAGER
    torchs = sorted(".".join(parts) for parts in loaded if parts[0] == "torch")
    assert len(torchs) <= 10, torchs


def imports_of(path: Path) -> list[str]:
    """Layers that a module of the package imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "subquad":
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("subquad."):
            found.append((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            found += [name[1] for name in names if name[0] == "subquad" and len(name) > 1]
    return found


def against_the_stream(layer: str, imported: list[str]) -> list[str]:
    return [name for name in imported if LAYERS.index(name) > LAYERS.index(layer)]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_stream(path: Path) -> None:
    layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if layer != "__init__":
        assert against_the_stream(layer, imports_of(path)) == []


def test_nothing_stands_on_scikit_learn() -> None:
    importers = [path.name for path in SOURCE.rglob("*.py") if "kernel_approximation" in imports_of(path)]
    assert importers == []


def test_a_wrong_import_would_be_seen() -> None:
    assert against_the_stream("kernels", ["features", "mechanisms"]) == ["mechanisms"]
    assert against_the_stream("recording", ["mechanisms", "calibration", "bench"]) == ["calibration", "bench"]
    assert against_the_stream("training", ["measure", "bench"]) == ["bench"]


def test_every_kind_of_import_is_seen(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "import subquad, subquad.models\nimport torch.nn\nfrom subquad import files\nfrom subquad.data.text import x"
    )
    assert sorted(imports_of(tmp_path / "module.py")) == ["data", "files", "models"]


def test_functions_fit_a_screen() -> None:
    """Seventy lines with its docstring, no more."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 70, f"{path.name}: {node.name} has {length} lines"


def test_modules_say_what_they_are() -> None:
    favor = (
        "head_dim=8, num_features=16, near=64, sinks=4, estimator='positive', coupling='orthogonal', kernel='softmax'"
    )
    assert repr(subquad.FavorAttention(8, 16, scale=0.5)) == f"FavorAttention({favor}, scale=0.5, num_heads=None)"
    assert repr(subquad.LinearAttention(8)) == "LinearAttention(head_dim=8, feature_map='elu1')"
    assert repr(subquad.SoftmaxAttention(4)) == "SoftmaxAttention(head_dim=4, scale=0.5)"
    assert repr(subquad.IdentityAttention(4)) == "IdentityAttention(head_dim=4)"
    strided = "head_dim=4, stride=32, pattern='fixed', summary=8, scale=0.5"
    assert repr(subquad.StridedAttention(4, 32, pattern="fixed")) == f"StridedAttention({strided})"


def test_safetensors_and_meta(tmp_path: Path) -> None:
    """Saving needs no pickle; a module made on the meta device can be brought to life."""
    from safetensors.torch import load_model, save_model

    attention, other = subquad.FavorAttention(8, 16, seed=1), subquad.FavorAttention(8, 16, seed=2)
    save_model(attention, str(tmp_path / "attention.safetensors"))
    load_model(other, str(tmp_path / "attention.safetensors"))
    assert torch.equal(other.feature_map.query, attention.feature_map.query)
    with torch.device("meta"):
        made = subquad.FavorAttention(8, 16, seed=1)
    assert made.feature_map.query.device.type == "meta"
    made = made.to_empty(device="cpu")
    made.reset_parameters()
    assert torch.equal(made.feature_map.query, attention.feature_map.query)
