"""The domains of a batch, divided over the ranks of a group whose placement deals rows to ranks.

All of them have the pool and take the same batch from it; each sweeps its own share of the domains while the weights
pass by, so that rows, alphas, multipliers and optimizer state are divided too. What a domain got is then the same
everywhere again. Every rank makes the same sweeps, however many domains its share has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from parverify.bab.domains import Domains
from parverify.parallel.comm import Comm
from parverify.program.executor import Executor


def of_each(executor: Executor, domains: Domains, work: Callable[[Domains], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What `work` makes of the domains, name -> (D, ...) on the host, each domain's on one rank where rows are dealt.

    Args:
        executor: says whether they are.
        domains: D domains, at least one.
        work: enters the same collectives for any number of domains; gives (n, ...) tensors, alike on all ranks but for
            n.
    """
    if not executor.splits_rows:
        return dict(work(domains))
    comm, count = executor.comm, len(domains)
    share = -(-count // comm.size)
    first = min(comm.rank * share, count - 1)  # where there are fewer domains than ranks, some repeat the last one
    made = work(domains.slice(first, min(first + share, count)))
    return {name: _gathered(comm, value.detach(), share)[:count] for name, value in made.items()}


def _gathered(comm: Comm, value: Tensor, share: int) -> Tensor:
    """All ranks' rows, `share` from each; bools travel as bytes."""
    mine = value.cpu().to(torch.uint8) if value.dtype == torch.bool else value.cpu()
    padded = mine.new_zeros(share, *mine.shape[1:])
    padded[: len(mine)] = mine
    out = mine.new_empty(share * comm.size, *mine.shape[1:])
    if out.numel():
        comm.all_gather(out, padded).wait()
    return out.to(value.dtype)
