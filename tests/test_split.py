# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The split layout answers like the single graph and PyTorch, and encodes what it has seen only once."""

import json
import shutil

import numpy as np
import onnx
import pytest
from conftest import TINY, error_line, run_script
from make_om import make_om

from sam3_utils import backends, contract
from sam3_utils.backends import open_model
from sam3_utils.cli import UsageError
from sam3_utils.compare import random_feeds
from sam3_utils.differences import output_differences
from sam3_utils.pipeline import batch_size_for


@pytest.fixture
def folder(exported_split):
    return exported_split["300I"]


@pytest.fixture(scope="module")
def feeds(processor):
    """Five pairs: two phrases on one picture, one on the next, two on a third."""
    feeds = random_feeds(processor, 224, 5)
    feeds["pixel_values"] = feeds["pixel_values"][[0, 0, 1, 2, 2]]
    return feeds


@pytest.fixture
def counted(folder, monkeypatch):
    """An open split model, and the runs of its parts, name by name."""
    model, runs = open_model(folder), []
    for part, session in model._sessions.items():
        run = session.run
        monkeypatch.setattr(session, "run", lambda *args, part=part, run=run: runs.append(part) or run(*args))
    return model, runs


def rows(feeds, *numbers):
    return {name: array[list(numbers)] for name, array in feeds.items()}


def test_split_single_and_pytorch_agree(folder, onnx_path, feeds):
    found = open_model(folder).infer(feeds)
    for path in (onnx_path, TINY):
        for name, row in output_differences(open_model(path).infer(feeds), found).items():
            assert row["max_abs"] <= 3e-5 * max(1, row["max_ref"]), (path, name)


def test_the_single_graph_s_nodes_are_the_parts_nodes(folder, onnx_path):
    """Cut, not traced again: what was proven of one holds of the other."""

    def nodes(path):
        return {node.name: (node.op_type, tuple(node.input)) for node in onnx.load(path).graph.node}

    parts = [nodes(path) for path in folder.glob("*.onnx")]
    assert sum(map(len, parts)) - len(nodes(onnx_path)) <= 6  # the phrase's mask is made in two of them
    assert {name: node for part in parts for name, node in part.items()} == nodes(onnx_path)


def test_a_picture_is_encoded_once_for_the_phrases_that_follow_each_other(counted, feeds):
    model, runs = counted
    model.infer(feeds)
    assert runs.count("vision") == 3 and runs.count("text") == len(set(map(bytes, feeds["input_ids"])))
    runs.clear()
    model.infer(rows(feeds, 4))  # the last picture and a known phrase, in another call
    assert runs == ["detector"]
    model.infer(rows(feeds, 0))
    assert runs == ["detector", "vision", "detector"]


def test_phrases_of_one_picture_go_through_the_detector_together(counted, feeds):
    model, runs = counted
    model.infer(rows(feeds, 0, 1))
    assert runs.count("detector") == 1


def test_only_the_last_picture_and_a_bounded_number_of_phrases_are_kept(counted, feeds, monkeypatch):
    model, runs = counted
    monkeypatch.setattr(backends, "TEXT_CACHE", 2)
    for number in range(4):
        phrase = {"input_ids": feeds["input_ids"][:1].copy(), "attention_mask": feeds["attention_mask"][:1]}
        phrase["input_ids"][0, 1] = number + 1
        model.infer(rows(feeds, 0) | phrase)
    assert len(model._texts) == 2 and model._picture.shape == (3, 224, 224)
    runs.clear()
    model.infer(rows(feeds, 0) | phrase)
    assert "text" not in runs


def test_what_was_encoded_alone_and_together_is_the_same_to_the_bit(folder, feeds):
    """Otherwise a run that was killed and goes on would differ from a quiet one."""
    together = open_model(folder).infer(rows(feeds, 0, 1))
    model = open_model(folder)
    model.infer(rows(feeds, 2))
    again = model.infer(rows(feeds, 0, 1))
    assert all(np.array_equal(together[name], again[name]) for name in contract.OUTPUTS)


@pytest.fixture
def oms(folder, tmp_path):
    """A split model of OMs, its detector for four phrases on one picture."""
    for part in contract.SPLIT:
        batch = 4 if part == "detector" else 1
        make_om(folder / f"sam3_{part}.onnx", tmp_path / f"sam3_{part}.om", batch, pictures=1)
    path = tmp_path / "sam3_split_300I_bs4.json"
    path.write_text(json.dumps({part: f"sam3_{part}.om" for part in contract.SPLIT}))
    return path


def test_oms_of_fixed_batches_take_any_number_of_pairs(oms, folder, feeds):
    model = open_model(oms)
    assert (model.runtime, model.device, model.shapes.batch) == ("om", "0", None)
    expected = open_model(folder).infer(feeds)
    for name, array in model.infer(feeds).items():
        assert np.abs(array - expected[name]).max() <= 3e-5 * max(1, np.abs(array).max()), name


def test_an_om_that_was_compiled_for_other_batches_is_refused(oms, folder):
    make_om(folder / "sam3_vision.onnx", oms.parent / "sam3_vision.om", 4)
    with pytest.raises(UsageError, match="compile vision for a batch of 1"):
        open_model(oms)
    make_om(folder / "sam3_vision.onnx", oms.parent / "sam3_vision.om", 1)
    make_om(folder / "sam3_detector.onnx", oms.parent / "sam3_detector.om", 4, pictures=2)
    with pytest.raises(UsageError, match="takes 2 pictures with 4 phrases"):
        open_model(oms)


def test_parts_that_do_not_belong_together_are_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    model = onnx.load(tmp_path / "sam3_text.onnx")
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = 32
    model.graph.node.append(onnx.helper.make_node("Slice", ["features", "start", "end", "axis"], ["text_features"]))
    next(node for node in model.graph.node if node.output[0] == "text_features").output[0] = "features"
    for name, value in (("start", 0), ("end", 32), ("axis", 2)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
    onnx.save(model, tmp_path / "sam3_text.onnx")
    with pytest.raises(UsageError, match="its parts belong to different models, sam3_text.onnx differs in C"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    "content, text",
    [
        ("{", "not a split model's manifest"),
        ('{"vision": "sam3_vision.onnx"}', "not a split model's manifest"),
        ('["sam3_vision.onnx"]', "not a split model's manifest"),
        ('{"vision": "a.onnx", "text": "sam3_text.onnx", "detector": "../b.onnx"}', "a.onnx, b.onnx is missing"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(folder, tmp_path, content, text):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "split.json").write_text(content)
    with pytest.raises(UsageError, match=text):
        open_model(tmp_path)


def test_the_export_does_not_mix_layouts(folder, exported):
    more = ("--target_device", "300I", "--model_path", TINY, "--verify", "never")
    result = run_script("sam3_export_onnx.py", *more, "--output_dir", folder)
    assert "holds sam3_vision.onnx, the other layout" in error_line(result)
    result = run_script("sam3_export_onnx.py", *more, "--output_dir", exported["300I"], "--layout", "split")
    assert "holds sam3.onnx, the other layout" in error_line(result)


def test_an_interrupted_export_leaves_nothing_that_opens_as_a_model(folder, tmp_path, monkeypatch):
    """Also over a finished one: its parts and the new ones would be mixed."""
    import sam3_export_onnx
    from sam3_utils import graph

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save, saved = graph.save, []

    def interrupted(model, path, *more):
        if path.name == "sam3_detector.onnx":
            raise KeyboardInterrupt
        saved.append(path.name)
        save(model, path, *more)

    monkeypatch.setattr(graph, "save", interrupted)
    arguments = ["--target_device", "300I", "--model_path", str(TINY), "--output_dir", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        sam3_export_onnx.main([*arguments, "--layout", "split", "--verify", "never"])
    assert saved == ["sam3_vision.onnx", "sam3_text.onnx"]
    assert not {"split.json", "export_report.json"} & {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match="a split export that was not finished"):
        open_model(tmp_path)


def test_an_export_that_the_disk_cannot_hold_is_refused_before_it_writes(tmp_path, monkeypatch):
    import sam3_export_onnx

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000_000))
    arguments = ["--target_device", "300I", "--model_path", str(TINY), "--output_dir", str(tmp_path)]
    with pytest.raises(UsageError, match=r"0\.0 GB free, 0\.0 GB needed"):
        sam3_export_onnx.main([*arguments, "--layout", "split"])
    assert not list(tmp_path.iterdir())


def test_the_batch_that_nobody_asks_for_is_the_detector_s(oms, folder):
    assert batch_size_for(open_model(oms), None) == 4 and batch_size_for(open_model(folder), None) == 1
    assert batch_size_for(open_model(oms), 3) == 3


def test_the_scripts_take_a_split_folder(folder, onnx_path, tmp_path, demo_data):
    values = []
    for path in (onnx_path, folder):
        out = tmp_path / path.name
        result = run_script(
            "sam3_coco_iou_eval.py", "--model_path", path, "--processor_path", TINY, "--coco_root", demo_data,
            "--batch_size", 4, "--output_dir", out,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        values.append(json.loads((out / "summary.json").read_text()))
    assert values[0]["value"] == pytest.approx(values[1]["value"], abs=1e-5)
    assert set(values[1]["seconds_by_stage"]) >= {"decode", "prepare", "vision", "text", "detector", "write"}
    result = run_script("sam3_compare.py", "--reference", onnx_path, "--processor_path", TINY, "--candidate", folder)
    assert result.returncode == 0 and result.stdout.rstrip().endswith("PASS"), result.stdout + result.stderr
