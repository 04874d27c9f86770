# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""sam3_check.py: what goes wrong for people is provoked or simulated, and must be found, with a remedy. The first tests
are the rows of docs/troubleshooting.md's table, in its order."""

import json
import re
import shutil

import numpy as np
import onnx
import pytest
from conftest import ROOT, TINY, error_line, run_script
from onnx import TensorProto, helper
from PIL import Image

from sam3_utils import health
from sam3_utils.files import sha256
from sam3_utils.health import NOTE, OK


def check(*options, **more):
    return run_script("sam3_check.py", *options, **more)


def fake_program(folder, name, text):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return folder


@pytest.mark.parametrize("damage", ("no folder", "no weights", "cut short", "a pointer", "another file"))
def test_weights_that_are_missing_or_damaged(tmp_path, damage):
    folder, options = tmp_path / "sam3_model", []
    if damage != "no folder":
        shutil.copytree(TINY, folder)
        weights = folder / "model.safetensors"
        if damage == "no weights":
            weights.unlink()
        elif damage == "cut short":
            weights.write_bytes(weights.read_bytes()[:-1000])
        elif damage == "a pointer":
            weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3439938512\n")
        else:
            (tmp_path / "sums").write_text(f"{'0' * 64}  model.safetensors\n")
            options = ["--sha256", tmp_path / "sums"]
    done = check("--model_path", folder, *options)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "MISSING" in done.stdout and "modelscope download --model facebook/sam3" in done.stdout


def test_too_little_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(health, "memory_gib", lambda: (8.0, 3.0))
    finding = health.check_memory(tmp_path)[0]
    assert finding.level == NOTE and "int8, OpenVINO" in finding.text and "float32" not in finding.text
    assert "--weights int8" in finding.remedy


def test_an_empty_mask_from_a_wrong_click(tmp_path):
    Image.fromarray(np.zeros((60, 80, 3), np.uint8)).save(tmp_path / "a.png")
    command = ("--model_path", TINY, "--images", tmp_path / "a.png", "--output_dir", tmp_path / "out")
    outside = run_script("sam3_predict.py", *command, "--points", "81,30")
    assert outside.returncode == 1 and "lies outside of the 80 x 60 picture" in outside.stderr
    label = run_script("sam3_predict.py", *command, "--points", "40,30,2", "--overwrite")
    assert "the label is 1 for what is meant, 0 for what is not" in error_line(label)


@pytest.mark.parametrize("built_for", (None, "12.8"))
def test_a_gpu_that_pytorch_does_not_see(tmp_path, monkeypatch, built_for):
    import torch

    fake_program(tmp_path / "bin", "nvidia-smi", "echo 'NVIDIA T4, 535.1, 15360 MiB'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = health.check_torch()[-1]
    assert finding.level == NOTE and "there is a GPU (NVIDIA T4" in finding.text
    assert ("update the driver" if built_for else "built for the CPU alone") in finding.remedy


def test_an_onnx_file_with_what_atc_does_not_take(tmp_path):
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    graph = helper.make_graph([helper.make_node("NonZero", ["x"], ["y"])], "g", [value], [value])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "bad.onnx")
    done = check("--model_path", tmp_path / "bad.onnx")
    assert "NonZero" in done.stdout and "sam3_export_onnx.py" in done.stdout


def test_a_good_onnx_file_is_fit(exported_split):
    findings = health.check_graph(exported_split["300I"])
    assert len(findings) == 3 and all(finding.level == OK for finding in findings)


def test_a_slow_cpu_without_its_fastest_runtime(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openvino", None)
    first, second = health.check_openvino()
    assert first.level == NOTE and "requirements-openvino.txt" in first.remedy
    assert second.subject == "--device auto" and second.text == "takes cpu, float32"


def test_an_opencv_that_lacks_libgl(tmp_path):
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    done = check(env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and "libGL.so.1" in done.stdout and "apt install libgl1 libglib2.0-0" in done.stdout


def test_a_provider_that_is_listed_and_cannot_start(monkeypatch):
    import onnxruntime

    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    findings = {finding.subject: finding for finding in health.check_onnxruntime()}
    assert findings["CUDAExecutionProvider"].level == NOTE and "listed, but" in findings["CUDAExecutionProvider"].text
    assert findings["CPUExecutionProvider"].level == OK


def test_a_package_of_another_version_and_one_that_is_missing(monkeypatch):
    version = health.metadata.version

    def other(name):
        if name == "pillow":
            return "1.0"
        if name == "tqdm":
            raise health.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(health.metadata, "version", other)
    findings = {finding.subject: finding for finding in health.check_python()}
    assert "1.0, proven with" in findings["pillow"].text and findings["tqdm"].text == "not installed"
    assert findings["pillow"].remedy.startswith("pip install pillow==")


def test_the_tools_of_an_ascend_host(tmp_path, monkeypatch):
    fake_program(tmp_path / "bin", "npu-smi", "echo 'Total Count : 1'")
    fake_program(tmp_path / "bin", "atc", "true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    levels = {finding.subject: finding.level for finding in health.check_ascend()}
    assert levels["NPU"] == levels["atc"] == levels["aclruntime"] == OK  # the stand-ins import


def test_the_kit_s_own_weights_are_whole_and_answer_sanely(tmp_path):
    (tmp_path / "sums").write_text(f"{sha256(TINY / 'model.safetensors')} *model.safetensors\n")
    report = tmp_path / "report.json"
    done = check("--model_path", TINY, "--sha256", tmp_path / "sums", "--smoke", "--report", report)
    assert done.returncode == 0, done.stdout
    findings = {one["subject"]: one for one in json.loads(report.read_text())["findings"]}
    assert findings["prompts"]["text"] == "words, exemplars, boxes, clicks"
    assert findings["model.safetensors"]["text"] == "SHA-256 as given"
    assert all(findings[f"smoke: {name}"]["level"] == OK for name in ("word", "click", "absent"))
    assert all(one["remedy"] for one in findings.values() if one["level"] != OK)
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_weights_that_do_not_belong_fail_the_smoke_test(tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, tmp_path / "model")
    tensors = load_file(TINY / "model.safetensors")
    name = "detector_model.vision_encoder.backbone.embeddings.patch_embeddings.projection.weight"
    tensors[name] = tensors[name].flip(1).contiguous()  # as if blue came before red
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    done = check("--model_path", tmp_path / "model", "--smoke")
    assert done.returncode == 1 and "weights, code and preparation do not belong together" in " ".join(
        done.stdout.split()
    )


def test_weights_are_fetched_when_asked_and_looked_at_then(tmp_path):
    (tmp_path / "modelscope.py").write_text(
        "import shutil\n"
        "def snapshot_download(name, local_dir):\n"
        "    assert name == 'facebook/sam3'\n"
        f"    shutil.copytree({str(TINY)!r}, local_dir, dirs_exist_ok=True)\n"
    )
    done = check("--model_path", tmp_path / "new", "--download", "modelscope", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and "this file is read" in " ".join(done.stdout.split())
    (tmp_path / "modelscope.py").write_text("def snapshot_download(*a, **k):\n    raise OSError('401 unauthorised')\n")
    done = check("--model_path", tmp_path / "other", "--download", "modelscope", env={"PYTHONPATH": str(tmp_path)})
    assert "accept the licence" in error_line(done)


def test_wrong_usage_is_one_line(tmp_path):
    assert "--model_path is missing" in error_line(check("--smoke"))
    assert "no such file" in error_line(check("--model_path", TINY, "--sha256", tmp_path / "none"))


@pytest.mark.parametrize("language", ("", "_zh"))
def test_the_page_on_troubles_says_what_the_program_says(language):
    page = (ROOT / "docs" / f"troubleshooting{language}.md").read_text(encoding="utf-8")
    for name, need in health.NEEDS.items():
        assert re.search(rf"\| {re.escape(name)} \| {need:g} GiB", page), name
    for command in ("sam3_check.py --model_path ./sam3_model", "--smoke", "--device auto", "sam3_predict.py"):
        assert command in page
