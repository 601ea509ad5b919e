"""How many ranks search while others bound the roots of further instances: from rates that were measured.

A list flows through two stages, bounding and, for a share of it, searching. With n ranks on a stage that takes t
seconds for an instance it passes n / t instances a second, and the whole flow is the slower of the two (FlowTrain,
2606.23087); `searching_ranks` makes that as fast as it can be.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What is known of a list.

    Args:
        bounding, searching: mean seconds that an instance spends in each stage; 0 where nothing was measured.
        undecided: share of the bounded instances that have to be searched.
    """

    bounding: float = 0.0
    searching: float = 0.0
    undecided: float = 0.0


def searching_ranks(ranks: int, rates: Rates) -> int:
    """How many of `ranks` search while there are instances to bound; the others, one at least, bound.

    Maximizes min(share n_b / t_b, n_s / t_s), the undecided instances that pass both stages in a second. One rank of
    several searches before any search has been measured.
    """
    if ranks == 1 or not rates.undecided:
        return 0
    if not rates.searching or not rates.bounding:
        return 1

    def flow(searching: int) -> float:
        found = rates.undecided * (ranks - searching) / rates.bounding
        return min(found, searching / rates.searching)

    return max(range(ranks), key=flow)
