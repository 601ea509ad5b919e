"""Every failure that a user can cause or must know of, one class a kind, each with an exit code.

A message is one line: what was wrong, where, what is allowed; `hint` says what to try next, and where none is given
the kind of failure has one (`usual_hint`), so that no error leaves a user without. Nothing here ever turns into a
verdict of `sat` or `unsat`.
"""

from __future__ import annotations

from typing import ClassVar


class ParverifyError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what happened, where, and what is allowed, in one line.
        hint: what the user can do about it, without the word `hint:`.
    """

    exit_code = 20
    usual_hint: ClassVar[str | None] = "nothing is concluded from it; -v says what happened before"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        quoted = "; hint: " in self.message  # it quotes another error
        hint = self.hint or (None if quoted else self.usual_hint)
        return self.message if hint is None else f"{self.message}; hint: {hint}"


def one_line(text: str) -> str:
    """A text as one line that a terminal shows as it is: single spaces, and escapes for what can't be printed."""
    words = " ".join(text.split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in words)


def why(error: Exception) -> str:
    """Why a file can't be read or written, without its name, which the message around it has."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class UsageError(ParverifyError):
    """An option, a configuration key or a file name that is not allowed."""

    exit_code = 2
    usual_hint = "`parverify COMMAND --help` lists the options, docs/cli.md and docs/config.md say what is allowed"


class ModelError(ParverifyError):
    """The network can't be read, or what was read does not equal the original."""

    exit_code = 21
    usual_hint = (
        "MODEL is an ONNX network with one input and one output tensor; `parverify supports` says what it may use"
    )


class UnsupportedOperatorError(ModelError):
    """The network uses operators that have no bound rule; all are listed at once.

    Args:
        operators: pairs of (node name, operator).
    """

    exit_code = 22

    def __init__(self, operators: list[tuple[str, str]]) -> None:
        self.operators = list(operators)
        listed = ", ".join(f"{op} (node {name})" for name, op in self.operators)
        super().__init__(f"unsupported operators: {listed}", "see `parverify supports` for what can be verified")


class SpecError(ParverifyError):
    """The property can't be read or does not fit the network.

    Args:
        line, column: 1-based place in the file, where known.
    """

    exit_code = 23
    usual_hint = (
        "SPEC is VNN-LIB 1.0 about the network's flat inputs X_i and outputs Y_i, with finite bounds on all X_i"
    )

    def __init__(self, message: str, *, line: int | None = None, column: int | None = None, hint: str | None = None):
        self.line, self.column = line, column
        where = "" if line is None else f"line {line}, column {column}: "
        super().__init__(where + message, hint)


class ResourceError(ParverifyError):
    """Nothing fits the memory budget."""

    exit_code = 24
    usual_hint = "give more by --memory, or divide the network over more ranks by --nproc"


class StoppedError(ParverifyError):
    """Work was given up because another rank has decided the run; never shown to a user."""

    usual_hint = None


class OutOfTimeError(ParverifyError):
    """The clock ran out inside a phase; the run ends as `timeout`."""

    exit_code = 12
    usual_hint = None


class DisagreementError(ParverifyError):
    """Ranks hold different copies of what must be equal on all of them.

    Args:
        tensor: its name.
        ranks: those whose copy differs from rank 0's.
    """

    exit_code = 20

    def __init__(self, tensor: str, ranks: list[int]) -> None:
        self.tensor, self.ranks = tensor, list(ranks)
        listed = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        super().__init__(
            f"ranks disagree: {tensor} on {listed} is not what it is on rank 0",
            "this is a fault of parverify or of the machine; nothing is concluded from it",
        )


class LostRankError(ParverifyError):
    """Communication failed, most likely because another rank is gone; that rank's own end says more."""

    exit_code = 20
    usual_hint = "with --journal and --restarts lost ranks are started again"
