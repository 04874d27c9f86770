# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights stored as float16 or int8: what is in the file, what the runtimes compute, what the gate says."""

import json

import numpy as np
import onnx
import pytest
from conftest import TINY, run_script
from make_om import make_om
from onnx import numpy_helper

from sam3_utils import graph, ort_graph, sessions, weights
from sam3_utils.backends import open_model
from sam3_utils.checkpoint import load_model
from sam3_utils.cli import UsageError
from sam3_utils.compare import random_feeds
from sam3_utils.preflight import check_model


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """kind -> folder of a split export."""
    folders = {kind: tmp_path_factory.mktemp(kind) / "model" for kind in ("float16", "int8")}
    for kind, folder in folders.items():
        result = run_script(
            "sam3_export_onnx.py", "--target_device", "300I", "--model_path", TINY, "--output_dir", folder,
            "--layout", "split", "--weights", kind,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert f"is {kind} good enough? sam3_compare.py" in result.stdout
        report = json.loads((folder / "export_report.json").read_text())
        assert report["weights"] == kind and report["verification"]["bound"] is None
    return folders


def initializers(path):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def test_float16_weights_are_the_checkpoint_s_rounded_once(stored):
    """A projection that no rewrite touches, in the layout that MatMul wants."""
    found = initializers(stored["float16"] / "sam3_vision.onnx")
    name = "vision_encoder.layers.1.mlp.fc1.weight"
    expected = load_model(TINY).state_dict()["vision_encoder.backbone.layers.1.mlp.fc1.weight"].numpy().T
    assert np.array_equal(found[f"{name}/float16"], expected.astype(np.float16))
    assert name not in found and found["vision_encoder.layers.1.mlp.fc1.bias"].dtype == np.float32
    large = [array.dtype for array in found.values() if array.ndim > 1 and array.dtype.kind == "f"]
    assert large and set(large) == {np.dtype(np.float16)}


def test_int8_weights_are_within_half_a_step_of_the_checkpoint_s(stored):
    found = initializers(stored["int8"] / "sam3_vision.onnx")
    name = "vision_encoder.layers.1.mlp.fc1.weight"
    expected = load_model(TINY).state_dict()["vision_encoder.backbone.layers.1.mlp.fc1.weight"].numpy().T
    values, scale = found[f"{name}/int8"], found[f"{name}/scale"]
    assert values.dtype == np.int8 and scale.shape == (expected.shape[1],)
    assert np.array_equal(np.abs(values).max(axis=0), np.full(expected.shape[1], 127))
    assert (np.abs(values * scale - expected) <= scale / 2 * 1.0001).all()


def test_a_column_of_zeros_stays_zero():
    matrix = np.zeros((3, 2), dtype=np.float32)
    matrix[:, 1] = 1, -2, 0.5
    values, scale = (weights.stored(f"w/{form}", lambda name: matrix) for form in ("int8", "scale"))
    assert np.isfinite(scale).all() and values.tolist() == [[0, 64], [0, -127], [0, 32]]


def test_the_files_shrink_as_told(stored, onnx_path):
    def size(paths):
        return sum(path.stat().st_size for path in paths)

    whole = size([onnx_path.with_name("sam3.onnx.data")])
    assert size(stored["float16"].glob("*.data")) <= 0.55 * whole
    assert size(stored["int8"].glob("*.data")) <= 0.55 * whole  # half of the tiny model is no matrix product


def test_onnx_runtime_computes_int8_weights_in_8_bits(stored):
    """Not by turning them back: every product with such a weight becomes DynamicQuantizeMatMul."""
    for part in ("vision", "text", "detector"):
        model = graph.load_structure(stored["int8"] / f"sam3_{part}.onnx")
        products = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
        uses = sum(node.op_type == "MatMul" and node.input[1] in products for node in model.graph.node)
        assert "int8 products" in ort_graph.for_cpu(model)
        found = [node.op_type for node in model.graph.node]
        assert found.count("DynamicQuantizeMatMul") == uses > 0 and "DequantizeLinear" not in found


@pytest.mark.parametrize("kind, bound", (("float16", 2e-3), ("int8", 5e-2)))
def test_answers_stay_close_and_pass_the_gate(stored, tmp_path, kind, bound):
    """`bound` in units of an output's deviation; measured on this input: 2.0e-4 and 2.3e-2."""
    report = tmp_path / "report.json"
    result = run_script("sam3_compare.py", "--reference", TINY, "--candidate", stored[kind], "--report", report)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(report.read_text())["outputs"]
    assert 0 < max(row["relative"] for row in figures.values()) <= bound


def test_atc_takes_float16_weights_and_refuses_int8(stored):
    check_model(stored["float16"] / "sam3_vision.onnx", "vision")
    with pytest.raises(UsageError, match="DequantizeLinear: ATC has no such operator"):
        check_model(stored["int8"] / "sam3_vision.onnx", "vision")


@pytest.mark.parametrize("kind", ("float32", "int8"))
@pytest.mark.parametrize("dtype, bound", (("float32", 2e-5), ("bfloat16", 5e-2)))
def test_openvino_answers_like_pytorch(stored, onnx_path, processor, kind, dtype, bound):
    pytest.importorskip("openvino", reason="openvino is not installed: pip install -r requirements-openvino.txt")
    feeds = random_feeds(processor, 224, 2)
    model = open_model(onnx_path if kind == "float32" else stored[kind], "openvino", dtype)
    assert (model.runtime, model.device) == ("openvino", "openvino")
    assert model.precision == dtype + (", int8 products" if kind == "int8" else "")
    for name, expected in open_model(TINY).infer(feeds).items():
        found = model.infer(feeds)[name]
        assert found.shape == expected.shape
        limit = 5e-2 if kind == "int8" else bound
        assert np.abs(found - expected).max() <= limit * np.abs(expected).max(), name


@pytest.mark.parametrize(
    "installed, flags, choice",
    [
        (True, "fpu amx_bf16 avx512_bf16", ("openvino", "bfloat16")),
        (True, "fpu avx512_bf16", ("openvino", "bfloat16")),
        (True, "fpu avx512f", ("openvino", "float32")),
        (False, "fpu amx_bf16", ("cpu", "float32")),
    ],
)
def test_auto_chooses_by_what_the_cpu_and_the_environment_have(monkeypatch, tmp_path, caplog, installed, flags, choice):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(sessions, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(sessions.importlib.util, "find_spec", lambda name: installed or None)
    assert sessions.fastest_cpu() == choice
    assert f"--device auto: {choice[0]}, {choice[1]} (" in caplog.text


def test_auto_is_for_onnx_files_and_chooses_the_type_itself(onnx_path, tmp_path):
    make_om(onnx_path, tmp_path / "sam3.om", 1)
    with pytest.raises(UsageError, match="--device auto: an .om runs on one NPU id"):
        open_model(tmp_path / "sam3.om", "auto")
    with pytest.raises(UsageError, match="--device auto: .* runs on one of cpu, cuda:0"):
        open_model(TINY, "auto")
    with pytest.raises(UsageError, match="--dtype bfloat16: --device auto chooses the type itself"):
        open_model(onnx_path, "auto", "bfloat16")


def test_openvino_that_is_not_installed_is_refused_with_the_remedy(monkeypatch, onnx_path):
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    with pytest.raises(UsageError, match="pip install -r requirements-openvino.txt"):
        open_model(onnx_path, "openvino")
