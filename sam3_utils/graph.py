# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""ONNX files: simplify, fix shapes, keep the weights beside the graph, and check that they are all there."""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from sam3_utils.cli import UsageError


def simplify(model):
    """Fold constants and decided branches with onnxslim; the answers stay the same.

    Args:
        model: onnx.ModelProto with its weights loaded.
    """
    import onnxslim

    return onnxslim.slim(model)


def set_shapes(model, shapes: dict[str, tuple]) -> None:
    """Write the known shapes of graph inputs and outputs; a string is a named free dimension.

    The tracer leaves symbols such as `Einsumpred_masks_dim_1` where every number but the batch is known.
    """
    for value in (*model.graph.input, *model.graph.output):
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
            dim.Clear()
            if isinstance(size, str):
                dim.dim_param = size
            else:
                dim.dim_value = size


def operator_counts(model) -> dict[str, int]:
    """How often each operator occurs in the main graph, most frequent first."""
    return dict(Counter(node.op_type for node in model.graph.node).most_common())


def save(model, path: Path) -> None:
    """Write `<path>` and one `<path>.data` beside it that holds the weights, both whole or neither.

    Without the external file protobuf's 2 GB limit stops facebook/sam3 (3.4 GB); ATC and ONNX Runtime read the
    relative location.
    """
    import onnx

    data = path.name + ".data"
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as aside:
        onnx.save_model(
            model,
            os.path.join(aside, path.name),
            save_as_external_data=True,
            all_tensors_to_one_file=True,
            location=data,
        )
        if os.path.exists(os.path.join(aside, data)):  # onnx makes it 0600, unlike the graph
            shutil.copymode(os.path.join(aside, path.name), os.path.join(aside, data))
        # Never an old graph beside new weights, even for a moment.
        path.unlink(missing_ok=True)
        for name in (data, path.name):
            if os.path.exists(os.path.join(aside, name)):
                os.replace(os.path.join(aside, name), path.parent / name)


def load_structure(path: Path):
    """The graph without its weights.

    Raises:
        UsageError: the file is not ONNX.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise UsageError(f"{path}: cannot be read as ONNX ({error})") from None
    if not model.graph.node:
        raise UsageError(f"{path}: not an ONNX model (no nodes); export it again with sam3_export_onnx.py")
    return model


def external_files(model, folder: Path) -> dict[Path, int]:
    """The side files that `model` (loaded from `folder`) names, and how many bytes of each it needs.

    The locations are read from the model: other writers name side files freely.
    """
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data

    needed: dict[Path, int] = {}
    for tensor in model.graph.initializer:
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            path = folder / info.location
            needed[path] = max(needed.get(path, 0), (info.offset or 0) + (info.length or 0))
    return needed


def check_external_files(model, path: Path) -> list[Path]:
    """Check that the weights of the ONNX file at `path` are beside it and not cut short; returns the side files.

    Raises:
        UsageError: a side file is missing or too short; a runtime's own message would not name the remedy.
    """
    needed = external_files(model, path.parent)
    for file, size in needed.items():
        if not file.is_file():
            raise UsageError(f"{path}: its weights {file.name} are not beside it; move both files together")
        if file.stat().st_size < size:
            raise UsageError(f"{file}: {file.stat().st_size} bytes, {path.name} needs {size}; copy or export it again")
    return sorted(needed)
