# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The exported files: the contract's tensors, opset 17, IR 8, one weight file, and PyTorch's own answers."""

import json
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from conftest import TINY, error_line, run_script

import sam3_export_onnx
from sam3_utils import compare, contract, convert_om, preflight
from sam3_utils.cli import CheckFailed, UsageError
from sam3_utils.compare import verify_onnx


def export(tmp_path, *extra, device="300I"):
    return run_script(
        "sam3_export_onnx.py", "--target_device", device, "--model_path", TINY, "--output_dir", tmp_path, *extra
    )


@pytest.fixture(params=("300I", "800I"))
def folder(request, exported):
    return exported[request.param]


def test_the_graph_is_opset_17_ir_8_and_valid(folder):
    model = onnx.load(folder / "sam3.onnx", load_external_data=False)
    assert model.ir_version == 8
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]
    onnx.checker.check_model(str(folder / "sam3.onnx"))


def test_the_graph_has_the_contract_s_tensors_and_only_the_batch_free(folder):
    graph = onnx.load(folder / "sam3.onnx", load_external_data=False).graph

    def tensors(values):
        types = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT64: "int64"}
        return {
            value.name: (
                types[value.type.tensor_type.elem_type],
                tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
            )
            for value in values
        }

    numbers = {"S": 224, "Q": 16, "M": 64}
    for values, wanted in ((graph.input, contract.INPUTS), (graph.output, contract.OUTPUTS)):
        assert tensors(values) == {
            name: (dtype, tuple(numbers.get(size, size) for size in shape)) for name, (dtype, shape) in wanted.items()
        }
        assert [value.name for value in values] == list(wanted)


def test_weights_are_in_one_file_beside_the_graph(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "export_report.json", "keep_dtype.cfg", "sam3.onnx", "sam3.onnx.data"
    ]  # fmt: skip
    graph = onnx.load(folder / "sam3.onnx", load_external_data=False).graph
    locations = {
        entry.value for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    assert locations == {"sam3.onnx.data"}


def test_all_outputs_equal_pytorch_s_at_batch_1_2_3_and_4(folder):
    for batch, rows in verify_onnx(TINY, folder / "sam3.onnx", (1, 2, 3, 4), None).items():
        for name, row in rows.items():
            assert row["max_abs"] <= 1e-4, (batch, name, row)


@pytest.mark.parametrize(
    "options",
    [
        ("--conv_transpose", "matmul", "--layer_norm", "decomposed", "--taps"),
        ("--skip_rewrite", "patch_embed", "qkv", "rope", "windows"),
    ],
    ids=("other forms", "no rewrite"),
)
def test_every_form_of_the_graph_equals_pytorch_and_passes_preflight(tmp_path, options):
    result = export(tmp_path, *options)  # verifies at batch 1, 2 and 3, and runs the preflight
    assert result.returncode == 0, result.stderr
    model = onnx.load(tmp_path / "sam3.onnx", load_external_data=False)
    operators = {node.op_type for node in model.graph.node}
    kernels = {
        attribute.ints[0]
        for node in model.graph.node
        for attribute in node.attribute
        if node.op_type == "Conv" and attribute.name == "kernel_shape"
    }
    outputs = [value.name for value in model.graph.output]
    if "--taps" in options:
        assert not operators & {"ConvTranspose", "LayerNormalization"} and kernels == {1, 3}
        assert outputs == [*contract.OUTPUTS, *contract.TAPS]
    else:
        assert {"ConvTranspose", "LayerNormalization"} <= operators and kernels == {1, 3, 14}
        assert outputs == list(contract.OUTPUTS)


def test_both_targets_get_the_same_graph_and_another_list_of_float32_nodes(exported):
    graphs = {folder.joinpath(name).read_bytes() for folder in exported.values() for name in ("sam3.onnx",)}
    assert len(graphs) == 1
    lists = {device: (folder / "keep_dtype.cfg").read_text().split() for device, folder in exported.items()}
    nodes = {node.name: node.op_type for node in onnx.load(exported["300I"] / "sam3.onnx").graph.node}
    assert set(lists["300I"]) < set(lists["800I"]) <= set(nodes)
    products = {"MatMul", "Gemm", "Conv", "ConvTranspose"}
    assert not {nodes[name] for name in lists["300I"]} & products  # its cube unit has no float32
    assert {nodes[name] for name in set(lists["800I"]) - set(lists["300I"])} == {"Conv", "ConvTranspose"}


def test_weights_that_no_rewrite_touches_are_the_checkpoint_s_bytes(onnx_path):
    """An MLP of the ViT and one of the text encoder (transposed for MatMul), and a convolution as it is."""
    from safetensors.numpy import load_file

    weights = load_file(TINY / "model.safetensors")
    stored = {
        tensor.name: onnx.numpy_helper.to_array(tensor, str(onnx_path.parent))
        for tensor in onnx.load(onnx_path, load_external_data=False).graph.initializer
    }
    vision, text = "detector_model.vision_encoder.", "detector_model.text_encoder.text_model.encoder."
    for ours, theirs, transposed in (
        ("vision_encoder.layers.2.mlp.fc1.weight", vision + "backbone.layers.2.mlp.fc1.weight", True),
        ("vision_encoder.layers.2.mlp.fc1.bias", vision + "backbone.layers.2.mlp.fc1.bias", False),
        ("text_encoder.layers.1.mlp.fc2.weight", text + "layers.1.mlp.fc2.weight", True),
        ("vision_encoder.neck.0.proj2.weight", vision + "neck.fpn_layers.0.proj2.weight", False),
    ):
        expected = weights[theirs].astype(np.float32)  # the tiny checkpoint is stored in 16 bits
        assert stored[ours].tobytes() == (expected.T if transposed else expected).tobytes(), ours


def test_each_vit_layer_has_one_qkv_matmul_then_transpose_split_squeeze(folder):
    """The sequence that ATC's QKV fusions look for, in each of the four layers."""
    model = onnx.load(folder / "sam3.onnx")
    consumers = {}
    for node in model.graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    found = 0
    for node in model.graph.node:
        if node.op_type == "MatMul" and weights.get(node.input[1]) == (96, 288):
            chain = [node]
            while len(consumers[chain[-1].output[0]]) == 1:
                chain.append(consumers[chain[-1].output[0]][0])
                if chain[-1].op_type == "Split":
                    break
            assert [link.op_type for link in chain] == ["MatMul", "Add", "Reshape", "Transpose", "Split"]
            assert [consumers[part][0].op_type for part in chain[-1].output] == ["Squeeze"] * 3
            found += 1
    assert found == 4


def test_the_report_holds_figures_counts_versions_and_hashes(folder):
    report = json.loads((folder / "export_report.json").read_text())
    assert report["nodes"] < report["nodes_traced"]
    assert report["rewrites"] == ["patch_embed", "qkv", "rope", "windows"]
    assert report["target_device"] == folder.name.rsplit("_", 1)[1]
    assert set(report["verification"]["outputs"]) == set(contract.OUTPUTS)
    assert report["versions"]["transformers"] == "5.0.0"
    from sam3_utils.files import sha256

    for name in ("sam3.onnx", "sam3.onnx.data", "keep_dtype.cfg"):
        assert report["sha256"][name] == sha256(folder / name)
    assert report["sha256"]["model.safetensors"] == sha256(TINY / "model.safetensors")


def test_another_device_warns_and_an_unverified_export_says_so(tmp_path):
    result = export(tmp_path, "--verify", "never", device="310B")
    assert result.returncode == 0, result.stderr
    assert "310B is exported like 800I" in result.stderr and "not verified" in result.stderr
    assert json.loads((tmp_path / "export_report.json").read_text())["verification"] is None


def test_a_graph_with_other_numbers_fails_the_verification(tmp_path, onnx_path, monkeypatch):
    """One weight changed by a tenth: verification must see it, exit 1, and leave no report that vouches for it."""

    model = onnx.load(onnx_path)
    tensor = max(model.graph.initializer, key=lambda entry: np.prod(entry.dims))
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * 1.1, tensor.name))
    onnx.save(model, tmp_path / "sam3.onnx")
    with pytest.raises(CheckFailed, match="differs from PyTorch"):
        sam3_export_onnx.verify(TINY, tmp_path / "sam3.onnx", 1e-4)


def test_the_batch_that_violates_the_bound_is_not_hidden_by_a_larger_allowed_difference(monkeypatch):
    """5e-4 of 10 is allowed by 1e-4, 4e-4 of 1 is not."""

    class SameProcess:
        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

        def submit(self, function, *args):
            return SimpleNamespace(result=lambda: function(*args))

    rows = {1: {"max_abs": 5e-4, "max_ref": 10.0}, 2: {"max_abs": 4e-4, "max_ref": 1.0}}
    monkeypatch.setattr(compare, "verify_onnx", lambda *args: {batch: {"x": row} for batch, row in rows.items()})
    monkeypatch.setattr(sam3_export_onnx, "ProcessPoolExecutor", SameProcess)
    with pytest.raises(CheckFailed, match="more than 0.0001 in x"):
        sam3_export_onnx.verify(TINY, TINY, 1e-4)
    rows[2] = {"max_abs": 0.9e-4, "max_ref": 1.0}
    assert sam3_export_onnx.verify(TINY, TINY, 1e-4)["x"]["max_abs"] == 0.9e-4


def test_a_failed_verification_is_on_record(tmp_path, monkeypatch):
    """So that sam3_convert_om.sh refuses the graph, which lies there under its name."""

    def fail(*args):
        raise CheckFailed("differs from PyTorch")

    monkeypatch.setattr(sam3_export_onnx, "verify", fail)
    with pytest.raises(CheckFailed):
        sam3_export_onnx.main(["--target_device", "300I", "--model_path", str(TINY), "--output_dir", str(tmp_path)])
    report = json.loads((tmp_path / "export_report.json").read_text())
    assert report["verification"]["error"] == "differs from PyTorch"
    with pytest.raises(UsageError, match="the export was not verified: differs from PyTorch"):
        convert_om.read_export_report(tmp_path / "sam3.onnx", "300I")


def test_a_graph_that_the_preflight_refuses_is_not_left_under_its_name(tmp_path, monkeypatch):

    def refuse(path, part):
        raise UsageError("not for ATC")

    (tmp_path / "keep_dtype.cfg").write_text("of another export")
    monkeypatch.setattr(preflight, "check_model", refuse)
    with pytest.raises(UsageError, match="not for ATC"):
        sam3_export_onnx.main(["--target_device", "300I", "--model_path", str(TINY), "--output_dir", str(tmp_path)])
    assert not (tmp_path / "sam3.onnx").exists() and not (tmp_path / "keep_dtype.cfg").exists()


def test_an_output_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").touch()
    assert "a file of that name" in error_line(export(tmp_path / "out"))


def test_two_exports_of_the_same_checkpoint_are_byte_equal(tmp_path, onnx_path):
    result = export(tmp_path, "--verify", "never")
    assert result.returncode == 0, result.stderr
    for name in ("sam3.onnx", "sam3.onnx.data"):
        assert (tmp_path / name).read_bytes() == onnx_path.with_name(name).read_bytes()
