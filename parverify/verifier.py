"""From a network and a query to a verdict: attack, bound, branch, and say honestly how it ended.

The order is by cost: cheap looks for a witness, bounds of growing strength that close disjuncts, a longer attack, and
branch and bound on what is left. `unsat` is concluded in one place only, when every disjunct was closed and nothing was
set aside; a witness becomes `sat` only through `WitnessSearch.confirm`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parverify.bab.activation import ActivationSpace, BetaOptions
from parverify.bab.batches import BatchSize
from parverify.bab.books import Books, Start
from parverify.bab.crew import Crew
from parverify.bab.crews import Crews, Task
from parverify.bab.driver import Search
from parverify.bab.input import InputSpace
from parverify.bab.leaves import LeafDecider
from parverify.bounds.alpha import AlphaOptions
from parverify.bounds.kept import layers_again, layers_kept
from parverify.bounds.layers import BoundOptions, LayerBounds, bound_layers, worth_rows
from parverify.bounds.region import select
from parverify.clock import Clock
from parverify.closing import Closing, close, close_by_interval
from parverify.config import Settings
from parverify.engine import Engine, Subject
from parverify.errors import OutOfTimeError, ParverifyError
from parverify.frontend.query import Query
from parverify.parallel.shared import from_rank, shared_clock
from parverify.parallel.world import World
from parverify.progress import Progress
from parverify.verdict import Result, Verdict, Witness

INPUT_SPLIT_DIMS = 12  # input splits are tried first where at most this many inputs vary
MIN_ITERATIONS = 2  # of alpha for the layers; where fewer fit the time, CROWN's bounds are kept


@dataclass
class _State:
    """What is known so far; written by the phases."""

    open: Tensor
    witness: Witness | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """What a run is given.

    Args:
        subject, query: what is asked.
        settings: how.
        clock: the deadline.
        progress: who is told.
        world: the ranks that work on it together.
        books: the run's journal; None for none.
        make_crew: gives the one group that searches; None for those of `Crews.make`.
    """

    subject: Subject
    query: Query
    settings: Settings
    clock: Clock
    progress: Progress
    world: World = field(default_factory=World)
    books: Books | None = None
    make_crew: Callable[[Engine], Crew] | None = None


class Verifier:
    """One run, in one floating-point type.

    Args:
        run: what is asked, and how.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._settings, self._progress, self._world = run, run.settings, run.progress, run.world
        self._books = run.books or Books.none(run.world)
        self._clock = shared_clock(run.clock, run.subject.network.comm)
        self._engine = Engine.make(run.subject, run.query, run.settings, self._clock)
        self._problem, self._executor = self._engine.problem, self._engine.executor
        self._budget, self._witnesses = self._engine.budget, self._engine.witnesses
        self._crown: tuple[int, LayerBounds, float] | None = None  # box, CROWN bounds of its layers, seconds they took
        self._state = _State(torch.nonzero(self._problem.box_of >= 0).flatten())
        self._crews: Crews | None = None

    # --- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """The verdict. Running out of time is a verdict here; every other failure is raised."""
        early = self.until_search()
        return self.search() if early is None else early

    def until_search(self) -> Result | None:
        """Attack and bound the whole boxes: the verdict where that decides, None where `search` has to."""
        said, left = self._concluded(), self._books.said(self._key("bounds"))
        if said is not None and (left is None or said.verdict is not Verdict.UNKNOWN):
            return said
        if left is not None:  # an earlier run came as far as this
            self._state.open = self._state.open.new_tensor(left["open"])
            return None
        result = self._ended(self._phases)
        if result is None:
            self._books.say(self._key("bounds"), {"open": self._state.open.tolist()})
        return result

    def search(self) -> Result:
        """Branch and bound on what `until_search` left open."""
        said = self._concluded()
        if said is not None:
            return said
        result = self._ended(lambda: self._timed("search", self._search))
        return self._result(Verdict.UNKNOWN, "the search came to no end") if result is None else result

    def _key(self, name: str) -> str:
        """The name that something of this run has in the journal."""
        return f"{self._settings.dtype}/{name}"

    def _concluded(self) -> Result | None:
        return self._books.concluded(self._key("verdict"), self._witnesses.confirm)

    def _ended(self, phases: Callable[[], str | None]) -> Result | None:
        """What phases came to: see `_phases`."""
        try:
            reason = phases()
        except OutOfTimeError as error:
            return self._result(Verdict.TIMEOUT, error.message)
        if reason is None:
            return None
        result = self._decided(reason)
        self._books.conclude(self._key("verdict"), result, self._clock)
        return result

    def _decided(self, reason: str) -> Result:
        if self._state.witness is not None:
            return self._result(Verdict.SAT, "a witness was replayed on the original network")
        if reason or len(self._state.open):
            return self._result(Verdict.UNKNOWN, reason or "disjuncts were left open")
        return self._result(Verdict.UNSAT, "every part of the unsafe region was closed")

    def _result(self, verdict: Verdict, reason: str) -> Result:
        stats = {
            **self._state.stats,
            "phases": {k: round(v, 4) for k, v in self._state.seconds.items()},
            "replays": self._witnesses.replays if self._crews is None else self._crews.replays,
            "open_disjuncts": len(self._state.open),
            **self._books.stats(),
        }
        if self._crews is not None:
            # a clock that ran out did so on one rank; the others are elsewhere
            alone = verdict is Verdict.TIMEOUT
            reports = [self._crews.report()] if alone else self._crews.reports()
            stats["ranks"] = [report.encode() for report in reports]
        witness = self._state.witness if verdict is Verdict.SAT else None
        return Result(verdict, witness, reason, stats)

    def _phases(self) -> str | None:
        """All phases before the search; returns why the query is undecided, an empty string where it is decided, and
        None where branch and bound is to go on."""
        settings = self._settings
        if not len(self._state.open):
            return ""
        if settings.attack.enabled and self._timed("attack", self._quick_attack):
            return ""
        method = settings.method
        rungs = ["crown-ibp", "crown"] if method in ("auto", "beta-crown") else [method]
        for rung in rungs:
            self._timed(rung, lambda rung=rung: self._bound_roots(rung))  # type: ignore[misc]
            if self._done:
                return ""
        if settings.attack.enabled and self._timed("attack", self._long_attack):
            return ""
        if method not in ("auto", "beta-crown"):
            return f"{method} bounds alone do not decide {len(self._state.open)} of the property's disjuncts"
        return None

    def _timed(self, name: str, phase: Any) -> Any:
        self._progress.phase(name)
        started = time.monotonic()
        try:
            return phase()
        finally:
            self._state.seconds[name] = self._state.seconds.get(name, 0.0) + time.monotonic() - started

    @property
    def _done(self) -> bool:
        return self._state.witness is not None or not len(self._state.open)

    # --- witnesses ---------------------------------------------------------------------------------------------------

    def _share(self, most: float, share: float) -> float:
        left = self._clock.left
        return most if math.isinf(left) else max(0.0, min(most, share * left))

    def _quick_attack(self) -> bool:
        attack = self._settings.attack
        return self._attack(
            min(8, attack.restarts), min(30, attack.steps), self._share(min(2.0, attack.seconds), 0.05), None
        )

    def _long_attack(self) -> bool:
        attack = self._settings.attack
        return self._attack(attack.restarts, attack.steps, self._share(attack.seconds, 0.1), self._state.open.tolist())

    def _attack(self, restarts: int, steps: int, seconds: float, disjuncts: list[int] | None) -> bool:
        """Look for a witness, each rank at places of its own where it can hold the whole network."""
        crew = self._assemble().apart(self._progress)
        count = crew.group.count
        found = crew.engine.witnesses.pgd(
            restarts=-(-restarts // count), steps=steps, seconds=seconds, disjuncts=disjuncts
        )
        if count > 1:
            everyone = [from_rank(self._world.comm, rank, found) for rank in range(count)]
            found = next((one for one in everyone if one is not None), None)
        self._state.witness = found
        return found is not None

    # --- bounds of the whole boxes ------------------------------------------------------------------------------------

    def _options(self, method: str) -> BoundOptions:
        alpha = AlphaOptions(self._settings.alpha.iterations, self._settings.alpha.lr)
        tile = self._budget.tile(self._settings.bounds.tile or self._executor.placement.tile)
        return BoundOptions(method, alpha, tile=tile, intersect=self._settings.bounds.intersect)

    def _bound_roots(self, method: str) -> None:
        """Close disjuncts by bounds over their whole boxes; candidates on the way are tried."""
        options = self._options(method)
        box_of = self._problem.box_of[self._state.open]
        kept = []
        for boxes in torch.unique(box_of).split(self._box_chunk()):
            parts = self._state.open[torch.isin(box_of, boxes)]
            with torch.no_grad():
                started = self._clock.now()
                found = bound_layers(self._executor, select(self._problem.boxes, boxes), options, clock=self._clock)
                if method == "crown" and len(boxes) == 1:
                    self._crown = (int(boxes[0]), found, self._clock.now() - started)
                if method == "ibp":
                    kept.append(close_by_interval(self._engine, found, boxes, parts))
                else:
                    kept.append(self._close(found, boxes, parts, options if method == "alpha-crown" else None))
            if self._state.witness is not None:
                return
        self._state.open = torch.cat(kept)
        self._progress.log(f"{method}: {len(self._state.open)} of {len(self._run.query)} disjuncts open")

    def _box_chunk(self) -> int:
        return max(1, min(256, self._budget.batch() // 4))

    def _close(self, found: LayerBounds, boxes: Tensor, parts: Tensor, options: BoundOptions | None) -> Tensor:
        """The disjuncts of `parts` that stay open under rows on the output, with alphas where there are options."""
        how = Closing(
            self._options("crown").tile, None if options is None else options.alpha, self._settings.attack.enabled
        )
        left, self._state.witness = close(self._engine, found, boxes, parts, how)
        return left

    # --- branch and bound ---------------------------------------------------------------------------------------------

    def _search(self) -> str:
        kind = self._settings.branching.kind
        free = int((self._problem.boxes.upper > self._problem.boxes.lower).sum(1).max())
        self._state.stats["free_inputs"] = free
        splittable = len(self._executor.graph.nonlinear) > 0
        if kind == "auto":
            if self._settings.method == "beta-crown":
                kind = "activation"
            else:
                kind = "input" if free <= INPUT_SPLIT_DIMS or not splittable else "activation"
        fallback = self._settings.branching.kind == "auto" and self._settings.method == "auto"
        given_up = self._books.said(self._key("input"))
        if given_up is not None:
            self._state.open = self._state.open.new_tensor(given_up["open"])
        elif kind == "input" or not splittable:
            reason = self._search_inputs(may_give_up=fallback and splittable)
            if reason is not None:
                return reason
            self._books.say(self._key("input"), {"open": self._state.open.tolist()})
            self._progress.log("input splits make too little progress: going on with activation splits")
        return self._search_activations()

    def _search_inputs(self, *, may_give_up: bool) -> str | None:
        """Input splits; None where they made too little progress and the rest should be tried otherwise."""
        key, parts = self._key("input"), self._state.open
        earlier = self._books.earlier(key)
        if earlier is not None and sorted(earlier.parts) != sorted(parts.tolist()):
            raise ParverifyError("the journal's search began with other disjuncts than were open", "start the run anew")

        def space(engine: Engine) -> InputSpace:
            return InputSpace(engine.problem, self._options("crown"), clock=engine.clock, confirm=engine.confirm)

        task = Task(
            len(parts) if earlier is None else earlier.open,
            space,
            lambda space: Start(key, space.roots(parts.cpu()), resumed=earlier is not None),
            lambda crew: self._batch(crew, 64),
            (lambda engine: _Watch(engine.clock)) if may_give_up else None,
        )
        result, parts = self._run_search(task, "input")
        if result.finished or result.witness is not None:
            reason = self._conclude(result)
            if not reason and result.witness is None:
                self._state.open = self._state.open[:0]
            return reason
        if not result.unresolved:  # disjuncts of boxes that were set aside are in the pool no more
            self._state.open = parts.to(self._state.open.device)
        return None

    def _search_activations(self) -> str:
        options = self._options("alpha-crown")
        reasons: list[str] = []
        left: list[Tensor] = []
        waiting = self._state.open
        for boxes in torch.unique(self._problem.box_of[waiting]).split(1):
            parts = waiting[self._problem.box_of[waiting] == boxes[0]]
            reason = self._search_box(boxes, parts, options)
            if self._state.witness is not None:
                return ""
            if reason:
                reasons.append(reason)
                left.append(parts)
        self._state.open = torch.cat(left) if left else waiting[:0]
        return "; ".join(sorted(set(reasons)))

    def _search_box(self, boxes: Tensor, parts: Tensor, options: BoundOptions) -> str:
        """Activation splits of the disjuncts of one box, after alpha-CROWN bounds of its layers."""
        key, region = self._key(f"box{int(boxes[0])}"), select(self._problem.boxes, boxes)
        earlier = self._books.earlier(key)
        if self._books.said(key) is not None or (earlier is not None and not earlier.open):
            return ""  # closed by an earlier run
        if earlier is not None:  # it closed the others before it began
            found, parts = layers_again(self._executor, region, self._books.space(key)), parts.new_tensor(earlier.parts)
        else:
            found, parts = self._bound_box(boxes, parts, options)
            if self._state.witness is not None:
                return ""
            if not len(parts):
                self._books.say(key, {"open": []})
                return ""
        self._progress.log(f"alpha-crown: {len(parts)} disjuncts open")
        beta, settings = self._settings.beta, self._settings.branching
        exact, kept = self._executor.graph.piecewise_linear, layers_kept(found) if self._books.kept else {}

        def space(engine: Engine) -> ActivationSpace:
            decider = LeafDecider(engine.problem, engine.network, region, engine.confirm, engine.clock, self._progress)
            return ActivationSpace(
                engine.problem,
                region,
                found,
                BetaOptions(beta.iterations, beta.lr_alpha, beta.lr_beta, settings.candidates),
                clock=engine.clock,
                confirm=engine.confirm,
                decide=decider if exact else None,
            )

        task = Task(
            len(parts) if earlier is None else earlier.open,
            space,
            lambda space: Start(key, space.roots(parts, torch.zeros_like(parts)), kept, resumed=earlier is not None),
            lambda crew: self._batch(crew, 16, self._problem.rows_per_part),
        )
        result, _ = self._run_search(task, "activation")
        return self._conclude(result)

    def _bound_box(self, boxes: Tensor, parts: Tensor, options: BoundOptions) -> tuple[LayerBounds, Tensor]:
        """Bounds of one box's layers by alpha-CROWN as far as time allows, and the disjuncts that they leave open."""
        region = select(self._problem.boxes, boxes)
        with torch.no_grad():
            found = self._crown_layers(boxes)
            parts = self._close(found, boxes, parts, options)  # alphas of the output's rows alone cost little
            iterations = self._affordable(found, options) if len(parts) else 0
            if iterations and self._state.witness is None:
                self._progress.log(f"alpha: {iterations} iterations for the layers")
                fewer = replace(options, alpha=replace(options.alpha, iterations=iterations))
                found = bound_layers(self._executor, region, fewer, known=found.boxes, clock=self._clock)
                parts = self._close(found, boxes, parts, options)
        return found, parts

    def _batch(self, crew: Crew, first: int, rows: int = 1) -> BatchSize:
        """The size of a crew's batches, `first` domains of so many rows to begin with."""
        wanted = self._settings.branching.batch
        return crew.batch(wanted or first, crew.engine.budget.batch(wanted, rows), fixed=bool(wanted))

    def _assemble(self) -> Crews:
        """The groups that search, made at the first search."""
        run = self._run
        if self._crews is None and run.make_crew is not None:
            self._crews = Crews(run.make_crew(self._engine))
        elif self._crews is None:
            self._crews = Crews.make(self._engine, run.subject, run.query, run.settings, self._books, run.world)
        return self._crews

    def _run_search(self, task: Task, branching: str) -> tuple[Search, Tensor]:
        """A search whose figures are kept however it ends, and the disjuncts that it leaves in the pool."""
        state = Search()
        self._state.stats["branching"] = branching
        try:
            found, parts = self._assemble().search(task, progress=self._progress, state=state)
        finally:
            self._note(state)
        self._note(found.since(state))
        self._state.witness = found.witness
        return found, parts

    def _note(self, state: Search) -> None:
        """Add a search's figures."""
        stats = self._state.stats
        for key, value in state.counts().items():
            stats[key] = stats.get(key, 0) + value

    def _crown_layers(self, boxes: Tensor) -> LayerBounds:
        """CROWN bounds of one box's layers, those of the rung before where they are still there."""
        if self._crown is None or self._crown[0] != int(boxes[0]):
            started = self._clock.now()
            found = bound_layers(
                self._executor, select(self._problem.boxes, boxes), self._options("crown"), clock=self._clock
            )
            self._crown = (int(boxes[0]), found, self._clock.now() - started)
        return self._crown[1]

    def _affordable(self, crown: LayerBounds, options: BoundOptions) -> int:
        """How many alpha iterations for the layers fit 40 % of the time left; 0 where too few do to matter.

        An iteration costs about three sweeps of the neurons that CROWN leaves unstable, and CROWN's own time tells what
        a row costs.
        """
        if math.isinf(self._clock.left) or self._crown is None:
            return options.alpha.iterations
        graph = self._executor.graph
        rows = sum(2 * int(worth_rows(graph, name, crown.boxes[name]).sum()) for name in crown.rows)
        sweep = self._crown[2] * rows / max(1, sum(crown.rows.values()))
        fits = int(0.4 * self._clock.left / max(3 * sweep, 1e-6))
        return 0 if fits < MIN_ITERATIONS else min(options.alpha.iterations, fits)

    def _conclude(self, result: Search) -> str:
        """Why a finished search decides nothing, or an empty string."""
        if result.witness is not None:
            return ""
        if result.unresolved:
            reasons = sorted(set(result.unresolved))
            return f"{len(result.unresolved)} subproblems stay open: " + "; ".join(reasons[:3])
        if result.finished and result.open == 0:
            return ""
        return "the search ended early"


class _Watch:
    """Says when input splits should be given up: after a while, hardly anything closes and the pool only grows."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._started = clock, clock.now()
        self._patience = 10.0 if math.isinf(clock.left) else max(2.0, 0.25 * clock.left)

    def __call__(self, state: Search) -> bool:
        late = self._clock.now() - self._started > self._patience
        return late and state.bounded > 64 and state.closed < 0.1 * state.bounded
