# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""sam3_convert_om.sh on a split export, against the stand-in for ATC: three OMs and the file that names them."""

import json
import shutil

import numpy as np
import pytest
from conftest import ROOT, error_line
from test_convert_om import SOC, convert, failure, listing

from sam3_utils.backends import open_model
from sam3_utils.compare import random_feeds, read_manifest
from sam3_utils.files import sha256


@pytest.fixture
def kit(tmp_path, exported_split):
    for device, folder in exported_split.items():
        shutil.copytree(folder, tmp_path / f"sam3_onnx_{device}")
    return tmp_path


@pytest.mark.parametrize("device", ("300I", "800I"))
def test_the_command_lines_word_by_word(kit, device):
    shapes = {
        "vision_bs1": "pixel_values:1,3,224,224",
        "text_bs1": "input_ids:1,32;attention_mask:1,32",
        "detector_bs4": "fpn_feat_0:1,64,64,64;fpn_feat_1:1,64,32,32;fpn_feat_2:1,64,16,16;"
        "text_features:4,32,64;attention_mask:4,32",
    }
    lines = ""
    for key, shape in shapes.items():
        part, batch = key.split("_")
        keep = kit / f"sam3_onnx_{device}/sam3_{part}.keep_dtype.cfg"
        lines += (
            f"atc --framework=5 --model={kit}/sam3_onnx_{device}/sam3_{part}.onnx "
            f"--output={kit}/sam3_om/.converting/sam3_{part}_{device}_{batch} "
            + (f"'--input_shape={shape}'" if ";" in shape else f"--input_shape={shape}")
            + f" --soc_version={SOC[device]} --precision_mode_v2=fp16 "
            + (f"--keep_dtype={keep} " if keep.read_text() else "")
            + ("" if device == "300I" else f"--fusion_switch_file={ROOT}/fusion_switch.cfg ")
            + "--op_compiler_cache_mode=enable --log=error\n"
        )
    result = convert(kit, "--dry_run", device=device)
    assert (result.returncode, result.stdout) == (0, lines), result.stderr
    assert not (kit / "sam3_om").exists()


def test_a_split_model_is_compiled_and_answers_like_the_export(kit, processor):
    result = convert(kit, batches="2")
    assert result.returncode == 0, result.stderr
    path = kit / "sam3_om" / "sam3_split_300I_bs2.json"
    assert "sam3_om/sam3_split_300I_bs2.json: the model of 3 files, for --model_path" in result.stdout
    assert json.loads(path.read_text()) == {
        part: f"sam3_{part}_300I_bs{2 if part == 'detector' else 1}.om" for part in ("vision", "text", "detector")
    }
    manifest = json.loads((kit / "sam3_om/sam3_detector_300I_bs2.manifest.json").read_text())
    assert open_model(path)._sessions["detector"].inputs["text_features"][1][0] == 2
    assert manifest["batch_size"] == 2 and "sam3_detector.onnx.data" in manifest["onnx"]["sha256"]
    feeds = random_feeds(processor, 224, 3)
    expected = open_model(kit / "sam3_onnx_300I").infer(feeds)
    for name, array in open_model(path).infer(feeds).items():
        assert np.abs(array - expected[name]).max() <= 1e-5 * max(1, np.abs(array).max()), name


def test_a_second_batch_size_reuses_the_parts_that_do_not_depend_on_it(kit):
    assert convert(kit, batches="1").returncode == 0
    first = (kit / "sam3_om/sam3_vision_300I_bs1.om").stat().st_mtime_ns
    result = convert(kit, batches="4")
    assert result.returncode == 0, result.stderr
    assert "sam3_vision_300I_bs1.om: there already, from the same files by the same command" in result.stderr
    assert (kit / "sam3_om/sam3_vision_300I_bs1.om").stat().st_mtime_ns == first
    assert sorted(path.name for path in (kit / "sam3_om").glob("sam3_split*")) == [
        "sam3_split_300I_bs1.json", "sam3_split_300I_bs4.json",
    ]  # fmt: skip
    result = convert(kit, batches="4")
    assert "sam3_detector_300I_bs4.om: there already" in error_line(result)


def test_parts_of_another_command_are_refused_and_replaced_only_when_asked(kit):
    """And then no manifest is left that would name the old detector beside the new parts."""
    assert convert(kit, batches="1").returncode == 0
    result = convert(kit, "--precision_mode_v2", "mixed_float16", batches="4")
    assert "sam3_vision_300I_bs1.om" in error_line(result)
    result = convert(kit, "--precision_mode_v2", "mixed_float16", "--overwrite", batches="4")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in (kit / "sam3_om").glob("sam3_split*")] == ["sam3_split_300I_bs4.json"]


def test_a_conversion_that_was_stopped_after_its_last_om_is_finished_without_compiling(kit):
    assert convert(kit, batches="1 4").returncode == 0
    (kit / "sam3_om/sam3_split_300I_bs4.json").unlink()
    made = {path.name: path.stat().st_mtime_ns for path in (kit / "sam3_om").glob("*.om")}
    result = convert(kit, batches="4")
    assert result.returncode == 0, result.stderr
    assert (kit / "sam3_om/sam3_split_300I_bs4.json").is_file()
    assert {path.name: path.stat().st_mtime_ns for path in (kit / "sam3_om").glob("*.om")} == made


def test_batch_sizes_that_lose_their_parts_are_named(kit):
    assert convert(kit, batches="1").returncode == 0
    result = convert(kit, "--precision_mode_v2", "mixed_float16", "--overwrite", batches="4")
    assert "sam3_split_300I_bs1.json: gone, since parts of it are replaced" in result.stderr
    assert "sam3_split_300I_bs4.json: gone" not in result.stderr


def test_a_dangling_link_for_the_output_is_named(kit):
    (kit / "sam3_om").symlink_to("nowhere")
    assert "sam3_om: a link to nothing (nowhere)" in error_line(convert(kit, batches="1"))


def test_an_edited_keep_list_is_not_taken_for_the_one_that_was_compiled(kit):
    """Its name on the command line is the same, and so is the graph."""
    keep = kit / "sam3_onnx_800I" / "sam3_vision.keep_dtype.cfg"
    names = keep.read_text().splitlines()
    assert len(names) > 1
    assert convert(kit, device="800I", batches="1").returncode == 0
    keep.write_text("\n".join(names[1:]) + "\n")
    line = error_line(convert(kit, device="800I", batches="4"))
    assert "sam3_vision_800I_bs1.om: there already" in line and "sam3_text" not in line
    assert convert(kit, "--overwrite", device="800I", batches="4").returncode == 0
    manifest = json.loads((kit / "sam3_om/sam3_vision_800I_bs1.manifest.json").read_text())
    assert manifest["keep_dtype"]["sha256"] == sha256(keep)
    assert not (kit / "sam3_om/sam3_split_800I_bs1.json").exists()  # its detector belonged to the old vision


@pytest.mark.parametrize("damage", ("another CANN", "changed OM", "no manifest"))
def test_a_part_of_unknown_or_other_origin_is_not_reused(kit, damage):
    assert convert(kit, batches="1").returncode == 0
    om, more = kit / "sam3_om/sam3_text_300I_bs1.om", {}
    if damage == "another CANN":
        (kit / "latest/x86_64-linux").mkdir(parents=True)
        (kit / "latest/x86_64-linux/ascend_toolkit_install.info").write_text("version=8.5.1\n")
        more["ASCEND_TOOLKIT_HOME"] = str(kit / "latest")
    elif damage == "changed OM":
        om.write_text(om.read_text() + " ")
    else:
        om.with_suffix(".manifest.json").unlink()
    result = convert(kit, batches="4", **more)
    assert "sam3_text_300I_bs1.om: there already; --overwrite replaces" in error_line(result)
    assert "ATC start" not in result.stdout and (kit / "sam3_om/sam3_split_300I_bs1.json").is_file()


def test_overwriting_one_batch_size_leaves_the_others_usable(kit):
    assert convert(kit, batches="1 4").returncode == 0
    vision = (kit / "sam3_om/sam3_vision_300I_bs1.om").stat().st_mtime_ns
    detector = (kit / "sam3_om/sam3_detector_300I_bs4.om").stat().st_mtime_ns
    result = convert(kit, "--overwrite", batches="4")
    assert result.returncode == 0, result.stderr
    assert (kit / "sam3_om/sam3_vision_300I_bs1.om").stat().st_mtime_ns == vision
    assert (kit / "sam3_om/sam3_detector_300I_bs4.om").stat().st_mtime_ns > detector
    for batch in (1, 4):
        assert open_model(kit / f"sam3_om/sam3_split_300I_bs{batch}.json").batch_size == batch


def test_names_with_atc_s_ending_for_host_code_are_followed(kit):
    result = convert(kit, batches="2", ATC_STANDIN="linux_suffix")
    assert result.returncode == 0, result.stderr
    path = kit / "sam3_om/sam3_split_300I_bs2.json"
    assert json.loads(path.read_text())["detector"] == "sam3_detector_300I_bs2_linux_x86_64.om"
    assert open_model(path).batch_size == 2
    result = convert(kit, batches="4")
    assert result.returncode == 0, result.stderr
    assert json.loads((kit / "sam3_om/sam3_split_300I_bs4.json").read_text()) == {
        "vision": "sam3_vision_300I_bs1_linux_x86_64.om", "text": "sam3_text_300I_bs1_linux_x86_64.om",
        "detector": "sam3_detector_300I_bs4.om",
    }  # fmt: skip


def test_a_detector_that_fails_leaves_no_split_model(kit):
    result = convert(kit, batches="4", ATC_STANDIN="fail_at=4")
    assert result.returncode == 1
    assert "Compiled before it: sam3_vision_300I_bs1, sam3_text_300I_bs1" in failure(result)
    assert not any("split" in name or "detector_300I_bs4.om" in name for name in listing(kit))
    assert convert(kit, batches="4").returncode == 0  # and goes on with what is there


def test_one_keep_list_for_all_parts_is_refused(kit):
    (kit / "mine.cfg").write_text("")
    result = convert(kit, "--keep_dtype", "mine.cfg")
    assert "a split model has a list for each graph" in error_line(result)
    assert "--keep_dtype" not in convert(kit, "--keep_dtype", "none", "--dry_run").stdout


def test_two_exports_in_one_folder_are_refused(kit):
    (kit / "sam3_onnx_300I" / "sam3.onnx").write_bytes(b"")
    result = convert(kit)
    assert "holds two exports, sam3.onnx and split.json" in error_line(result)


def test_the_manifest_of_a_split_om_is_that_of_all_its_parts(kit, caplog):
    assert convert(kit, batches="2").returncode == 0
    path = kit / "sam3_om/sam3_split_300I_bs2.json"
    hashes = {om.name: sha256(om) for om in (kit / "sam3_om").glob("*.om")}
    found = read_manifest(path, hashes, "candidate")
    assert found["soc_version"] == "Ascend310P3" and found["batch_size"] == 2 and not caplog.text
    assert {part: manifest["om"]["name"] for part, manifest in found["parts"].items()} == json.loads(path.read_text())
    (kit / "sam3_om/sam3_vision_300I_bs1.manifest.json").unlink()
    assert read_manifest(path, hashes, "candidate") is None
    assert "candidate: no sam3_vision_300I_bs1.manifest.json beside it" in caplog.text
