"""What a run does not import: torch's compiler and what it brings along take longer than many an instance."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

RUN = """
    import sys
    import torch
    from torch import nn
    import parverify
    from parverify.frontend.vnnlib import read_query

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ConvTranspose2d(3, 1, 2, stride=2)
            self.last = nn.Linear(16, 2)
            self.shift = nn.Parameter(torch.ones(4, 1))

        def forward(self, x):
            return self.last((torch.relu(self.second(torch.relu(self.first(x)))) + x * x + self.shift).flatten(1))

    torch.manual_seed(0)
    parverify.compute_bounds(Residual(), torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4), method="alpha-crown")
    result = parverify.verify("examples/bundled/digits.onnx", "examples/bundled/digits_ball_sat.vnnlib", timeout=60)
    assert result.verdict.value == "sat", result
    heavy = [name for name in ("torch._dynamo", "torch._inductor", "torchvision", "sympy") if name in sys.modules]
    assert not heavy, heavy
    import onnx2torch.node_converters.nms as nms
    import onnx2torch.node_converters.roialign as roialign
    boxes, scores = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.9], [2.0, 2.0, 3.0, 3.0]]), torch.arange(3.0)
    assert nms.torchvision.ops.nms(boxes, scores, 0.5).tolist() == [2, 1]
    assert roialign.roi_align(torch.ones(1, 1, 4, 4), [boxes], 2).shape == (3, 1, 2, 2)
    assert "torchvision" in sys.modules
"""


def test_a_run_imports_neither_the_compiler_nor_torchvision_until_it_needs_them(request: pytest.FixtureRequest) -> None:
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN)],
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr


def test_a_torchvision_that_is_there_already_is_left_alone() -> None:
    code = """
        import torchvision
        from parverify.frontend.deferred import torchvision_on_call
        with torchvision_on_call():
            import torchvision as inside
        assert inside is torchvision
        import sys
        assert sys.modules["torchvision"] is torchvision
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
