# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What ATC would refuse or compute differently is named before it is started: node, reason and remedy."""

import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
from conftest import ROOT
from onnx import TensorProto, helper, numpy_helper

from sam3_utils import preflight
from sam3_utils.cli import UsageError


@pytest.fixture
def broken(onnx_path, tmp_path):
    """Change a copy of the exported model with a function, and return what the preflight says of it."""

    def check(change) -> str:
        model = onnx.load(onnx_path, load_external_data=False)
        shutil.copy(onnx_path.with_name("sam3.onnx.data"), tmp_path)
        change(model)
        (tmp_path / "sam3.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(UsageError) as error:
            preflight.check_model(tmp_path / "sam3.onnx")
        assert "\n" not in str(error.value)
        return str(error.value)

    return check


def node_of(model, op_type):
    return next(node for node in model.graph.node if node.op_type == op_type)


def replace_attribute(node, name, value):
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def test_the_exported_models_pass(exported):
    for folder in exported.values():
        assert len(preflight.check_model(folder / "sam3.onnx").graph.node) > 500


def test_an_opset_beyond_18_is_refused(broken):
    def change(model):
        model.opset_import[0].version = 19

    assert "opset 19: ATC takes 11 to 18 (E16002)" in broken(change)


def test_layer_normalization_below_opset_17_is_refused_by_node(broken):
    def change(model):
        model.opset_import[0].version = 16

    text = broken(change)
    assert "node vision_encoder/layer_norm/LayerNormalization and" in text
    assert "LayerNormalization: ATC has it for opset 17 to 18, the model says 16" in text


def test_a_second_opset_import_is_refused(broken):
    text = broken(lambda model: model.opset_import.append(helper.make_opsetid("pkg.torch", 1)))
    assert "opset_import has 2 entries (ai.onnx 17, pkg.torch 1), ATC takes one" in text and "E16005" in text


def test_a_loop_is_refused_and_named(broken):
    def change(model):
        body = helper.make_graph(
            [helper.make_node("Identity", ["going"], ["still"]), helper.make_node("Identity", ["x"], ["y"])],
            "body",
            [
                helper.make_tensor_value_info("count", TensorProto.INT64, []),
                helper.make_tensor_value_info("going", TensorProto.BOOL, []),
                helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
            ],
            [
                helper.make_tensor_value_info("still", TensorProto.BOOL, []),
                helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
            ],
        )
        model.graph.initializer.append(numpy_helper.from_array(np.array(1), "trips"))
        loop = helper.make_node("Loop", ["trips", "", "pred_logits"], ["looped"], "repeat", body=body)
        model.graph.node.append(loop)

    assert "node repeat: Loop: ATC has no such operator (E16002)" in broken(change)


@pytest.mark.parametrize(
    "operator, domain, reason",
    [
        ("Gelu", "", "Gelu: ATC has no such operator"),
        ("FusedMatMul", "com.microsoft", "FusedMatMul is of domain com.microsoft, ATC knows ai.onnx only"),
    ],
)
def test_operators_that_atc_does_not_have_are_refused_and_named(broken, operator, domain, reason):
    def change(model):
        node = node_of(model, "Erf")
        node.op_type, node.domain = operator, domain

    assert f"node vision_encoder/layers.0/mlp/activation_fn/Erf: {reason}" in broken(change)


@pytest.mark.parametrize(
    "attribute, value, reason",
    [
        ("coordinate_transformation_mode", "asymmetric", "nearest with asymmetric and round_prefer_ceil"),
        ("nearest_mode", "floor", "nearest with half_pixel and floor"),
        ("mode", "cubic", "mode cubic: ATC has nearest and linear only"),
    ],
)
def test_a_resize_that_atc_would_compute_differently_is_refused(broken, attribute, value, reason):
    text = broken(lambda model: replace_attribute(node_of(model, "Resize"), attribute, value))
    assert f"node mask_decoder/Resize: Resize: {reason}" in text


def test_a_resize_to_a_computed_size_is_refused(broken):
    def change(model):
        node = node_of(model, "Resize")
        model.graph.node.insert(0, helper.make_node("Shape", ["attention_mask"], ["size"], "size_of_mask"))
        node.input[:] = [node.input[0], "", "", "size"]

    assert "node mask_decoder/Resize: Resize: its size is computed while the model runs" in broken(change)


def test_a_shape_that_depends_on_the_numbers_is_refused(broken):
    def change(model):
        model.graph.node.append(helper.make_node("NonZero", ["attention_mask"], ["where"], "find_tokens"))

    assert "node find_tokens: NonZero: its shape depends on more than the batch" in broken(change)


def test_more_than_eight_dimensions_and_double_precision_are_refused(broken):
    def change(model):
        shape = numpy_helper.from_array(np.array([-1, 1, 1, 1, 1, 1, 1, 1, 32]), "nine")
        model.graph.initializer.append(shape)
        model.graph.node.append(helper.make_node("Reshape", ["attention_mask", "nine"], ["deep"], "too_deep"))
        model.graph.node.append(helper.make_node("Cast", ["pred_logits"], ["wide"], "to_double", to=TensorProto.DOUBLE))

    text = broken(change)
    assert "node too_deep: Reshape: 9 dimensions, ATC takes 8" in text
    assert "node to_double: double tensors" in text


def test_contradicting_shapes_are_refused(broken):
    def change(model):
        node = next(node for node in model.graph.node if node.name == "vision_encoder/layers.0/mlp/fc1/MatMul")
        node.input[1] = "vision_encoder.layers.0.mlp.fc2.weight"

    assert "contradict each other" in broken(change) and "vision_encoder/layers.0/mlp/fc1/MatMul" in broken(change)


@pytest.mark.parametrize("damage", ("missing", "truncated"))
def test_weights_that_are_missing_or_cut_short_are_refused(onnx_path, tmp_path, damage):
    shutil.copy(onnx_path, tmp_path)
    if damage == "truncated":
        data = onnx_path.with_name("sam3.onnx.data").read_bytes()
        (tmp_path / "sam3.onnx.data").write_bytes(data[:-1])
    with pytest.raises(UsageError, match="are not beside it" if damage == "missing" else "bytes, sam3.onnx needs"):
        preflight.check_model(tmp_path / "sam3.onnx")


@pytest.mark.parametrize("location", ("/elsewhere/sam3.onnx.data", "../sam3.onnx.data"))
def test_weights_outside_of_the_model_s_folder_are_refused(broken, location):
    def change(model):
        tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
        next(entry for entry in tensor.external_data if entry.key == "location").value = location

    assert f"said to be in {location}: the place must be relative, below the model" in broken(change)


def in_a_branch(model, node, *initializers):
    """Put a node into both branches of an If."""
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)]
    body = helper.make_graph([node], "branch", [], outputs, list(initializers))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
    model.graph.node.append(
        helper.make_node("If", ["always"], ["chosen"], "choice", then_branch=body, else_branch=body)
    )


def external(name, dims, **entries):
    tensor = TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_a_branch_is_refused_and_what_is_in_it_named(broken):
    text = broken(lambda model: in_a_branch(model, helper.make_node("Gelu", ["pred_logits"], ["g"], "in_branch")))
    assert "node choice: If: what its branches give is not known before it runs" in text
    assert "node in_branch and 1 more: Gelu: ATC has no such operator" in text


def test_weights_of_a_branch_and_of_constant_nodes_must_be_there(broken):
    def change(model):
        far = external("far", [4], location="gone.bin", offset=0, length=16)
        in_a_branch(model, helper.make_node("Identity", ["far"], ["near"], "in_branch"), far)
        constant = helper.make_node("Constant", [], ["c"], "constant", value=external("", [2], location="/etc/passwd"))
        model.graph.node.append(constant)

    text = broken(change)
    assert "said to be in /etc/passwd: the place must be relative" in text
    assert "gone.bin" in text or "passwd" in text.split("must be relative")[1]


@pytest.mark.parametrize(
    "entries, text",
    [
        ({"offset": -64}, "offset must be non-negative"),
        ({"offset": "abc"}, "is damaged"),
        ({"length": 4}, "bytes, its entry says 4 from"),
        ({"offset": 2**40}, "bytes, sam3.onnx needs"),
    ],
)
def test_entries_that_are_not_where_the_weight_lies_are_refused(broken, entries, text):
    def change(model):
        tensor = next(tensor for tensor in model.graph.initializer if tensor.external_data)
        for key, value in entries.items():
            next(entry for entry in tensor.external_data if entry.key == key).value = str(value)

    assert text in broken(change)


def test_a_weight_without_a_length_has_that_of_its_shape(broken):
    def change(model):
        size = model.graph.initializer.add()
        size.CopyFrom(external("unsized", [2**20], location="sam3.onnx.data", offset=2**20))

    assert "bytes, sam3.onnx needs 5242880" in broken(change)


def test_a_batch_that_is_written_into_the_graph_is_refused(broken):
    """Shapes at a batch of 1 alone would agree."""

    def change(model):
        for tensor in model.graph.initializer:
            values = numpy_helper.to_array(tensor) if tensor.data_type == TensorProto.INT64 else None
            if values is not None and values.ndim == 1 and len(values) > 1 and values[0] == -1:
                tensor.CopyFrom(numpy_helper.from_array(np.array([1, *values[1:]]), tensor.name))

    text = broken(change)
    assert "contradict each other" in text or "do not have the inputs' batch" in text


def test_an_output_that_forgets_the_batch_is_refused(broken):
    def change(model):
        node = next(node for node in model.graph.node if "presence_logits" in node.output)
        node.output[0] = "all"
        model.graph.node.append(helper.make_node("ReduceMean", ["all"], ["presence_logits"], "mean", axes=[0]))

    assert "outputs presence_logits do not have the inputs' batch" in broken(change)


def test_an_output_s_shape_is_what_the_nodes_make_not_what_the_file_says(broken):
    def change(model):
        node = next(node for node in model.graph.node if "presence_logits" in node.output)
        node.output[0] = "flat"
        model.graph.initializer.append(numpy_helper.from_array(np.array([2]), "last"))
        model.graph.node.append(helper.make_node("Unsqueeze", ["flat", "last"], ["presence_logits"], "deeper"))

    assert "output presence_logits has 3 dimensions, not 2" in broken(change)


def test_an_output_that_no_node_makes_is_refused(broken):
    def change(model):
        next(node for node in model.graph.node if "pred_boxes" in node.output).output[0] = "boxes"

    assert "output pred_boxes is made by no node" in broken(change)


def test_functions_of_a_model_are_refused(broken):
    def change(model):
        model.functions.append(
            helper.make_function("", "Erf", ["x"], ["y"], [helper.make_node("Tanh", ["x"], ["y"])], model.opset_import)
        )

    assert "1 functions of its own, which ATC does not know" in broken(change)


def test_an_operator_that_ended_before_the_model_s_opset_is_refused(broken):
    def change(model):
        model.graph.node.append(helper.make_node("Scatter", ["pred_logits"], ["s"], "old"))

    assert "node old: Scatter: ATC has it for opset 9 to 11, the model says 17" in broken(change)


def test_a_model_without_onnx_s_own_operators_is_refused(broken):
    def change(model):
        model.opset_import[0].domain = "pkg.torch"

    assert "opset_import has 1 entries (pkg.torch 17), ATC takes one, of ai.onnx" in broken(change)


@pytest.mark.parametrize("kind", (TensorProto.DOUBLE, TensorProto.COMPLEX64, TensorProto.COMPLEX128))
def test_weights_of_types_that_atc_hardly_knows_are_refused(broken, kind):
    def change(model):
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(2, dtype), "wide"))

    assert f"node wide: {TensorProto.DataType.Name(kind).lower()} weights" in broken(change)


def test_a_resize_with_antialias_is_refused(broken):
    text = broken(lambda model: replace_attribute(node_of(model, "Resize"), "antialias", 1))
    assert "mode nearest with antialias: ATC has nearest and linear only" in text


def test_a_nearest_resize_in_five_dimensions_is_refused(broken):
    def change(model):
        model.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, 1, 2, 2], "f4"), "five"))
        node = helper.make_node(
            "Resize", ["pred_masks", "", "five"], ["r"], "deep", mode="nearest", nearest_mode="round_prefer_ceil"
        )
        model.graph.node.append(node)

    assert "node deep: Resize: nearest in five dimensions" in broken(change)


@pytest.mark.parametrize("attribute, value", (("kernel_shape", [3, 256]), ("strides", [64, 1])))
def test_convolutions_beyond_atc_s_limits_are_refused(broken, attribute, value):
    text = broken(lambda model: replace_attribute(node_of(model, "Conv"), attribute, value))
    assert "Conv: kernel" in text and "ATC takes up to 255 and 63" in text


def test_scales_in_a_constant_node_are_constant(onnx_path, tmp_path):
    model = onnx.load(onnx_path, load_external_data=False)
    shutil.copy(onnx_path.with_name("sam3.onnx.data"), tmp_path)
    scales = {name for node in model.graph.node if node.op_type == "Resize" for name in node.input[2:] if name}
    for tensor in [tensor for tensor in model.graph.initializer if tensor.name in scales]:
        model.graph.initializer.remove(tensor)
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], f"{tensor.name}/C", value=tensor))
    (tmp_path / "sam3.onnx").write_bytes(model.SerializeToString())
    assert scales and preflight.check_model(tmp_path / "sam3.onnx")


def test_a_renamed_input_is_refused_with_both_sides(broken):
    def change(model):
        value = next(value for value in model.graph.input if value.name == "input_ids")
        value.name = "tokens"
        for node in model.graph.node:
            node.input[:] = ["tokens" if name == "input_ids" else name for name in node.input]

    text = broken(change)
    assert "input input_ids is missing" in text and "input tokens is unknown" in text and "Wanted:" in text


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "sam3.onnx").write_bytes(b"not a model")
    with pytest.raises(UsageError, match="cannot be read as ONNX|not an ONNX model"):
        preflight.check_model(tmp_path / "sam3.onnx")


def test_transformers_own_export_is_refused_for_what_atc_would_get_wrong(tmp_path):
    """The same weights through the exporter without this kit: shapes and sizes that are computed as it runs."""
    import torch
    from conftest import TINY

    from sam3_utils.checkpoint import load_model

    class Straight(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sam3 = load_model(TINY)

        def forward(self, *inputs):
            outputs = self.sam3(**dict(zip(INPUTS, inputs)))
            return tuple(outputs[name] for name in OUTPUTS)

    from sam3_utils.contract import INPUTS, OUTPUTS

    ones = torch.ones(2, 32, dtype=torch.int64)
    torch.onnx.export(
        Straight(), (torch.zeros(2, 3, 224, 224), ones, ones), tmp_path / "sam3.onnx", dynamo=False, opset_version=17,
        input_names=list(INPUTS), output_names=list(OUTPUTS), dynamic_axes={n: {0: "N"} for n in (*INPUTS, *OUTPUTS)},
    )  # fmt: skip
    with pytest.raises(UsageError) as error:
        preflight.check_model(tmp_path / "sam3.onnx")
    assert "node /sam3/mask_decoder/pixel_decoder/Resize and 1 more: Resize: its size is computed" in str(error.value)


def test_three_gigabytes_of_weights_are_checked_without_being_read(onnx_path, tmp_path):
    """A side file of 3 GB that takes no space: the check must not load it (3 GB resident), only its size counts."""
    model = onnx.load(onnx_path, load_external_data=False)
    large = model.graph.initializer.add(name="large", dims=[3 * 2**28], data_type=TensorProto.FLOAT)
    large.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "sam3.onnx.data"), ("offset", 0), ("length", 3 * 2**30)):
        large.external_data.add(key=key, value=str(value))
    (tmp_path / "sam3.onnx").write_bytes(model.SerializeToString())
    with open(tmp_path / "sam3.onnx.data", "wb") as stream:
        stream.truncate(3 * 2**30)
    code = "\n".join((
        "import sys, pathlib; from sam3_utils import preflight",
        "preflight.check_model(pathlib.Path(sys.argv[1]))",
        "print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])",
    ))  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "sam3.onnx")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 500_000  # KiB, its largest so far; Python with onnx takes about 150 MB
