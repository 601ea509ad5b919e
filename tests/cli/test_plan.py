"""`parverify plan`: text and JSON of what every rank would do, predictions, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from parverify.cli import cli
from tests.cli.conftest import ROOT
from tests.flow.lists import entry

MODEL = str(ROOT / "examples" / "bundled" / "digits.onnx")
SPEC = str(ROOT / "examples" / "bundled" / "digits_square_unsat.vnnlib")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", MODEL, SPEC, *arguments])


def report(*arguments: str) -> dict[str, Any]:
    result = call("--json", "-", *arguments)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_text() -> None:
    result = call("--strategy", "fold", "--nproc", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "strategy fold, 2 ranks, crown, float32"
    for rank in range(2):
        assert any(line.startswith(f"rank {rank} holds ") for line in lines)
        assert any(line.startswith(f"rank {rank}, sweep of rows on ") for line in lines)
        assert any(line.startswith(f"rank {rank}, its gradient") for line in lines)
    assert any(line.split()[:1] == ["broadcast"] and "from 1" in line for line in lines)
    assert lines[-4] == "predicted for crown bounds with 5 % of a layer's neurons in rows"
    assert lines[-3].split() == ["rank", "resident", "peak", "all_gather", "broadcast", "flops"]
    assert [line.split()[0] for line in lines[-2:]] == ["0", "1"]


def test_ranks_that_do_the_same_are_not_repeated() -> None:
    text = call("--strategy", "fsdp", "--nproc", "3").stdout
    assert text.count(": as on rank 0") == 4
    assert text.count("  gather ") > 0


@pytest.mark.parametrize("strategy", ["single", "fsdp", "tp", "fold", "ring"])
def test_predictions(strategy: str) -> None:
    """Weights at rest are divided, and one rank is the same under every strategy."""
    alone = report("--strategy", strategy)
    two = report("--strategy", strategy, "--nproc", "2")
    assert alone["strategy"] == two["strategy"] == strategy and (alone["world_size"], two["world_size"]) == (1, 2)
    (only,) = alone["ranks"]
    assert only["predicted"]["collectives"] == {} and only["predicted"] == report()["ranks"][0]["predicted"]
    held = sum(rank["weight_bytes"] for rank in two["ranks"])
    assert held == only["weight_bytes"] * (2 if strategy == "single" else 1)
    for rank in two["ranks"]:
        assert rank["weight_bytes"] <= rank["predicted"]["resident_bytes"] < rank["predicted"]["peak_bytes"]
        assert (strategy == "single") == (rank["predicted"]["collectives"] == {})


def test_start_unstable_and_method(tmp_path: Path) -> None:
    whole = report("--method", "alpha-crown", "--set", "alpha.iterations=3", "--nproc", "2")
    nodes = [line["node"] for line in whole["ranks"][0]["sweep"] if line["step"] == "affine"]
    part = report("--start", nodes[1], "--unstable", "0.5", "--nproc", "2")
    assert part["start"] == nodes[1] and part["ranks"][0]["sweep"][0]["node"] == nodes[1]
    assert (whole["unstable"], part["unstable"], whole["method"], part["method"]) == (0.05, 0.5, "alpha-crown", "crown")
    more = report("--method", "alpha-crown", "--set", "alpha.iterations=3", "--nproc", "2", "--unstable", "0.5")
    assert more["ranks"][0]["predicted"]["flops"] > whole["ranks"][0]["predicted"]["flops"]
    target = tmp_path / "plan.json"
    assert call("--json", str(target), "--quiet").stdout == ""
    assert json.loads(target.read_text())["strategy"] == "single"


def test_a_strategy_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('use = [{ preset = "fsdp", match = "n1" }]\nplace = [{ match = "n5", how = "stream" }]\n')
    ranks = report("--strategy", str(path), "--nproc", "2")["ranks"]
    steps = {(line["node"], line["step"].strip()) for line in ranks[0]["sweep"]}
    assert ("n1", "gather") in steps and ("n5", "broadcast") in steps
    assert not any(step in ("gather", "broadcast") for node, step in steps if node == "n3")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--strategy", "zero"], "unknown strategy 'zero'; allowed: fold"),
        (["--strategy", "fsdp", "--interm", "ibp"], "interm"),
        (["--nproc", "0"], "--nproc"),
        (["--start", "nowhere"], "no sweep starts from 'nowhere'; allowed: n1"),
        (["--unstable", "2"], "--unstable"),
        (["--nproc", "2", "--method", "alpha-crown", "--set", "alpha.joint=true"], "needs all rows on every rank"),
    ],
)
def test_what_is_refused(arguments: list[str], text: str) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and text in result.stderr


def test_a_simulation_measures_the_instance_itself(tmp_path: Path) -> None:
    made = entry(tmp_path / "hard", "it", seed=1, sat=False, margin=0.01, n_in=4)
    arguments = ["plan", made.model, made.spec, "--simulate", "4", "--calibrate", "20", "--json", "-"]
    result = CliRunner().invoke(cli, [*arguments, "--set", "attack.enabled=false", "--set", "branching.batch=16"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["measured"]["decided"] and found["measured"]["bounded"] > 50
    assert [one["ranks"] for one in found["forecasts"]] == [1, 2, 4]
    seconds = [one["search"] for one in found["forecasts"]]
    assert seconds == sorted(seconds, reverse=True) and seconds[2] < seconds[0]
    quick = CliRunner().invoke(cli, ["plan", MODEL, SPEC, "--simulate", "2"])
    assert quick.exit_code == 2 and "there was no branch and bound in that run" in quick.stderr
