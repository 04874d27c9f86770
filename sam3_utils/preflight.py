# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Would ATC take this ONNX file? Everything that can be told from its structure, without an NPU and without reading
the weights.

The rules are those of CANN 8.5: its parser looks an operator up under the model's own opset, knows one opset domain,
reads weights beside the graph, and has one rounding for nearest Resize. What it accepts and computes differently is
refused here too.
"""

from pathlib import Path, PurePosixPath

from sam3_utils import contract, graph
from sam3_utils.cli import UsageError

OPSETS = range(11, 19)  # ATC: "opset v11~v18 only"
MAX_RANK = 8
MAX_KERNEL, MAX_STRIDE = 255, 63
# ONNX operators that CANN's parser knows: the list published for CANN commercial 8.0.0 (hiascend.com, page
# operatorlist_00176) and the open source plugins of 8.5.0 (hicann/ops-nn, ops-math, ops-cv).
OPERATORS = frozenset(
    """
    Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization
    Bernoulli BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu Clip Col2Im Compress Concat
    ConcatFromSequence Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace Det Div Dropout
    Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gemm
    GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample HardSigmoid HardSwish Hardmax
    Identity If InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log
    LogSoftmax LpNormalization LpPool MatMul Max MaxPool MaxRoiPool MaxUnpool Mean MeanVarianceNormalization Min
    Mish Mod Mul Multinomial Neg NonMaxSuppression NonZero Not OneHot Or PRelu Pad Pow RandomNormal
    RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize
    ReverseSequence RoiAlign Round Scatter ScatterElements ScatterND Selu SequenceAt SequenceConstruct
    SequenceEmpty SequenceErase SequenceInsert SequenceLength Shape Shrink Sigmoid Sign Sin Sinh Size Slice
    Softmax SoftmaxCrossEntropyLoss Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze Sub Sum
    Tan Tanh TfIdfVectorizer ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze Upsample Where Xor
    """.split()
)
# Plugins that are not registered for the whole of `OPSETS`.
OPERATOR_OPSETS = {
    "AffineGrid": range(8, 17),
    "Bernoulli": range(15, 19),
    "Col2Im": range(18, 19),
    "LayerNormalization": range(17, 19),
    "Mish": range(18, 19),
    "ReduceL1": range(8, 18),
    "ReduceL2": range(8, 18),
    "Scatter": range(9, 12),
    "SoftmaxCrossEntropyLoss": range(12, 19),
    "Trilu": range(14, 19),
    "Upsample": range(8, 17),
}


def _attributes(node) -> dict:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _opset(model) -> tuple[int, list[str]]:
    """The model's opset, and what is wrong with its imports."""
    imports = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    if len(model.opset_import) != 1 or "ai.onnx" not in imports:
        named = ", ".join(f"{domain} {version}" for domain, version in imports.items())
        return imports.get("ai.onnx", 0), [
            f"opset_import has {len(model.opset_import)} entries ({named}), ATC takes one, of ai.onnx (E16005): "
            "export with sam3_export_onnx.py"
        ]
    opset = imports["ai.onnx"]
    if opset not in OPSETS:
        return opset, [f"opset {opset}: ATC takes {OPSETS.start} to {OPSETS.stop - 1} (E16002): export with opset 17"]
    return opset, []


def _conv(node) -> str | None:
    """What ATC would refuse about a convolution, or None."""
    attributes = _attributes(node)
    kernel, strides = (max(attributes.get(name, [1]), default=1) for name in ("kernel_shape", "strides"))
    if kernel > MAX_KERNEL or strides > MAX_STRIDE:
        return f"kernel {kernel}, stride {strides}: ATC takes up to {MAX_KERNEL} and {MAX_STRIDE}: use smaller ones"
    return None


def _resize(node, constants: dict[str, list[int]]) -> str | None:
    """What ATC would refuse or compute differently about a Resize, or None.

    Args:
        constants: name -> dimensions.
    """
    attributes = {"mode": b"nearest", "coordinate_transformation_mode": b"half_pixel", "antialias": 0}
    attributes |= {"nearest_mode": b"round_prefer_floor"} | _attributes(node)
    names = ("mode", "coordinate_transformation_mode", "nearest_mode")
    mode, coordinates, rounding = (attributes[name].decode(errors="replace") for name in names)
    if any(name and name not in constants for name in node.input[2:]):
        return "its size is computed while the model runs: make scales or sizes constant"
    if mode not in ("nearest", "linear") or attributes["antialias"]:
        return f"mode {mode}{' with antialias' if attributes['antialias'] else ''}: ATC has nearest and linear only"
    if mode == "nearest" and any(constants.get(name) == [5] for name in node.input[2:]):
        return "nearest in five dimensions, where ATC has linear only: resize fewer axes"
    if mode == "nearest" and (coordinates, rounding) != ("half_pixel", "round_prefer_ceil"):
        return (
            f"nearest with {coordinates} and {rounding}: ATC always rounds by round_prefer_ceil, which shifts the "
            "picture here: use half_pixel with round_prefer_ceil, equal for whole factors"
        )
    return None


def _operators(model, opset: int) -> list[tuple[str, str]]:
    """(fault, node) of every node that ATC has no operator for, or another one."""
    constants = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    constants |= {
        node.output[0]: list(node.attribute[0].t.dims) for node in model.graph.node if node.op_type == "Constant"
    }
    found = []
    for node in graph.all_nodes(model.graph):
        where = node.name or node.output[0]
        if node.domain not in ("", "ai.onnx"):
            found.append((f"{node.op_type} is of domain {node.domain}, ATC knows ai.onnx only", where))
        elif node.op_type == "If":
            found.append(("If: what its branches give is not known before it runs: export with a fixed choice", where))
        elif node.op_type not in OPERATORS:
            found.append((f"{node.op_type}: ATC has no such operator (E16002): export with sam3_export_onnx.py", where))
        elif opset in OPSETS and opset not in OPERATOR_OPSETS.get(node.op_type, OPSETS):
            known = OPERATOR_OPSETS[node.op_type]
            fault = f"{node.op_type}: ATC has it for opset {known.start} to {known.stop - 1}, the model says {opset}"
            found.append((f"{fault} (E16002): export with opset 17", where))
        elif node.op_type == "Resize" and (fault := _resize(node, constants)):
            found.append((f"Resize: {fault}", where))
        elif node.op_type in ("Conv", "ConvTranspose") and (fault := _conv(node)):
            found.append((f"{node.op_type}: {fault}", where))
    return found


def _shapes(model, types: dict) -> list[tuple[str, str]]:
    """(fault, node) of every tensor whose shape ATC could not fix, or whose rank or type it does not take.

    Args:
        types: `graph.infer_shapes` at some batch.
    """
    from onnx import TensorProto

    wide = (TensorProto.DOUBLE, TensorProto.COMPLEX64, TensorProto.COMPLEX128)
    found = [
        (f"{TensorProto.DataType.Name(tensor.data_type).lower()} weights: export in float32", tensor.name)
        for tensor in model.graph.initializer
        if tensor.data_type in wide
    ]
    for node in model.graph.node:
        for name in filter(None, node.output):
            dtype, shape = types.get(name, (None, None))
            where = node.name or name
            if dtype in wide:
                kind = TensorProto.DataType.Name(dtype).lower()
                found.append((f"{kind} tensors: ATC hardly has operators for them: export in float32", where))
            if shape is None or None in shape:
                fault = f"{node.op_type}: its shape depends on more than the batch: fix every other size"
                found.append((fault, where))
            elif len(shape) > MAX_RANK:
                fault = f"{node.op_type}: {len(shape)} dimensions, ATC takes {MAX_RANK}: reshape in smaller steps"
                found.append((fault, where))
    return found


def _weights(model, path: Path) -> list[str]:
    """What is wrong with the files of the weights."""
    faults = []
    locations = {
        entry.value for tensor in graph.external_tensors(model) for entry in tensor.external_data
        if entry.key == "location"
    }  # fmt: skip
    for location in sorted(locations):
        if PurePosixPath(location).is_absolute() or ".." in PurePosixPath(location).parts:
            faults.append(f"its weights are said to be in {location}: the place must be relative, below the model")
    try:
        graph.check_external_files(model, path)
    except UsageError as error:
        faults.append(str(error))
    return faults


def _contract(model, path: Path, part: str, inferred: list[dict]) -> list[str]:
    """What is wrong with inputs and outputs. The outputs' shapes are those that follow from the nodes, not those that
    the file declares.

    Args:
        inferred: `graph.infer_shapes` at two batches.
    """
    from onnx import TensorProto

    names = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.INT64: "int64"}
    weights = {tensor.name for tensor in model.graph.initializer}
    made = {name for node in model.graph.node for name in node.output}
    inputs = {
        value.name: (
            names.get(value.type.tensor_type.elem_type, str(value.type.tensor_type.elem_type)),
            tuple(dim.dim_value or None for dim in value.type.tensor_type.shape.dim),
        )
        for value in model.graph.input
        if value.name not in weights
    }
    faults, outputs = [], {}
    for name in (value.name for value in model.graph.output):
        if name not in made:
            faults.append(f"output {name} is made by no node: export it again")
            continue
        (dtype, first), (_, second) = (types.get(name, (None, None)) for types in inferred)
        if first is not None and second is not None and len(first) == len(second):
            sizes = tuple(size if size == other else None for size, other in zip(first, second))
            outputs[name] = names.get(dtype, str(dtype)), sizes
    try:
        contract.check_io(inputs, outputs, path.name, part)
    except UsageError as error:
        faults.append(str(error))
    # A size of 1 in place of the batch would pass for a model of a fixed batch.
    free = any(shape and shape[0] is None for _, shape in inputs.values())
    fixed = [name for name, (_, shape) in outputs.items() if free and shape and shape[0] is not None]
    if fixed:
        faults.append(f"outputs {', '.join(fixed)} do not have the inputs' batch: export it again")
    return faults


def findings(model, path: Path, part: str) -> list[str]:
    """Everything that ATC would refuse or get wrong, each with the nodes concerned and the remedy.

    Args:
        model: onnx.ModelProto without its weights. path: where it was loaded from. part: which of `contract.PARTS`.
    """
    opset, faults = _opset(model)
    if model.functions:
        faults.append(f"{len(model.functions)} functions of its own, which ATC does not know: export it again")
    by_fault: dict[str, list[str]] = {}
    try:
        inferred = [graph.infer_shapes(model, batch) for batch in (1, 3)]
    except UsageError as error:
        inferred, shapes = [{}, {}], [(str(error), "")]
    else:
        shapes = _shapes(model, inferred[0])
    for fault, where in [*_operators(model, opset), *shapes]:
        by_fault.setdefault(fault, []).append(where)
    for fault, nodes in by_fault.items():
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        faults.append(f"node {nodes[0]}{more}: {fault}" if nodes[0] else fault)
    faults += _weights(model, path)
    return faults + (_contract(model, path, part, inferred) if inferred[0] else [])


def check_model(path: Path, part: str = "single"):
    """Check an ONNX file before ATC gets it; returns its structure, an onnx.ModelProto without the weights.

    Raises:
        UsageError: it cannot be read, or ATC would refuse it or compute something else; all that was found.
    """
    model = graph.load_structure(path)
    faults = findings(model, path, part)
    if faults:
        raise UsageError(f"{path}: not for ATC: {'; '.join(faults)}")
    return model
