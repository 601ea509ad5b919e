"""The base of our dispatch modes."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A mode that torch's compiler isn't told to leave alone.

    Telling it means importing it, two seconds at the start of every run, and a detour for every operator; nothing is
    compiled here.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
