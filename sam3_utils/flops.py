# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The work of an ONNX graph: floating-point operations of its matrix products, and the bytes it must move at least."""

import logging
import math
from collections import Counter
from pathlib import Path

from sam3_utils import files, graph
from sam3_utils.backends import is_om, is_split, split_parts
from sam3_utils.cli import UsageError
from sam3_utils.contract import INPUTS, SPLIT

logger = logging.getLogger(__name__)
COUNTED = ("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose")
# Products of other kinds, and nodes that hold graphs of their own: a count without them would be silently too low.
NOT_COUNTABLE = {
    "Attention", "ConvInteger", "DeformConv", "GRU", "If", "LSTM", "Loop", "MatMulInteger", "QLinearConv",
    "QLinearMatMul", "RNN", "Scan",
}  # fmt: skip


def _shapes(model, batch: int) -> dict[str, tuple[int | None, ...]]:
    """name -> shape of every tensor of known rank, from `graph.infer_shapes`.

    Raises:
        UsageError: SAM3's inputs are fixed to another batch, or the shapes contradict each other.
    """
    for value in model.graph.input:
        size = value.type.tensor_type.shape.dim[0].dim_value if value.name in INPUTS else 0
        if size not in (0, batch):
            raise UsageError(f"the graph is made for batches of {size}, not {batch}")
    return {name: shape for name, (_, shape) in graph.infer_shapes(model, batch).items() if shape is not None}


def _flops(node, inputs: list[tuple[int, ...]], output: tuple[int, ...]) -> int:
    """2 for every multiply-add; a bias is not counted, as usual."""
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "MatMul":
        return 2 * math.prod(output) * inputs[0][-1]
    if node.op_type == "Gemm":
        return 2 * math.prod(output) * inputs[0][0 if "transA" in attributes and attributes["transA"].i else 1]
    if node.op_type == "Conv":  # weights: (out, in / group, *kernel)
        return 2 * math.prod(output) * math.prod(inputs[1][1:])
    if node.op_type == "ConvTranspose":  # weights: (in, out / group, *kernel); every input meets each of them
        return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:])
    terms = attributes["equation"].s.decode().replace(" ", "").split("->")[0].split(",")
    sizes = {index: size for term, shape in zip(terms, inputs) for index, size in zip(term, shape)}
    return 2 * math.prod(sizes.values())


def count_flops(model, batch: int) -> dict[str, dict[str, int]]:
    """FLOPs of one run over `batch` pictures: matrix products and convolutions, 2 for each multiply-add.

    Args:
        model: onnx.ModelProto; its weights need not be loaded.

    Returns:
        The same total twice: under "operators" by operator type, under "parts" by the first component of the nodes'
        names, such as vision_encoder.

    Raises:
        UsageError: a shape cannot be found, or the graph has products that are not counted here.
    """
    foreign = {node.op_type for node in model.graph.node if node.domain not in ("", "ai.onnx")}
    foreign |= NOT_COUNTABLE & {node.op_type for node in model.graph.node}
    if foreign:
        raise UsageError(f"the graph has {', '.join(sorted(foreign))}, whose work is not counted; use a plain export")
    shapes = _shapes(model, batch)
    operators, parts = Counter(), Counter()
    for node in model.graph.node:
        if node.op_type not in COUNTED:
            continue
        *inputs, output = (shapes.get(name, (None,)) for name in (*filter(None, node.input), node.output[0]))
        if None in (*output, *(size for shape in inputs for size in shape)):
            raise UsageError(f"the shapes of {node.name} depend on more than the batch; export with fixed sizes")
        flops = _flops(node, inputs, output)
        operators[node.op_type] += flops
        part, _, rest = node.name.strip("/").partition("/")
        parts[part if rest else "other"] += flops
    return {"operators": dict(operators.most_common()), "parts": dict(parts.most_common())}


def least_bytes(model, batch: int, float_bytes: int | None = None) -> int:
    """A lower bound of the bytes that one run moves: weights, inputs and outputs once; no intermediate result.

    Tables that only Gather reads do not count, since a run needs some rows of them.

    Args:
        model: onnx.ModelProto; its weights need not be loaded.
        float_bytes: bytes of a floating-point weight on the device; None takes them as they are stored.

    Raises:
        UsageError: the shape of an input or output cannot be found.
    """
    from onnx.helper import tensor_dtype_to_np_dtype

    shapes = _shapes(model, batch)
    outputs = {value.name for value in model.graph.output}
    tensors = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    tensors |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    read_whole = {
        name for node in model.graph.node for position, name in enumerate(node.input)
        if position or node.op_type != "Gather"
    }  # fmt: skip
    total = 0
    for name, kind in tensors.items():
        is_weight, dtype = name not in INPUTS and name not in outputs, tensor_dtype_to_np_dtype(kind)
        if is_weight and name not in read_whole:
            continue
        if None in shapes.get(name, (None,)):
            raise UsageError(f"the shape of {name} depends on more than the batch; export with fixed sizes")
        size = float_bytes if is_weight and float_bytes and dtype.kind == "f" else dtype.itemsize
        total += math.prod(shapes[name]) * size
    return total


def stage_flops(work: dict, stage: str) -> float:
    """The part of `work_of`'s FLOPs that falls into a stage, such as "vision" or "vision, NPU"; all of them for what is
    not a stage."""
    vision, text = (
        sum(flops for name, flops in work["parts"].items() if name.startswith(prefix)) for prefix in ("vision", "text")
    )
    rest = work["flops"] - vision - text
    return {"vision": vision, "text": text, "detector": rest, "text and detector": text + rest}.get(
        stage.partition(",")[0], work["flops"]
    )


def graph_of(model_path: Path | None, manifest: dict | None) -> Path | None:
    """What a model's work can be counted on, or None.

    Args:
        manifest: what was written beside the model. An OM's names the ONNX file it was compiled from, which counts if
            it is still that file; those of a split model's OMs name the parts of a split export, whose folder it is.
    """
    if model_path is None or not is_om(model_path):
        return model_path
    if is_split(model_path):
        manifests = (manifest or {}).get("parts", {})
        graphs = [graph_of(om, manifests.get(part)) for part, om in split_parts(model_path).items()]
        return None if None in graphs else graphs[0].parent
    named = (manifest or {}).get("onnx")
    if not named:
        return None
    path = model_path.absolute().parent.parent / named["path"]  # relative to the folder that holds ./sam3_om
    if path.is_file() and files.sha256(path) == named["sha256"].get(path.name):
        return path
    logger.warning("%s: compiled from %s, which is gone or another file by now", model_path, named["path"])
    return None


def _work_of_parts(path: Path, float_bytes: int | None) -> dict:
    works = [work_of(file, 1, float_bytes) for part, file in split_parts(path).items() if part in SPLIT]
    total = {kind: dict(sum((Counter(work[kind]) for work in works), Counter())) for kind in ("operators", "parts")}
    return total | {
        "flops": sum(work["flops"] for work in works),
        "least_bytes": sum(work["least_bytes"] for work in works),
        "graph": [work["graph"] for work in works],
    }


def work_of(path: Path, batch: int, float_bytes: int | None = None) -> dict:
    """What one picture costs when `batch` of them run at once, and which graph says so.

    Args:
        path: an ONNX file, a split folder, or a checkpoint folder, whose graph is traced as the export would do it. A
            split model's parts are added up: what a picture with one phrase costs.
        float_bytes: as in `least_bytes`.

    Returns:
        `flops`; the same by "operators" and by "parts"; `least_bytes`; `graph` with path, SHA-256 and opsets.

    Raises:
        UsageError: the graph cannot be read, or not counted.
    """
    if is_split(path):
        return _work_of_parts(path, float_bytes)
    if path.is_dir():
        from sam3_utils import checkpoint, text_graph  # torch, which a host with an NPU need not have

        logger.info("%s: tracing its graph, to count the work", path)
        model, digest = text_graph.build(checkpoint.empty_model(path))[0]["single"], None
    else:
        model, digest = graph.load_structure(path), files.sha256(path)
    work = {kind: {name: value / batch for name, value in counts.items()}
            for kind, counts in count_flops(model, batch).items()}  # fmt: skip
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    return work | {
        "flops": sum(work["operators"].values()),
        "least_bytes": least_bytes(model, batch, float_bytes) / batch,
        "graph": {"path": str(path), "sha256": digest, "opset": opsets},
    }
