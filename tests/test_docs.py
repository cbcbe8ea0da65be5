"""Every Python block of the documentation runs, block after block of one page in one namespace."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path) -> None:
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_mechanism_has_a_page_and_a_row() -> None:
    import subquad

    readme = (ROOT / "README.md").read_text()
    for mechanism in subquad.MECHANISMS:
        assert (ROOT / "docs" / "mechanisms" / f"{mechanism.name}.md").exists()
        assert f"| [`{mechanism.name}`]" in readme


def test_every_make_target_is_real() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`?make ([a-z-]+)`", page.read_text()):
            assert target in targets, f"{page.name}: make {target}"


def test_kernels_begin_with_their_letters() -> None:
    kernels = ROOT / "src" / "subquad" / "kernels"
    shapes = re.compile(r"\[(\.\.|borders|[BNJX]), [A-Z]|\[[MD]v?\]\[|\]\[[MDV]v?\]")
    for path in (path for kind in ("*.py", "*.hpp") for path in kernels.rglob(kind)):
        text = path.read_text()
        python = path.suffix == ".py"
        head = ast.get_docstring(ast.parse(text)) or "" if python else text.partition("#pragma once")[0]
        assert "Letters" in head or not shapes.search(text), path.relative_to(kernels)


def test_the_glossary_names_what_is_there() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    found = re.findall(r"`([a-z_/]+(?:/|\.py|\.hpp))`", text)
    assert len(found) > 5
    for path in found:
        assert (ROOT / "src" / "subquad" / path).exists(), path
