# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The exported graph: the contract's tensors, opset 17, IR 8, one weight file, and PyTorch's own answers."""

import json

import numpy as np
import onnx
import pytest
from conftest import TINY, error_line, run_script

from sam3_utils import contract
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
    assert sorted(path.name for path in folder.iterdir()) == ["export_report.json", "sam3.onnx", "sam3.onnx.data"]
    graph = onnx.load(folder / "sam3.onnx", load_external_data=False).graph
    locations = {
        entry.value for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    assert locations == {"sam3.onnx.data"}


def test_all_outputs_equal_pytorch_s_at_batch_1_2_and_3(folder):
    for batch, rows in verify_onnx(TINY, folder / "sam3.onnx", (1, 2, 3)).items():
        for name, row in rows.items():
            assert row["max_abs"] <= 1e-4, (batch, name, row)


def test_no_control_flow_no_double_precision_and_no_patch_convolution(folder):
    model = onnx.load(folder / "sam3.onnx")
    operators = {node.op_type for node in model.graph.node}
    assert not operators & {"If", "Loop", "Scan", "NonZero"}
    assert onnx.TensorProto.DOUBLE not in {tensor.data_type for tensor in model.graph.initializer}
    kernels = {
        attribute.ints[0]
        for node in model.graph.node
        if node.op_type == "Conv"
        for attribute in node.attribute
        if attribute.name == "kernel_shape"
    }
    assert kernels == {1, 3}


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
    assert report["rewrites"] == ["patch_embed", "qkv", "rope"]
    assert report["attention"] == {"300I": "eager", "800I": "sdpa"}[report["target_device"]]
    assert set(report["verification"]["outputs"]) == set(contract.OUTPUTS)
    assert report["versions"]["transformers"] == "5.0.0"
    from sam3_utils.files import sha256

    for name in ("sam3.onnx", "sam3.onnx.data"):
        assert report["sha256"][name] == sha256(folder / name)
    assert report["sha256"]["model.safetensors"] == sha256(TINY / "model.safetensors")


def test_rewrites_can_be_switched_off_and_other_devices_warn(tmp_path):
    result = export(tmp_path, "--skip_rewrite", "patch_embed", "qkv", "rope", "--verify", "never", device="310B")
    assert result.returncode == 0, result.stderr
    assert "310B is exported like 800I" in result.stderr and "not verified" in result.stderr
    report = json.loads((tmp_path / "export_report.json").read_text())
    assert report["rewrites"] == [] and report["verification"] is None and report["attention"] == "sdpa"
    graph = onnx.load(tmp_path / "sam3.onnx").graph
    assert (96, 3, 14, 14) in {tuple(tensor.dims) for tensor in graph.initializer}


def test_a_graph_with_other_numbers_fails_the_verification(tmp_path, onnx_path, monkeypatch):
    """One weight changed by a tenth: verification must see it, exit 1, and leave no report that vouches for it."""
    from types import SimpleNamespace

    import sam3_export_onnx
    from sam3_utils.cli import CheckFailed

    model = onnx.load(onnx_path)
    tensor = max(model.graph.initializer, key=lambda entry: np.prod(entry.dims))
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * 1.1, tensor.name))
    onnx.save(model, tmp_path / "sam3.onnx")
    with pytest.raises(CheckFailed, match="differs from PyTorch"):
        sam3_export_onnx.verify(SimpleNamespace(model_path=TINY, output_dir=tmp_path))


def test_an_output_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").touch()
    assert "a file of that name" in error_line(export(tmp_path / "out"))


def test_two_exports_of_the_same_checkpoint_are_byte_equal(tmp_path, onnx_path):
    result = export(tmp_path, "--verify", "never")
    assert result.returncode == 0, result.stderr
    for name in ("sam3.onnx", "sam3.onnx.data"):
        assert (tmp_path / name).read_bytes() == onnx_path.with_name(name).read_bytes()
