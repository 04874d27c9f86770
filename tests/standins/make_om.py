# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0

"""Writes a stand-in `.om` for the `ais_bench` of this folder: JSON that names an ONNX file and a fixed batch.

python make_om.py model.onnx model.om 4
"""

import json
import os
import sys

import numpy as np
import onnx
import onnxruntime as ort


def _dtype(value):
    return onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name


def _dims(value):
    """Dimensions of a graph value: int where static, else str; [""] where even the rank is unknown."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return [""]
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]


def _is_static(shape):
    return all(isinstance(dim, int) for dim in shape)


def _input_shapes(values, batch, pictures, overrides):
    """Fixed shapes of the inputs, and what the graph's names for the batch dimension stand for."""
    symbols = {dim: batch for value in values for dim in _dims(value)[:1] if isinstance(dim, str)}
    symbols |= {"P": pictures} if "P" in symbols else {}
    shapes = {}
    for value in values:
        dims = _dims(value)
        shape = [symbols.get(d, d) if i == 0 or d else d for i, d in enumerate(dims)]
        if not _is_static(shape) and value.name not in overrides:
            raise ValueError(f"input {value.name} has shape {dims}: give it in input_shapes")
        shapes[value.name] = shape if _is_static(shape) else list(overrides[value.name])
    return shapes, symbols


def _output_shapes(graph, onnx_path, inputs, input_shapes, symbols):
    """Fixed shapes of the outputs: from the graph, else from its value_info, else by one run with zeros."""
    shapes = {}
    for value in [*graph.output, *graph.value_info]:
        shape = [symbols.get(dim, dim) if dim else dim for dim in _dims(value)]
        if _is_static(shape):
            shapes.setdefault(value.name, shape)
    missing = [value.name for value in graph.output if value.name not in shapes]
    if missing:
        session = ort.InferenceSession(str(onnx_path), providers=["CPUExecutionProvider"])
        zeros = {name: np.zeros(input_shapes[name], _dtype(value)) for name, value in inputs.items()}
        shapes.update((name, list(array.shape)) for name, array in zip(missing, session.run(missing, zeros)))
    return shapes


def _om_output_name(graph, name):
    """`<last node>:<index>:<onnx output name>`, as in a real OM."""
    for position, node in enumerate(graph.node):
        if name in node.output:
            return f"{node.name or f'{node.op_type}_{position}'}:{list(node.output).index(name)}:{name}"
    return name


def _entries(values, order, names, dtypes, shapes):
    """The inputs or outputs of the OM, in this order."""
    entries = []
    for name in order:
        onnx_dtype = _dtype(values[name])
        entry = {"name": names[name], "dtype": np.dtype(dtypes.get(name, onnx_dtype)).name, "shape": shapes[name]}
        entries.append({**entry, "onnx_name": name, "onnx_dtype": onnx_dtype})
    return entries


def make_om(
    onnx_path, om_path, batch, *, pictures=None, input_names=None, input_dtypes=None, input_shapes=None,
    input_order=None, output_names=None, output_dtypes=None, output_shapes=None, drop_output=None,
):  # fmt: skip
    """Writes the stand-in OM of `onnx_path` at a fixed batch; `pictures` is what "P" stands for if not the batch.

    The `*_names`, `*_dtypes`, `*_shapes` (dicts by ONNX name) and `drop_output` (one ONNX name) make an OM that is not
    what the caller expects. Outputs never keep the ONNX order, as a real OM need not; inputs follow `input_order`.
    """
    graph = onnx.load(str(onnx_path), load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = {value.name: value for value in graph.input if value.name not in weights}
    outputs = {value.name: value for value in graph.output}
    _check_names(inputs, input_names, input_dtypes, input_shapes, input_order)
    _check_names(outputs, output_names, output_dtypes, output_shapes, drop_output and [drop_output])

    in_shapes, symbols = _input_shapes(inputs.values(), batch, pictures or batch, input_shapes or {})
    out_shapes = _output_shapes(graph, onnx_path, inputs, in_shapes, symbols)
    in_names = {name: name for name in inputs} | (input_names or {})
    out_names = {name: _om_output_name(graph, name) for name in outputs} | (output_names or {})
    in_shapes.update(input_shapes or {})
    out_shapes.update(output_shapes or {})
    order = sorted(outputs, reverse=True)
    if order == list(outputs):
        order.reverse()
    order = [name for name in order if name != drop_output]
    om = {
        "onnx": os.path.abspath(onnx_path),
        "batch": batch,
        "inputs": _entries(inputs, input_order or inputs, in_names, input_dtypes or {}, in_shapes),
        "outputs": _entries(outputs, order, out_names, output_dtypes or {}, out_shapes),
    }
    with open(om_path, "w", encoding="utf-8") as file:
        json.dump(om, file, indent=1)
    # ais_bench refuses a model that the group or others may write.
    os.chmod(om_path, 0o640)


def _check_names(known, *overrides):
    """A misspelt override would silently make a right OM."""
    unknown = {name for override in overrides for name in override or ()} - set(known)
    if unknown:
        raise ValueError(f"{sorted(unknown)} not in the ONNX graph, which has {sorted(known)}")


if __name__ == "__main__":
    make_om(sys.argv[1], sys.argv[2], int(sys.argv[3]))
