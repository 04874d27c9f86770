# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""SAM3's text and click branches as ONNX graphs, with their weights or without, and the nodes that 16 bits hurt."""

import re
from functools import partial
from itertools import chain

from sam3_utils import checkpoint, contract, graph, weights
from sam3_utils.click_model import ClickBranch
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
    (r"click_neck/levels\.\d/.*(ConvTranspose|Conv|MatMul)", True),
    (r"click_decoder/points_embedding/.*", False),
)
# What moves data has no precision of its own. (Split stays: between float32 nodes ATC would round box coordinates.)
MOVES = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Concat", "Gather", "Slice"}


def _traced(branch, inputs: dict, outputs: list[str]):
    """A branch as one tidy graph, its weights still inputs; name -> values of those; how many nodes were traced."""
    values = branch.state_dict()
    traced = graph.trace(branch.to("meta"), inputs, outputs)
    nodes = len(traced.graph.node)
    permutations = graph.fold_weight_transposes(traced)
    graph.fold_constants(traced)
    graph.tidy_names(traced)
    for name, order in permutations.items():
        values[name] = values[name].permute(order)
    return traced, values, nodes


def build(
    sam3,
    names=REWRITES,
    conv_transpose="operator",
    layer_norm="operator",
    parts=("single",),
    taps=False,
    exemplars=0,
    kind="float32",
    tracker=None,
    clicks=0,
):
    """Trace the text branch of a `Sam3Model` and, where asked for, the click branch of a `Sam3TrackerModel`. Their
    modules are taken over and left on the meta device.

    Args:
        sam3: on the CPU, or on the meta device for the structure alone.
        names, conv_transpose, layer_norm: as in `static_model.TextBranch`.
        parts: which of `contract.PARTS` to make.
        taps: give the single graph the three feature levels `contract.TAPS` as further outputs.
        exemplars: how many boxes a list of box exemplars holds, for the part "exemplar" and a detector that goes with
            it; 0: none.
        kind: what weights are stored as: "float32", or a kind of `weights.store`.
        tracker, clicks: the model, and how many points a prompt holds, for the parts `contract.CLICKS` and a vision
            part that goes with them.

    Returns:
        part -> tidy onnx.ModelProto, its weights still graph inputs; a function from a weight's name to its values, for
        `graph.save`; the number of nodes that were traced.
    """
    sizes = checkpoint.tensor_sizes(sam3.config) | {"K": exemplars, "T": exemplars + 1, "L": clicks}
    boxes, makers = (contract.BOXES, ("vision", "text", "exemplar")) if exemplars else ({}, ("vision", "text"))
    between = {part: list(contract.PARTS[part][1]) for part in makers}
    between["vision"] += contract.BACKBONE
    inputs = contract.with_sizes(contract.INPUTS | boxes, sizes | {"N": 2})
    branch = TextBranch(sam3, names, conv_transpose, layer_norm, exemplars)
    traced, values, nodes = _traced(branch, inputs, [*contract.OUTPUTS, *chain(*between.values())])
    source = dict.fromkeys(parts, traced)
    if clicks:
        width = tracker.mask_decoder.hidden_size
        sizes |= {"U": width // 8, "V": width // 4, "W": width}
        inputs = contract.with_sizes(contract.BACKBONE | contract.CLICK_PROMPT, sizes | {"P": 2, "N": 2})
        branch = ClickBranch(tracker, clicks, conv_transpose, layer_norm)
        traced, more, count = _traced(branch, inputs, [*contract.CLICK_OUTPUTS, *contract.CLICK_FEATURES])
        source |= dict.fromkeys(contract.CLICKS, traced)
        values, nodes = values | more, nodes + count
    models = {}
    for part in parts:
        inputs, outputs = contract.PARTS[part]
        if part == "single" and taps:
            outputs = outputs | contract.PARTS["vision"][1]
        if part == "vision" and clicks:
            outputs = outputs | contract.BACKBONE
        if part == "detector" and exemplars:
            inputs = inputs | contract.EXEMPLARS
        free = {"N": "N", "P": "N" if part == "single" else "P"}
        models[part] = graph.part_of(
            source[part], *(contract.with_sizes(tensors, sizes | free) for tensors in (inputs, outputs))
        )
        if kind != "float32":
            weights.store(models[part], kind, values)
    return models, partial(weights.stored, weight=lambda name: values[name].numpy()), nodes


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
