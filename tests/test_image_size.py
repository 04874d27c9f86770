# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Pictures of another size: the graph agrees with transformers built for that size, and the scripts find the size."""

import json

import numpy as np
import pytest
import torch
from conftest import TINY, error_line, run_script

from sam3_utils.backends import open_model
from sam3_utils.checkpoint import load_model, size_unit
from sam3_utils.cli import UsageError
from sam3_utils.compare import random_feeds
from sam3_utils.contract import OUTPUTS

UNIT = 112  # patch 14 x window 8; the checkpoint's own size is 224


@pytest.fixture(scope="module", params=(112, 336))
def sized(request, tmp_path_factory):
    """(side, folder of a split export for it)."""
    folder = tmp_path_factory.mktemp("sized") / "model"
    result = run_script(
        "sam3_export_onnx.py", "--target_device", "300I", "--model_path", TINY, "--output_dir", folder,
        "--layout", "split", "--image_size", request.param,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report = json.loads((folder / "export_report.json").read_text())
    assert report["image_size"] == request.param and report["verification"]["bound"] == 1e-4
    return request.param, folder


def test_the_graph_agrees_with_transformers_built_for_that_size(sized, processor):
    """Independent of the kit's loader: transformers' config with another image_size, the same weights."""
    from transformers import Sam3Config, Sam3Model

    side, folder = sized
    config = Sam3Config.from_pretrained(TINY)
    config.image_size = side
    reference = Sam3Model.from_pretrained(TINY, config=config, dtype=torch.float32).eval()
    feeds = random_feeds(processor, side, 2)
    with torch.inference_mode():
        expected = reference(**{name: torch.from_numpy(array) for name, array in feeds.items()})
    found = open_model(folder).infer(feeds)
    for name in OUTPUTS:
        wanted = expected[name].numpy()
        assert found[name].shape == wanted.shape
        assert np.abs(found[name] - wanted).max() <= 1e-4 * max(1, np.abs(wanted).max()), name
    assert found["pred_masks"].shape[-1] == side // 14 * 4
    torch_model = open_model(TINY, image_size=side)
    assert torch_model.shapes == open_model(folder).shapes
    assert np.abs(torch_model.infer(feeds)["pred_masks"] - expected.pred_masks.numpy()).max() <= 1e-4


def test_the_unit_is_patch_times_window():
    assert size_unit(json.loads((TINY / "config.json").read_text())) == UNIT
    assert size_unit({"vision_config": {"backbone_config": {"patch_size": 14, "window_size": 24}}}) == 336


@pytest.mark.parametrize("side, near", ((200, "112 or 224"), (50, "112"), (-112, "112")))
def test_another_size_is_refused_with_its_neighbours(side, near):
    with pytest.raises(UsageError, match=f"--image_size {side}: .* multiples of 112 .*such as {near}$"):
        load_model(TINY, image_size=side)


def test_a_graph_is_made_for_one_size(onnx_path):
    with pytest.raises(UsageError, match="is made for 224; export it for another size"):
        open_model(onnx_path, image_size=112)
    assert open_model(onnx_path, image_size=224).shapes.image_size == 224


def test_the_scripts_make_pictures_as_the_model_takes_them_and_say_so(sized, tmp_path, demo_data):
    side, folder = sized
    values = []
    for path, more in ((folder, ()), (TINY, ("--image_size", side))):
        out = tmp_path / path.name
        result = run_script(
            "sam3_coco_iou_eval.py", "--model_path", path, "--processor_path", TINY, "--coco_root", demo_data,
            "--max_samples", 6, "--output_dir", out, *more,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert f"takes pictures of {side} x {side}; {TINY} made them 224 x 224" in result.stderr
        summary = json.loads((out / "summary.json").read_text())
        assert summary["settings"]["image_size"] == side
        values.append(summary["value"])
    assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_a_processor_of_another_model_is_still_refused(sized, tmp_path, demo_data):
    """Without the checkpoint's config.json nobody knows which sizes belong to it."""
    for path in TINY.iterdir():
        if path.suffix in (".json", ".txt") and path.name != "config.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    result = run_script(
        "sam3_coco_iou_eval.py", "--model_path", sized[1], "--processor_path", tmp_path, "--coco_root", demo_data,
    )  # fmt: skip
    assert "they belong to different models" in error_line(result)
