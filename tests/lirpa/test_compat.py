"""auto_LiRPA is found, and nothing of what it misses leaks into torch, numpy or the import system."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from parverify.errors import UsageError
from parverify.lirpa import alphas_move
from parverify.lirpa.compat import VARIABLE, Lirpa
from parverify.lirpa.compat import lirpa as find
from tests.lirpa.networks import around, bounded


def test_version(library: Lirpa) -> None:
    assert library.version == library.module.__version__
    assert (0, 3) <= tuple(int(part) for part in library.version.split(".")[:2]) <= (0, 7)


def test_stand_ins_are_gone(library: Lirpa) -> None:
    """They exist while it is imported; afterwards its modules alone hold what they took."""
    helper = importlib.import_module("torch.onnx.symbolic_helper")
    if "_set_opset_version" in library.shims:
        assert not hasattr(helper, "_set_opset_version")
    for name in ("appdirs", "tqdm", "graphviz", "numpy.lib.arraysetops"):
        if name in library.shims:
            assert name not in sys.modules


def test_parsing_leaves_the_exporter_alone(library: Lirpa) -> None:
    found = importlib.util.find_spec("torch.onnx._internal.torchscript_exporter")
    name = "torch.onnx._internal.torchscript_exporter._globals" if found else "torch.onnx._globals"
    settings = importlib.import_module(name).GLOBALS
    before = settings.export_onnx_opset_version
    bounded("mlp")
    assert settings.export_onnx_opset_version == before


def test_parameters_can_be_listed(library: Lirpa) -> None:
    module = bounded("mlp")
    assert {name for name, _ in module.named_parameters()} == {f"{i}.{what}" for i in (0, 2, 4, 6) for what in
                                                              ("weight", "bias")}  # fmt: skip
    module.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))


def test_a_wrong_place_is_named(library: Lirpa, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "auto_LiRPA"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv(VARIABLE, "/nowhere")
    with pytest.raises(UsageError, match="/nowhere"):
        find.__wrapped__()


@pytest.mark.parametrize("version", ["0.2.1", "0.8", "1.0"])
def test_versions_that_nobody_tried_are_refused(library: Lirpa, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parverify.lirpa.compat._version", lambda: version)
    with pytest.raises(UsageError, match=version):
        find.__wrapped__()


def test_a_package_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "auto_LiRPA", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed"):
        find.__wrapped__()


# --- alphas without gradient ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_probe_tells_the_truth(library: Lirpa) -> None:
    """On another network than the probe's, bounds get tighter exactly where it says that alphas move."""
    module = bounded("mlp")
    x = around((3,))
    crown = module.compute_bounds(x=(x,), method="CROWN")[0]
    optimized = module.compute_bounds(x=(x,), method="CROWN-Optimized")[0]
    assert bool((optimized > crown + 1e-5).any()) == alphas_move()


def test_the_probe_leaves_the_optimizers_alone(library: Lirpa) -> None:
    alphas_move.__wrapped__()
    assert library.part("optimized_bounds").optim is torch.optim


@pytest.mark.parametrize("moved", [False, True])
def test_the_probe_notices_alphas_that_stay(
    library: Lirpa, moved: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stand-in for a library in which gradients reach the alphas, or don't."""

    class Module:
        def __init__(self, *_: object, **__: object) -> None: ...

        def compute_bounds(self, **_: object) -> None:
            alpha = torch.ones(2, requires_grad=True)
            if moved:
                (alpha * torch.tensor([0.0, 1.0])).sum().backward()
            optim = part.optim
            adam = optim.Adam([{"params": [alpha], "lr": 0.5}])
            scheduler = optim.lr_scheduler.ExponentialLR(adam, 0.98)
            adam.step()
            scheduler.step()

    part = SimpleNamespace(optim=torch.optim)
    stand_in = SimpleNamespace(BoundedModule=Module, BoundedTensor=lambda *_: None, PerturbationLpNorm=dict)
    found = SimpleNamespace(version="0.0", module=stand_in, part=lambda _: part)
    monkeypatch.setattr("parverify.lirpa.probe.lirpa", lambda: found)
    assert alphas_move.__wrapped__() is moved
    assert ("get no gradient" in caplog.text) is not moved
