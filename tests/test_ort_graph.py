# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The exported graph in ONNX Runtime's own operators gives the same answers, and finds every place."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from sam3_utils import graph, ort_graph
from sam3_utils.compare import random_feeds
from sam3_utils.contract import OUTPUTS


def run(model, feeds, folder):
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return dict(zip(OUTPUTS, session.run(list(OUTPUTS), feeds)))


def test_fused_attention_gives_the_written_out_answers(onnx_path, processor):
    """In every attention without a bias: the picture encoder's, and the self-attentions of DETR encoder and decoder."""
    model = graph.load_structure(onnx_path)
    softmaxes = [node.name for node in model.graph.node if node.op_type == "Softmax"]
    feeds = random_feeds(processor, 224, 2)
    expected = run(model, feeds, onnx_path.parent)
    assert ort_graph.for_cpu(model) == ("fused attention",)
    left = [node.name for node in model.graph.node if node.op_type == "Softmax"]
    fused = sum(node.op_type == "MultiHeadAttention" for node in model.graph.node)
    assert fused == len(softmaxes) - len(left) > 0
    assert fused == sum("vision_encoder" in name or "self_attn" in name for name in softmaxes)
    assert not any("vision_encoder" in name or "self_attn" in name for name in left)
    for name, array in run(model, feeds, onnx_path.parent).items():
        assert np.abs(array - expected[name]).max() <= 2e-5 * max(1, np.abs(expected[name]).max()), name


def attention(bias=False, extra_use=False, back=(0, 2, 1, 3)):
    """A graph of 2 heads, 3 tokens and 4 channels in each head: q, k and v are inputs."""
    nodes = [
        helper.make_node("Transpose", ["k"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "turned"], ["scores"]),
        helper.make_node("Softmax", ["biased" if bias else "scores"], ["weights"], "block/Softmax", axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["heads"]),
        helper.make_node("Transpose", ["heads"], ["together"], perm=list(back)),
        helper.make_node("Reshape", ["together", "size"], ["out"]),
    ]
    if bias:
        nodes.insert(2, helper.make_node("Add", ["scores", "b"], ["biased"]))
    inputs = [helper.make_tensor_value_info(name, 1, ["N", 2, 3, 4]) for name in "qkv"]
    outputs = [helper.make_tensor_value_info("out", 1, None)]
    outputs += [helper.make_tensor_value_info("scores", 1, None)] * extra_use
    constants = [numpy_helper.from_array(np.array([-1, 3, 8]), "size"), numpy_helper.from_array(np.ones(3, "f4"), "b")]
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, constants), opset_imports=[helper.make_opsetid("", 17)]
    )


def test_attention_by_a_formula():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 5, 2, 3, 4)).astype(np.float32)
    model = attention()
    model.ir_version = 8
    assert ort_graph.for_cpu(model) == ("fused attention",)
    assert [node.op_type for node in model.graph.node] == ["Transpose", "Reshape", "MultiHeadAttention"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, dict(q=q, k=k, v=v))[0]
    weights = np.exp(q @ k.swapaxes(2, 3))
    expected = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(5, 3, 8)
    assert np.abs(found - expected).max() <= 1e-6


@pytest.mark.parametrize("change", ({"bias": True}, {"extra_use": True}, {"back": (0, 1, 2, 3)}))
def test_what_only_looks_like_plain_attention_is_left_alone(change):
    model = attention(**change)
    before = model.SerializeToString()
    assert ort_graph.for_cpu(model) == ()
    assert onnx.ModelProto.FromString(before).graph.node == model.graph.node


@pytest.mark.parametrize("change", ("free", "axis"))
def test_attention_of_unknown_sizes_or_over_another_axis_is_left_alone(change):
    model = attention()
    if change == "free":
        for value in model.graph.input:
            value.type.tensor_type.shape.dim[2].dim_param = "tokens"
    else:
        model.graph.node[2].attribute[0].i = 2
    assert ort_graph.for_cpu(model) == ()


def int8_product(*zero_point, axis=1, scale=(2,), dtype=np.int8):
    """x (N, 3) times a weight of 3 x 2 stored in 8 bits."""
    constants = [
        numpy_helper.from_array(np.array([[1, -2], [3, 4], [-5, 6]]).astype(dtype), "w"),
        numpy_helper.from_array(np.full(scale, 0.5, "f4"), "s"),
        *(numpy_helper.from_array(np.full(scale, value, dtype), "z") for value in zero_point),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", [tensor.name for tensor in constants], ["d"], axis=axis),
        helper.make_node("MatMul", ["x", "d"], ["y"], "product"),
    ]
    values = [helper.make_tensor_value_info(name, 1, ["N", size]) for name, size in (("x", 3), ("y", 2))]
    body = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_product_in_8_bits_is_near_the_exact_one():
    model = int8_product()
    assert ort_graph.for_cpu(model) == ("int8 products",)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.array([[1, 2, 3], [-3, 0.5, 1]], np.float32)
    expected = x @ (np.array([[1, -2], [3, 4], [-5, 6]]) * 0.5)
    assert (
        np.abs(session.run(None, {"x": x})[0] - expected).max() <= 3 / 255 * 6 * 1.01
    )  # half a step of x, which spans 6, times the largest column


@pytest.mark.parametrize(
    "model",
    (int8_product(1), int8_product(axis=0, scale=(3,)), int8_product(dtype=np.uint8), int8_product(scale=())),
    ids=("zero point", "a scale for each row", "unsigned", "one scale"),
)
def test_other_8_bit_weights_are_left_to_onnx_runtime(model):
    assert ort_graph.for_cpu(model) == ()


def test_a_graph_whose_shapes_contradict_each_other_is_left_to_other_checks():
    model = attention()
    model.graph.node[1].input[1] = "size"
    assert ort_graph.for_cpu(model) == ()
