"""When results are given large pages of memory."""

from pathlib import Path

import pytest
import torch

from subquad import FavorAttention, LinearAttention
from subquad.kernels.cpu import large_pages, library


def machine(folder: Path, *devices: tuple[str, str]) -> Path:
    for i, (number, features) in enumerate(devices):
        device = folder / f"virtio{i}"
        device.mkdir()
        (device / "device").write_text(number + "\n")
        (device / "features").write_text(features + "\n")
    return folder


@pytest.mark.parametrize(
    ("devices", "takes"),
    [
        ((), False),
        ((("0x0005", "01100101"),), True),
        ((("0x0005", "01100001"),), False),
        ((("0x0002", "11111111"), ("0x0005", "000001")), True),
        ((("0x0002", "11111111"),), False),
        ((("0x0005", ""),), False),
    ],
)
def test_a_balloon_that_reports_free_pages_is_found(
    tmp_path: Path, devices: tuple[tuple[str, str], ...], takes: bool
) -> None:
    assert large_pages.host_takes_memory_back(machine(tmp_path, *devices)) is takes


def test_machines_without_such_devices_keep_their_memory(tmp_path: Path) -> None:
    assert not large_pages.host_takes_memory_back(tmp_path / "nothing")
    (tmp_path / "virtio0").mkdir()
    assert not large_pages.host_takes_memory_back(tmp_path)


def test_the_user_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    takes, keeps = machine(tmp_path, ("0x0005", "000001")), tmp_path / "nothing"
    for devices, reason in ((takes, "the host of this virtual machine takes free memory back"), (keeps, "")):
        monkeypatch.delenv(large_pages.VARIABLE, raising=False)
        monkeypatch.setattr(large_pages.host_takes_memory_back, "__defaults__", (devices,))
        assert large_pages.why_not() == reason
        monkeypatch.setenv(large_pages.VARIABLE, "1")
        assert large_pages.why_not() == ""
        monkeypatch.setenv(large_pages.VARIABLE, "0")
        assert large_pages.why_not() == "switched off by SUBQUAD_LARGE_PAGES"
        monkeypatch.setenv(large_pages.VARIABLE, "yes")
        assert large_pages.why_not() == "SUBQUAD_LARGE_PAGES must be 0 or 1, not 'yes'"


@pytest.mark.skipif(not library.AVAILABLE, reason=library.WHY_MISSING)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("kind", [FavorAttention, LinearAttention])
def test_results_are_the_same_bits(kind: type, heads: int) -> None:
    """Several megabytes of them, in heads that do not begin with a page."""
    assert isinstance(library.LOADED, library.Library)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, 20_001, 9, generator=generator).unbind()
    attention, found = kind(9, backend="cpu"), []
    try:
        for wanted in (0, 1):
            library.LOADED.use_large_pages(wanted)
            given = [x.clone().requires_grad_() for x in (q, k, v)]
            out = attention(*given, causal=True)
            found.append([out, *torch.autograd.grad(out, given, torch.ones_like(out))])
    finally:
        library.LOADED.use_large_pages(int(not large_pages.why_not()))
    assert all(map(torch.equal, *found))
