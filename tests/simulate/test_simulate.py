"""Searches in simulated time: nothing is lost, times are sums, and a fitted tree forecasts other numbers of ranks."""

from __future__ import annotations

import heapq
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from parverify.bab.batches import BatchSize
from parverify.bab.stealing import nearest_first
from parverify.cli import cli
from parverify.errors import UsageError
from parverify.simulate.events import Simulation, simulate
from parverify.simulate.measured import fit, fit_line, forecast, read_measured
from parverify.simulate.model import Batches, Machine, Scenario
from parverify.simulate.tree import Shape, Splitter
from tests.simulate.protocol import Protocol

BATCHES = Batches(base=0.02, each=0.004, start=16)


def scenario(nodes: int = 3000, **shape: Any) -> Scenario:
    return Scenario(Shape(nodes, **shape), BATCHES)


@pytest.mark.parametrize("ranks", [1, 2, 5, 33])
@pytest.mark.parametrize("heaviest", [True, False])
@pytest.mark.parametrize("skew", [0.05, 0.5])
def test_each_domain_is_bounded_once_on_any_number_of_ranks(ranks: int, heaviest: bool, skew: float) -> None:
    found = simulate(scenario(3001, skew=skew, heaviest=heaviest, wide=False), Machine(ranks, nodes=min(ranks, 4)))
    assert found.bounded == 3002  # even: each split has two children
    assert 0 <= found.idle < 1 and 0 <= found.overhead < 0.2
    assert found.search * ranks * (1 - found.idle) >= 3002 * BATCHES.each
    assert (found.moved > 0) == (ranks > 1)


def test_the_time_of_one_rank_is_that_of_its_batches() -> None:
    fixed = replace(BATCHES, start=8, fixed=True)
    found = simulate(Scenario(Shape(2000, wide=False), fixed, before=3.0), Machine(1))
    assert found.search == pytest.approx(found.batches * 0.02 + 2000 * 0.004)
    assert found.seconds == pytest.approx(found.search + 3.0)
    assert (found.idle, found.messages) == (0, 0)


def test_the_same_scenario_gives_the_same_figures() -> None:
    factors = replace(BATCHES, factors=(0.5, 1.0, 2.0))
    one = Scenario(Shape(2000, heaviest=False, seed=4), factors)
    assert simulate(one, Machine(16)) == simulate(one, Machine(16))
    assert simulate(one, Machine(16)) != simulate(replace(one, tree=Shape(2000, seed=5)), Machine(16))


def test_more_ranks_are_faster_and_slow_messages_are_slower() -> None:
    times = [simulate(scenario(20000), Machine(ranks)).search for ranks in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True) and times[0] / times[1] > 1.7
    near, far = (simulate(scenario(3000), Machine(16, nodes=16, latency=latency)) for latency in (1e-4, 0.5))
    assert far.search > near.search + 1.0 and far.idle > near.idle


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cores_for_all_ranks_change_nothing(ranks: int) -> None:
    assert simulate(scenario(2000), Machine(ranks, cores=ranks)) == simulate(scenario(2000), Machine(ranks))


def test_ranks_that_share_cores_are_a_little_slower_than_the_cores() -> None:
    case = Scenario(Shape(20000, wide=False), replace(BATCHES, start=16, fixed=True))
    alone, shared, own = (simulate(case, Machine(ranks, cores=cores)) for ranks, cores in [(2, 2), (4, 2), (4, 4)])
    assert shared.search == pytest.approx(1.1 * alone.search, rel=0.05)
    assert own.search < 0.6 * shared.search
    split = simulate(case, Machine(4, nodes=2, cores=2))
    assert split.search == pytest.approx(own.search, rel=0.05)
    with pytest.raises(UsageError, match="no 0 cores"):
        Machine(4, cores=0)


def test_few_domains_are_split_over_several_levels() -> None:
    splitter = Splitter(Shape(1000, skew=0.5))
    assert splitter.split([1000], 16)[0] == 16
    assert splitter.split([1000] * 9, 16)[0] == 18
    count, still = Splitter(Shape(1000)).split([2, 2], 16)
    assert (count, still) == (16, [])  # closed on the way, bounded in vain


def test_ranks_ask_in_the_order_of_the_protocol() -> None:
    simulation = Simulation(scenario(), Machine(12, nodes=3))
    nodes = [rank // 4 for rank in range(12)]
    for rank in range(12):
        assert tuple(simulation._order(rank)) == nearest_first(rank, nodes)
        assert simulation._ranks[rank].same == 3


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 1), (8, 2), (16, 4)])
@pytest.mark.parametrize("skew", [0.1, 0.4])
def test_the_protocol_itself_takes_as_long(ranks: int, nodes: int, skew: float) -> None:
    machine, seeds = Machine(ranks, nodes=nodes), range(4)
    times, messages = np.zeros((2, len(seeds))), np.zeros((2, len(seeds)))
    for seed in seeds:
        case = scenario(6000, skew=skew, seed=seed)
        protocol, found = Protocol(case, machine), simulate(case, machine)
        times[:, seed] = protocol.run(), found.search
        messages[:, seed] = protocol.messages, found.messages
        assert protocol.bounded >= 6000 * 0.9
    assert times[1].mean() == pytest.approx(times[0].mean(), rel=0.1)
    assert 0.3 < messages[1].sum() / messages[0].sum() < 4  # credit, and repeats, are not counted alike


def test_a_thousand_ranks_come_to_an_end() -> None:
    found = simulate(scenario(20000), Machine(1024, nodes=128))
    assert found.bounded >= 20000 and found.ranks == 1024
    assert found.messages > 1024 * 1023


# --- measured ---------------------------------------------------------------------------------------------------------


def report(tree: Shape, batches: Batches = BATCHES) -> dict[str, Any]:
    """What a run of this tree on one rank would have written; batches vary by a tenth."""
    splitter, size, rng = Splitter(tree), BatchSize(batches.start, 4096), np.random.default_rng(0)
    pool, sizes, samples = [tree.root], [], []
    clock, closed = 1.5, 0
    while pool:
        domains = [heapq.heappop(pool) for _ in range(min(len(pool), max(1, size.size // 2)))]
        children, still = splitter.split(domains, size.size)
        seconds = (batches.base + batches.each * children) * rng.uniform(0.9, 1.1)
        clock, closed = clock + seconds, closed + children - len(still)
        for domain in still:
            heapq.heappush(pool, domain)
        size.adapt(children, seconds)
        sizes.append(children)
        samples.append(
            {"t": clock, "open": len(pool), "closed": closed, "worst": 0.0, "depth": 0, "memory": 0, "phase": "search"}
        )
    rank = {
        "rank": 0, "bounded": sum(sizes), "received": 0, "sent": 0, "idle_seconds": 0.0, "batch_sizes": sizes,
        "bytes": 0, "samples": samples,
    }  # fmt: skip
    stats = {"ranks": [rank], "branching": "activation"}
    return {"verdict": "unsat", "seconds": clock + 0.5, "stats": stats, "settings": {"branching": {"batch": 0}}}


@pytest.mark.parametrize(("skew", "heaviest"), [(0.1, True), (0.45, True), (0.3, False)])
def test_a_forecast_from_one_rank_is_that_of_the_tree_itself(skew: float, heaviest: bool) -> None:
    tree = Shape(6000, skew, heaviest=heaviest, seed=77)
    measured = read_measured(report(tree), "it")
    assert measured.before == pytest.approx(2.0, abs=0.1)
    assert measured.batches.base == pytest.approx(BATCHES.base, abs=0.02)
    assert measured.batches.each == pytest.approx(BATCHES.each, rel=0.1)
    scenarios = fit(measured)
    for ranks in (1, 2, 4):
        true = simulate(Scenario(tree, BATCHES), Machine(ranks))
        assert forecast(scenarios, Machine(ranks)).search == pytest.approx(true.search, rel=0.15)
    assert forecast(fit(measured, domains=12000), Machine(1)).bounded == pytest.approx(12000, rel=0.15)


def test_times_are_fitted_by_a_line_without_negative_parts() -> None:
    sizes = np.array([2.0, 4.0, 8.0, 16.0])
    base, each, factors = fit_line(sizes, 0.3 + 0.01 * sizes)
    assert (base, each) == (pytest.approx(0.3), pytest.approx(0.01))
    assert factors == pytest.approx((1.0,) * 4)
    assert fit_line(sizes, 0.01 * sizes - 0.005)[0] == 0
    base, each, _ = fit_line(sizes, np.array([4.0, 3.0, 2.0, 1.0]))
    assert (base, each) == (2.5, 0.0)
    base, each, factors = fit_line(np.array([5.0, 5.0]), np.array([1.0, 3.0]))
    assert (base, each, np.mean(factors)) == (0.0, pytest.approx(0.4), pytest.approx(1.0))


def test_a_thinned_record_gives_the_mean_time() -> None:
    content = report(Shape(3000))
    rank = content["stats"]["ranks"][0]
    busy = rank["samples"][-1]["t"] - rank["samples"][0]["t"]
    rank["batch_sizes"] = rank["batch_sizes"][::2]
    batches = read_measured(content, "it").batches
    assert (batches.base, batches.each) == (0.0, pytest.approx(busy / rank["bounded"]))


def test_what_other_stages_took_belongs_to_the_batches() -> None:
    plain, content = read_measured(report(Shape(3000)), "it"), report(Shape(3000))
    rank = content["stats"]["ranks"][0]
    mixed, late = [], 0.0
    for place, sample in enumerate(rank["samples"]):
        mixed.append(sample | {"t": sample["t"] + late})
        if place % 5 == 0:
            late += 0.3
            mixed.append(sample | {"t": sample["t"] + late, "phase": "leaf"})
    busy = rank["samples"][-1]["t"] - 1.5
    rank |= {"samples": mixed}
    rank["stages"] = {"search": {"domains": 1, "seconds": busy}, "leaf": {"domains": 1, "seconds": late}}
    batches = read_measured(content, "it").batches
    assert batches.each == pytest.approx(plain.batches.each * (1 + late / busy), rel=0.02)
    assert batches.factors == pytest.approx(plain.batches.factors)


def test_a_run_without_a_search_can_not_be_simulated() -> None:
    content = report(Shape(100))
    content["stats"]["ranks"] = []
    with pytest.raises(UsageError, match="no branch and bound"):
        read_measured(content, "it")
    with pytest.raises(UsageError, match="take no time"):
        Batches(0.0, 0.0)


# --- command line -----------------------------------------------------------------------------------------------------


def plan(folder: Path, *extra: str) -> Result:
    for name in ("a.onnx", "b.vnnlib"):
        (folder / name).touch()
    return CliRunner().invoke(cli, ["plan", str(folder / "a.onnx"), str(folder / "b.vnnlib"), *extra])


def test_plan_simulates_powers_of_two_from_a_report(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report(Shape(3000))))
    done = plan(tmp_path, "--simulate", "12", "--nodes", "3", "--measured", str(path), "--json", str(tmp_path / "o"))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["1", "2", "4", "8", "12"]
    content = json.loads((tmp_path / "o").read_text())
    assert [one["ranks"] for one in content["forecasts"]] == [1, 2, 4, 8, 12]
    assert content["forecasts"][0]["search"] > content["forecasts"][2]["search"]
    assert plan(tmp_path, "--simulate", "12", "--measured", str(path), "--json", "-").stdout.startswith("{")
    shared = plan(tmp_path, "--simulate", "4", "--cores", "1", "--measured", str(path), "--json", "-")
    content = json.loads(shared.stdout)
    assert content["cores"] == 1
    assert content["forecasts"][2]["search"] > 0.8 * content["forecasts"][0]["search"]


def test_plan_warns_of_a_run_without_a_proof(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report(Shape(600)) | {"verdict": "timeout"}))
    done = plan(tmp_path, "--simulate", "2", "--measured", str(path))
    assert done.exit_code == 0 and "ended before a proof" in done.stderr
    done = plan(tmp_path, "--simulate", "2", "--measured", str(path), "--domains", "2000")
    assert "ended before" not in done.stderr and 1500 < int(done.stdout.splitlines()[-1].split()[5]) < 3000


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["--measured", "absent.json"], "can't read absent.json"),
        (["--measured", "RUN", "--nodes", "5"], "can't be spread over 5 nodes"),
        (["--measured", "RUN", "--cores", "0"], "--cores"),
        (["--measured", "RUN", "--latency", "-1"], "positive"),
    ],
)
def test_plan_refuses_what_can_not_be_simulated(tmp_path: Path, extra: list[str], text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(report(Shape(600))))
    done = plan(tmp_path, "--simulate", "4", *[str(path) if word == "RUN" else word for word in extra])
    assert done.exit_code == 2 and text in done.stderr
