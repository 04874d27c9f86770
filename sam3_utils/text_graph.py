# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""SAM3's text branch as an ONNX graph, with its weights or without, and the nodes of it that 16 bits hurt."""

import re
from functools import partial

import numpy as np

from sam3_utils import checkpoint, contract, graph, weights
from sam3_utils.static_model import REWRITES, TextBranch

# Where float16 costs most: (pattern of the node's name, is it a matrix product or convolution?). Box coordinates are
# spaced 0.0005 apart near 1 in float16, half a pixel of 1008; statistics over a whole feature level sum 2.6 million
# numbers; the neck's convolutions are where mixed precision was seen to lose SAM3's accuracy.
SENSITIVE = (
    (r"vision_encoder/neck\.\d/.*(ConvTranspose|Conv|MatMul)", True),
    (r"detr_decoder/query_position(_\d+)?/waves/.*", False),
    (r"detr_decoder/box_bias(_\d+)?/distances/.*", False),
    (r"detr_decoder/(Sigmoid|Clip|Add)[^/]*", False),
    (r"box_corners/.*", False),
    (r"mask_decoder/norms\.\d/.*", False),
    (r"exemplar_encoder/(box_embedding/waves|pooling/weights)/.*", False),
)
# What moves data has no precision of its own. (Split stays: between float32 nodes ATC would round box coordinates.)
MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Concat", "Gather", "Slice"}


def build(
    sam3,
    names=REWRITES,
    conv_transpose="operator",
    layer_norm="operator",
    parts=("single",),
    taps=False,
    exemplars=0,
    kind="float32",
):
    """Trace the text branch of a `Sam3Model`, whose modules are taken over and left on the meta device.

    Args:
        sam3: on the CPU, or on the meta device for the structure alone.
        names, conv_transpose, layer_norm: as in `static_model.TextBranch`.
        parts: which of `contract.PARTS` to make.
        taps: give the single graph the three feature levels `contract.TAPS` as further outputs.
        exemplars: how many boxes a list of box exemplars holds, for the part "exemplar" and a detector that goes with
            it; 0: none.
        kind: what weights are stored as, one of `weights.KINDS`.

    Returns:
        part -> tidy onnx.ModelProto, its weights still graph inputs; a function from a weight's name to its values, for
        `graph.save`; the number of nodes that were traced.
    """
    branch = TextBranch(sam3, names, conv_transpose, layer_norm, exemplars)
    values = branch.state_dict()
    sizes = checkpoint.tensor_sizes(sam3.config) | {"K": exemplars, "T": exemplars + 1}
    boxes, makers = (contract.BOXES, ("vision", "text", "exemplar")) if exemplars else ({}, ("vision", "text"))
    between = [name for part in makers for name in contract.PARTS[part][1]]
    inputs = contract.with_sizes(contract.INPUTS | boxes, sizes | {"N": 2})
    traced = graph.trace(branch.to("meta"), inputs, [*contract.OUTPUTS, *between])
    nodes = len(traced.graph.node)
    permutations = graph.fold_weight_transposes(traced)
    graph.fold_constants(traced)
    graph.tidy_names(traced)
    models = {}
    for part in parts:
        inputs, outputs = contract.PARTS[part]
        if part == "single" and taps:
            outputs = outputs | contract.PARTS["vision"][1]
        if part == "detector" and exemplars:
            inputs = inputs | contract.EXEMPLARS
        free = {"N": "N", "P": "N" if part == "single" else "P"}
        models[part] = graph.part_of(
            traced, *(contract.with_sizes(tensors, sizes | free) for tensors in (inputs, outputs))
        )

        if kind != "float32":
            weights.store(models[part], kind, values)

    def weight(name: str) -> np.ndarray:
        return values[name].permute(permutations.get(name, tuple(range(values[name].dim())))).numpy()

    return models, partial(weights.stored, weight=weight), nodes


def sensitive_nodes(model, target_device: str) -> list[str]:
    """Names of the nodes to keep in float32 when the rest is compiled to float16, for ATC's `--keep_dtype`.

    On 300I (Ascend310P) matrix products and convolutions are left out: its cube unit has no float32.
    """
    return [
        node.name
        for node in model.graph.node
        if node.op_type not in MOVES
        and any(
            re.fullmatch(pattern, node.name) and not (cube and target_device == "300I") for pattern, cube in SENSITIVE
        )
    ]
