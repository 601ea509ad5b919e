"""A few lines over `onnx.helper` that write a graph with one input and one output, weights included.

Opset 13 and IR version 8, which every onnxruntime since 2022 reads. Names are `operator_number`.
"""

from __future__ import annotations

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn


class GraphBuilder:
    """Collects nodes and weights; every method returns the name of the value that it made."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        """Append one operator with one output."""
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Tensor) -> str:
        """Store a tensor beside the graph."""
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value.detach().numpy(), name))
        return name

    def reshape(self, x: str, shape: tuple[int, ...]) -> str:
        return self.op("Reshape", x, self.constant(torch.tensor(shape)))

    def linear(self, x: str, layer: nn.Linear) -> str:
        """A linear layer on a matrix, as Gemm."""
        return self.op("Gemm", x, self.constant(layer.weight), self.constant(layer.bias), transB=1)

    def dense(self, x: str, layer: nn.Linear) -> str:
        """A linear layer on the last axis of any tensor, as MatMul and Add."""
        weight = layer.weight.detach().t().contiguous()
        return self.op("Add", self.op("MatMul", x, self.constant(weight)), self.constant(layer.bias))

    def conv(self, x: str, layer: nn.Conv2d) -> str:
        inputs = [x, self.constant(layer.weight)] + ([] if layer.bias is None else [self.constant(layer.bias)])
        pads = [int(p) for p in layer.padding]
        return self.op("Conv", *inputs, strides=list(layer.stride), pads=[*pads, *pads])

    def batch_norm(self, x: str, layer: nn.BatchNorm2d) -> str:
        """Batch norm with the running statistics."""
        parts = [layer.weight, layer.bias, layer.running_mean, layer.running_var]
        return self.op("BatchNormalization", x, *(self.constant(p) for p in parts), epsilon=layer.eps)


def export(module: nn.Module) -> onnx.ModelProto:
    """The ONNX model of a network of `networks.py`, input `x` of its `input_shape`, output `y` of (1, 10)."""
    builder = GraphBuilder()
    last = module.to_onnx(builder, "x")
    builder.nodes[-1].output[0] = "y"  # the last node made is the one that nothing reads
    if last != builder.nodes[-1].name:
        raise ValueError(f"{type(module).__name__}.to_onnx must return its last node, got {last}")
    graph = helper.make_graph(
        builder.nodes,
        type(module).__name__,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, module.input_shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 10))],
        builder.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model
