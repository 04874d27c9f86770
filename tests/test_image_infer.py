# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""sam3_image_infer.py over a small SA-Co set: whatever dies, the final predictions are those of a quiet run."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, STANDINS, TINY, error_line, run_script
from make_om import make_om
from pycocotools import mask as coco_mask

from sam3_utils.saco import annotation_path, prediction_path

SUBSETS = ("metaclip_nps", "sa1b_nps")
PAIRS = 64


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    from make_demo_saco import make_subset

    root = tmp_path_factory.mktemp("saco") / "dataset"
    assert sum(make_subset(root, subset, 8, 2, 5) for subset in SUBSETS) == PAIRS
    return root


def command(model, dataset, output_dir, *extra) -> list[str]:
    arguments = [
        "--model_path", model, "--processor_path", TINY, "--dataset_root", dataset, "--batch_size", 2,
        "--output_dir", output_dir, "--subset", *SUBSETS, *extra,
    ]  # fmt: skip
    return [sys.executable, str(ROOT / "sam3_image_infer.py"), *map(str, arguments)]


def infer(model, dataset, output_dir, *extra, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(model, dataset, output_dir, *extra), capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(STANDINS)}, **options,
    )  # fmt: skip


def predictions(output_dir) -> dict[str, bytes]:
    return {subset: prediction_path(output_dir, subset).read_bytes() for subset in SUBSETS}


@pytest.fixture(scope="module")
def quiet_run(tmp_path_factory, onnx_path, dataset):
    folder = tmp_path_factory.mktemp("infer") / "gold_predictions"
    result = infer(onnx_path, dataset, folder)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_predictions_have_the_official_place_and_form(quiet_run, dataset):
    folder, result = quiet_run
    for subset in SUBSETS:
        path = folder / f"gold_{subset}" / "dumps" / f"gold_{subset}" / "coco_predictions_segm.json"
        entries = json.loads(path.read_text())
        images = {
            image["id"]: image
            for image in json.loads(annotation_path(dataset / "gt-annotations", subset, "a").read_text())["images"]
        }
        assert entries
        for entry in entries:
            image = images[entry["image_id"]]
            assert set(entry) == {"image_id", "category_id", "segmentation", "score", "bbox", "area"}
            assert entry["category_id"] == 1 and 0.3 < entry["score"] <= 1
            assert entry["segmentation"]["size"] == [image["height"], image["width"]]
            assert len(entry["bbox"]) == 4 and all(
                value == round(value, 5) for value in (*entry["bbox"], entry["score"])
            )
            share = coco_mask.area(entry["segmentation"]) / (image["height"] * image["width"])
            assert entry["area"] == pytest.approx(float(share), abs=1e-7)
        assert sorted(child.name for child in (folder / f"gold_{subset}").iterdir()) == [
            "dumps",
            "run.json",
            "summary.json",
        ]
        summary = json.loads((folder / f"gold_{subset}" / "summary.json").read_text())
        assert (summary["pairs"], summary["value"], summary["settings"]["batch_size"]) == (PAIRS // 2, len(entries), 2)
    assert result.stdout.count("32 pairs ->") == 2


def test_every_prediction_equals_transformers_own(quiet_run, dataset):
    import torch
    from PIL import Image
    from transformers import Sam3Model, Sam3Processor

    model, processor = Sam3Model.from_pretrained(TINY, dtype=torch.float32), Sam3Processor.from_pretrained(TINY)
    subset = SUBSETS[1]
    entries = json.loads(predictions(quiet_run[0])[subset])
    for image in json.loads(annotation_path(dataset / "gt-annotations", subset, "a").read_text())["images"][:8]:
        picture = Image.open(dataset / "sa1b-images" / image["file_name"])
        inputs = processor(images=picture, text=image["text_input"], return_tensors="pt")
        with torch.no_grad():
            outputs = model(**inputs)
        expected = processor.post_process_instance_segmentation(
            outputs, threshold=0.3, target_sizes=[(image["height"], image["width"])]
        )[0]
        found = [entry for entry in entries if entry["image_id"] == image["id"]]
        order = expected["scores"].argsort(descending=True)
        assert [entry["score"] for entry in found] == pytest.approx(expected["scores"][order].tolist(), abs=2e-5)
        for entry, index in zip(found, order):
            x1, y1, x2, y2 = (expected["boxes"][index] / torch.tensor(picture.size * 2)).tolist()
            assert entry["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1], abs=2e-5)
            difference = coco_mask.decode(entry["segmentation"]) != expected["masks"][index].numpy()
            assert difference.mean() < 1e-4


def test_two_workers_and_npus_give_the_bytes_of_one(quiet_run, tmp_path, onnx_path, dataset):
    make_om(onnx_path, tmp_path / "sam3_800I_bs2.om", 2)
    for name, model, devices in (("cpus", onnx_path, "cpu,cpu"), ("npus", tmp_path / "sam3_800I_bs2.om", "0, 1")):
        result = infer(model, dataset, tmp_path / name, "--device", devices)
        assert result.returncode == 0, result.stderr
        assert predictions(tmp_path / name) == predictions(quiet_run[0]), name


def test_a_split_om_gives_the_predictions_of_the_single_graph(quiet_run, tmp_path, exported_split, dataset):
    """On the NPU id 0, without --device; the detector takes four phrases of a picture, batches are of two pairs."""
    for part in ("vision", "text", "detector"):
        batch = 4 if part == "detector" else 1
        make_om(exported_split["300I"] / f"sam3_{part}.onnx", tmp_path / f"sam3_{part}.om", batch, pictures=1)
    path = tmp_path / "sam3_split_300I_bs4.json"
    path.write_text(json.dumps({part: f"sam3_{part}.om" for part in ("vision", "text", "detector")}))
    result = infer(path, dataset, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    for subset, expected in predictions(quiet_run[0]).items():
        found = json.loads(prediction_path(tmp_path / "out", subset).read_bytes())
        assert len(found) == len(json.loads(expected)) > 0
        for ours, theirs in zip(found, json.loads(expected)):
            assert (ours["image_id"], ours["category_id"]) == (theirs["image_id"], theirs["category_id"])
            assert ours["score"] == pytest.approx(theirs["score"], abs=1e-5)
            assert coco_mask.iou([ours["segmentation"]], [theirs["segmentation"]], [0])[0, 0] >= 0.99


def children(pid: int) -> list[int]:
    """Worker processes of a running parent, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                if "spawn_main" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
        except (OSError, IndexError):
            continue
    return sorted(found)


def lines(folder) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("gold_*/work/*.jsonl"))


def start_and_wait(model, dataset, folder, wanted: int, *extra) -> subprocess.Popen:
    """Start a run and wait until `wanted` more pairs are on disk."""
    goal = lines(folder) + wanted
    process = subprocess.Popen(
        command(model, dataset, folder, *extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while process.poll() is None and lines(folder) < goal:
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()
    return process


def assert_all_gone(pids: list[int]) -> None:
    deadline = time.time() + 20
    while time.time() < deadline and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_killed_worker_is_reported_and_its_work_done_by_the_other(quiet_run, tmp_path, onnx_path, dataset):
    process = start_and_wait(onnx_path, dataset, tmp_path, 6, "--device", "cpu,cpu")
    os.kill(random.Random(1).choice(children(process.pid)), signal.SIGKILL)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert "its worker died (exit code -9); its work goes to the others" in stderr
    assert predictions(tmp_path) == predictions(quiet_run[0])


def test_when_every_worker_is_killed_the_run_ends_and_goes_on_later(quiet_run, tmp_path, onnx_path, dataset):
    process = start_and_wait(onnx_path, dataset, tmp_path, 4)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1 and "every worker has died" in stderr and "Traceback" not in stderr
    assert infer(onnx_path, dataset, tmp_path).returncode == 0
    assert predictions(tmp_path) == predictions(quiet_run[0])


def test_killed_parents_leave_no_orphans_and_nothing_is_lost(quiet_run, tmp_path, onnx_path, dataset):
    rng = random.Random(2)
    for kill_all in (False, True):
        process = start_and_wait(onnx_path, dataset, tmp_path, rng.randint(3, 12), "--device", "cpu,cpu")
        workers = children(process.pid)
        assert len(workers) == 2
        if kill_all:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate()
        assert_all_gone(workers)
        for path in tmp_path.glob("gold_*/work/*.jsonl"):
            with open(path, "a") as stream:
                stream.write('{"pair": 100')  # as a power cut leaves a line
    assert infer(onnx_path, dataset, tmp_path).returncode == 0
    assert predictions(tmp_path) == predictions(quiet_run[0])


def test_ctrl_c_leaves_a_resumable_state_and_no_process(quiet_run, tmp_path, onnx_path, dataset):
    process = start_and_wait(onnx_path, dataset, tmp_path, 5, "--device", "cpu,cpu")
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr and "interrupted" in stderr
    assert_all_gone(workers)
    assert infer(onnx_path, dataset, tmp_path).returncode == 0
    assert predictions(tmp_path) == predictions(quiet_run[0])


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(quiet_run, tmp_path, onnx_path, dataset):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    result = infer(onnx_path, dataset, tmp_path, preexec_fn=small_files)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "File too large" in result.stderr.splitlines()[-1]
    assert infer(onnx_path, dataset, tmp_path).returncode == 0
    assert predictions(tmp_path) == predictions(quiet_run[0])


def test_bad_pictures_hold_back_their_subset_until_they_are_mended(quiet_run, tmp_path, onnx_path, dataset):
    copy = tmp_path / "dataset"
    shutil.copytree(dataset, copy)
    first, second = sorted((copy / "metaclip-images" / "metaclip_nps").iterdir())[:2]
    first.unlink()
    second.write_bytes(second.read_bytes()[:500])
    result = infer(onnx_path, copy, tmp_path / "out", "--device", "cpu,cpu")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert first.name in result.stderr and second.name in result.stderr
    assert "metaclip_nps: 8 of 32 pairs failed" in result.stdout and "sa1b_nps: 32 pairs ->" in result.stdout
    assert not prediction_path(tmp_path / "out", "metaclip_nps").exists()
    for path in (first, second):
        shutil.copy(dataset / "metaclip-images" / "metaclip_nps" / path.name, path)
    result = infer(onnx_path, copy, tmp_path / "out")
    assert result.returncode == 0 and "sa1b_nps: already complete" in result.stdout
    assert predictions(tmp_path / "out") == predictions(quiet_run[0])


def test_a_run_of_something_else_is_refused(quiet_run, tmp_path, onnx_path, dataset):
    folder = tmp_path / "copy"
    shutil.copytree(quiet_run[0], folder)
    for extra in (("--score_threshold", 0.4), ("--batch_size", 3)):
        assert "holds a run with another settings" in error_line(infer(onnx_path, dataset, folder, *extra))
    assert "holds a run with another model" in error_line(infer(TINY, dataset, folder))
    assert predictions(folder) == predictions(quiet_run[0])
    prediction_path(folder, SUBSETS[0]).write_text("[]")
    assert "missing or changed since it was written" in error_line(infer(onnx_path, dataset, folder))


def test_wrong_usage_is_one_line(tmp_path, onnx_path, dataset):
    out = tmp_path / "out"
    cases = [
        (("--subset", "food"), "--subset food: choose from"),
        (("--subset", "crowded"), "gold_crowded_merged_a_release_test.json: missing"),
        (("--device", "cpu,cuda:99"), "cuda:99"),
        (("--device", "0"), "--device 0"),
        (("--model_path", "none.om"), "nothing matches"),
        (("--dataset_root", tmp_path), "missing"),
        (("--device", "cpu,"), "a name is empty"),
    ]
    for extra, text in cases:
        assert text in error_line(infer(onnx_path, dataset, out, *extra)), extra
    copy = tmp_path / "dataset"
    shutil.copytree(dataset, copy)
    annotation_path(copy / "gt-annotations", SUBSETS[0], "a").write_bytes(b"")
    assert "not valid JSON" in error_line(infer(onnx_path, copy, out))


def test_a_pair_with_two_lines_stops_the_merge(tmp_path):
    from sam3_utils.cli import CheckFailed
    from sam3_utils.saco_predict import finished_pairs

    (tmp_path / "1.jsonl").write_text('{"pair": 7, "predictions": []}\n')
    (tmp_path / "2.jsonl").write_text('{"pair": 7, "predictions": []}\n')
    with pytest.raises(CheckFailed, match="pair 7 is there twice"):
        finished_pairs(tmp_path)


def test_the_chain_to_cgf1(quiet_run, dataset):
    result = run_script(
        "batch_eval.py", "--gt_base", dataset / "gt-annotations", "--pred_dir", quiet_run[0], "--subset", *SUBSETS
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.splitlines()[-1].split()[5]) >= 50
