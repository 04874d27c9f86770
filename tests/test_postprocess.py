# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Scores and masks equal transformers' post_process_instance_segmentation, bit for bit, in bounded memory."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, SHARED
from pycocotools import mask as coco_mask

from sam3_utils.metrics import mask_iou
from sam3_utils.postprocess import encode_rle, instance_scores, resize_masks, union_mask

SIZES = [(480, 640), (640, 427), (30, 200), (1, 400), (333, 500)]


def seeded_outputs(rng, batch: int, queries: int = 40, side: int = 72):
    """Logits of smooth blobs, more than ten of them above a score of 0.5 in every picture."""
    coarse = torch.from_numpy(rng.normal(0, 4, (batch, queries, 9, 9)).astype(np.float32))
    masks = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")
    logits = torch.from_numpy(rng.normal(1.0, 2.0, (batch, queries)).astype(np.float32))
    presence = torch.full((batch, 1), 4.0)
    boxes = torch.rand(batch, queries, 4)
    return SimpleNamespace(pred_masks=masks, pred_logits=logits, presence_logits=presence, pred_boxes=boxes)


def assert_equal_to_transformers(processor, sizes):
    outputs = seeded_outputs(np.random.default_rng(len(sizes)), len(sizes))
    expected = processor.post_process_instance_segmentation(
        outputs, threshold=0.5, mask_threshold=0.5, target_sizes=sizes
    )
    scores = instance_scores(outputs.pred_logits.numpy(), outputs.presence_logits.numpy())
    for row, size in enumerate(sizes):
        kept = np.flatnonzero(scores[row] > 0.5)
        assert len(kept) >= 10
        assert np.array_equal(scores[row][kept], expected[row]["scores"].numpy())
        masks = np.concatenate(list(resize_masks(outputs.pred_masks[row].numpy()[kept], size, 0.5)))
        assert np.array_equal(masks, expected[row]["masks"].numpy().astype(bool)), size
        assert np.array_equal(union_mask(outputs.pred_masks[row].numpy()[kept], size, 0.5), masks.any(0))


def test_scores_and_masks_are_transformers_own(processor):
    assert_equal_to_transformers(processor, SIZES)


def test_scores_and_masks_are_transformers_own_at_the_sizes_of_photographs(processor):
    import json

    path = SHARED / "data" / "coco2017" / "annotations" / "instances_val2017.json"
    if not path.exists():
        pytest.skip("the COCO sample annotations are not beside the repository")
    images = json.loads(path.read_text())["images"][:20]
    assert_equal_to_transformers(processor, [(image["height"], image["width"]) for image in images])


def test_a_confident_instance_is_gated_by_presence():
    score = instance_scores(np.array([[5.0]], np.float32), np.array([[-5.0]], np.float32))
    assert score[0, 0] == pytest.approx(1 / (1 + np.exp(-5)) / (1 + np.exp(5)), rel=1e-6) and score[0, 0] < 0.01


def test_no_instance_gives_an_empty_union():
    assert not union_mask(np.zeros((0, 8, 8), np.float32), (5, 7), 0.5).any()


def test_a_corner_stays_in_its_corner_of_a_wide_picture():
    logits = np.full((1, 8, 8), -9.0, np.float32)
    logits[0, :4, 6:] = 9.0
    union = union_mask(logits, (30, 200), 0.5)
    assert union[:14, 155:].all() and not union[16:].any() and not union[:, :145].any()


def test_many_instances_of_a_large_picture_stay_within_bounded_memory():
    """200 masks of 6000 x 4000 pixels are 19 GB as float32; the union must fit in 2 GB with everything else."""
    program = (
        "import resource, numpy as np, torch\n"
        "from sam3_utils.postprocess import union_mask\n"
        "union_mask(np.zeros((1, 288, 288), np.float32), (64, 64), 0.5)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "union_mask(np.ones((200, 288, 288), np.float32), (4000, 6000), 0.5)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    grown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(grown.stdout) < 600, f"{grown.stdout} MiB"


def test_rle_and_iou_are_pycocotools_and_exact():
    mask = np.zeros((3, 5), bool)
    mask[1:, 2:4] = True
    rle = encode_rle(mask)
    assert rle["size"] == [3, 5] and isinstance(rle["counts"], str)
    assert np.array_equal(coco_mask.decode(rle).astype(bool), mask)
    other = np.zeros((3, 5), bool)
    other[2, :] = True
    assert mask_iou(rle, encode_rle(other)) == 2 / 7
    empty = encode_rle(np.zeros((3, 5), bool))
    assert mask_iou(empty, empty) == 0.0 and mask_iou(rle, empty) == 0.0
