# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The structure of the graph: what is not in it, how many nodes a layer costs, and what their names say."""

import re
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import TINY
from onnx import TensorProto, helper

from sam3_utils import graph, text_graph
from sam3_utils.checkpoint import load_processor
from sam3_utils.compare import random_feeds
from sam3_utils.contract import OUTPUTS
from sam3_utils.differences import output_differences

MOVING = ("Transpose", "Slice", "Concat", "Gather")
DYNAMIC = {"If", "Loop", "Scan", "Shape", "Range", "ConstantOfShape", "CumSum", "Mod", "IsNaN", "NonZero", "Einsum"}


def structure(layers: dict[str, int], global_layers: list[int]):
    """The graph of `Sam3Config`'s defaults, facebook/sam3's sizes, with fewer layers; no weight exists."""
    from transformers import Sam3Config, Sam3Model

    config = Sam3Config()
    backbone = config.vision_config.backbone_config
    backbone.num_hidden_layers, backbone.global_attn_indexes = layers["vit"], global_layers
    config.text_config.num_hidden_layers = layers["text"]
    config.detr_encoder_config.num_layers = layers["encoder"]
    config.detr_decoder_config.num_layers = layers["decoder"]
    with torch.device("meta"):
        sam3 = Sam3Model(config).eval()
    return text_graph.build(sam3)[0]["single"]


@pytest.fixture(scope="module")
def full_width():
    return structure({"vit": 5, "text": 2, "encoder": 2, "decoder": 3}, [2, 4])


def test_nothing_dynamic_wide_or_complex_is_in_the_graph_of_the_full_width(full_width):
    assert not {node.op_type for node in full_width.graph.node} & DYNAMIC
    types = graph.infer_shapes(full_width, 1)
    tensors = {name: dtype for name, (dtype, _) in types.items()}
    assert set(tensors.values()) <= {TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32}
    wide = {name for name, dtype in tensors.items() if dtype == TensorProto.INT64} - {"input_ids", "attention_mask"}
    constants = {tensor.name for tensor in full_width.graph.initializer}
    assert wide <= constants  # shapes, axes, sizes of splits
    casts = [node for node in full_width.graph.node if node.op_type == "Cast"]
    assert sorted(node.input[0] for node in casts) == ["attention_mask", "input_ids"]


def test_every_shape_is_a_number_but_for_the_batch(full_width):
    """Found at batch 2 and 5: each size is either the same, or a multiple of the batch in one place only."""
    at_2, at_5 = graph.infer_shapes(full_width, 2), graph.infer_shapes(full_width, 5)
    for name, (_, small) in at_2.items():
        large = at_5[name][1]
        assert None not in small and None not in large, name
        changed = [(a, b) for a, b in zip(small, large, strict=True) if a != b]
        assert len(changed) <= 1 and all(5 * a == 2 * b for a, b in changed), (name, small, large)
        assert len(small) <= 8


def counts(model, prefix: str = "") -> tuple[int, int]:
    """Nodes whose name begins like this, and how many of them only move data."""
    found = [node.op_type for node in model.graph.node if node.name.startswith(prefix)]
    return len(found), sum(operator in MOVING for operator in found)


def test_nodes_of_facebook_sam3_in_all_and_per_layer(full_width):
    """Counted in models of full width and few layers; the sums for the full depth follow from them.

    Straight export has 12,724 nodes, 1,053 of them Transpose. What moves data and is left in a ViT layer: 3 Transposes
    (q, k, v to heads; k for the product; heads back to tokens) and 2 Concats (rotation of q and of k).
    """
    shallow = structure({"vit": 1, "text": 1, "encoder": 1, "decoder": 2}, [])
    layers = {
        part: counts(full_width, f"{part}/layers.1/") for part in ("vision_encoder", "text_encoder", "detr_encoder")
    }
    # With all that lies between two decoder layers: the queries' self-attention, position, box bias and refinement.
    layers["detr_decoder"] = tuple(
        deep - less for deep, less in zip(counts(full_width, "detr_decoder/"), counts(shallow, "detr_decoder/"))
    )
    assert layers == {
        "vision_encoder": (39, 5), "text_encoder": (30, 3), "detr_encoder": (51, 8), "detr_decoder": (134, 15)
    }  # fmt: skip
    # Here windows are left and entered twice, there four times: a Reshape, Transpose, Reshape each way.
    missing = {"vision_encoder": 32 - 5, "text_encoder": 24 - 2, "detr_encoder": 6 - 2, "detr_decoder": 6 - 3}
    nodes, moving = counts(full_width)
    nodes += 4 * 3 + sum(missing[part] * layers[part][0] for part in layers)
    moving += 4 * 1 + sum(missing[part] * layers[part][1] for part in layers)
    assert (nodes, moving) == (3168, 380)


def test_node_names_are_readable_unique_and_in_reading_order(full_width):
    names = [node.name for node in full_width.graph.node]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]\w*(\.\d+)?(/\w+(\.\d+)?)+", name) for name in names)
    assert {"vision_encoder/layers.1/attention/qkv/MatMul", "vision_encoder/neck.0/scale_layers.0/ConvTranspose"} < {
        *names
    }
    parts = list(dict.fromkeys(name.split("/")[0] for name in names))
    assert parts == [
        "text_mask", "vision_encoder", "text_encoder", "detr_encoder", "detr_decoder", "dot_product_scoring",
        "mask_decoder", "box_corners",
    ]  # fmt: skip


def test_the_text_mask_is_made_once_and_shared_by_all_layers(full_width):
    consumers = Counter(name for node in full_width.graph.node for name in node.input)
    bias = next(node.output[0] for node in full_width.graph.node if node.name == "text_mask/Reshape")
    # 2 encoder layers, 3 decoder layers, the mask decoder, and the sum with the causal bias that the text layers share
    assert consumers[bias] == 2 + 3 + 1 + 1
    causal = next(node.output[0] for node in full_width.graph.node if "text_encoder.causal_bias" in node.input)
    assert consumers[causal] == 2


def test_the_export_is_valid_for_the_checker_and_strict_shape_inference(exported):
    for folder in exported.values():
        onnx.checker.check_model(str(folder / "sam3.onnx"), full_check=True)
        model = onnx.load(folder / "sam3.onnx", load_external_data=False)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]


def with_atc_s_rounding(path, target):
    """A copy of the model in which every Resize rounds as ATC does, whatever the model says."""
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "Resize":
            kept = [attribute for attribute in node.attribute if attribute.name != "nearest_mode"]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute("nearest_mode", "round_prefer_ceil")])
    onnx.save(model, target)
    return sum(node.op_type == "Resize" for node in model.graph.node)


def test_answers_stay_pytorch_s_when_every_resize_rounds_as_atc_does(onnx_path, tmp_path, tiny_reference):
    assert with_atc_s_rounding(onnx_path, tmp_path / "atc.onnx") == 2
    for batch in (1, 2, 4):
        feeds, expected = tiny_reference(batch)
        found = run(tmp_path / "atc.onnx", feeds)
        for name, row in output_differences(expected, found).items():
            assert row["max_abs"] <= 1e-4, (batch, name, row)


def test_the_rounding_matters_for_a_resize_as_pytorch_exports_it(onnx_path, tmp_path, tiny_reference):
    """The counter-example: asymmetric coordinates, equal to PyTorch with floor, are wrong under ATC's rule."""
    model = onnx.load(onnx_path)
    for node in model.graph.node:
        if node.op_type == "Resize":
            for attribute in node.attribute:
                value = {"coordinate_transformation_mode": b"asymmetric", "nearest_mode": b"floor"}.get(attribute.name)
                attribute.s = value or attribute.s
    onnx.save(model, tmp_path / "straight.onnx")
    with_atc_s_rounding(tmp_path / "straight.onnx", tmp_path / "atc.onnx")
    feeds, expected = tiny_reference(1)
    differences = {
        name: output_differences(expected, run(tmp_path / f"{name}.onnx", feeds))["pred_masks"]["max_abs"]
        for name in ("straight", "atc")
    }
    assert differences["straight"] <= 1e-4 and differences["atc"] >= 1.0


def run(path, feeds) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip(OUTPUTS, session.run(list(OUTPUTS), feeds)))


@pytest.fixture(scope="module")
def tiny_reference():
    """batch -> (feeds, PyTorch's outputs) of the tiny checkpoint."""
    from sam3_utils.backends import open_model

    model, processor = open_model(TINY), load_processor(TINY)

    def answer(batch: int):
        feeds = random_feeds(processor, 224, batch, seed=batch)
        return feeds, model.infer(feeds)

    return answer


def test_weights_of_one_shape_are_not_taken_for_copies_of_each_other():
    """Traced without values, two weights look the same to the exporter; each must come back as itself."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval().to("meta")
    model = graph.trace(module, {"x": ("float32", (2, 4))}, ["y"])
    graph.tidy_names(model)
    assert {value.name for value in model.graph.input} == {"x", "0.weight", "0.bias", "1.weight", "1.bias"}
    used = {name for node in model.graph.node for name in node.input}
    assert {"0.weight", "0.bias", "1.weight", "1.bias"} <= used


def test_a_weight_that_is_transposed_for_one_use_only_is_left_alone():
    """y = x W^T + W: folding the Transpose into W would change the sum."""

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))

        def forward(self, x):
            return x @ self.weight.t() + self.weight

    model = graph.trace(Both().eval(), {"x": ("float32", (2, 4, 4))}, ["y"])
    assert graph.fold_weight_transposes(model) == {}
    assert [node.op_type for node in model.graph.node].count("Transpose") == 1


def test_saved_weights_are_aligned_complete_and_small_ones_inline(tmp_path):
    """47 x 32 numbers do not end where the next weight may begin."""
    module = torch.nn.Sequential(torch.nn.Linear(47, 33), torch.nn.Linear(33, 17)).eval()
    values = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    model = graph.trace(module.to("meta"), {"x": ("float32", (2, 3, 47))}, ["y"])
    permutations = graph.fold_weight_transposes(model)
    assert set(permutations) == {"0.weight", "1.weight"}
    written = []
    graph.save(
        model, tmp_path / "m.onnx", lambda name: values[name].T if "weight" in name else values[name], written.append
    )
    stored = {
        tensor.name: tensor for tensor in onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.initializer
    }
    assert {name for name, tensor in stored.items() if tensor.external_data} == {"0.weight", "1.weight"}
    assert sum(written) == (47 * 33 + 33 * 17) * 4
    for name in values:
        array = onnx.numpy_helper.to_array(stored[name], str(tmp_path))
        assert np.array_equal(array, values[name].T if "weight" in name else values[name])
    offsets = [int(entry.value) for t in stored.values() for entry in t.external_data if entry.key == "offset"]
    assert all(offset % graph.ALIGNMENT == 0 for offset in offsets)
    x = np.random.default_rng(0).normal(size=(5, 3, 47)).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    expected = (x @ values["0.weight"].T + values["0.bias"]) @ values["1.weight"].T + values["1.bias"]
    assert np.allclose(session.run(None, {"x": x})[0], expected, atol=1e-5)
