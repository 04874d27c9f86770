# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""One interface over three runtimes; what does not fit is refused before it computes something wrong.

`ais_bench` is the stand-in in tests/standins, which checks byte counts only, as the real one does.
"""

import os
import re
import shutil
import stat

import numpy as np
import onnx
import pytest
from conftest import TINY
from make_om import make_om

from sam3_utils import contract
from sam3_utils.backends import NotFinite, open_model
from sam3_utils.cli import CheckFailed, UsageError, one_path
from sam3_utils.compare import random_feeds
from sam3_utils.differences import output_differences
from sam3_utils.pipeline import batch_size_for, infer_padded
from sam3_utils.sessions import OmSession, check_om_path


@pytest.fixture(scope="module")
def feeds(processor):
    return random_feeds(processor, 224, 3)


@pytest.fixture(scope="module")
def onnx_outputs(onnx_path, feeds):
    return open_model(onnx_path).infer(feeds)


def make(tmp_path, onnx_path, name="sam3_300I_bs4.om", batch=4, **changes):
    path = tmp_path / name
    make_om(onnx_path, path, batch, **changes)
    return path


def test_torch_and_onnx_agree_by_name_and_shape(feeds, onnx_outputs):
    torch_outputs = open_model(TINY).infer(feeds)
    assert list(torch_outputs) == list(onnx_outputs) == list(contract.OUTPUTS)
    for name, row in output_differences(torch_outputs, onnx_outputs).items():
        assert torch_outputs[name].dtype == onnx_outputs[name].dtype == np.float32
        assert row["max_abs"] <= 1e-4, name


def test_every_slot_of_a_batch_equals_the_batch_of_one(onnx_path, feeds, onnx_outputs):
    model = open_model(onnx_path)
    for row in range(3):
        single = model.infer({name: array[row : row + 1] for name, array in feeds.items()})
        for name, array in single.items():
            assert np.abs(array[0] - onnx_outputs[name][row]).max() <= 1e-4, (row, name)


def test_taps_are_the_neck_s_levels_on_every_runtime_and_come_only_when_asked_for(tmp_path, onnx_path, feeds):
    """Against transformers' own vision encoder; ONNX and OM offer what their graph has as outputs."""
    import torch

    from sam3_utils.checkpoint import load_model

    model = onnx.load(onnx_path)
    for name in contract.TAPS[1:]:
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 64, None, None])
        )
    onnx.save(model, tmp_path / "tapped.onnx")
    with torch.inference_mode():
        vision = load_model(TINY).get_vision_features(torch.from_numpy(feeds["pixel_values"]))
    levels = dict(zip(contract.TAPS, vision.fpn_hidden_states))
    om = make(tmp_path, tmp_path / "tapped.onnx", batch=3, output_dtypes={"fpn_feat_2": "float16"})
    for path, offered in (
        (TINY, contract.TAPS),
        (tmp_path / "tapped.onnx", contract.TAPS[1:]),
        (om, contract.TAPS[1:]),
    ):
        opened = open_model(path)
        assert opened.taps == offered
        assert list(opened.infer(feeds)) == list(contract.OUTPUTS)
        outputs = opened.infer(feeds, offered[-1:])
        assert list(outputs) == [*contract.OUTPUTS, "fpn_feat_2"]
        for name, array in opened.infer(feeds, offered).items():
            if name in levels:
                bound = 0.02 if path == om and name == "fpn_feat_2" else 1e-4  # float16's steps between 16 and 32
                assert array.dtype == np.float32 and np.abs(array - levels[name].numpy()).max() <= bound, (path, name)
    assert open_model(onnx_path).taps == ()


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_a_checkpoint_can_be_computed_in_16_bit(feeds, onnx_outputs, dtype):
    outputs = open_model(TINY, "cpu", dtype).infer(feeds)
    assert 0 < np.abs(outputs["presence_logits"] - onnx_outputs["presence_logits"]).max() < 0.5


@pytest.mark.parametrize(
    "device, text",
    [("0", "cpu, cuda:0"), ("cpu:1", "cpu"), ("gpu", "cpu"), ("cuda:x", "cpu"), ("cpu,cpu", "cpu"), ("", "cpu")],
)
def test_a_device_that_does_not_fit_is_refused_with_the_choices(onnx_path, device, text):
    for path in (TINY, onnx_path):
        with pytest.raises(UsageError, match=f"--device {device}: .*{text}"):
            open_model(path, device)


@pytest.mark.parametrize("device", ("cuda:99", "npu:0"))
def test_a_torch_device_that_does_not_exist_is_refused(device):
    with pytest.raises(UsageError, match=f"--device {device}"):
        open_model(TINY, device)


@pytest.mark.parametrize("device", ("cuda:0", "trt:0", "cann:0"))
def test_a_provider_that_is_not_installed_is_refused_with_its_package(onnx_path, device):
    import onnxruntime

    if len(onnxruntime.get_available_providers()) > 2:
        pytest.skip("this onnxruntime has more than the CPU")
    with pytest.raises(UsageError, match="onnxruntime-(gpu|cann)"):
        open_model(onnx_path, device)


def test_a_provider_that_falls_back_is_refused(onnx_path, monkeypatch):
    """ONNX Runtime lists CUDA in its GPU package even where it cannot start, and computes on the CPU instead."""
    import onnxruntime

    class FallenBack:
        def __init__(self, *args, **kwargs):
            pass

        def get_providers(self):
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", FallenBack)
    with pytest.raises(UsageError, match="fell back to the CPU"):
        open_model(onnx_path, "cuda:0")


def test_dtype_is_for_checkpoints_only(onnx_path):
    with pytest.raises(UsageError, match="--dtype float16"):
        open_model(onnx_path, "cpu", "float16")


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "sam3.pt"
    path.write_bytes(b"x")
    with pytest.raises(UsageError, match="not a checkpoint folder"):
        open_model(path)


@pytest.mark.parametrize("kind", ("missing", "cut", "no_onnx"))
def test_an_onnx_file_without_its_weights_is_refused(tmp_path, onnx_path, kind):
    shutil.copy(onnx_path, tmp_path)
    if kind == "cut":
        (tmp_path / "sam3.onnx.data").write_bytes(onnx_path.with_name("sam3.onnx.data").read_bytes()[:-100])
    if kind == "no_onnx":
        (tmp_path / "sam3.onnx").write_text("not onnx")
    with pytest.raises(UsageError, match={"missing": "not beside it", "cut": "needs", "no_onnx": "ONNX"}[kind]):
        open_model(tmp_path / "sam3.onnx")


def test_an_onnx_model_of_something_else_is_refused(tmp_path, onnx_path):
    model = onnx.load(onnx_path)
    model.graph.output[0].name = "masks"
    next(node for node in model.graph.node if "pred_masks" in node.output).output[0] = "masks"
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(UsageError, match="output pred_masks is missing"):
        open_model(tmp_path / "other.onnx")


def test_an_om_answers_like_its_onnx_although_order_and_names_differ(tmp_path, onnx_path, feeds, onnx_outputs):
    order = ["attention_mask", "pixel_values", "input_ids"]
    model = open_model(make(tmp_path, onnx_path, batch=3, input_order=order))
    assert (model.runtime, model.device, model.shapes.batch) == ("om", "0", 3)
    strided = {name: np.ascontiguousarray(array.T).T for name, array in feeds.items()}
    for name, array in model.infer(strided).items():  # ONNX Runtime's CPU fuses attention, the stand-in does not
        assert np.abs(array - onnx_outputs[name]).max() <= 1e-5 * max(1, np.abs(array).max()), name
    model.close()


def test_float16_outputs_of_an_om_are_taken(tmp_path, onnx_path, feeds, onnx_outputs):
    halves = dict.fromkeys(contract.OUTPUTS, "float16")
    model = open_model(make(tmp_path, onnx_path, batch=3, output_dtypes=halves), "1")
    outputs = model.infer(feeds)
    assert model.precision == "as compiled, float16 outputs"
    assert outputs["pred_boxes"].dtype == np.float32
    assert 0 < np.abs(outputs["pred_boxes"] - onnx_outputs["pred_boxes"]).max() < 1e-3


def test_a_partial_batch_is_padded_for_an_om_and_the_padding_dropped(tmp_path, onnx_path, feeds, onnx_outputs):
    model = open_model(make(tmp_path, onnx_path))
    outputs = infer_padded(model, feeds)
    assert outputs["pred_masks"].shape == (3, 16, 64, 64)
    assert np.abs(outputs["pred_masks"] - onnx_outputs["pred_masks"]).max() <= 1e-4
    assert batch_size_for(model, None) == batch_size_for(model, 4) == 4
    with pytest.raises(UsageError, match="give --batch_size 4"):
        batch_size_for(model, 8)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"input_names": {"pixel_values": "images"}}, "input pixel_values is missing"),
        ({"input_dtypes": {"input_ids": "int32"}}, "input input_ids is int32, not int64"),
        ({"input_dtypes": {"pixel_values": "int32"}}, "input pixel_values is int32, not float32"),
        ({"input_shapes": {"pixel_values": [4, 224, 224, 3]}}, "pixel_values"),
        ({"input_shapes": {"input_ids": [2, 64]}}, "input_ids"),
        ({"input_shapes": {"pixel_values": [4, 3, -1, -1]}}, "S is not fixed"),
        ({"output_shapes": {"pred_logits": [4, 15]}}, "pred_logits"),
        ({"output_dtypes": {"pred_masks": "int8"}}, "output pred_masks is int8"),
        ({"output_names": {"pred_masks": "node:0:masks"}}, "output pred_masks is missing"),
        ({"output_names": {"semantic_seg": "Conv_1:0:pred_masks"}}, "two outputs share a name"),
        ({"drop_output": "presence_logits"}, "output presence_logits is missing"),
    ],
)
def test_an_om_whose_tensors_are_off_is_refused_when_opened(tmp_path, onnx_path, changes, text):
    with pytest.raises(UsageError, match=text) as refused:
        open_model(make(tmp_path, onnx_path, **changes))
    assert "\n" not in str(refused.value)


def test_feeds_that_ais_bench_would_compute_wrongly_are_stopped(tmp_path, onnx_path, feeds):
    model = open_model(make(tmp_path, onnx_path, batch=3))
    turned = feeds["pixel_values"].transpose(0, 2, 3, 1)  # NHWC: as many bytes
    with pytest.raises(ValueError, match="pixel_values"):
        model.infer(feeds | {"pixel_values": turned})
    with pytest.raises(ValueError, match="input_ids"):
        model.infer(feeds | {"input_ids": feeds["input_ids"].astype(np.float64)})


def test_a_failing_device_is_reported_with_what_was_fed(tmp_path, onnx_path, feeds):
    model = open_model(make(tmp_path, onnx_path, batch=3))
    model.close()
    with pytest.raises(CheckFailed, match=r"NPU 0: inference failed .*pixel_values float32 \(3, 3, 224, 224\)"):
        model.infer(feeds)


def test_a_broken_om_is_refused(tmp_path, capfd):
    path = tmp_path / "broken.om"
    path.write_text("{")
    with pytest.raises(UsageError, match="cannot be opened on NPU 0"):
        open_model(path)


def test_paths_that_ais_bench_refuses_are_explained(tmp_path, onnx_path):
    path = make(tmp_path, onnx_path)
    link = tmp_path / "link.om"
    link.symlink_to(path)
    spaced = tmp_path / "my models"
    spaced.mkdir()
    shutil.copy(path, spaced / "a.om")
    with pytest.raises(UsageError, match="symbolic link.*" + re.escape(str(path))):
        check_om_path(link)
    with pytest.raises(UsageError, match="only letters, digits"):
        check_om_path(spaced / "a.om")
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    with pytest.raises(UsageError, match="chmod go-w"):
        check_om_path(path)


def test_a_foreign_owner_is_explained(tmp_path, onnx_path, monkeypatch):
    path = make(tmp_path, onnx_path)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(os, "getgroups", lambda: [54321])
    with pytest.raises(UsageError, match="belongs to another user"):
        check_om_path(path)


def test_a_missing_ais_bench_is_explained(tmp_path, onnx_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ais_bench.infer.interface", None)
    with pytest.raises(UsageError, match="needs ais_bench and aclruntime.*ais-bench-benchmark"):
        open_model(make(tmp_path, onnx_path))


@pytest.mark.parametrize("device", ("cpu", "0,1", "-1", "256", "npu:0"))
def test_an_om_takes_one_npu_id(tmp_path, onnx_path, device):
    with pytest.raises(UsageError, match="one NPU id"):
        open_model(make(tmp_path, onnx_path), device)


def test_non_finite_outputs_are_reported_not_read_as_nothing_found(tmp_path, onnx_path, feeds, monkeypatch):
    run = OmSession.run

    def broken(session, *args):
        outputs = run(session, *args)
        outputs["pred_masks"] = outputs["pred_masks"].copy()
        outputs["pred_masks"].flat[1] = np.nan
        return outputs

    monkeypatch.setattr(OmSession, "run", broken)
    with pytest.raises(NotFinite, match="1 non-finite values of .* in pred_masks"):
        open_model(make(tmp_path, onnx_path, batch=3)).infer(feeds)


def test_a_wildcard_must_match_exactly_one_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sam3_300I_bs4_a.om", "sam3_300I_bs4_b.om", "sam3_300I_bs8.om"):
        (tmp_path / name).touch()
    assert one_path(["sam3_300I_bs8*.om"], "--model_path").name == "sam3_300I_bs8.om"
    with pytest.raises(UsageError, match="2 paths match.*bs4_a.om, .*bs4_b.om"):
        one_path(["sam3_300I_bs4*.om"], "--model_path")  # as quoted
    with pytest.raises(UsageError, match="2 paths match"):
        one_path(["sam3_300I_bs4_a.om", "sam3_300I_bs4_b.om"], "--model_path")  # as the shell expands it
    with pytest.raises(UsageError, match="nothing matches"):
        one_path([""], "--model_path")  # an empty variable is not the current folder
    with pytest.raises(UsageError, match="nothing matches"):
        one_path(["sam3_800I*.om"], "--model_path")
