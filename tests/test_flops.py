# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Counted work against numbers worked out by hand and against PyTorch's own counter."""

import shutil
from collections import Counter

import onnx
import pytest
import torch
from conftest import TINY
from torch.utils.flop_counter import FlopCounterMode

from sam3_utils import checkpoint, flops, graph
from sam3_utils.cli import UsageError
from sam3_utils.contract import INPUTS, OUTPUTS, TAPS
from sam3_utils.static_model import TextBranch

BATCH = 2


def model_of(text: str, domains: str = '"": 17') -> onnx.ModelProto:
    """A model from ONNX's text form, `(inputs) => (outputs) { nodes }`."""
    return onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{domains}]> g {text}")


def total(model, batch: int = 1) -> int:
    counts = flops.count_flops(model, batch)
    assert sum(counts["operators"].values()) == sum(counts["parts"].values())
    return sum(counts["operators"].values())


# 2 x multiply-adds, written out from the operators' definitions.
SINGLE = {
    "matrix": ("(float[3,4] x, float[4,5] w) => (float[a,b] y) { y = MatMul (x, w) }", 2 * 3 * 5 * 4),
    "vector times matrix": ("(float[4] x, float[4,5] w) => (float[a] y) { y = MatMul (x, w) }", 2 * 5 * 4),
    "matrix times vector": ("(float[3,4] x, float[4] w) => (float[a] y) { y = MatMul (x, w) }", 2 * 3 * 4),
    "batches that broadcast": (
        "(float[7,1,3,4] x, float[2,4,5] w) => (float[a,b,c,d] y) { y = MatMul (x, w) }",
        2 * 7 * 2 * 3 * 5 * 4,
    ),
    "Gemm": ("(float[3,4] x, float[4,5] w, float[5] b) => (float[a,c] y) { y = Gemm (x, w, b) }", 2 * 3 * 5 * 4),
    "Gemm, both transposed": (
        "(float[4,3] x, float[5,4] w) => (float[a,c] y) { y = Gemm <transA=1, transB=1> (x, w) }",
        2 * 3 * 5 * 4,
    ),
    "Einsum": (
        '(float[2,6,4] x, float[2,4,3,5] w) => (float[a,b,c,d] y) { y = Einsum <equation="bqc,bchw->bqhw"> (x, w) }',
        2 * 2 * 6 * 4 * 3 * 5,
    ),
    # height (9 + 2 - 3) // 2 + 1 = 5, width (11 + 2 - 3) // 2 + 1 = 6; each output sums 4 / 2 channels x 3 x 3
    "Conv with groups, stride and pads": (
        "(float[2,4,9,11] x, float[6,2,3,3] w, float[6] b) => (float[a,c,d,e] y)"
        "{ y = Conv <group=2, strides=[2,2], pads=[1,1,1,1]> (x, w, b) }",
        2 * (2 * 6 * 5 * 6) * (2 * 3 * 3),
    ),
    # dilated: height 9 - (3 - 1) * 2 = 5, width 11 - 4 = 7
    "Conv with dilation": (
        "(float[1,1,9,11] x, float[1,1,3,3] w) => (float[a,c,d,e] y) { y = Conv <dilations=[2,2]> (x, w) }",
        2 * (5 * 7) * (3 * 3),
    ),
    # every one of 2 x 4 x 5 x 6 inputs meets 3 output channels of its group, 2 x 2 each
    "ConvTranspose with groups": (
        "(float[2,4,5,6] x, float[4,3,2,2] w) => (float[a,c,d,e] y)"
        "{ y = ConvTranspose <group=2, strides=[2,2]> (x, w) }",
        2 * (2 * 4 * 5 * 6) * (3 * 2 * 2),
    ),
    "no product": ("(float[3,4] x, float[3,4] w) => (float[a,b] y) { y = Mul (x, w) }", 0),
}  # fmt: skip


@pytest.mark.parametrize("text, expected", SINGLE.values(), ids=SINGLE)
def test_a_single_operator_costs_what_its_definition_says(text, expected):
    assert total(model_of(text)) == expected


def test_a_free_batch_is_replaced_and_the_model_is_left_alone():
    model = model_of("(float[N,3,4] pixel_values, float[4,5] w) => (float[N,3,5] y) { y = MatMul (pixel_values, w) }")
    before = model.SerializeToString()
    assert [total(model, batch) for batch in (1, 2, 5)] == [120, 240, 600]
    assert model.SerializeToString() == before


def test_weights_need_not_be_there(tmp_path, onnx_path):
    alone = tmp_path / "sam3.onnx"
    shutil.copy(onnx_path, alone)
    assert total(graph.load_structure(alone)) == total(onnx.load(onnx_path))


REFUSED = {
    "another batch": (
        "(float[4,3,4] pixel_values, float[4,5] w) => (float[4,3,5] y) { y = MatMul (pixel_values, w) }",
        "made for batches of 4, not 1",
    ),
    "another free size": (
        "(float[N,M] x, float[4,5] w) => (float[N,5] y) { y = MatMul (x, w) }", "more than the batch",
    ),
    "sizes that depend on values": (
        "(float[3,4] x, float[5,2] w) => (float[a,b] y) { i = NonZero (x) t = Transpose (i) f = Cast <to=1> (t)"
        " s = Transpose (w) y = MatMul (f, s) }",
        "more than the batch",
    ),
    "a rank that depends on values": (
        "(float[3,4] x, int64[2] sizes, float[4,2] w) => (y)"
        "{ s = Unique (sizes) r = Reshape (x, s) y = MatMul (r, w) }",
        "more than the batch",
    ),
    "shapes that contradict": (
        "(float[3,4] x, float[5,6] w) => (float[a,b] y) { y = MatMul (x, w) }", "contradict each other",
    ),
    "a product that is not counted": (
        "(int8[3,4] x, int8[4,5] w) => (int32[3,5] y) { y = MatMulInteger (x, w) }", "MatMulInteger",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_counted_is_refused_not_left_out(text, message):
    with pytest.raises(UsageError, match=message):
        flops.count_flops(model_of(text), 1)


def test_a_fused_operator_of_another_domain_is_refused():
    text = "(float[3,4] x, float[4,5] w) => (float[3,5] y) { y = com.microsoft.FusedMatMul (x, w) }"
    with pytest.raises(UsageError, match="FusedMatMul"):
        flops.count_flops(model_of(text, '"": 17, "com.microsoft": 1'), 1)


# PyTorch's counter sees what ran: transposed, stacked or fused, a product is a product.
KIND = {"Conv": "convolution", "ConvTranspose": "convolution", "MatMul": "product", "Gemm": "product"}
TORCH_KIND = {"aten.convolution": "convolution", "aten.bmm": "product", "aten.mm": "product", "aten.addmm": "product"}


def torch_counts(module, *arguments, **named) -> dict[str, Counter]:
    """Module path -> kind -> FLOPs, of one run."""
    with FlopCounterMode(display=False, depth=20) as counter, torch.no_grad():
        module(*arguments, **named)
    found = {}
    for path, counts in counter.get_flop_counts().items():
        found[path] = Counter()
        for operator, count in counts.items():
            found[path][TORCH_KIND[str(operator)]] += count
    return found


@pytest.fixture(scope="module")
def inputs():
    ids = torch.ones(BATCH, 32, dtype=torch.long)
    return {"pixel_values": torch.zeros(BATCH, 3, 224, 224), "input_ids": ids, "attention_mask": ids}


@pytest.fixture(scope="module")
def exported_counts(onnx_path):
    return flops.count_flops(graph.load_structure(onnx_path), BATCH)


def test_the_exported_graph_costs_exactly_what_pytorch_counts_for_the_module_it_was_traced_from(
    exported_counts, inputs
):
    counted = torch_counts(TextBranch(checkpoint.load_model(TINY)), **inputs)
    parts = {
        path.removeprefix("TextBranch."): sum(kinds.values()) for path, kinds in counted.items() if path.count(".") == 1
    }
    assert exported_counts["parts"] == {part: count for part, count in parts.items() if count}
    by_kind = Counter()
    for operator, count in exported_counts["operators"].items():
        by_kind[KIND[operator]] += count
    assert by_kind == counted["Global"]


def test_against_transformers_the_graph_saves_what_nobody_reads_and_nothing_else(exported_counts, inputs):
    """Eager attention, so that PyTorch's counter sees its products. Parts without a difference must agree exactly."""
    model = checkpoint.load_model(TINY)
    model.set_attn_implementation("eager")
    counted = {
        path.removeprefix("Sam3Model."): sum(kinds.values()) for path, kinds in torch_counts(model, **inputs).items()
    }
    parts = exported_counts["parts"]
    # The neck's coarsest level goes to other branches only.
    assert parts["vision_encoder"] == counted["vision_encoder"] - counted["vision_encoder.neck.fpn_layers.3"]
    # CLIP's pooled feature is not used; what is, goes through a projection outside of transformers' text_encoder.
    unused = counted["text_encoder.text_projection"]
    assert parts["text_encoder"] == counted["text_encoder"] - unused + counted["text_projection"]
    assert parts["detr_encoder"] == counted["detr_encoder"]
    assert parts["mask_decoder"] == counted["mask_decoder"]
    # transformers scores and boxes the queries of all three decoder layers, and returns those of the last one.
    queries, hidden, layers = 16, 64, 3
    saved = counted["dot_product_scoring.query_proj"] * (layers - 1) // layers
    saved += (layers - 1) * 2 * BATCH * queries * hidden  # their products with the text
    masked_mean = 2 * BATCH * 32 * hidden  # of the text: a product in the graph, a sum in transformers
    assert parts["dot_product_scoring"] == counted["dot_product_scoring"] - saved + masked_mean
    boxes_outside = counted["Global"] - sum(count for path, count in counted.items() if path in PARTS)
    assert 0.9 < parts["detr_decoder"] / (counted["detr_decoder"] + boxes_outside) < 1
    assert 0.99 < sum(parts.values()) / counted["Global"] < 1


PARTS = (
    "vision_encoder", "text_encoder", "text_projection", "detr_encoder", "detr_decoder", "dot_product_scoring",
    "mask_decoder",
)  # fmt: skip


def test_facebook_sam3_takes_6_05_tflop_a_picture():
    """Its default configuration on the meta device: structure only. 6.05 TFLOP: 5.61 of them are the picture's."""
    from transformers import Sam3Config, Sam3Model

    with torch.device("meta"):
        sam3 = Sam3Model(Sam3Config()).eval()
    vision = torch_counts(sam3.vision_encoder, torch.zeros(1, 3, 1008, 1008, device="meta"))
    vision = {path.removeprefix("Sam3VisionModel."): sum(kinds.values()) for path, kinds in vision.items()}
    shapes = {"pixel_values": (2, 3, 1008, 1008), "input_ids": (2, 32), "attention_mask": (2, 32)}
    traced = graph.trace(
        TextBranch(sam3).to("meta"), {name: (INPUTS[name][0], shapes[name]) for name in INPUTS}, [*OUTPUTS, *TAPS]
    )
    counts = flops.count_flops(traced, 1)
    assert counts["parts"]["vision_encoder"] == vision["Global"] - vision["neck.fpn_layers.3"]
    assert sum(counts["operators"].values()) == pytest.approx(6.05e12, rel=1e-3)


def test_least_bytes_are_weights_inputs_and_outputs_once():
    model = model_of(
        "(float[N,3,2,2] pixel_values, int64[N,32] input_ids, float[11,7] table) => (float[N,3,2,5] y, float[N,32,7] z)"
        "<float[2,5] w = {0,0,0,0,0,0,0,0,0,0}> { y = MatMul (pixel_values, w) z = Gather (table, input_ids) }"
    )
    # float32 pictures, int64 tokens, both outputs; the 2 x 5 weights; of the table only rows are read
    moved = 2 * (3 * 2 * 2 * 4 + 32 * 8 + 3 * 2 * 5 * 4 + 32 * 7 * 4)
    assert flops.least_bytes(model, 2) == moved + 2 * 5 * 4
    assert flops.least_bytes(model, 2, float_bytes=2) == moved + 2 * 5 * 2


def test_an_output_of_unknown_rank_has_no_bytes():
    model = model_of("(float[3,4] x, int64[2] sizes) => (float y) { s = Unique (sizes) y = Reshape (x, s) }")
    with pytest.raises(UsageError, match="the shape of y"):
        flops.least_bytes(model, 1)
