"""Small functions and modules, one or more per ATen operator that can be imported: name -> (shape, function)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Function = Callable[[Tensor], Tensor]
Table = dict[str, tuple[tuple[int, ...], Function]]

W = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
V = torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MASK = torch.tensor([[True, False, True], [False, False, True]])
VISIBLE = torch.tensor([[True, False, True], [True, True, True], [False, False, True]])
VECTOR, MATRIX, IMAGE = (1, 5), (2, 3), (1, 2, 5, 6)


def positive(x: Tensor) -> Tensor:
    return x * x + 0.5


ACTIVATIONS: Table = {
    name: (VECTOR, function)
    for name, function in {
        "relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "sin": torch.sin,
        "cos": torch.cos, "erf": torch.erf, "silu": F.silu, "sign": torch.sign, "floor": torch.floor,
        "ceil": torch.ceil, "round": torch.round, "square": torch.square, "atan": torch.atan, "mish": F.mish,
        "hardswish": F.hardswish, "softsign": F.softsign, "gelu": F.gelu, "logsigmoid": F.logsigmoid,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "softplus": F.softplus, "sgn": torch.sgn,
        "softplus_beta": lambda x: F.softplus(x, beta=2.5), "elu": F.elu, "elu_alpha": lambda x: F.elu(x, 0.3),
        "selu": F.selu, "celu": F.celu, "celu_alpha": lambda x: F.celu(x, 1.7), "hardtanh": F.hardtanh,
        "hardtanh_limits": lambda x: F.hardtanh(x, -0.3, 0.7), "relu6": lambda x: F.relu6(5 * x),
        "hardsigmoid": lambda x: F.hardsigmoid(4 * x), "leaky_relu": F.leaky_relu,
        "leaky_relu_slope": lambda x: F.leaky_relu(x, 0.3), "softshrink": F.softshrink,
        "softshrink_at": lambda x: F.softshrink(x, 0.1), "tanhshrink": F.tanhshrink, "abs": torch.abs,
        "threshold": lambda x: F.threshold(x, 0.2, 0.2), "neg": torch.neg, "tan": lambda x: torch.tan(x / 4),
        "log": lambda x: torch.log(positive(x)), "sqrt": lambda x: torch.sqrt(positive(x)),
        "rsqrt": lambda x: torch.rsqrt(positive(x)), "reciprocal": lambda x: torch.reciprocal(positive(x)),
        "softmin": lambda x: F.softmin(x, -1), "relu_": lambda x: torch.relu_(x * 2),
        "sigmoid_": lambda x: (x * 2).sigmoid_(), "identity": nn.Identity(), "dropout": nn.Dropout(0.5).eval(),
    }.items()
}  # fmt: skip

ARITHMETIC: Table = {
    "add_number": (VECTOR, lambda x: x + 0.1),
    "add_alpha": (MATRIX, lambda x: torch.add(x, V, alpha=0.3)),
    "add_self": (MATRIX, lambda x: x + 2 * x.flip(0)),
    "add_broadcast": (MATRIX, lambda x: x[:1] + x[:, :1]),
    "radd": (VECTOR, lambda x: 3 - x),
    "rsub_alpha": (VECTOR, lambda x: torch.rsub(x, 1.5, alpha=2)),
    "sub_alpha": (MATRIX, lambda x: torch.sub(V, x, alpha=0.7)),
    "mul_constant": (MATRIX, lambda x: x * V * 0.1),
    "mul_widens": ((3,), lambda x: x * W),
    "mul_variables": (MATRIX, lambda x: x[:1] * x),
    "mul_square": (MATRIX, lambda x: x * x),
    "div_number": (VECTOR, lambda x: x / 3),
    "div_constant": (MATRIX, lambda x: x / V),
    "div_variable": (MATRIX, lambda x: x[0] / positive(x[1])),
    "rdiv": (MATRIX, lambda x: 2 / positive(x)),
    "floor_divide": (VECTOR, lambda x: torch.div(x, 0.3, rounding_mode="floor")),
    "inplace": (VECTOR, lambda x: (x * 1).add_(1).mul_(2).div_(3).sub_(0.5).neg_()),
    "inplace_same_object": (VECTOR, lambda x: (lambda y: y.relu_() + y)(x * 2)),
    "pow2": (VECTOR, lambda x: x**2),
    "pow3": (VECTOR, lambda x: x**3),
    "pow4": (VECTOR, lambda x: torch.pow(x, 4.0)),
    "pow1": (VECTOR, lambda x: x**1),
    "pow_inverse": (VECTOR, lambda x: positive(x) ** -1),
    "pow_inverse_square": (VECTOR, lambda x: positive(x) ** -2),
    "pow_half": (VECTOR, lambda x: positive(x) ** 0.5),
    "pow_minus_half": (VECTOR, lambda x: positive(x) ** -0.5),
    "pow_fraction": (VECTOR, lambda x: positive(x) ** 1.7),
    "pow_tensor": (MATRIX, lambda x: torch.pow(x, torch.tensor(3.0, dtype=torch.float64))),
    "pow_base": (VECTOR, lambda x: 2**x),
    "pow_base_tensor": (MATRIX, lambda x: torch.pow(V.abs() + 0.1, x)),
    "clamp": (VECTOR, lambda x: x.clamp(-0.5, 0.25)),
    "clamp_min": (VECTOR, lambda x: x.clamp(min=0.1)),
    "clamp_max": (VECTOR, lambda x: x.clamp(max=0.1)),
    "clamp_min_op": (VECTOR, lambda x: torch.clamp_min(x, 0.3)),
    "clamp_max_op": (VECTOR, lambda x: torch.clamp_max(x, 0.3)),
    "clamp_tensor": (MATRIX, lambda x: x.clamp(-V.abs(), V.abs() / 2)),
    "clamp_variable": (MATRIX, lambda x: x[0].clamp(x[1] - 1, x[1])),
    "clamp_nothing_binds": (VECTOR, lambda x: x.clamp(-1e38, 1e38)),
    "clamp_to_huge": (VECTOR, lambda x: x.clamp(min=2e30) * 1e-30 + x.clamp(max=-2e30) * 1e-30),
    "clamp_empty": (VECTOR, lambda x: x.clamp(1.0, -1.0) + x),
    "maximum": (MATRIX, lambda x: torch.maximum(x[0], x[1])),
    "maximum_constant": (MATRIX, lambda x: torch.maximum(V, x)),
    "minimum": (MATRIX, lambda x: torch.minimum(x[0], x[1]) - torch.minimum(x[0], V)),
    "where": (MATRIX, lambda x: torch.where(MASK, x, 2 * x.flip(1))),
    "where_greater": (MATRIX, lambda x: torch.where(x > 0.25, x, 2 * x.flip(1))),
    "where_less": (MATRIX, lambda x: torch.where(x <= x.flip(1), x, -x)),
    "compare_as_numbers": (MATRIX, lambda x: (x >= 0.1).float() - (x < -0.2).to(x.dtype) + (x != 0.3).double()),
    "compare_as_integers": (MATRIX, lambda x: (x > 0.1).long().to(x.dtype) * x),
    "logic": (MATRIX, lambda x: torch.where((x > -0.5) & ~(x > 0.5) | (x.flip(0) > 1), x, 0 * x)),
    "where_numbers": (MATRIX, lambda x: torch.where(MASK, x, 7.0)),
    "masked_fill": (MATRIX, lambda x: x.masked_fill(MASK, -3.5)),
}

SHAPES: Table = {
    "reshape": (IMAGE, lambda x: x.reshape(2, 5, 6).view(10, -1)),
    "flatten": (IMAGE, lambda x: x.flatten(1)),
    "squeeze": ((1, 3, 1), lambda x: x.squeeze().unsqueeze(0).unsqueeze(-1)),
    "transpose": (MATRIX, lambda x: x.t() @ x),
    "permute_reshape": (IMAGE, lambda x: x.permute(0, 2, 3, 1).reshape(1, -1)),
    "transpose_flatten": (IMAGE, lambda x: x.transpose(1, -1).flatten(1)),
    "slice": (IMAGE, lambda x: x[:, :, 1:4:2, -3:]),
    "select": (IMAGE, lambda x: x[0, 1] + x.select(1, 0)),
    "flip": (IMAGE, lambda x: x.flip(2, 3)),
    "roll": (MATRIX, lambda x: x.roll((1, 2), (0, 1))),
    "rot90": (MATRIX, lambda x: torch.rot90(x)),
    "repeat": (MATRIX, lambda x: x.repeat(2, 1, 2)),
    "tile": (MATRIX, lambda x: torch.tile(x, (2, 1))),
    "repeat_interleave": (MATRIX, lambda x: x.repeat_interleave(2, 1)),
    "expand": ((1, 3), lambda x: x.expand(4, 3) * W),
    "broadcast_to": ((3,), lambda x: torch.broadcast_to(x, (2, 3)).contiguous()),
    "gather": (MATRIX, lambda x: x.gather(1, torch.tensor([[0, 2, 2], [1, 0, 1]]))),
    "index_select": (MATRIX, lambda x: x.index_select(1, torch.tensor([2, 0, 0]))),
    "index": (MATRIX, lambda x: x[[1, 0, 1], torch.tensor([2, 0, 1])]),
    "index_mixed": (IMAGE, lambda x: x[:, [1, 0], :, [3, 2]]),
    "index_mask": (MATRIX, lambda x: x[MASK]),
    "take": (MATRIX, lambda x: x.take(torch.tensor([5, 0, 3]))),
    "tril": ((3, 3), lambda x: x.tril() + 2 * x.triu(1)),
    "diagonal": ((3, 3), lambda x: x.diagonal() + x.diagonal(1).sum()),
    "unfold": ((1, 7), lambda x: x.unfold(1, 3, 2)),
    "unfold_image": (IMAGE, lambda x: F.unfold(x, (2, 3), padding=1, stride=2)),
    "as_rows": (IMAGE, lambda x: x.permute(0, 3, 1, 2).contiguous().view(1, 6, 10)),
    "pad": (IMAGE, lambda x: F.pad(x, (1, 2, 0, 1))),
    "pad_value": (IMAGE, lambda x: F.pad(x, (1, 0), value=-1.1)),
    "pad_crop": (IMAGE, lambda x: F.pad(x, (-1, 2))),
    "pad_reflect": (IMAGE, lambda x: F.pad(x, (2, 1, 1, 3), mode="reflect")),
    "pad_replicate": (IMAGE, lambda x: F.pad(x, (2, 1, 1, 3), mode="replicate")),
    "pad_1d": ((1, 2, 5), lambda x: F.pad(x, (2, 1), mode="reflect") - F.pad(x, (2, 1), mode="replicate")),
    "pixel_shuffle": ((1, 4, 2, 3), lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": ((1, 1, 4, 6), lambda x: F.pixel_unshuffle(x, 2)),
    "channel_shuffle": ((1, 4, 2, 2), lambda x: F.channel_shuffle(x, 2)),
    "cat": (MATRIX, lambda x: torch.cat([x, x * 2, x[:1]], 0)),
    "cat_constants": (MATRIX, lambda x: torch.cat([W[:2, :1], x, 0.1 * W[2:, 1:], x], -1)),
    "cat_one_variable": (MATRIX, lambda x: torch.cat([W * 0.1, x])),
    "cat_empty": (MATRIX, lambda x: torch.cat([x, x[:, :0]], 1)),
    "stack": (MATRIX, lambda x: torch.stack([x, W[:2], x * x], -1)),
    "split": ((1, 7), lambda x: (lambda p: p[0] * p[1] + p[2].sum())(x.split(3, 1))),
    "split_sizes": ((1, 7), lambda x: x.split([2, 5], 1)[1]),
    "chunk": ((1, 6), lambda x: (lambda p: p[0] - p[2])(x.chunk(3, 1))),
    "unbind": (MATRIX, lambda x: (lambda p: p[0] * p[1])(x.unbind(0))),
    "scatter": (MATRIX, lambda x: torch.zeros_like(x).scatter(1, torch.tensor([[2, 0], [1, 2]]), x[:, :2])),
    "scatter_number": (MATRIX, lambda x: x.scatter(1, torch.tensor([[2], [1]]), 0.1)),
    "index_put": (MATRIX, lambda x: x.index_put((torch.tensor([0, 1]),), torch.stack([V, V * x[0]]))),
    "slice_scatter": (MATRIX, lambda x: torch.slice_scatter(x, 2 * x[:, :2], 1, 1, 3)),
    "select_scatter": (MATRIX, lambda x: torch.select_scatter(x, V, 0, 1)),
    "diagonal_scatter": ((3, 3), lambda x: torch.diagonal_scatter(x, V * x[0])),
    "zeros_like": (MATRIX, lambda x: x - torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 0.1)),
    "new_zeros": (MATRIX, lambda x: torch.cat([x, x.new_zeros(1, 3), x.new_full((1, 3), 0.1), x.new_ones(1, 3)])),
    "clone": (MATRIX, lambda x: x.clone().contiguous().detach()),
    "cast": (MATRIX, lambda x: x.to(torch.float64).double().type_as(W)),
    "movedim": (IMAGE, lambda x: x.movedim(1, 3).swapaxes(1, 2)),
    "meshed": (MATRIX, lambda x: torch.outer(x[0], x[1])),
    "write_then_read_the_same": (MATRIX, lambda x: (lambda y: y.index_put_((torch.tensor([0]),), V))(x * 2)),
}

IMAGES: Table = {
    "max_pool": (IMAGE, lambda x: F.max_pool2d(x, 2)),
    "max_pool_padded": (IMAGE, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "max_pool_ceil": (IMAGE, lambda x: F.max_pool2d(x, (3, 2), 2, ceil_mode=True)),
    "max_pool_ceil_padded": (IMAGE, lambda x: F.max_pool2d(x, 2, (3, 2), 1, ceil_mode=True)),
    "max_pool_dilated": (IMAGE, lambda x: F.max_pool2d(x, 2, 1, dilation=(3, 2))),
    "max_pool_dilated_padded": (IMAGE, lambda x: F.max_pool2d(x, 3, 1, padding=1, dilation=2)),
    "max_pool_three": ((3, 5, 6), lambda x: F.max_pool2d(x, 2)),
    "max_pool_1d": ((1, 2, 7), lambda x: F.max_pool1d(x, 3, 2, 1)),
    "max_pool_3d": ((1, 1, 3, 4, 4), lambda x: F.max_pool3d(x, 2, 1)),
    "adaptive_max_pool": (IMAGE, lambda x: F.adaptive_max_pool2d(x, (2, 4))),
    "adaptive_max_pool_1d": ((1, 2, 7), lambda x: F.adaptive_max_pool1d(x, 3)),
    "adaptive_max_pool_one": (IMAGE, lambda x: F.adaptive_max_pool2d(x, 1)),
    "avg_pool": (IMAGE, lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "avg_pool_ceil": (IMAGE, lambda x: F.avg_pool2d(x, 2, 3, 1, ceil_mode=True, count_include_pad=False)),
    "avg_pool_divisor": (IMAGE, lambda x: F.avg_pool2d(x, 2, divisor_override=3)),
    "avg_pool_1d": ((1, 2, 7), lambda x: F.avg_pool1d(x, 3, 2)),
    "avg_pool_3d": ((1, 1, 3, 4, 4), lambda x: F.avg_pool3d(x, 2)),
    "lp_pool": (IMAGE, lambda x: F.lp_pool2d(positive(x), 2.0, 2)),
    "adaptive_avg_pool": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, (2, 4))),
    "adaptive_avg_pool_1d": ((1, 2, 7), lambda x: F.adaptive_avg_pool1d(x, 3)),
    "adaptive_avg_pool_one": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, 1)),
    "adaptive_avg_pool_3d": ((1, 1, 3, 4, 4), lambda x: F.adaptive_avg_pool3d(x, (2, 2, 3))),
    "nearest": (IMAGE, lambda x: F.interpolate(x, scale_factor=2)),
    "nearest_size": (IMAGE, lambda x: F.interpolate(x, size=(7, 4))),
    "nearest_exact": (IMAGE, lambda x: F.interpolate(x, size=(7, 4), mode="nearest-exact")),
    "nearest_1d": ((1, 2, 7), lambda x: F.interpolate(x, size=10)),
    "bilinear": (IMAGE, lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear")),
    "bilinear_corners": (IMAGE, lambda x: F.interpolate(x, size=(3, 9), mode="bilinear", align_corners=True)),
    "bicubic": (IMAGE, lambda x: F.interpolate(x, size=(6, 7), mode="bicubic")),
    "linear_1d": ((1, 2, 7), lambda x: F.interpolate(x, size=10, mode="linear")),
    "trilinear": ((1, 1, 2, 3, 2), lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")),
}

REDUCTIONS: Table = {
    "sum": (IMAGE, lambda x: x.sum()),
    "sum_dim": (IMAGE, lambda x: x.sum(1)),
    "sum_dims": (IMAGE, lambda x: x.sum((1, -1), keepdim=True)),
    "mean": (IMAGE, lambda x: x.mean()),
    "mean_dims": (IMAGE, lambda x: x.mean((2, 3))),
    "var": (MATRIX, lambda x: x.var(1)),
    "var_biased": (MATRIX, lambda x: x.var(0, unbiased=False, keepdim=True)),
    "var_all": (MATRIX, lambda x: x.var()),
    "std": (MATRIX, lambda x: (x * V).std(1, correction=0)),
    "cumsum": (IMAGE, lambda x: x.cumsum(2)),
    "max": (MATRIX, lambda x: x.max()),
    "max_dim": (IMAGE, lambda x: x.max(2).values),
    "max_dim_keep": (IMAGE, lambda x: x.max(-1, keepdim=True)[0]),
    "min": (MATRIX, lambda x: x.min()),
    "min_dim": (IMAGE, lambda x: x.min(1).values),
    "amax": (IMAGE, lambda x: x.amax((1, 3))),
    "amin": (IMAGE, lambda x: x.amin(-1, keepdim=True)),
    "amax_all": (MATRIX, lambda x: x.amax()),
    "norm2": (MATRIX, lambda x: (x + 3).norm(dim=1)),
    "norm1": (MATRIX, lambda x: torch.linalg.vector_norm(x, 1, dim=0, keepdim=True)),
    "normalize": (MATRIX, lambda x: F.normalize(x + 3, dim=1)),
    "softmax": (MATRIX, lambda x: x.softmax(1)),
    "softmax_dim0": (IMAGE, lambda x: (3 * x).softmax(1)),
    "softmax_long": ((1, 70), lambda x: x.softmax(-1)),
    "log_softmax": (MATRIX, lambda x: F.log_softmax(x, 0)),
    "logsumexp": (MATRIX, lambda x: x.logsumexp(1)),
    "logsumexp_keep": (IMAGE, lambda x: x.logsumexp((1, 2), keepdim=True)),
}

PRODUCTS: Table = {
    "linear_function": (MATRIX, lambda x: F.linear(x, W)),
    "matmul_right": (MATRIX, lambda x: x @ W.t()),
    "matmul_left": (MATRIX, lambda x: W[:, :2] @ x),
    "matmul_vector": (MATRIX, lambda x: x @ V),
    "matmul_vectors": ((3,), lambda x: x @ V + V @ x),
    "mv": (MATRIX, lambda x: torch.mv(W, x[0])),
    "dot_variables": (MATRIX, lambda x: torch.dot(x[0], x[1])),
    "mv_variables": (MATRIX, lambda x: torch.mv(x, x[0] * 2)),
    "addmv": (MATRIX, lambda x: torch.addmv(V[:2], x, V, beta=0.3, alpha=2)),
    "matmul_variables": (MATRIX, lambda x: x @ (x * 2).t()),
    "matmul_batch": ((2, 3, 4), lambda x: x @ (x + 1).transpose(1, 2)),
    "matmul_broadcast": ((2, 3, 4), lambda x: x @ x[0].t()),
    "matmul_batch_constant": ((2, 4, 3), lambda x: x @ torch.stack([W.t(), -W.t()])),
    "bmm": ((2, 3, 4), lambda x: torch.bmm(torch.stack([V[None], V[None] * 2]), x)),
    "baddbmm": ((2, 3, 4), lambda x: torch.baddbmm(V[:, None], x, x.transpose(1, 2), beta=0.2, alpha=3)),
    "addbmm": ((2, 3, 4), lambda x: torch.addbmm(V, x, x.transpose(1, 2), beta=0.2, alpha=3)),
    "addmm": (MATRIX, lambda x: torch.addmm(x, x @ W.t(), W, beta=0.5, alpha=0.1)),
    "einsum": (MATRIX, lambda x: torch.einsum("ij,kj->ki", x, W)),
    "einsum_variables": ((2, 3, 4), lambda x: torch.einsum("bij,bkj->bik", x, x)),
    "einsum_batch": ((2, 3, 4), lambda x: torch.einsum("bij,jk->bki", x, W)),
    "conv_function": ((1, 3, 5), lambda x: F.conv1d(x, W[:, :, None])),
    "conv_same": ((1, 3, 6), lambda x: F.conv1d(x, torch.stack([W, -W, W], -1), padding="same")),
}

ATTENTION: Table = {
    "attention": ((2, 3, 4), lambda x: F.scaled_dot_product_attention(x, 2 * x, x - 1)),
    "attention_mask": ((1, 3, 4), lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.outer(V, V))),
    "attention_scale": ((1, 2, 3, 4), lambda x: F.scaled_dot_product_attention(x, x, x, scale=0.3)),
    "attention_causal": ((2, 3, 4), lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    "attention_causal_heads": ((1, 2, 3, 4), lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    "attention_bool": ((1, 2, 3, 4), lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=VISIBLE)),
    "attention_constant_key": ((1, 3, 3), lambda x: F.scaled_dot_product_attention(x, W[None], W[None] * 2)),
}

FUNCTIONS: Table = ACTIVATIONS | ARITHMETIC | SHAPES | IMAGES | REDUCTIONS | PRODUCTS | ATTENTION


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A module with random parameters and running statistics, in float64 and eval mode."""
    torch.manual_seed(0)
    module = make().double().eval()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.2 if tensor.dim() == 1 else torch.randn_like(tensor) / 2)
    return module


def _made(
    table: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]],
) -> dict[str, tuple[tuple[int, ...], nn.Module]]:
    return {name: (shape, _seeded(make)) for name, (shape, make) in table.items()}


class Attention(nn.Module):
    """Self-attention by torch's own layer."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=self.weights)[0]


class Residual(nn.Module):
    """A block whose constants meet variables in every way: a token, a position, a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 4))
        self.position = nn.Parameter(torch.ones(1, 4, 4))
        self.gain = nn.Parameter(torch.ones(4))
        self.scales = nn.ParameterList([torch.ones(2), torch.ones(2)])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.token, x], 1) + self.position
        return y + torch.relu(y) * self.gain.exp() * torch.cat(list(self.scales))


MODULES = _made({
    "linear": ((2, 3), lambda: nn.Linear(3, 4)),
    "linear_no_bias": ((1, 2, 3), lambda: nn.Linear(3, 4, bias=False)),
    "bilinear_layers": ((1, 3), lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))),
    "prelu": ((2, 3), lambda: nn.PReLU()),
    "prelu_channels": ((1, 2, 3, 3), lambda: nn.PReLU(2)),
    "conv_bn": ((1, 2, 5, 5), lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())),
    "conv_bn_no_bias": ((1, 2, 5, 5), lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, bias=False),
                                                            nn.BatchNorm2d(4))),
    "convT_bn": ((1, 2, 3, 3), lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3, 2), nn.BatchNorm2d(3))),
    "convT_groups_bn": ((1, 4, 3), lambda: nn.Sequential(nn.ConvTranspose1d(4, 6, 2, 2, groups=2), nn.BatchNorm1d(6))),
    "conv1d_bn": ((1, 2, 7), lambda: nn.Sequential(nn.Conv1d(2, 3, 3, 2, 1), nn.BatchNorm1d(3))),
    "conv3d_bn": ((1, 1, 3, 3, 3), lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2))),
    "convT3d": ((1, 1, 2, 2, 2), lambda: nn.ConvTranspose3d(1, 2, 2, 2)),
    "conv_reflect": ((1, 2, 5, 5), lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")),
    "linear_bn": ((1, 3), lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))),
    "bn_alone": ((1, 2, 3, 3), lambda: nn.BatchNorm2d(2)),
    "bn_no_affine": ((1, 2, 3), lambda: nn.BatchNorm1d(2, affine=False)),
    "bn_of_instance": ((1, 2, 4), lambda: nn.BatchNorm1d(2, track_running_stats=False)),
    "bn_relu_bn": ((1, 2, 3), lambda: nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(), nn.BatchNorm1d(2))),
    "layer_norm": ((2, 4), lambda: nn.LayerNorm(4)),
    "layer_norm_two": ((2, 3, 4), lambda: nn.LayerNorm((3, 4), elementwise_affine=False)),
    "group_norm": ((1, 4, 3, 2), lambda: nn.GroupNorm(2, 4)),
    "instance_norm": ((1, 2, 3, 3), lambda: nn.InstanceNorm2d(2, affine=True)),
    "instance_norm_running": ((1, 2, 5), lambda: nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
    "rms_norm": ((2, 4), lambda: nn.RMSNorm(4, eps=1e-3)),
    "attention_layer": ((1, 3, 4), lambda: Attention(False)),
    "attention_weights": ((1, 3, 4), lambda: Attention(True)),
    "encoder": ((1, 3, 4), lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)),
    "encoder_norm_first": ((1, 3, 4), lambda: nn.TransformerEncoderLayer(4, 2, 6, 0.1, "gelu", norm_first=True)),
    "residual": ((1, 3, 4), Residual),
    "softmax2d": ((1, 2, 2, 2), lambda: nn.Softmax2d()),
    "dropout_flatten": ((1, 2, 3), lambda: nn.Sequential(nn.Dropout(), nn.Flatten(), nn.Linear(6, 2))),
    "unflatten": ((1, 6), lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Upsample(scale_factor=2))),
    "relu_inplace": ((1, 3), lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))),
    "glu_like": ((1, 3), lambda: nn.Sequential(nn.Linear(3, 4), nn.Hardtanh(-0.5, 0.5), nn.ELU(0.5), nn.SiLU(True))),
})  # fmt: skip
