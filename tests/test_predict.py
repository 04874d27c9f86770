# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""sam3_predict.py as users run it: what it writes, that it goes on, and what it refuses."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY, error_line, export_tiny, run_script
from PIL import Image
from pycocotools import mask as coco_mask
from scenes import draw_scene

from sam3_utils.files import sha256


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three pictures; the first scene's shapes are known."""
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(3):
        Image.fromarray(draw_scene(np.random.default_rng([8, seed]), 180, 240)[0]).save(folder / f"scene {seed}.png")
    return folder


def predict(*options, model=TINY, **more):
    return run_script("sam3_predict.py", "--model_path", model, *options, **more)


def result_of(output, stem):
    (folder,) = output.glob(f"{stem}.????????")
    return folder, json.loads((folder / "result.json").read_text())


def decode(mask):
    return coco_mask.decode(mask | {"counts": mask["counts"].encode()}).astype(bool)


@pytest.fixture(scope="module")
def output(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicted") / "out"
    done = predict(
        "--images", photos, "--text", "circle", "square", "star", "--points", "100,80", "20,20,0",
        "--box", "60,40,200,160", "--write", "overlay", "masks", "cutouts", "labelme", "--show_input", "--side_by_side",
        "--output_dir", folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 of 3 pictures" in done.stdout and done.stderr == ""
    return folder


def test_every_picture_has_a_folder_named_by_its_content(photos, output):
    for seed in range(3):
        path = photos / f"scene {seed}.png"
        folder, result = result_of(output, f"scene {seed}")
        assert folder.name == f"scene {seed}.{sha256(path)[:8]}" and result["image"]["image_id"] == sha256(path)
        assert [record["kind"] for record in result["results"]] == ["concept"] * 3 + ["visual"]
        assert result["results"][3]["prompt"] == {
            "points": [[100.0, 80.0], [20.0, 20.0]], "labels": [1, 0], "box": [60.0, 40.0, 200.0, 160.0],
        }  # fmt: skip
        assert Image.open(folder / "overlay.png").size == (240, 180)
        assert Image.open(folder / "model_input.png").size == (224, 224)


def test_masks_cutouts_and_labelme_say_what_the_result_says(output):
    seen = 0
    for folder in output.glob("scene*"):
        result = json.loads((folder / "result.json").read_text())
        counted = 0
        for number, record in enumerate(result["results"]):
            instances = record["instances"] if record["kind"] == "concept" else [record["instances"][record["best"]]]
            for index, instance in enumerate(one for one in instances if one["area"]):
                mask = decode(instance["mask"])
                stem = f"{number:02d}_{index:03d}.png"
                np.testing.assert_array_equal(np.asarray(Image.open(folder / f"mask_{stem}")) > 0, mask)
                assert (np.asarray(Image.open(folder / f"cutout_{stem}"))[..., 3] > 0).sum() == mask.sum()
                counted += 1
        assert len(list(folder.glob("mask_*"))) == len(list(folder.glob("cutout_*"))) == counted
        shapes = json.loads((folder / "labelme.json").read_text())["shapes"]
        assert len({shape["group_id"] for shape in shapes}) <= counted
        seen += counted
    content = json.loads((output / "coco.json").read_text())
    assert len(content["images"]) == 3 and len(content["annotations"]) == seen > 3
    assert {one["name"] for one in content["categories"]} >= {"circle", "square", "star", "object"} - {"none"}


def test_the_same_object_by_word_box_and_click_is_drawn_side_by_side(output):
    shown = 0
    for folder in output.glob("scene*"):
        compared = json.loads((folder / "result.json").read_text())["side_by_side"]
        assert (folder / "side_by_side.png").is_file() == (compared is not None)
        if compared:
            shown += 1
            assert compared.keys() == {"box", "click"} and Image.open(folder / "side_by_side.png").size == (720, 196)
    assert shown


def test_the_summary_says_how_it_was_made(output):
    summary = json.loads((output / "summary.json").read_text())
    assert summary["model"]["sha256"]["model.safetensors"] == sha256(TINY / "model.safetensors")
    assert summary["settings"]["text"] == ["circle", "square", "star"] and summary["pictures"] == 3
    assert {"decode", "vision", "write"} <= summary["seconds_by_stage"].keys() and summary["peak_memory_mib"] > 100


def test_a_stopped_run_goes_on_and_nothing_is_overwritten_unasked(photos, tmp_path):
    command = ("--images", photos, "--text", "circle", "--output_dir", tmp_path / "out")
    assert predict(*command).returncode == 0
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("scene*/result.json")}
    gone, *kept = made
    before = json.loads(gone.read_text())
    shutil.rmtree(gone.parent)
    (tmp_path / "out" / f".{gone.parent.name}.writing").mkdir()  # of a run that was killed
    again = predict(*command)
    assert again.returncode == 0 and json.loads(gone.read_text()) == before
    assert all(path.stat().st_mtime_ns == made[path] for path in kept)
    assert not list((tmp_path / "out").glob(".*.writing"))
    other = predict("--images", photos, "--text", "star", "--output_dir", tmp_path / "out")
    assert "holds a run with another settings; give another --output_dir or --overwrite" in error_line(other)
    assert predict(*command[:2], "--text", "star", *command[4:], "--overwrite").returncode == 0
    assert json.loads(gone.read_text())["results"][0]["prompt"] == {"text": "star"}


def test_bad_pictures_are_listed_and_the_others_done(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "mixed")
    (tmp_path / "mixed" / "text.jpg").write_text("no picture")
    (tmp_path / "mixed" / "empty.png").touch()
    whole = (photos / "scene 0.png").read_bytes()
    (tmp_path / "mixed" / "cut.png").write_bytes(whole[: len(whole) // 2])
    done = predict("--images", tmp_path / "mixed", "--text", "circle", "--output_dir", tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr and "3 of 6 pictures" in done.stdout
    failed = json.loads((tmp_path / "out" / "summary.json").read_text())["failed"]
    assert {path.rsplit("/", 1)[1] for path in failed} == {"text.jpg", "empty.png", "cut.png"}


def test_a_click_outside_of_one_picture_is_that_picture_s_fault(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "mixed")
    Image.new("RGB", (50, 50)).save(tmp_path / "mixed" / "small.png")
    done = predict("--images", tmp_path / "mixed", "--points", "100,80", "--output_dir", tmp_path / "out")
    assert done.returncode == 1 and "100, 80 lies outside of the 50 x 50 picture" in done.stderr


def test_a_list_names_pictures_beside_it(photos, tmp_path):
    (photos / "list.txt").write_text("scene 1.png\n\nscene 0.png\n")
    done = predict("--images", photos / "list.txt", "--text", "circle", "--output_dir", tmp_path / "out")
    assert done.returncode == 0 and "2 of 2 pictures" in done.stdout


def test_onnx_answers_as_pytorch_does(photos, output, tmp_path):
    folder = export_tiny(tmp_path / "onnx", "--layout", "split", "--clicks", "6", "--verify", "never")
    done = predict(
        "--images", photos, "--text", "circle", "square", "star", "--points", "100,80", "20,20,0",
        "--box", "60,40,200,160", "--processor_path", TINY, "--output_dir", tmp_path / "out", model=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for seed in range(3):
        wanted, found = (result_of(place, f"scene {seed}")[1]["results"] for place in (output, tmp_path / "out"))
        for first, second in zip(wanted, found):
            assert len(first["instances"]) == len(second["instances"])
            for one, other in zip(first["instances"], second["instances"]):
                assert one["score"] == pytest.approx(other["score"], abs=1e-4)
                assert (decode(one["mask"]) != decode(other["mask"])).sum() <= 2


@pytest.mark.parametrize(
    "options, text",
    [
        (["--images", "{photos}"], "no prompt: give --text, --exemplars, --points or --box"),
        (["--images", "nowhere.png", "--text", "a"], None),
        (["--images", "{empty}", "--text", "a"], "no picture in it"),
        (["--images", "{photos}", "--points", "1"], "--points"),
        (["--images", "{photos}", "--points", "nan,2"], "--points"),
        (["--images", "{photos}", "--box", "1,2,3"], "--box"),
        (["--images", "{photos}", "--exemplars", "1,2,3,4,5"], "the label is 1 for what is meant"),
        (["--images", "{photos}", "--points", "1,2", "--side_by_side"], "--side_by_side needs --text"),
        (["--images", "{photos}", "--text", "a", "--device", "cuda:9"], "cuda:9"),
    ],
)
def test_wrong_usage_is_one_line(photos, tmp_path, options, text):
    (tmp_path / "empty").mkdir()
    options = [option.format(photos=photos, empty=tmp_path / "empty") for option in options]
    done = predict(*options, "--output_dir", tmp_path / "out", cwd=tmp_path)
    if text is None:  # one bad picture among many is no usage error; alone it is all of them
        assert done.returncode == 1 and "no such file" in done.stderr.lower() and "Traceback" not in done.stderr
    else:
        assert text in error_line(done)


def test_a_system_without_proc_and_fcntl_runs_too(photos, tmp_path):
    """Windows has neither; the lock is then left out, and said to be."""
    program = (
        "import runpy, sys, pathlib\n"
        "sys.modules['fcntl'] = None\n"
        "real = pathlib.Path.is_file\n"
        "pathlib.Path.is_file = lambda self: str(self) != '/proc/self/status' and real(self)\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"sys.argv = ['sam3_predict.py', '--model_path', {str(TINY)!r}, '--images', {str(photos / 'scene 0.png')!r},\n"
        f"            '--text', 'circle', '--output_dir', {str(tmp_path / 'out')!r}]\n"
        f"runpy.run_path({str(ROOT / 'sam3_predict.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot be locked on this system" in done.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["peak_memory_mib"] > 100
