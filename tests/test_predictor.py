# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The predictor against transformers' processors and post-processing, its cache, and what it refuses."""

import hashlib
import io

import numpy as np
import pytest
import torch
from conftest import TINY
from PIL import Image
from scenes import draw_scene
from transformers import Sam3Model, Sam3TrackerModel, Sam3TrackerProcessor

from sam3_utils.backends import open_model
from sam3_utils.cli import UsageError
from sam3_utils.images import PictureError
from sam3_utils.predictor import FeatureCache, PostProcess, Predictor, PromptError, image_id_of


@pytest.fixture(scope="module")
def scene():
    return draw_scene(np.random.default_rng([5, 2]), 200, 310)


@pytest.fixture(scope="module")
def model():
    return open_model(TINY)


@pytest.fixture
def predictor(model, processor, scene):
    predictor = Predictor(model, processor)
    predictor.set_image(scene[0])
    return predictor


def test_words_are_answered_as_transformers_does(predictor, processor, scene):
    theirs = Sam3Model.from_pretrained(TINY, dtype=torch.float32).eval()
    image = Image.fromarray(scene[0])
    for phrase in {one.shape for one in scene[1]} | {"large red star"}:
        inputs = processor(images=image, text=phrase, return_tensors="pt")
        with torch.inference_mode():
            outputs = theirs(**inputs)
        (wanted,) = processor.post_process_instance_segmentation(
            outputs, threshold=0.5, mask_threshold=0.5, target_sizes=[(200, 310)]
        )
        found = predictor.predict_text(phrase).instances
        order = np.argsort(-wanted["scores"].numpy(), kind="stable")
        assert len(found) == len(order)
        for one, index in zip(found, order):
            assert one.score == pytest.approx(float(wanted["scores"][index]), abs=1e-5)
            assert np.allclose(one.box_xyxy, wanted["boxes"][index].numpy(), atol=1e-2)
            np.testing.assert_array_equal(one.mask, wanted["masks"][index].numpy().astype(bool))
            assert one.area == one.mask.sum()


def test_clicks_are_answered_as_transformers_does(predictor, processor, scene):
    theirs = Sam3TrackerModel.from_pretrained(TINY, dtype=torch.float32).eval()
    tracker = Sam3TrackerProcessor(processor.image_processor, target_size=processor.image_processor.size["height"])
    image = Image.fromarray(scene[0])
    for points, labels, box in (
        ([[150, 90]], [1], None),
        ([[150, 90], [20, 30]], [1, 0], None),
        (None, None, [60, 40, 200, 160]),
    ):
        inputs = tracker(
            images=image, input_points=[[points]] if points else None, input_labels=[[labels]] if points else None,
            input_boxes=[[box]] if box else None, return_tensors="pt",
        )  # fmt: skip
        single = points is not None and len(points) == 1
        sizes = inputs.pop("original_sizes")
        with torch.inference_mode():
            outputs = theirs(**inputs, multimask_output=single)
        masks = tracker.post_process_masks(outputs.pred_masks, sizes)[0][0].numpy()
        found = predictor.predict_points(points or [], labels, box)
        assert len(found.instances) == (3 if single else 1)
        for one, mask, score in zip(found.instances, masks, outputs.iou_scores[0, 0]):
            np.testing.assert_array_equal(one.mask, mask)
            assert one.score == pytest.approx(float(score), abs=1e-5)
        assert found.kind == "visual" and found.best.score == max(one.score for one in found.instances)
        assert found.object_score == pytest.approx(float(outputs.object_score_logits.sigmoid()), abs=1e-5)


def test_a_click_after_others_is_identical_to_a_cold_one(model, processor, scene):
    cold = Predictor(model, processor)
    cold.set_image(scene[0])
    wanted = cold.predict_points([[100, 100]])
    warm = Predictor(model, processor)
    warm.set_image(draw_scene(np.random.default_rng([5, 9]), 240, 320)[0])
    warm.predict_points([[3, 3]])
    warm.set_image(scene[0])
    warm.predict_text("circle")
    warm.predict_box([10, 10, 90, 90])
    found = warm.predict_points([[100, 100]])
    assert found.instances == wanted.instances
    np.testing.assert_array_equal(found.logits, wanted.logits)


def test_a_picture_is_encoded_once_for_all_questions(model, processor, scene, monkeypatch):
    pictures, necks = [], []
    encode, neck = model.encode_picture, model.encode_clicks
    monkeypatch.setattr(model, "encode_picture", lambda pixels: pictures.append(1) or encode(pixels))
    monkeypatch.setattr(model, "encode_clicks", lambda features: necks.append(1) or neck(features))
    predictor = Predictor(model, processor)
    for _ in range(2):
        predictor.set_image(scene[0])
        predictor.predict_text("circle")
        predictor.predict_points([[10, 10]])
        predictor.predict_box([10, 10, 60, 60])
    assert len(pictures) == len(necks) == 1
    assert predictor.cache.misses == 1
    predictor.predict_text("star")  # what clicks do not need any more is gone, what words need is not
    assert "backbone_features" not in predictor.cache.get(predictor.image_id)


def test_exemplars_are_a_concept_and_a_box_is_one_object(predictor, processor, scene):
    height, width = scene[0].shape[:2]
    box = [20, 20, 90, 90]
    assert predictor.predict_exemplars([box]).kind == "concept"
    assert predictor.predict_box(box).kind == "visual"
    with_boxes = predictor.predict_text("circle", [box, [100, 20, 150, 90]], [1, 0])
    assert with_boxes.kind == "concept" and 0 <= with_boxes.presence <= 1
    tokens = processor.tokenizer(["circle"], padding="max_length", max_length=32, return_tensors="np")
    centres = [[55 / width, 55 / height, 70 / width, 70 / height], [125 / width, 55 / height, 50 / width, 70 / height]]
    outputs = predictor.model.infer(
        {
            "pixel_values": processor.image_processor(images=scene[0], return_tensors="pt")["pixel_values"].numpy(),
            **{name: array.astype(np.int64) for name, array in tokens.items()},
            "input_boxes": np.array([centres], np.float32),
            "input_boxes_labels": np.array([[1, 0]]),
        }
    )
    wanted = 1 / (1 + np.exp(-outputs["presence_logits"][0, 0]))
    assert with_boxes.presence == pytest.approx(wanted, abs=1e-5)


def test_fewer_detections_are_the_best_ones_and_lower_thresholds_give_more(predictor, scene):
    shape = scene[1][0].shape
    many = predictor.predict_text(shape, options=PostProcess(score_threshold=0.0)).instances
    assert len(many) == 16 and [one.score for one in many] == sorted((one.score for one in many), reverse=True)
    few = predictor.predict_text(shape, options=PostProcess(score_threshold=0.0, max_detections=3)).instances
    assert few == many[:3]
    large = predictor.predict_points([[100, 100]], options=PostProcess(click_threshold=-50.0)).instances
    assert all(one.area == 200 * 310 for one in large)


def test_masks_are_cleaned_where_asked(predictor):
    rough = predictor.predict_points([[100, 100]], multimask=False).best
    clean = predictor.predict_points([[100, 100]], multimask=False, options=PostProcess(max_island_area=10**6)).best
    assert clean.area == 0 and clean.box_xyxy is None and rough.area > 0


def test_an_earlier_mask_changes_the_answer(predictor):
    first = predictor.predict_points([[100, 100]])
    points, labels = [[100, 100], [200, 50]], [1, 0]
    with_mask = predictor.predict_points(points, labels, mask_input=first.logits[first.best_index])
    without = predictor.predict_points(points, labels)
    assert np.abs(with_mask.logits - without.logits).max() > 1e-3


def test_every_kind_of_picture_is_taken(model, processor, tmp_path, scene):
    predictor, image = Predictor(model, processor), Image.fromarray(scene[0])
    image.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    masks = []
    for given in (tmp_path / "a.png", str(tmp_path / "a.png"), data, image, scene[0], image.convert("RGBA")):
        predictor.set_image(given)
        masks.append(predictor.predict_points([[100, 100]]).instances)
    assert all(one == masks[0] for one in masks)
    assert image_id_of(data) == image_id_of(tmp_path / "a.png") == hashlib.sha256(data).hexdigest()
    assert image_id_of(image) == image_id_of(scene[0]) != image_id_of(scene[0].transpose(1, 0, 2))


def test_a_photo_lying_on_its_side_is_turned(model, processor, scene):
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[274] = 6
    Image.fromarray(scene[0]).save(buffer, "JPEG", exif=exif)
    predictor = Predictor(model, processor)
    predictor.set_image(buffer.getvalue())
    assert predictor.size == (310, 200)


@pytest.mark.parametrize(
    "array", (np.zeros((3, 20, 30), np.uint8), np.zeros((20, 30), np.uint8), np.zeros((20, 30, 3)))
)
def test_an_array_that_is_no_picture_is_refused(model, processor, array):
    with pytest.raises(PromptError, match=r"\(height, width, 3\) uint8 is known"):
        Predictor(model, processor).set_image(array)


@pytest.mark.parametrize("data", (b"", b"text", b"\xff\xd8\xff\xe0 cut short"))
def test_bytes_that_are_no_picture_are_refused(model, processor, data):
    with pytest.raises(PictureError, match="cannot be decoded"):
        Predictor(model, processor).set_image(data)


@pytest.mark.parametrize(
    "call, where",
    [
        (lambda p: p.predict_points(), "points"),
        (lambda p: p.predict_points([[float("nan"), 3]]), "points[0]"),
        (lambda p: p.predict_points([[float("inf"), 3]]), "points[0]"),
        (lambda p: p.predict_points([[1, 2], [311, 3]], [1, 1]), "points[1]"),
        (lambda p: p.predict_points([[1, -0.5]]), "points[0]"),
        (lambda p: p.predict_points([["left", 3]]), "points[0]"),
        (lambda p: p.predict_points([[1, 2, 3]]), "points[0]"),
        (lambda p: p.predict_points([5]), "points[0]"),
        (lambda p: p.predict_points([[0.4, 0.7]]), "points[0]"),
        (lambda p: p.predict_box([0.1, 0.2, 0.8, 0.9]), "box"),
        (lambda p: p.predict_points([[1, 2]], [2]), "labels[0]"),
        (lambda p: p.predict_points([[1, 2]], [True]), "labels[0]"),
        (lambda p: p.predict_points([[1, 2]], [1, 0]), "labels"),
        (lambda p: p.predict_points([[1, 2]], mask_input=np.zeros((3, 3))), "mask_input"),
        (lambda p: p.predict_points([[1, 2]], mask_input=np.full((64, 64), np.nan)), "mask_input"),
        (lambda p: p.predict_box([50, 10, 20, 60]), "box"),
        (lambda p: p.predict_box([20, 10, 20, 60]), "box"),
        (lambda p: p.predict_box([20, 10, 400, 60]), "box"),
        (lambda p: p.predict_box([20, 10, 60]), "box"),
        (lambda p: p.predict_box([20, 10, 60, float("nan")]), "box"),
        (lambda p: p.predict_text(""), "text"),
        (lambda p: p.predict_text("   "), "text"),
        (lambda p: p.predict_text("word " * 40), "text"),
        (lambda p: p.predict_text("star", [[5, 5, 2, 9]]), "boxes[0]"),
        (lambda p: p.predict_text("star", [[1, 1, 2, 2], [5, 5, 9, 900]]), "boxes[1]"),
        (lambda p: p.predict_text("star", [[1, 1, 2, 2]], [3]), "labels[0]"),
        (lambda p: p.predict_exemplars([]), "boxes"),
    ],
)
def test_a_wrong_prompt_names_what_is_wrong(predictor, call, where):
    with pytest.raises(PromptError) as refused:
        call(predictor)
    assert refused.value.field == where and "\n" not in str(refused.value)


def test_without_a_picture_and_after_its_features_are_gone_one_is_told(model, processor, scene):
    predictor = Predictor(model, processor)
    with pytest.raises(PromptError, match="call set_image first"):
        predictor.predict_text("star")
    predictor.set_image(scene[0])
    assert predictor.forget(predictor.image_id) and not predictor.forget(predictor.image_id)
    with pytest.raises(PromptError, match="call set_image again"):
        predictor.predict_points([[1, 1]])


def test_a_model_without_clicks_still_takes_words(onnx_path, processor, scene):
    predictor = Predictor(open_model(onnx_path), processor)
    predictor.set_image(scene[0])
    assert predictor.predict_text("circle").kind == "concept"
    with pytest.raises(UsageError, match="--clicks 1"):
        predictor.predict_points([[1, 1]])


def entry(megabytes):
    return {"a": np.zeros(megabytes * 250_000, np.float32)}


def test_the_cache_keeps_what_was_used_last_within_its_bytes():
    cache = FeatureCache(3_000_000)
    for name in "abc":
        cache.put(name, entry(1))
    assert cache.get("a") and cache.bytes == 3_000_000
    cache.put("d", entry(1))
    assert "b" not in cache and all(name in cache for name in "acd") and cache.evictions == 1
    cache.put("e", entry(2))
    assert "e" in cache and cache.bytes <= 3_000_000
    cache.put("large", entry(9))  # over the bound alone: kept until the next
    assert "large" in cache and len(cache) == 1
    cache.put("f", entry(1))
    assert "large" not in cache and cache.bytes == 1_000_000
    cache.put("f", entry(2))
    assert cache.bytes == 2_000_000 and cache.drop("f") and not cache.drop("f") and cache.bytes == 0
    assert cache.get("f") is None


def test_a_cache_of_no_bytes_keeps_one_picture(model, processor, scene):
    predictor = Predictor(model, processor, cache_bytes=0)
    for seed in range(3):
        predictor.set_image(draw_scene(np.random.default_rng([5, seed]), 120, 130)[0])
        predictor.predict_points([[10, 10]])
        assert len(predictor.cache) == 1
