"""What a call of `compute_bounds` asks for, in parverify's words, or why it must stay with auto_LiRPA.

Names and defaults of arguments and options differ between versions; the tables here hold those of all of them.
Whatever is in no table and differs from its default is a reason not to divide a call: nothing is ignored that could
change bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parverify.bounds.alpha import AlphaOptions
from parverify.bounds.region import BallRegion, BoxRegion, Region

METHODS = {
    "ibp": "ibp",
    "ibp+backward": "crown-ibp",
    "ibp+crown": "crown-ibp",
    "crown-ibp": "crown-ibp",
    "crown": "crown",
    "backward": "crown",
    "crown-optimized": "alpha-crown",
    "alpha-crown": "alpha-crown",
}
"""auto_LiRPA's name of a method, in small letters, to ours."""

UNDERSTOOD = frozenset({"self", "x", "C", "method", "IBP", "bound_lower", "bound_upper"})
"""Arguments that are honoured; any other must have its default."""

COST_ONLY = frozenset({
    "conv_mode", "sparse_intermediate_bounds", "sparse_conv_intermediate_bounds",
    "sparse_intermediate_bounds_with_ibp", "sparse_features_alpha", "sparse_spec_alpha", "minimum_sparsity",
    "crown_batch_size", "max_crown_size", "use_full_conv_alpha", "use_full_conv_alpha_thresh", "verbosity",
    "final_shape", "deterministic", "forward_before_compute_bounds", "forward_refinement", "dynamic_forward",
    "forward_max_dim", "batched_crown_max_vram_ratio", "fixed_reducemax_index", "buffers", "param", "bn",
    "bound_every_node", "no_ibp_loss_fusion",
})  # fmt: skip
"""Options that say how coefficients are stored, how many rows are pushed at once, what is printed, what other methods
do, or how operators are rewritten that are not divided anyway."""

EMPTY: tuple[Any, ...] = ({}, [], (), None, False)
PLAIN: dict[str, tuple[Any, ...]] = {
    "relu": (*EMPTY, "adaptive"),
    "activation_bound_option": (*EMPTY, "adaptive"),
    "optimize_graph": (*EMPTY, {"optimizer": None}),
    "reshape": (*EMPTY, "reshape"),
    "softmax": (*EMPTY, "complex", "lse"),
    "hardtanh": (*EMPTY, "same-slope"),
}
"""Options that must have one of these values; those in no table must be empty."""

OPTIMIZING_COST_ONLY = frozenset({
    "enable_alpha_crown", "init_alpha", "keep_best", "early_stop_patience", "start_save_best", "use_shared_alpha",
    "loss_reduction_func", "stop_criterion_func", "multi_spec_keep_func", "single_node_split", "deterministic",
    "pruning_in_iteration_threshold", "intermediate_refinement_layers", "best_of_oc_and_no_oc", "oc_lr",
    "share_gammas", "lr_beta", "lr_cut_beta", "lr_intermediate_beta", "lr_coeffs",
})  # fmt: skip
"""Options of an optimization that only say when it ends early, what is shared to save memory, or how what is not
optimized here would be."""

OPTIMIZING_PLAIN: dict[str, tuple[Any, ...]] = {"optimizer": (*EMPTY, "adam"), "max_time": (*EMPTY, 1e9)}

THEIRS = {"iteration": 20, "lr_alpha": 0.5, "lr_decay": 0.98}
"""auto_LiRPA's defaults: where an option still has it, ours applies."""


class UndividedError(Exception):
    """Why a call stays with auto_LiRPA, in a few words for the log."""


@dataclass(frozen=True)
class Request:
    """What to bound.

    Args:
        method: of the output: "ibp", "crown-ibp", "crown" or "alpha-crown".
        layers: of the layers before it.
        region: D input domains.
        shape: of the inputs without the batch axis.
        C: (D, rows, outputs), or None for the outputs themselves.
        lower, upper: which sides are wanted.
        alpha: how alphas are optimized.
        differentiable: the tensors that the caller may differentiate the region by.
    """

    method: str
    layers: str
    region: Region
    shape: tuple[int, ...]
    C: Tensor | None
    lower: bool = True
    upper: bool = True
    alpha: AlphaOptions = field(default_factory=AlphaOptions)
    differentiable: tuple[Tensor, ...] = ()


def understand(bounded: Any, arguments: Mapping[str, Any], defaults: Mapping[str, Any], kind: Any) -> Request:
    """What a call asks for.

    Args:
        bounded: the module.
        arguments: of its `compute_bounds`, all of them.
        defaults: of these arguments.
        kind: auto_LiRPA's class `PerturbationLpNorm`.

    Raises:
        UndividedError: something in it can't be divided.
    """
    for name, value in arguments.items():
        if name not in UNDERSTOOD and not _same(value, defaults.get(name)):
            raise UndividedError(f"argument {name}")
    method = method_of(arguments)
    options = dict(bounded.bound_opts)
    optimizing = options.pop("optimize_bound_args", None) or {}
    _check(options, COST_ONLY | {"enable_opt_interm_bounds"}, PLAIN, "bound_opts")
    if method == "alpha-crown":
        _check(
            optimizing,
            OPTIMIZING_COST_ONLY | THEIRS.keys() | {"fix_intermediate_layer_bounds", "fix_interm_bounds"},
            OPTIMIZING_PLAIN,
            "optimize_bound_args",
        )
    fixed = optimizing.get("fix_interm_bounds", optimizing.get("fix_intermediate_layer_bounds", True))
    everywhere = method == "alpha-crown" and (not fixed or bool(options.get("enable_opt_interm_bounds")))
    x = input_of(bounded, arguments.get("x"))
    region, differentiable = region_of(x, kind)
    C = arguments.get("C")
    if C is not None and not (isinstance(C, Tensor) and C.dim() == 3):
        raise UndividedError("a C that is not of shape (batch, rows, outputs)")
    return Request(
        method,
        "crown" if method == "alpha-crown" and not everywhere else method,
        region,
        tuple(x.shape[1:]),
        C,
        bool(arguments.get("bound_lower", True)),
        bool(arguments.get("bound_upper", True)),
        alpha_options(optimizing),
        differentiable,
    )


def method_of(arguments: Mapping[str, Any]) -> str:
    """Our name of the method that a call asks for.

    Raises:
        UndividedError: it is none of ours.
    """
    name = arguments.get("method")
    found = "ibp" if name is None and arguments.get("IBP") else METHODS.get(str(name).lower())
    if found is None:
        raise UndividedError(f"method {name}")
    return "crown-ibp" if found == "crown" and arguments.get("IBP") else found


def alpha_options(optimizing: Mapping[str, Any]) -> AlphaOptions:
    """Iterations and rates where they were set, ours where they are auto_LiRPA's defaults."""
    ours = AlphaOptions()
    given = {key: optimizing.get(key, default) for key, default in THEIRS.items()}
    return AlphaOptions(
        int(given["iteration"]),
        ours.lr if given["lr_alpha"] == THEIRS["lr_alpha"] else float(given["lr_alpha"]),
        ours.decay if given["lr_decay"] == THEIRS["lr_decay"] else float(given["lr_decay"]),
    )


def region_of(x: Tensor, kind: Any) -> tuple[Region, tuple[Tensor, ...]]:
    """The region around a `BoundedTensor`, and the tensors that describe it and take part in autograd.

    Raises:
        UndividedError: the perturbation is not a plain Lp ball or a box.
    """
    around: Any = getattr(x, "ptb", None)
    if type(around) is not kind:
        raise UndividedError(f"perturbation {'None' if around is None else type(around).__name__}")
    for name in ("sparse", "eps_min", "constraints"):
        value = getattr(around, name, None)
        if isinstance(value, tuple) or (not isinstance(value, Tensor) and value):
            raise UndividedError(f"perturbation with {name}")
    if not x.is_floating_point():
        raise UndividedError(f"input of type {x.dtype}")
    parts = [part for part in (x, around.x_L, around.x_U, around.eps) if isinstance(part, Tensor)]
    differentiable = tuple(part for part in parts if part.requires_grad)
    center, eps = x.detach().as_subclass(Tensor), around.eps
    eps = eps.detach() if isinstance(eps, Tensor) else eps
    if around.norm == math.inf:
        lower = center - eps if around.x_L is None else around.x_L.detach()
        upper = center + eps if around.x_U is None else around.x_U.detach()
        lower, upper = (side.to(center).expand_as(center).reshape(len(center), -1) for side in (lower, upper))
        return BoxRegion(lower, upper), differentiable
    radius = torch.as_tensor(eps, dtype=center.dtype, device=center.device)
    if around.norm not in (1, 2) or radius.numel() != 1:
        raise UndividedError(f"norm {around.norm} with {radius.numel()} radii")
    return BallRegion(
        center.reshape(len(center), -1), radius.reshape(1).expand(len(center)), around.norm
    ), differentiable


def input_of(bounded: Any, x: Any) -> Tensor:
    """The one input of a call, or of the call before it where none is given.

    Raises:
        UndividedError: there are several, or weights are perturbed too.
    """
    given = x if isinstance(x, (tuple, list)) or x is None else (x,)
    if given is None:
        given = [
            bounded[name].value
            for name, index in zip(bounded.input_name, bounded.input_index, strict=True)
            if index is not None
        ]
    if len(given) != 1 or not isinstance(given[0], Tensor):
        raise UndividedError(f"{len(given)} inputs")
    for node in bounded._modules.values():
        if getattr(node, "perturbation", None) is not None and type(node).__name__ != "BoundInput":
            raise UndividedError("perturbed weights")
    return given[0]


def _check(given: Mapping[str, Any], free: frozenset[str], plain: Mapping[str, tuple[Any, ...]], where: str) -> None:
    for name, value in given.items():
        if name not in free and not any(_same(value, allowed) for allowed in plain.get(name, EMPTY)):
            raise UndividedError(f"{where}[{name!r}]")


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    if isinstance(value, Tensor) or isinstance(default, Tensor):
        return False
    return type(value) is type(default) and bool(value == default)
