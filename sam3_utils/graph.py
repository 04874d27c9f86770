# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""ONNX files: trace a module without its weights, fold and name, put the weights beside it, check they are there."""

import io
import math
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sam3_utils.cli import UsageError

OPSET = 17  # the highest that CANN 8.5 maps every operator of; LayerNormalization needs at least 17
IR_VERSION = 8
ALIGNMENT = 64  # bytes, of each tensor in the data file
INLINE_BYTES = 1024  # smaller tensors stay in the graph file, as onnx.save_model leaves them


def trace(module, inputs: dict[str, tuple[str, tuple]], outputs: list[str]):
    """Trace a torch module on the meta device: no weight is read and nothing is computed but shapes.

    Args:
        module: on the meta device, in eval mode.
        inputs: name -> (torch dtype name, shape at batch 2).
        outputs: names, in the order in which the module gives them.

    Returns:
        onnx.ModelProto of opset 17 whose first dimension is free ("N"). Its weights are graph inputs, called by their
        names in the module's state_dict; `attach_weights` gives them values.
    """
    import onnx
    import torch

    arguments = tuple(
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for dtype, shape in inputs.values()
    )
    traced = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of constants that are meant to be constant, and of the legacy exporter
        torch.onnx.export(
            module, arguments, traced, dynamo=False, opset_version=OPSET, export_params=False,
            do_constant_folding=False, input_names=list(inputs), output_names=outputs,
            dynamic_axes={name: {0: "N"} for name in (*inputs, *outputs)},
        )  # fmt: skip
    model = onnx.load_from_string(traced.getvalue())
    model.ir_version = IR_VERSION
    # The exporter takes weights of one shape for copies of each other, having no values to compare: Identity nodes
    # stand where the second one is meant.
    values = {value.name: value for value in model.graph.input}
    weights = module.state_dict()
    for node in [node for node in model.graph.node if node.op_type == "Identity" and node.output[0] in weights]:
        value = model.graph.input.add()
        value.CopyFrom(values[node.input[0]])
        value.name = node.output[0]
        model.graph.node.remove(node)
    return model


def fold_constants(model) -> None:
    """Constants as initializers, equal ones once, and their Casts computed: all that the tracer leaves to fold."""
    from onnx import helper, numpy_helper

    values: dict[str, np.ndarray] = {}
    for node in list(model.graph.node):
        if node.op_type == "Constant":
            values[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        elif node.op_type == "Cast" and node.input[0] in values:
            dtype = helper.tensor_dtype_to_np_dtype(node.attribute[0].i)
            values[node.output[0]] = values[node.input[0]].astype(dtype)
        else:
            continue
        model.graph.node.remove(node)
    first: dict[tuple, str] = {}
    same = {
        name: first.setdefault((array.dtype.str, array.shape, array.tobytes()), name) for name, array in values.items()
    }
    for node in model.graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(values[name], name) for name in values if name in used)


def fold_weight_transposes(model) -> dict[str, tuple[int, ...]]:
    """Remove the Transpose before the MatMuls with an `nn.Linear`'s weight; returns weight name -> permutation.

    ATC and ONNX Runtime would do it at load time, with both copies in memory.
    """
    weights = {value.name: value for value in model.graph.input}
    uses = Counter(name for node in model.graph.node for name in node.input)
    transposes: dict[str, list] = {}
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.input[0] in weights:
            transposes.setdefault(node.input[0], []).append(node)
    permutations, replaced = {}, {}
    for name, nodes in transposes.items():
        orders = {tuple(node.attribute[0].ints) for node in nodes}
        if len(nodes) < uses[name] or len(orders) > 1:
            continue
        permutations[name] = orders.pop()
        dims = weights[name].type.tensor_type.shape.dim
        sizes = [dims[axis].dim_value for axis in permutations[name]]
        for dim, size in zip(dims, sizes):
            dim.dim_value = size
        for node in nodes:
            replaced[node.output[0]] = name
            model.graph.node.remove(node)
    for node in model.graph.node:
        node.input[:] = [replaced.get(name, name) for name in node.input]
    return permutations


def tidy_names(model) -> None:
    """Node and tensor names without the tracer's leading slash: `vision_encoder/layers.7/attention/qkv/MatMul`."""
    for node in model.graph.node:
        node.name = node.name.lstrip("/")
        for names in (node.input, node.output):
            names[:] = [name.lstrip("/") for name in names]
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.lstrip("/")


def part_of(model, inputs: dict[str, tuple[str, tuple]], outputs: dict[str, tuple[str, tuple]]):
    """The part of a graph between some of its tensors, as a graph of its own; node names stay.

    Args:
        model: from `trace`, its weights graph inputs; it stays as it is.
        inputs, outputs: name -> (numpy dtype name, shape), a string in a shape being a named free dimension. The tracer
            leaves symbols such as `Reshapepred_masks_dim_1` where every number but the batch is known.
    """
    import onnx
    from onnx import helper

    producers = {name: node for node in model.graph.node for name in node.output}
    needed, open_names, names = set(), list(outputs), set()
    while open_names:
        name = open_names.pop()
        if name not in names:
            names.add(name)
            if name not in inputs and name in producers:
                needed.add(producers[name].name)
                open_names += producers[name].input
    part = onnx.ModelProto()
    part.CopyFrom(model)
    weights = [value for value in model.graph.input if value.name in names and value.name not in inputs]
    for field in ("node", "input", "output", "initializer", "value_info"):
        part.graph.ClearField(field)
    part.graph.node.extend(node for node in model.graph.node if node.name in needed)
    part.graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in names)
    for values, tensors in ((part.graph.input, inputs), (part.graph.output, outputs)):
        values.extend(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in tensors.items()
        )
    part.graph.input.extend(weights)
    return part


def infer_shapes(model, batch: int) -> dict[str, tuple[int, tuple[int | None, ...]]]:
    """TensorProto type and shape of every tensor of the main graph at one batch size; the model stays as it is.

    Args:
        model: onnx.ModelProto; its weights need not be loaded.
        batch: what the inputs' first dimension becomes where it is free.

    Returns:
        name -> (type, shape); None in a shape stands for what does not follow from the inputs' shapes.

    Raises:
        UsageError: the shapes contradict each other.
    """
    import onnx

    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].HasField("dim_value"):
            dims[0].dim_value = batch
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    del fixed.graph.value_info[:]
    try:
        fixed = onnx.shape_inference.infer_shapes(fixed, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise UsageError(f"the shapes inside the graph contradict each other: {' '.join(str(error).split())}") from None
    types = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in fixed.graph.initializer}
    for value in (*fixed.graph.input, *fixed.graph.value_info, *fixed.graph.output):
        tensor = value.type.tensor_type
        sizes = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
        types[value.name] = (tensor.elem_type, sizes if tensor.HasField("shape") else None)
    return types


def operator_counts(model) -> dict[str, int]:
    """How often each operator occurs in the main graph, most frequent first."""
    return dict(Counter(node.op_type for node in model.graph.node).most_common())


def save(model, path: Path, weight: Callable[[str], np.ndarray], progress: Callable[[int], None]) -> None:
    """Write `<path>` and one `<path>.data` beside it that holds the weights, both whole or neither.

    Without the external file protobuf's 2 GB limit stops facebook/sam3 (3.4 GB); ATC and ONNX Runtime read the
    relative location. One weight at a time is in memory beside what `weight` keeps.

    Args:
        model: its graph inputs that `weight` knows become initializers.
        weight: name -> array as the graph wants it; raises KeyError for the model's real inputs.
        progress: called with the bytes written since the last call.
    """
    from onnx import TensorProto, helper, numpy_helper

    data = path.name + ".data"
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as aside:
        with open(os.path.join(aside, data), "wb") as stream:
            for value in list(model.graph.input):
                try:
                    array = np.ascontiguousarray(weight(value.name))
                except KeyError:
                    continue
                model.graph.input.remove(value)
                if array.nbytes < INLINE_BYTES:
                    model.graph.initializer.append(numpy_helper.from_array(array, value.name))
                    continue
                stream.write(bytes(-stream.tell() % ALIGNMENT))
                tensor = model.graph.initializer.add(
                    name=value.name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
                    data_location=TensorProto.EXTERNAL,
                )  # fmt: skip
                for key, entry in (("location", data), ("offset", stream.tell()), ("length", array.nbytes)):
                    tensor.external_data.add(key=key, value=str(entry))
                stream.write(array.data)
                progress(array.nbytes)
        with open(os.path.join(aside, path.name), "wb") as stream:
            stream.write(model.SerializeToString())
        # Never an old graph beside new weights, even for a moment.
        path.unlink(missing_ok=True)
        for name in (data, path.name):
            os.replace(os.path.join(aside, name), path.parent / name)


def load_structure(path: Path):
    """The graph without its weights.

    Raises:
        UsageError: the file is not ONNX.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except (DecodeError, OSError) as error:
        raise UsageError(f"{path}: cannot be read as ONNX ({error})") from None
    if not model.graph.node:
        raise UsageError(f"{path}: not an ONNX model (no nodes); export it again with sam3_export_onnx.py")
    return model


def all_nodes(onnx_graph) -> Iterator:
    """All nodes, those in the bodies of If, Loop and Scan included."""
    for node in onnx_graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from all_nodes(body)


def external_tensors(model) -> Iterator:
    """Every tensor whose values lie in a side file: weights and Constant nodes, those of bodies included."""
    from onnx.external_data_helper import uses_external_data

    tensors = list(model.graph.initializer)
    for attribute in (attribute for node in all_nodes(model.graph) for attribute in node.attribute):
        tensors += [attribute.t, *attribute.tensors]
        tensors += [tensor for body in (attribute.g, *attribute.graphs) for tensor in body.initializer]
    return filter(uses_external_data, tensors)


def external_files(model, folder: Path) -> dict[Path, int]:
    """The side files that `model` (loaded from `folder`) names, and how many bytes of each it needs.

    The locations are read from the model: other writers name side files freely.

    Raises:
        UsageError: an entry says something else than where as many bytes lie as the tensor has.
    """
    from onnx.external_data_helper import ExternalDataInfo
    from onnx.helper import tensor_dtype_to_np_dtype

    needed: dict[Path, int] = {}
    for tensor in external_tensors(model):
        size = math.prod(tensor.dims) * tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        try:
            info = ExternalDataInfo(tensor)
            offset, length = int(info.offset or 0), size if info.length is None else int(info.length)
        except ValueError as error:
            raise UsageError(f"the entry of {tensor.name} for its side file is damaged ({error})") from None
        if offset < 0 or length != size:
            raise UsageError(f"{tensor.name} has {size} bytes, its entry says {length} from {offset} on")
        path = folder / info.location
        needed[path] = max(needed.get(path, 0), offset + length)
    return needed


def check_external_files(model, path: Path) -> list[Path]:
    """Check that the weights of the ONNX file at `path` are beside it and not cut short; returns the side files.

    Raises:
        UsageError: a side file is missing or too short; a runtime's own message would not name the remedy.
    """
    try:
        needed = external_files(model, path.parent)
    except UsageError as error:
        raise UsageError(f"{path}: {error}; export it again") from None
    for file, size in needed.items():
        if not file.is_file():
            raise UsageError(f"{path}: its weights {file.name} are not beside it; move both files together")
        if file.stat().st_size < size:
            raise UsageError(f"{file}: {file.stat().st_size} bytes, {path.name} needs {size}; copy or export it again")
    return sorted(needed)
