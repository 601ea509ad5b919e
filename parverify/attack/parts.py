"""The disjuncts of a query as tensors, so that thousands of them are searched in one batch.

Rows are stored by their nonzero coefficients only, padded to a common number of rows and of coefficients: a row of a
property mentions one or two outputs, however many the network has. Outputs and inputs are one vector `z = (y, x)`, so
rows on inputs need no case of their own. Padding rows have residual -inf and never bind; a disjunct without rows has
margin -inf. The *margin* of a disjunct is its largest residual: the disjunct holds where it is <= 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parverify.attack.replay import Grid
from parverify.frontend.query import Disjunct, Query

_WIDEST = 1e12
_UNBOUNDED = 1e3


@dataclass(frozen=True)
class Rows:
    """The rows of all disjuncts.

    Args:
        index: (D, m, k) int64, positions in z.
        coef: (D, m, k), their coefficients; 0 where padded.
        d: (D, m), right-hand sides.
        nudge: (D, m), the smallest normal number where the row is strict and 0 elsewhere, so that a strict row at
            exactly 0 counts as violated; -inf in padding rows.
        weight: (D, m), 1 / sum of absolute coefficients.
        inputs: whether z holds the inputs too.
    """

    index: Tensor
    coef: Tensor
    d: Tensor
    nudge: Tensor
    weight: Tensor
    inputs: bool

    @classmethod
    def of(cls, query: Query, *, dtype: torch.dtype, device: torch.device) -> Rows:
        """Gather the rows of every disjunct of a query that has at least one."""
        inputs = any(part.C_x is not None for part in query)
        nonzero = [_nonzero(part, inputs) for part in query]
        m = max(1, *(part.d.size for part in query))
        k = max(1, *(int(slot.max(initial=0)) + 1 for _, _, _, slot in nonzero))
        index = np.zeros((len(query), m, k), dtype=np.int64)
        coef = np.zeros((len(query), m, k))
        d, nudge, weight = np.zeros((len(query), m)), np.full((len(query), m), -np.inf), np.ones((len(query), m))
        for at, (part, (row, column, value, slot)) in enumerate(zip(query, nonzero, strict=True)):
            index[at, row, slot] = column
            coef[at, row, slot] = value
            d[at, : part.d.size] = part.d
            nudge[at, : part.d.size] = np.where(part.strict, torch.finfo(dtype).tiny, 0.0)
        size = np.abs(coef).sum(-1)
        np.divide(1.0, size, out=weight, where=size > 0)

        def real(array: np.ndarray) -> Tensor:
            return torch.as_tensor(array, dtype=dtype, device=device)

        return cls(torch.as_tensor(index, device=device), real(coef), real(d), real(nudge), real(weight), inputs)

    @property
    def elements(self) -> int:
        """Coefficients of one disjunct, padding included."""
        return self.coef.shape[1] * self.coef.shape[2]

    def join(self, y: Tensor, x: Tensor) -> Tensor:
        """The vector z that rows speak of, from (N, n_out) and (N, n_in)."""
        return torch.cat([y, x.to(y.dtype)], dim=1) if self.inputs else y

    def residual(self, z: Tensor, point: Tensor, part: Tensor) -> Tensor:
        """Residuals of pairs (point, disjunct): (N, n_z), (P,), (P,) -> (P, m)."""
        products = self.coef[part] * z[point[:, None, None], self.index[part]]
        return products.sum(-1) - self.d[part] + self.nudge[part]

    def scale(self, z: Tensor, point: Tensor, part: Tensor) -> Tensor:
        """The size of the largest row's terms, (P,): what rounding errors of a margin are relative to."""
        products = self.coef[part] * z[point[:, None, None], self.index[part]]
        return (products.abs().sum(-1) + self.d[part].abs()).amax(-1)


def _nonzero(part: Disjunct, inputs: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Row, column in z, value and place within its row of every nonzero coefficient."""
    matrix = part.C_y
    if inputs and part.C_x is not None:
        matrix = np.concatenate([part.C_y, part.C_x], axis=1)
    row, column = np.nonzero(matrix)
    slot = np.arange(row.size) - np.searchsorted(row, row)
    return row, column, matrix[row, column], slot


@dataclass(frozen=True)
class Boxes:
    """The distinct input boxes of a query, and which disjuncts have which.

    Args:
        grids: each box on the host, rounded inward.
        box: (D,) int64 on the host, each disjunct's box; -1 where that is empty.
        lower, upper: (U, n_in), the boxes as the network sees them; unbounded coordinates are cut to a finite part.
        start, count, order: the disjuncts of box u are `order[start[u] : start[u] + count[u]]`.
        input_dtype: the type whose numbers the network sees.
    """

    grids: tuple[Grid, ...]
    box: np.ndarray
    lower: Tensor
    upper: Tensor
    start: Tensor
    count: Tensor
    order: Tensor
    input_dtype: torch.dtype

    @classmethod
    def of(cls, query: Query, *, input_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> Boxes:
        """Gather the boxes of a query; boxes that are one object or equal are kept once."""
        known: dict[object, int] = {}
        grids: list[Grid] = []
        box = np.full(len(query), -1, dtype=np.int64)
        for at, part in enumerate(query):
            if part.empty_box:
                continue
            same = (id(part.lower), id(part.upper))
            if same not in known:
                key = (part.lower.tobytes(), part.upper.tobytes())
                if key not in known:
                    known[key] = len(grids)
                    grids.append(Grid.of(part.lower, part.upper, input_dtype))
                known[same] = known[key]
            box[at] = known[same]
        seen = [_bounded(*grid.seen()) for grid in grids]
        lower = np.array([low for low, _ in seen]).reshape(len(grids), query.n_in)
        upper = np.array([high for _, high in seen]).reshape(len(grids), query.n_in)
        order = np.argsort(box, kind="stable")[int((box < 0).sum()) :]
        count = np.bincount(box[box >= 0], minlength=len(grids))
        return cls(
            tuple(grids),
            box,
            torch.as_tensor(lower, dtype=dtype, device=device),
            torch.as_tensor(upper, dtype=dtype, device=device),
            torch.as_tensor(np.cumsum(count) - count, device=device),
            torch.as_tensor(count, device=device),
            torch.as_tensor(order, device=device),
            input_dtype,
        )

    def __len__(self) -> int:
        return len(self.grids)

    def snap(self, x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        """Move points into boxes and onto numbers that the network can be given, all shapes (..., n_in)."""
        on_grid = x.to(self.input_dtype) if self.input_dtype.is_floating_point else x.round()
        return torch.maximum(torch.minimum(on_grid.to(x.dtype), upper), lower)

    def pairs(self, box: Tensor) -> tuple[Tensor, Tensor]:
        """All (point, disjunct) for points that lie in the boxes `box` (Q,): two (P,) tensors."""
        count = self.count[box]
        point = torch.repeat_interleave(torch.arange(box.numel(), device=box.device), count)
        begin = torch.cumsum(count, 0) - count
        offset = torch.arange(point.numel(), device=box.device) - begin[point]
        return point, self.order[self.start[box][point] + offset]


def _bounded(lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut coordinates too wide to sample down to their part near zero; only the search is narrowed by it."""
    wide = upper / 2 - lower / 2 > _WIDEST
    near = np.clip(-_UNBOUNDED, lower, upper), np.clip(_UNBOUNDED, lower, upper)
    return np.where(wide, near[0], lower), np.where(wide, near[1], upper)
