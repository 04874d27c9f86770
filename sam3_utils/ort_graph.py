# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The exported graph in ONNX Runtime's own operators, for its CPU provider: made when a session opens, never stored.

Both operators are of the domain com.microsoft, which ATC and OpenVINO do not know.
"""

import copy

import numpy as np

from sam3_utils import graph
from sam3_utils.cli import UsageError


class _Links:
    """Who makes and who uses a tensor."""

    def __init__(self, model):
        self.producer = {name: node for node in model.graph.node for name in node.output}
        self.users: dict[str, list] = {value.name: [None] for value in model.graph.output}
        for node in model.graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)

    def next(self, node, *operators):
        """The nodes that follow `node` one by one if each is the only user and of these operators; otherwise None."""
        found = []
        for operator in operators:
            users = self.users.get(node.output[0], [])
            if len(users) != 1 or users[0] is None or users[0].op_type != operator:
                return None
            node = users[0]
            found.append(node)
        return found

    def made_by(self, name: str, operator: str):
        """The node of this operator that makes a tensor, or None."""
        node = self.producer.get(name)
        return node if node is not None and node.op_type == operator else None


def _permutation(node) -> list[int]:
    return list(node.attribute[0].ints)


def _axis(node, default: int) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "axis"), default)


def fuse_attention(model) -> int:
    """Attention without a bias as MultiHeadAttention, which goes over the scores in tiles that fit the cache.

    Written out, the scores of facebook/sam3's picture encoder are 1.7 GB in a layer that sees the whole picture, and
    softmax makes a second copy. ONNX Runtime's tiled form takes no bias: attention with one stays as it is.

        before   MatMul(q, Transpose(k)) -> Softmax -> MatMul(v) -> Transpose -> Reshape
        after    MultiHeadAttention(q, k, v), the heads of q, which has to be (N, tokens, hidden), put back first

    Returns:
        the number of places.
    """
    from onnx import helper, numpy_helper

    links = _Links(model)
    shapes = {name: shape for name, (_, shape) in graph.infer_shapes(model, batch=1).items()}
    replaced, sizes = {}, {}  # id of the last node -> the new ones; name -> what a Reshape makes
    for softmax in model.graph.node:
        scores = softmax.op_type == "Softmax" and _axis(softmax, -1) == -1 and links.made_by(softmax.input[0], "MatMul")
        turned = scores and links.made_by(scores.input[1], "Transpose")
        after = scores and links.next(softmax, "MatMul", "Transpose", "Reshape")
        if not turned or not after or links.next(scores, "Softmax") is None:
            continue
        product, back, merged = after
        query, value = scores.input[0], product.input[1]
        known = [shapes.get(name) or (None,) for name in (query, value)]
        if any(len(shape) != 4 or None in shape for shape in known):
            continue
        if product.input[0] != softmax.output[0] or _permutation(back) != [0, 2, 1, 3]:
            continue
        _, heads, tokens, head_dim = shapes[query]
        prefix, hidden = softmax.name.rpartition("/")[0] + "/fused", heads * head_dim
        if _permutation(turned) == [0, 1, 3, 2]:  # keys and values may keep their heads apart
            key = turned.input[0]
            nodes = [helper.make_node("Transpose", [query], [prefix + "_turned"], perm=[0, 2, 1, 3])]
            merges = {"_query": (prefix + "_turned", tokens)}
        elif (
            _permutation(turned) == [0, 2, 3, 1]
            and all(links.made_by(name, "Transpose") for name in (query, value))
            and all(_permutation(links.producer[name]) == [0, 2, 1, 3] for name in (query, value))
        ):
            length, nodes = shapes[value][2], []
            merges = {
                "_query": (links.producer[query].input[0], tokens),
                "_key": (turned.input[0], length),
                "_value": (links.producer[value].input[0], length),
            }
            key, value = prefix + "_key", prefix + "_value"
        else:
            continue
        for suffix, (name, length) in merges.items():  # (N, length, heads, head_dim) to (N, length, hidden)
            size = f"fused_{length}_{hidden}"
            sizes[size] = (-1, length, hidden)
            nodes.append(helper.make_node("Reshape", [name, size], [prefix + suffix]))
        nodes.append(
            helper.make_node(
                "MultiHeadAttention", [prefix + "_query", key, value], list(merged.output), prefix,
                domain="com.microsoft", num_heads=heads, scale=1.0,
            )
        )  # fmt: skip
        replaced[id(merged)] = nodes
    nodes = [new for node in model.graph.node for new in replaced.get(id(node), [node])]
    _set_nodes(model, nodes)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(size, dtype=np.int64), name) for name, size in sizes.items()
    )
    return len(replaced)


def fuse_int8(model) -> int:
    """Products with int8 weights as DynamicQuantizeMatMul, which rounds the other side to 8 bits as it runs, with one
    range for the whole tensor: the rows of a batch share it, so that an answer depends a little on its neighbours.

        before   MatMul(x, DequantizeLinear(weight, scale)) [-> Add(bias)]
        after    DynamicQuantizeMatMul(x, weight, scale, none, [bias])

    Left alone, ONNX Runtime would turn the weights back to float32 once and gain nothing.

    Returns:
        the number of places.
    """
    from onnx import TensorProto, helper

    links = _Links(model)
    constants = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    int8 = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT8}
    replaced: dict[int, list] = {}
    for node in model.graph.node:
        scaled = node.op_type == "MatMul" and links.made_by(node.input[1], "DequantizeLinear")
        # A zero point, or a scale for each row, is another thing than this operator takes.
        if not scaled or len(scaled.input) != 2 or scaled.input[0] not in int8 or _axis(scaled, 1) != 1:
            continue
        if constants[scaled.input[0]] != 2 or constants.get(scaled.input[1]) != 1:
            continue
        inputs, last = [node.input[0], *scaled.input, ""], node
        add = links.next(node, "Add")
        bias = add and [name for name in add[0].input if constants.get(name) == 1]
        if bias:
            inputs, last = [*inputs, bias[0]], add[0]
            replaced[id(node)] = []
        new = helper.make_node(
            "DynamicQuantizeMatMul", inputs, list(last.output), node.name + "_int8", domain="com.microsoft"
        )
        replaced[id(last)] = [new]
    _set_nodes(model, [new for node in model.graph.node for new in replaced.get(id(node), [node])])
    return sum(map(len, replaced.values()))


def _set_nodes(model, nodes: list) -> None:
    """Give the graph these nodes, without those that nobody uses any more."""
    used = {value.name for value in model.graph.output}
    kept = []
    for node in reversed(nodes):
        if used.intersection(node.output):
            used.update(node.input)
            kept.append(node)
    kept = [copy.deepcopy(node) for node in reversed(kept)]
    del model.graph.node[:]
    model.graph.node.extend(kept)


def for_cpu(model):
    """The graph as ONNX Runtime's CPU provider runs it best, and what was done, such as "attention fused".

    Args:
        model: onnx.ModelProto, its weights need not be loaded. It is changed.

    Returns:
        the names of the rewrites that found a place, a tuple of str.
    """
    from onnx import helper

    try:
        done = {"fused attention": fuse_attention(model), "int8 products": fuse_int8(model)}
    except UsageError:
        return ()  # not a graph of this kit: shapes that contradict each other are the contract's to report
    if any(done.values()):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return tuple(name for name, places in done.items() if places)
