"""`apply_fsdp` and `apply_tp`: swap auto_LiRPA's operators in place for those over divided weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from parverify.errors import UsageError
from parverify.lirpa.compat import lirpa
from parverify.lirpa.operators import VALUES, Layout, Near, Source, operator, placeholder
from parverify.lirpa.ranks import comm_of
from parverify.parallel.comm import Comm
from parverify.parallel.window import hold_together

_LOG = logging.getLogger("parverify.lirpa")

WEIGHTED = ("BoundLinear", "BoundMatMul", "BoundConv", "BoundConvTranspose")
"""Operators whose second input may be divided."""


def apply_fsdp(bounded_module: Any, mesh: Any = None) -> Any:
    """Divide the weights of a `BoundedModule` over ranks, in place; every rank calls this.

    auto_LiRPA's own propagation then runs over operators that gather a weight before each use and free it afterwards:
    the same bounds bit for bit, with 1/P of the weights at rest. Biases and what other operators read stay whole. The
    module that it was made from must be let go, or it keeps the weights alive.

    Args:
        bounded_module: an `auto_LiRPA.BoundedModule`, the same on all ranks.
        mesh: as for `shard`.

    Returns:
        The module itself.

    Raises:
        UsageError: it is no `BoundedModule`, was divided before, or uses an option that reads weights elsewhere.
    """
    return _apply(bounded_module, comm_of(mesh, bounded_module), {})


def apply_tp(bounded_module: Any, mesh: Any = None) -> Any:
    """As `apply_fsdp`, but linear operators multiply only a rank's own output features and sum up coefficients.

    Sums are taken in another order, so bounds agree to a tolerance. Convolutions gather their weights.
    """
    return _apply(bounded_module, comm_of(mesh, bounded_module), {"BoundLinear": "TPBoundLinear"})


def _apply(bounded: Any, comm: Comm, instead: dict[str, str]) -> Any:
    if not isinstance(bounded, lirpa().bounded_module):
        raise UsageError(f"an auto_LiRPA BoundedModule is needed, not a {type(bounded).__name__}")
    if bounded.bound_opts.get("loss_fusion"):
        raise UsageError("loss_fusion reads weights outside of operators", "build the module without it")
    if any(hasattr(node, "layout") for node in bounded._modules.values()):
        raise UsageError("the module's weights are divided already")
    kept: list[str] = []
    for node in list(bounded._modules.values()):
        if type(node) is not lirpa().operator("BoundParams") or node.param.dim() < 2:
            continue
        uses = list(_uses(bounded, node, ()))
        if not uses or any(user is None for user, _ in uses):
            kept.append(node.ori_name)
            continue
        _divide(node, uses, comm, instead)
    _let_read([node for node in bounded._modules.values() if hasattr(node, "layout")], comm)
    if kept and comm.rank == 0:
        _LOG.warning("weights that stay whole on every rank, because other operators read them: %s", ", ".join(kept))
    return bounded


def _let_read(nodes: list[Any], comm: Comm) -> None:
    """Put the ranks' parts of weights where those of one machine have them in common."""
    nodes = [node for node in nodes if not node.layout.rows and node.param.device.type == "cpu"]
    found = hold_together(comm, [node.param.detach() for node in nodes])
    if found is None:
        return
    for node, both in zip(nodes, found, strict=True):
        node.param.data = both.part
        node.near = Near(both)


def _uses(bounded: Any, node: Any, between: tuple[Any, ...]) -> Iterator[tuple[Any, Source | None]]:
    """The operators that read a weight, through transpositions, with the way to them; None for any other reader."""
    params = between[0].inputs[0] if between else node
    for name in node.output_name:
        reader = bounded._modules[name]
        kind = _plain_name(reader)
        at = [i for i, before in enumerate(reader.inputs) if before is node]
        if kind == "BoundTranspose" and at == [0]:
            yield from _uses(bounded, reader, (*between, reader))
        elif kind in WEIGHTED and at == [1]:
            yield reader, Source(params, between, node)
        else:
            yield None, None
    if node.name == bounded.final_name:
        yield None, None


def _plain_name(node: Any) -> str:
    """The name of auto_LiRPA's own operator."""
    return str(getattr(type(node), "stands_for", type(node)).__name__)


def _divide(node: Any, uses: list[tuple[Any, Source | None]], comm: Comm, instead: dict[str, str]) -> None:
    kinds = {reader: instead.get(_plain_name(reader), f"FSDP{_plain_name(reader)}") for reader, _ in uses}
    rows = all(kind.startswith("TP") and _splittable(reader) for reader, kind in kinds.items())
    weight = node.param
    layout = Layout(comm, weight.shape, rows)
    hollow = placeholder(weight.detach())
    node._parameters["param"] = nn.Parameter(layout.share(weight), requires_grad=weight.requires_grad)
    node.__class__ = operator("FSDPBoundParams")
    node.layout, node.hollow = layout, hollow
    for reader, source in uses:
        reader.__class__ = operator(kinds[reader])
        reader.source = source
    _empty(node, hollow)
    for _, source in uses:
        if source is not None:
            for i, moved in enumerate(source.between):
                _empty(moved, Source(node, source.between[: i + 1], moved).through(hollow))


def _splittable(node: Any) -> bool:
    """Whether a Gemm is plainly x W^T + b, in which output features are rows of W."""
    factors = (getattr(node, "alpha_linear", None), getattr(node, "beta_linear", None))
    if factors == (None, None):
        factors = (node.alpha, node.beta)
    return bool(node.transB and not node.transA and factors == (1.0, 1.0))


def _empty(node: Any, hollow: Any) -> None:
    """Let go of a weight that a node keeps as a constant."""
    for name in VALUES:
        if getattr(node, name, None) is not None:
            setattr(node, name, hollow)
    if getattr(node, "interval", None) is not None:
        node.interval = (hollow, hollow)
