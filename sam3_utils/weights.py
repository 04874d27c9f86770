# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights stored in fewer bytes than float32, with the nodes that turn them back."""

from collections.abc import Callable, Container

import numpy as np


def store(model, kind: str, names: Container[str]) -> None:
    """Change a traced graph so that its large weights are stored as `kind`.

        float16   weight/float16 -> Cast -> weight               all weights of two dimensions and more
        int8      weight/int8, weight/scale -> DequantizeLinear  those of the matrix products, a scale for each column

    Biases and the scales of normalisations stay float32, being one thousandth of the bytes. What is computed in is the
    runtime's choice: ONNX Runtime and ATC turn float16 weights back once, when they open or compile the model.

    Args:
        model: from `graph.part_of`, its weights graph inputs.
        kind: "float16" or "int8".
        names: of all weights, to tell them from the model's real inputs.
    """
    from onnx import TensorProto, helper

    uses: dict[str, set] = {}
    for node in model.graph.node:
        for position, name in enumerate(node.input):
            uses.setdefault(name, set()).add((node.op_type, position))
    inputs, nodes = [], []
    for value in model.graph.input:
        tensor, name = value.type.tensor_type, value.name
        sizes = [dim.dim_value for dim in tensor.shape.dim]
        matrix = name in names and tensor.elem_type == TensorProto.FLOAT and len(sizes) > 1
        if matrix and kind == "float16":
            inputs.append(helper.make_tensor_value_info(f"{name}/float16", TensorProto.FLOAT16, sizes))
            nodes.append(helper.make_node("Cast", [f"{name}/float16"], [name], f"{name}/Cast", to=TensorProto.FLOAT))
        elif matrix and kind == "int8" and len(sizes) == 2 and uses[name] == {("MatMul", 1)}:
            inputs.append(helper.make_tensor_value_info(f"{name}/int8", TensorProto.INT8, sizes))
            inputs.append(helper.make_tensor_value_info(f"{name}/scale", TensorProto.FLOAT, sizes[1:]))
            pair = [f"{name}/int8", f"{name}/scale"]
            nodes.append(helper.make_node("DequantizeLinear", pair, [name], f"{name}/DequantizeLinear", axis=1))
        else:
            inputs.append(value)
    graph = type(model.graph)()
    graph.CopyFrom(model.graph)
    for field, entries in (("input", inputs), ("node", [*nodes, *model.graph.node])):
        graph.ClearField(field)
        getattr(graph, field).extend(entries)
    model.graph.CopyFrom(graph)


def stored(name: str, weight: Callable[[str], np.ndarray]) -> np.ndarray:
    """The values of a weight of the changed graph.

    Args:
        name: as `store` leaves it, such as `vision_encoder.layers.0.mlp.fc1.weight/int8`.
        weight: name without that ending -> float32 array.

    Raises:
        KeyError: there is no such weight.
    """
    name, _, form = name.partition("/")
    array = weight(name)
    if form == "float16":
        return array.astype(np.float16)
    if form:
        # The largest of each column becomes 127; a column of zeros may have any scale.
        scale = np.maximum(np.abs(array).max(axis=0), np.finfo(np.float32).tiny) / np.float32(127)
        return scale if form == "scale" else np.rint(array / scale).astype(np.int8)
    return array
