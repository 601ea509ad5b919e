"""The instances of a list and where their answers go; values only, without torch, for the process that supervises."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from parverify.cli.outcome import Outcome
from parverify.errors import ParverifyError
from parverify.results import AtomicFile, format_witness, to_json

GRACE = 5.0  # seconds of work beyond the timeout after which an instance is ended from outside


@dataclass(frozen=True)
class Entry:
    """One instance.

    Args:
        name: of its files in the results' folder.
        model, spec: its files.
        timeout: seconds of work on it.
    """

    name: str
    model: str
    spec: str
    timeout: float

    @property
    def engine_timeout(self) -> float:
        """When the engine's clock ends, so that the answer is there before the timeout."""
        return self.timeout - min(1.0, 0.1 * self.timeout) if math.isfinite(self.timeout) else self.timeout


@dataclass(frozen=True)
class Batch:
    """What ranks work on together.

    Args:
        entries: the instances, in the order in which they are begun.
        results: the folder for their answers.
        folder: a private one, in which each rank says what it works on.
    """

    entries: tuple[Entry, ...]
    results: str
    folder: str


@dataclass(frozen=True)
class Answer:
    """The end of one instance.

    Args:
        entry: which.
        outcome: its end.
        seconds: of work.
    """

    entry: Entry
    outcome: Outcome
    seconds: float

    def save(self, folder: str | Path) -> Answer:
        """Write `NAME.json` and then `NAME.txt`, whose presence says that the instance is done.

        Returns:
            This answer, or an `error` where its witness is no witness.
        """
        answer, text = self, f"{self.outcome.verdict}\n"
        if self.outcome.verdict == "sat":
            try:
                text += format_witness(self.outcome.x, self.outcome.y) + "\n"
            except ParverifyError as error:
                answer = Answer(self.entry, Outcome.of(error), self.seconds)
                text = "error\n"
        AtomicFile(Path(folder, f"{self.entry.name}.json"), option="--results-dir").write(to_json(answer.content()))
        AtomicFile(result_path(folder, self.entry), option="--results-dir").write(text)
        return answer

    def line(self) -> str:
        """For people."""
        reason = f"  ({self.outcome.reason})" if self.outcome.verdict == "error" else ""
        return f"{self.outcome.verdict:8} {self.seconds:8.2f} s  {self.entry.name}{reason}"

    def content(self) -> dict[str, object]:
        """What the JSON file holds."""
        outcome = self.outcome
        return {
            "verdict": outcome.verdict,
            "reason": outcome.reason,
            "seconds": round(self.seconds, 3),
            "witness": {"x": outcome.x, "y": outcome.y} if outcome.verdict == "sat" else None,
            "stats": outcome.stats,
            "model": self.entry.model,
            "spec": self.entry.spec,
            "timeout": self.entry.timeout if math.isfinite(self.entry.timeout) else None,
            "exit_code": outcome.exit_code,
        }


def result_path(folder: str | Path, entry: Entry) -> Path:
    """The file in VNN-COMP's form."""
    return Path(folder, f"{entry.name}.txt")


# --- what a rank works on ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnderWay:
    """What one rank works on, for the process that supervises it.

    Args:
        name: of the instance, empty for none.
        until: `time.monotonic()` at which it is ended from outside; infinite for never.
    """

    name: str = ""
    until: float = math.inf

    @staticmethod
    def of(entry: Entry, spent: float) -> UnderWay:
        """An instance on which work goes on now, after `spent` seconds of it."""
        return UnderWay(entry.name, time.monotonic() + entry.timeout - spent + GRACE)

    def save(self, folder: str, rank: int) -> None:
        """Replace what the rank said before."""
        scratch = Path(folder, f".under-way-{rank}")
        scratch.write_text(json.dumps(asdict(self)))
        os.replace(scratch, Path(folder, f"under-way-{rank}"))


def under_way(folder: str | Path) -> list[UnderWay]:
    """What the ranks of this machine work on."""
    found = [UnderWay(**json.loads(path.read_text())) for path in sorted(Path(folder).glob("under-way-*"))]
    return [one for one in found if one.name]
