"""What the documents promise: their links lead somewhere, and the README's Python runs as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", *map(str, ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda name: Path(name).name if "docs" in name else name)
def test_links_lead_to_files(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document} links to {target}"


def test_recipes_name_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:parverify|tests|examples|benchmarks|docs|vnncomp)/[\w./]*)`", text))
    assert len(named) > 15
    made_by_running = {"benchmarks/out/"}
    placeholders = {"parverify/a/b.py", "tests/a/test_b.py"}
    absent = {name for name in named - made_by_running - placeholders if not (ROOT / name).exists()}
    assert not absent


def test_readme_python_runs(tmp_path: Path) -> None:
    """All blocks in order as one program, with the bundled example under the names that the text uses."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    bundled = ROOT / "examples" / "bundled"
    shutil.copy(bundled / "digits.onnx", tmp_path / "model.onnx")
    shutil.copy(bundled / "digits_ball_sat.vnnlib", tmp_path / "property.vnnlib")
    (tmp_path / "readme.py").write_text("\n".join(blocks))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "readme.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("sat")
