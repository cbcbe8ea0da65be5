"""Saved models in processes that do not know subquad, and the file that leads transformers to it."""

import builtins
import json
import logging
import os
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import subquad
from subquad.errors import CheckpointError
from subquad.models import SubquadConfig, SubquadForCausalLM, modeling_subquad
from subquad.models.configuration import AUTO_MAP, SHIM
from subquad.training import save_model
from subquad.training.checksums import verify
from tiny_models import make, random_ids

NAMED = {auto: f"modeling_subquad.{name}" for auto, name in AUTO_MAP.items()}
REMOTE = """
    import json, sys
    import torch
    from pathlib import Path
    from transformers import AutoConfig, AutoModelForCausalLM
    assert not any(name.startswith("subquad") for name in sys.modules)
    folder = Path(sys.argv[1])

    def tell(**found):
        print("\\n" + json.dumps(found))  # on a line of its own: transformers' question ends without one
"""


def saved(folder: Path) -> Any:
    model = make(attention=["favor", "softmax"], dtype=torch.float32)
    model.redraw(5)  # features that no constructor would draw
    model.save_pretrained(folder)
    return model


def elsewhere(folder: Path, program: str) -> dict[str, Any]:
    """What a process that has not imported subquad prints last, as JSON. Nobody answers its questions."""
    environment = os.environ | {"PYTHONPATH": str(Path(subquad.__file__).parent.parent), "HF_HUB_OFFLINE": "1"}
    environment["HF_MODULES_CACHE"] = str(folder.parent / "modules")  # transformers copies code there
    command = [sys.executable, "-c", textwrap.dedent(REMOTE) + textwrap.dedent(program), str(folder)]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# Elsewhere ------------------------------------------------------------------------------------------------------------


def test_code_runs_if_it_is_trusted_and_only_then(tmp_path: Path) -> None:
    model, ids = saved(tmp_path / "model"), random_ids(2, 40)
    torch.save(ids, tmp_path / "ids.pt")
    with (tmp_path / "model" / SHIM.name).open("a") as shim:
        shim.write(f"\nimport pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    found = elsewhere(
        tmp_path / "model",
        f"""
        torch.set_num_threads({torch.get_num_threads()})
        refused = []
        for choice in ({{}}, {{"trust_remote_code": False}}):
            try:
                AutoModelForCausalLM.from_pretrained(folder, **choice)
            except ValueError as error:
                refused.append("trust_remote_code=True" in str(error))
        ran = [folder.with_name("ran").exists(), "subquad" in sys.modules]
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        ran += [folder.with_name("ran").exists(), "subquad" in sys.modules]
        torch.save(model(torch.load(folder.with_name("ids.pt"))).logits, folder.with_name("logits.pt"))
        model.save_pretrained(folder.with_name("again"))
        tell(refused=refused, ran=ran, kind=type(model).__module__)
        """,
    )
    assert found == {"refused": [True, True], "ran": [False, False, True, True], "kind": "subquad.models.heads"}
    assert torch.equal(torch.load(tmp_path / "logits.pt"), model(ids).logits)
    again = tmp_path / "again"  # saved there: the shim as we know it, and no copies of our source
    assert sorted(path.name for path in again.glob("*.py")) == [SHIM.name]
    assert (again / SHIM.name).read_text() == SHIM.read_text()
    assert json.loads((again / "config.json").read_text())["auto_map"] == NAMED


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("subquad", "this model is one of the package subquad; pip install 'subquad[models]'"),
        ("subquad.models", "No module named 'subquad.models'"),  # an installation that no advice of ours mends
    ],
)
def test_what_is_missing_is_said(missing: str, message: str, tmp_path: Path) -> None:
    saved(tmp_path / "model")
    found = elsewhere(
        tmp_path / "model",
        f"""
        class Blocker:
            def find_spec(self, name, *_):
                if name == {missing!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Blocker())
        try:
            AutoConfig.from_pretrained(folder, trust_remote_code=True)
        except ImportError as error:
            tell(said=str(error))
        """,
    )
    assert found == {"said": message}


# Here -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Fails if transformers asks a question, and records what it logs."""
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked about code"))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")
    return caplog


@pytest.mark.parametrize("choice", [{}, {"trust_remote_code": False}, {"trust_remote_code": True}], ids=str)
def test_known_classes_need_no_shim(choice: dict[str, Any], tmp_path: Path, silent: Any) -> None:
    model, ids = saved(tmp_path), random_ids(2, 40)
    (tmp_path / SHIM.name).write_text("raise RuntimeError('this must not run')")
    for kind in (SubquadForCausalLM, AutoModelForCausalLM):
        assert torch.equal(kind.from_pretrained(tmp_path, **choice)(ids).logits, model(ids).logits)
    assert type(AutoModel.from_pretrained(tmp_path, **choice)).__name__ == "SubquadModel"
    assert silent.records == []


def test_models_saved_without_a_shim_load(tmp_path: Path, silent: Any) -> None:
    model, ids = saved(tmp_path), random_ids(2, 40)
    (tmp_path / SHIM.name).unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for kind in (SubquadForCausalLM, AutoModelForCausalLM):
        assert torch.equal(kind.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    assert silent.records == []


def test_the_shim_names_what_is_registered() -> None:
    for auto, name in AUTO_MAP.items():
        ours = getattr(import_module("subquad.models"), name)
        assert getattr(modeling_subquad, name) is ours
        if auto != "AutoConfig":
            assert getattr(transformers, auto)._model_mapping[SubquadConfig] is ours
    assert sorted(AUTO_MAP.values()) == sorted(modeling_subquad.__all__)
    assert AutoConfig.for_model("subquad").__class__ is SubquadConfig


def test_code_that_a_config_names_is_not_passed_on(tmp_path: Path) -> None:
    SubquadConfig.from_dict({"auto_map": {"AutoModel": "somebody/else--modeling.Model"}}).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == NAMED


def test_derived_configurations_are_left_to_transformers(tmp_path: Path) -> None:
    class Derived(SubquadConfig):
        model_type = "derived"

    Derived().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    for kind in (SubquadConfig, Derived):
        kind.register_for_auto_class()
    assert (SubquadConfig._auto_class, Derived._auto_class) == (None, "AutoConfig")


def test_the_shim_is_among_the_checksums(tmp_path: Path) -> None:
    save_model(make(), None, tmp_path / "model")
    verify(tmp_path / "model")
    with (tmp_path / "model" / SHIM.name).open("a") as shim:
        shim.write("\n")
    with pytest.raises(CheckpointError) as caught:
        verify(tmp_path / "model")
    assert str(caught.value) == (
        f"{tmp_path / 'model'}: modeling_subquad.py is not what was written; use a copy that is whole, or --resume the "
        "run that made it"
    )
