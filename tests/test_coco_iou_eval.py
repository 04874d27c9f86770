# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""sam3_coco_iou_eval.py as a user runs it: three runtimes, kills, bad pictures, refusals, real photographs."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED, TINY, error_line, run_script
from make_om import make_om
from PIL import Image


def evaluate(model, coco_root, output_dir, *extra, **options):
    return run_script(
        "sam3_coco_iou_eval.py", "--model_path", model, "--processor_path", TINY, "--coco_root", coco_root,
        "--batch_size", 4, "--output_dir", output_dir, *extra, **options,
    )  # fmt: skip


def summary(folder) -> dict:
    return json.loads((folder / "summary.json").read_text())


def records(folder, name="samples.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def onnx_run(tmp_path_factory, onnx_path, demo_data):
    folder = tmp_path_factory.mktemp("runs") / "onnx"
    result = evaluate(onnx_path, demo_data, folder, "--overlays", 2)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_the_result_is_one_line_and_the_summary_says_what_was_measured(onnx_run, onnx_path):
    folder, result = onnx_run
    content = summary(folder)
    lines = [line for line in result.stdout.splitlines() if "Mean IoU" in line]
    assert lines == [f"Mean IoU (onnx): {content['value']:.6f}"]
    assert (content["metric"], content["samples"], content["failed"]) == ("Mean IoU", 36, 0)
    assert content["model"]["runtime"] == "onnx" and set(content["model"]["sha256"]) == {"sam3.onnx", "sam3.onnx.data"}
    assert content["settings"]["batch_size"] == 4 and content["settings"]["crowd"] == "exclude"
    assert content["device"] == "cpu" and content["versions"]["transformers"] == "5.0.0"
    assert content["samples_by_crowd_rule"] == {"exclude": 36, "include": 36}
    assert all(len(line) <= 100 for line in result.stdout.splitlines() if str(folder) not in line)


def test_records_have_their_keys_and_add_up_to_the_value(onnx_run):
    folder, _ = onnx_run
    rows = records(folder)
    keys = {"image_id", "category_id", "prompt", "iou", "gt_area", "pred_area", "score"}
    assert all(keys <= set(row) for row in rows)
    assert summary(folder)["value"] == pytest.approx(np.mean([row["iou"] for row in rows]), abs=1e-12)
    presence = summary(folder)["presence"]
    absent = records(folder, "absent.jsonl")
    assert presence["absent_empty"] == sum(row["score"] <= 0.5 for row in absent) and presence["absent"] == len(absent)
    assert presence["present_found"] == sum(row["score"] > 0.5 for row in rows)


def test_overlays_show_worst_and_best(onnx_run):
    pictures = sorted((onnx_run[0] / "overlays").iterdir())
    assert [path.name.split("_")[0] for path in pictures] == ["best", "best", "worst", "worst"]
    assert all(Image.open(path).size[0] % 3 == 0 for path in pictures)


def test_every_iou_equals_one_computed_with_transformers_alone(onnx_run, demo_data):
    """Sam3Model, Sam3Processor, numpy and pycocotools' decoder: none of the kit's code."""
    from pycocotools.coco import COCO
    from transformers import Sam3Model, Sam3Processor

    coco = COCO(str(demo_data / "annotations" / "instances_val2017.json"))
    model, processor = Sam3Model.from_pretrained(TINY, dtype=torch.float32), Sam3Processor.from_pretrained(TINY)
    for row in records(onnx_run[0])[:12]:
        info = coco.loadImgs(row["image_id"])[0]
        inputs = processor(
            images=Image.open(demo_data / "val2017" / info["file_name"]), text=row["prompt"], return_tensors="pt"
        )
        with torch.no_grad():
            outputs = model(**inputs)
        found = processor.post_process_instance_segmentation(
            outputs, threshold=0.5, mask_threshold=0.5, target_sizes=[(info["height"], info["width"])]
        )[0]["masks"]
        predicted = found.numpy().any(0) if len(found) else np.zeros((info["height"], info["width"]), bool)
        annotations = coco.loadAnns(coco.getAnnIds(row["image_id"], row["category_id"]))
        truth = np.any([coco.annToMask(annotation) for annotation in annotations], axis=0)
        expected = (predicted & truth).sum() / (predicted | truth).sum()
        assert row["iou"] == pytest.approx(expected, abs=2e-3), row["prompt"]
        assert row["gt_area"] == truth.sum()


def test_torch_onnx_and_an_om_of_batch_4_give_the_same_mean_iou(onnx_run, tmp_path, onnx_path, demo_data):
    value = summary(onnx_run[0])["value"]
    assert evaluate(TINY, demo_data, tmp_path / "torch").returncode == 0
    assert summary(tmp_path / "torch")["value"] == pytest.approx(value, abs=1e-4)
    make_om(onnx_path, tmp_path / "sam3_300I_bs4.om", 4)
    # The guide's unquoted wildcard, as the shell leaves it when it matches nothing there.
    result = evaluate(tmp_path / "sam3_300I_bs4*.om", demo_data, tmp_path / "om", "--device", 0)
    assert result.returncode == 0, result.stderr
    assert summary(tmp_path / "om")["value"] == pytest.approx(value, abs=1e-6)
    assert f"Mean IoU (om): {summary(tmp_path / 'om')['value']:.6f}" in result.stdout


def test_a_run_killed_at_random_points_ends_with_the_same_summary(onnx_run, tmp_path, onnx_path, demo_data):
    folder, rng = tmp_path / "killed", random.Random(5)
    command = [
        sys.executable, ROOT / "sam3_coco_iou_eval.py", "--model_path", onnx_path, "--processor_path", TINY,
        "--coco_root", demo_data, "--batch_size", "4", "--output_dir", folder,
    ]  # fmt: skip
    lines_before = 0
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = lines_before + rng.randint(1, 9)
        while process.poll() is None:
            path = folder / "samples.jsonl"
            if path.exists() and path.read_bytes().count(b"\n") >= wanted:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        process.wait()
        lines_before = (folder / "samples.jsonl").read_bytes().count(b"\n")
        with open(folder / "samples.jsonl", "ab") as stream:
            stream.write(b'{"image_id": 1, "categ')  # as a power cut in the middle of a line leaves it
    assert lines_before < 36, "the run was over before it was killed"
    result = evaluate(onnx_path, demo_data, folder)
    assert result.returncode == 0, result.stderr
    undisturbed, resumed = summary(onnx_run[0]), summary(folder)
    for name in ("seconds", "seconds_by_stage", "peak_memory_mib"):
        assert undisturbed.pop(name) and resumed.pop(name)
    assert resumed == undisturbed
    assert sorted(map(str, records(folder))) == sorted(map(str, records(onnx_run[0])))


def test_a_finished_run_and_a_run_of_something_else_are_refused_unless_overwritten(
    onnx_run, tmp_path, onnx_path, demo_data
):
    folder = tmp_path / "copy"
    shutil.copytree(onnx_run[0], folder)
    assert "holds a finished run" in error_line(evaluate(onnx_path, demo_data, folder))
    (folder / "summary.json").unlink()
    assert "another settings" in error_line(evaluate(onnx_path, demo_data, folder, "--score_threshold", 0.4))
    assert "another model" in error_line(evaluate(TINY, demo_data, folder))
    assert len(records(folder)) == 36
    (folder / "run.json").unlink()
    assert "samples.jsonl of an unknown run" in error_line(evaluate(onnx_path, demo_data, folder))
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").touch()
    shutil.rmtree(folder / "overlays")
    (folder / "overlays").symlink_to(precious)
    result = evaluate(onnx_path, demo_data, folder, "--overwrite", "--max_samples", 5)
    assert result.returncode == 0, result.stderr
    assert summary(folder)["samples"] == len(records(folder)) == 5 and not (folder / "overlays").exists()
    assert (precious / "thesis.txt").exists()


def test_two_runs_do_not_write_into_one_folder(tmp_path, onnx_path, demo_data):
    import fcntl

    folder = tmp_path / "busy"
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert "another run is writing here" in error_line(evaluate(onnx_path, demo_data, folder))
    finally:
        os.close(handle)


@pytest.fixture
def damaged_data(tmp_path, demo_data):
    """The demo set with four bad pictures, and an annotation file with every kind of fault."""
    root = tmp_path / "coco2017"
    shutil.copytree(demo_data, root)
    pictures = sorted((root / "val2017").iterdir())
    pictures[0].unlink()
    pictures[3].write_bytes(pictures[3].read_bytes()[:700])
    pictures[4].write_bytes(b"")
    Image.new("RGB", (9, 9)).save(pictures[11])
    path = root / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    content["categories"][0]["name"] = "星形 " * 20
    content["annotations"] += [
        {"id": 0, "image_id": 2, "category_id": 1, "segmentation": [[1, 2, 3, 4]]},
        {"id": 0, "image_id": 77, "category_id": 1, "segmentation": [[1, 2, 3, 4, 5, 6]]},
        {"id": 0, "image_id": 2, "category_id": 1, "iscrowd": 0, "segmentation": [[5, 5, 50, 5, 50, 50]]},
    ]
    path.write_text(json.dumps(content))
    return root


def test_bad_pictures_and_annotations_cost_only_their_own_samples(damaged_data, tmp_path, onnx_path):
    folder = tmp_path / "out"
    result = evaluate(onnx_path, damaged_data, folder)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    failed = records(folder, "failed.jsonl")
    assert {row["image_id"] for row in failed} == {1, 4, 5, 12}
    assert all(row["error"] for row in failed)
    content = summary(folder)
    assert content["failed"] == len(failed)
    assert content["samples"] + content["presence"]["absent"] + content["failed"] == 36 + 36 + 1
    assert len(content["truncated_prompts"]) == 1 and "not in Latin letters" in result.stderr
    assert content["annotation_problems"] == {
        "polygons of fewer than three points, odd length, or values that are no coordinates": 1,
        "annotations without a usable mask": 1,
        "annotations of an unknown image or category": 1,
    }
    assert any(row["image_id"] == 2 and row["category_id"] == 1 for row in records(folder))


def test_a_failed_picture_that_is_mended_is_evaluated_when_the_run_goes_on(
    damaged_data, demo_data, tmp_path, onnx_path
):
    folder = tmp_path / "out"
    evaluate(onnx_path, damaged_data, folder)
    before = summary(folder)["failed"]
    (folder / "summary.json").unlink()
    shutil.copy(sorted((demo_data / "val2017").iterdir())[0], damaged_data / "val2017")
    assert evaluate(onnx_path, damaged_data, folder).returncode == 1
    assert {row["image_id"] for row in records(folder, "failed.jsonl")} == {4, 5, 12}
    assert summary(folder)["failed"] == before - 6


def test_wrong_usage_is_refused_in_one_line(tmp_path, onnx_path, demo_data):
    out = tmp_path / "out"
    make_om(onnx_path, tmp_path / "bs2.om", 2)
    make_om(onnx_path, tmp_path / "other.om", 4, output_names={"pred_masks": "a:0:b"})
    cases = [
        ((tmp_path / "none.onnx", demo_data), "nothing matches"),
        ((onnx_path, tmp_path), "instances_val2017.json: missing"),
        ((tmp_path / "bs2.om", demo_data), "give --batch_size 2"),
        ((tmp_path / "other.om", demo_data), "output pred_masks is missing"),
    ]
    for arguments, text in cases:
        assert text in error_line(evaluate(*arguments, out)), text
    for extra in (("--device", "cuda:0"), ("--device", "0"), ("--batch_size", "0"), ("--score_threshold", "2")):
        assert extra[0] in error_line(evaluate(onnx_path, demo_data, out, *extra))
    assert not out.exists()


def test_a_crowd_rule_changes_the_truth_and_both_counts_are_printed(tmp_path, onnx_path, demo_data):
    root = tmp_path / "coco2017"
    shutil.copytree(demo_data, root)
    path = root / "annotations" / "instances_val2017.json"
    content = json.loads(path.read_text())
    for annotation in content["annotations"]:
        if annotation["image_id"] == 1:
            annotation["iscrowd"] = 1
    path.write_text(json.dumps(content))
    for rule, count in (("exclude", 33), ("include", 36)):
        result = evaluate(onnx_path, root, tmp_path / rule, "--crowd", rule)
        assert "samples with iscrowd masks left out: 33, with them: 36" in result.stdout
        assert summary(tmp_path / rule)["samples"] == count


def test_max_detections_keeps_the_best_only(tmp_path, onnx_path, demo_data):
    assert evaluate(onnx_path, demo_data, tmp_path, "--score_threshold", 0, "--max_detections", 2).returncode == 0
    assert {row["instances"] for row in records(tmp_path)} == {2}


def test_real_photographs_lose_no_sample(tmp_path, onnx_path):
    coco_root = SHARED / "data" / "coco2017"
    if not coco_root.exists():
        pytest.skip("the COCO sample is not beside the repository")
    result = evaluate(onnx_path, coco_root, tmp_path, timeout=600)
    assert result.returncode == 0, result.stderr
    expected = json.loads((SHARED / "data" / "coco2017_pairs_expected.json").read_text())["pairs"]
    areas = {(row["image_id"], row["category_id"]): row["gt_area"] for row in records(tmp_path)}
    assert areas == {(pair["image_id"], pair["category_id"]): pair["union_area_noncrowd"] for pair in expected}
    assert summary(tmp_path)["samples"] == 446 and summary(tmp_path)["failed"] == 0
