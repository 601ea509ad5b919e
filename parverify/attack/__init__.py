"""Candidate witnesses, found by sampling and gradient descent; replay of the original network decides."""

from parverify.attack.batches import Forward
from parverify.attack.replay import Replay
from parverify.attack.search import WitnessSearch

__all__ = ["Forward", "Replay", "WitnessSearch"]
