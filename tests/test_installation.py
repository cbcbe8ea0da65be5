"""The package as pip makes and installs it: the source archive, a wheel of that, an environment that has no other."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

import subquad
from subquad.kernels.cpu import library

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.full, pytest.mark.skipif(not library.AVAILABLE, reason="no compiler")]


def do(*command: Any, cwd: Path | None = None, code: int = 0) -> str:
    """What a command prints, or complains of; it sees nothing of this tree but what is installed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stderr if code else done.stdout


def new_environment(folder: Path, *wanted: str | Path) -> Path:
    """The Python of an environment with what pip was given, and nothing else."""
    do(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    do(python, "-m", "pip", "install", "--quiet", *wanted)
    return python


def packages_of(python: Path) -> Path:
    return Path(do(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built of it."""
    folder = tmp_path_factory.mktemp("archives")
    python = new_environment(folder / "builder", "hatchling")
    do(python, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (source,) = folder.glob("*.tar.gz")
    do(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def installed(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel; torch and the like are those of this one, seen by a path file."""
    python = new_environment(tmp_path_factory.mktemp("installed") / "environment", "--no-deps", archives[1])
    (packages_of(python) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_what_is_in_the_archives(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as source:
        names = [name.partition("/")[2] for name in source.getnames()]
    package = Path(subquad.__file__).parent
    code = {str(path.relative_to(package)) for suffix in ("py", "hpp", "cpp") for path in package.rglob(f"*.{suffix}")}
    assert {f"src/subquad/{name}" for name in code} <= set(names)
    assert not [name for name in names if name.endswith(".so")]
    with zipfile.ZipFile(archives[1]) as wheel:
        names = wheel.namelist()
    assert {f"subquad/{name}" for name in code} <= set(names)
    assert {"subquad/py.typed", "subquad/data/sample/README.md"} <= set(names)
    assert [name for name in names if name.endswith(".so")], "the engine was not compiled"


def test_an_installed_package_works(installed: Path, tmp_path: Path) -> None:
    program = """
import sys, torch, subquad
from pathlib import Path
assert Path(sys.prefix) in Path(subquad.__file__).parents, subquad.__file__
q, k, v = torch.randn(3, 1, 2, 50, 16)
attention = subquad.FavorAttention(16, 32)
native, plain = (subquad.functional.favor_attention(q, k, v, attention.feature_map, causal=True, backend=backend)
                 for backend in ("cpu", "torch"))
assert (native - plain).abs().max() < 1e-5
from subquad.data import load_proteins
assert len(load_proteins()) == 4000
from subquad.models import SubquadConfig, SubquadForCausalLM
SubquadForCausalLM(SubquadConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).save_pretrained("model")
"""
    do(installed, "-c", program, cwd=tmp_path)
    program = """
import os
os.environ["HF_MODULES_CACHE"] = "modules"  # transformers copies code there
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True)).__module__)
"""
    assert do(installed, "-c", program, cwd=tmp_path) == "subquad.models.heads\n"


def test_the_installed_command_works(installed: Path) -> None:
    command = installed.with_name("subquad")
    assert do(command, "--version") == f"{subquad.__version__}\n"
    assert "native engine agrees with torch" in do(command, "doctor")


def files_of(package: str) -> set[str]:
    """What a package and those that it requires have in site-packages, without extras."""
    found: set[str] = set()
    names = [package]
    for name in names:  # grows
        try:
            parts = distribution(name)
        except PackageNotFoundError:  # required on other systems
            continue
        found |= {Path(file).parts[0] for file in parts.files or ()} - {"..", "__pycache__"}
        required = (re.split(r"[^\w.-]", line)[0] for line in parts.requires or () if "extra ==" not in line)
        names += [other for other in required if other not in names]
    return found


def test_an_installation_without_extras(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """torch and what it requires are linked in; all else that this environment has is missing there."""
    python = new_environment(tmp_path / "environment", "--no-deps", archives[1])
    here, there = Path(sysconfig.get_path("purelib")), packages_of(python)
    for name in files_of("torch"):
        if not (there / name).exists():
            (there / name).symlink_to(here / name)
    do(python, "-c", "import subquad.nn; subquad.attention('favor', head_dim=8)")
    assert do(python, "-c", "import subquad.models", code=1).splitlines()[-1] == (
        "subquad.errors.MissingPackageError: subquad.models needs transformers; pip install 'subquad[models]'"
    )
    assert do(python.with_name("subquad"), "--help", code=2).splitlines()[-1] == (  # torch warns that it has no numpy
        "subquad: error: the command line needs typer; pip install 'subquad[cli]'"
    )
