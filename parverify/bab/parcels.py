"""What makes a message arrive exactly once: its sender keeps it, its receiver knows which numbers it has accepted."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from parverify.parallel.slots import Message


@dataclass
class Parcel:
    """A message that is kept until it is acknowledged."""

    message: Message
    due: float
    wait: float


@dataclass
class Seen:
    """Numbers of the parcels accepted from one sender: all below `below`, and those in `beyond`."""

    below: int = 0
    beyond: set[int] = field(default_factory=set)

    def add(self, epoch: int) -> bool:
        """Note a number; False if it was there already."""
        if epoch < self.below or epoch in self.beyond:
            return False
        self.beyond.add(epoch)
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1
        return True

    def write(self) -> bytes:
        """The numbers, for another group to read."""
        return struct.pack(f"<{1 + len(self.beyond)}Q", self.below, *sorted(self.beyond))

    @staticmethod
    def read(data: bytes) -> Seen:
        """What `write` wrote."""
        below, *beyond = struct.unpack(f"<{len(data) // 8}Q", data)
        return Seen(below, set(beyond))

    def __contains__(self, epoch: int) -> bool:
        return epoch < self.below or epoch in self.beyond
