# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Clients that speak other interfaces: requests in the shapes of Label Studio's ML backend and of Roboflow's server."""

import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
from conftest import ROOT, TINY
from pycocotools import mask as coco_mask
from serving import base64_of, free_port, picture_bytes, service

from sam3_utils import label_studio
from sam3_utils.backends import open_model
from sam3_utils.cli import UsageError
from sam3_utils.predictor import PostProcess, Predictor

CONFIG = (
    '<View><Image name="image" value="$image"/><BrushLabels name="tag" toName="image"><Label value="Cat"/>'
    '</BrushLabels><KeyPointLabels name="point" toName="image"><Label value="Cat"/></KeyPointLabels></View>'
)


def unbrush(rle: list[int]) -> np.ndarray:
    """Label Studio's RLE read bit by bit as its own front end reads it: values of the flat RGBA picture."""
    bits, at = "".join(f"{byte:08b}" for byte in rle), 0

    def read(count):
        nonlocal at
        at += count
        return int(bits[at - count : at], 2)

    total, word = read(32), read(5) + 1
    sizes = [read(4) + 1 for _ in range(4)]
    values = []
    while len(values) < total:
        is_run = read(1)
        length = read(sizes[read(2)]) + 1
        values += [read(word)] * length if is_run else [read(word) for _ in range(length)]
    return np.array(values)


@pytest.fixture(scope="module")
def predictor(processor):
    return Predictor(open_model(TINY), processor)


def masks():
    rng = np.random.default_rng(0)
    yield np.array([[1, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1]], bool)  # an odd first run
    yield np.zeros((4, 7), bool)
    yield np.ones((300, 301), bool)  # runs over 65536
    yield rng.random((37, 23)) > 0.5


@pytest.mark.parametrize("mask", masks(), ids=("odd", "empty", "full", "noise"))
def test_a_brush_rle_is_read_back(mask):
    values = unbrush(label_studio.brush_rle(mask)).reshape(*mask.shape, 4)
    for channel in range(4):
        np.testing.assert_array_equal(values[..., channel], mask * 255)


def mark(kind, value, **more):
    return {
        "original_width": 320, "original_height": 240, "image_rotation": 0, "id": "x", "from_name": "point",
        "to_name": "image", "type": kind, "origin": "manual", "value": {**value, kind: ["Cat"]}, **more,
    }  # fmt: skip


def request(data, *marks):
    return {
        "tasks": [{"id": 7, "data": {"image": data}, "annotations": [], "predictions": []}],
        "label_config": CONFIG, "project": "1.1", "params": {"login": None, "password": None,
                                                              "context": {"result": list(marks)}},
    }  # fmt: skip


def test_clicks_and_a_box_in_percent_become_a_brush_mask(predictor):
    data = picture_bytes(50)
    asked = request(
        f"data:image/png;base64,{base64_of(data)}",
        mark("keypointlabels", {"x": 50, "y": 50, "width": 0.3}, is_positive=True),
        mark("keypointlabels", {"x": 6.25, "y": 12.5, "width": 0.3}, is_positive=False),
        mark("rectanglelabels", {"x": 25, "y": 25, "width": 50, "height": 50, "rotation": 0}),
    )
    ((shape,),) = [one["result"] for one in label_studio.answer(predictor, asked, None)["results"]]
    predictor.set_image(data)
    best = predictor.predict_points([[160, 120], [20, 30]], [1, 0], [80, 60, 240, 180]).best
    assert (shape["from_name"], shape["to_name"], shape["type"]) == ("tag", "image", "brushlabels")
    assert shape["value"]["brushlabels"] == ["Cat"] and shape["score"] == best.score
    values = unbrush(shape["value"]["rle"]).reshape(240, 320, 4)
    np.testing.assert_array_equal(values[..., 3] > 0, best.mask)


def test_without_marks_nothing_is_asked(predictor):
    asked = request("whatever")
    assert label_studio.answer(predictor, asked, None)["results"][0]["result"] == []


def test_pictures_come_from_below_the_root_alone(tmp_path):
    (tmp_path / "in").mkdir()
    found = label_studio.picture_of("/data/local-files/?d=in/a.png", tmp_path)
    assert found == (tmp_path / "in" / "a.png").resolve()
    for address, root in (
        ("/data/local-files/?d=../../etc/passwd", tmp_path),
        ("/data/local-files/?d=/etc/passwd", tmp_path),
        ("/data/local-files/?d=in/a.png", None),
        ("http://example.org/a.png", tmp_path),
        ("/data/upload/1/a.png", tmp_path),
    ):
        with pytest.raises(UsageError):
            label_studio.picture_of(address, root)


def test_an_interface_without_a_brush_is_refused():
    for config in ("<View/>", '<!DOCTYPE a [<!ENTITY b "c">]><View><BrushLabels name="a" toName="b"/></View>'):
        with pytest.raises(UsageError, match="no BrushLabels"):
            label_studio.names_in(config)


def test_the_label_studio_example_answers(tmp_path):
    (tmp_path / "a.png").write_bytes(picture_bytes(51))
    port = free_port()
    process = subprocess.Popen([sys.executable, ROOT / "examples/label_studio_backend.py", TINY, tmp_path, str(port)])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                try:
                    if client.get("/health").json() == {"status": "UP"}:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            assert client.post("/setup", json={"project": "1", "schema": CONFIG}).json() == {"model_version": "sam3"}
            asked = request("/data/local-files/?d=a.png", mark("keypointlabels", {"x": 50, "y": 50}, is_positive=True))
            assert client.post("/predict", json=asked).json()["results"][0]["result"][0]["value"]["format"] == "rle"
            wrong = request("http://example.org/a.png", mark("keypointlabels", {"x": 50, "y": 50}))
            assert client.post("/predict", json=wrong).status_code == 422
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with service(tmp_path_factory.mktemp("roboflow") / "state", "--roboflow_compat") as (client, _):
        yield client


def image(data):
    return {"type": "base64", "value": base64_of(data)}


def test_the_aliases_are_off_unless_asked_for(tmp_path):
    with service(tmp_path / "state") as (client, _):
        assert client.post("/sam3/embed_image", json={"image": image(picture_bytes(52))}).status_code == 404


def test_a_picture_is_embedded_and_asked_by_its_id(client, predictor):
    data = picture_bytes(52)
    embedded = client.post("/sam3/embed_image", json={"image": image(data)}).json()
    body = {
        "image_id": embedded["image_id"], "format": "rle", "output_prob_thresh": 0.4,
        "prompts": [{"type": "text", "text": "circle"}, {"type": "text", "text": "star", "output_prob_thresh": 0.1}],
    }  # fmt: skip
    answer = client.post("/sam3/concept_segment", json=body).json()
    predictor.set_image(data)
    for result, phrase, threshold in zip(answer["prompt_results"], ("circle", "star"), (0.4, 0.1)):
        wanted = predictor.predict_text(phrase, options=PostProcess(score_threshold=threshold)).instances
        assert result["echo"]["text"] == phrase
        assert [one["masks"] for one in result["predictions"]] == [one.rle for one in wanted]
        assert all(one["format"] == "rle" for one in result["predictions"])


def test_a_box_is_read_from_its_corner_in_a_concept_and_from_its_centre_in_a_visual_prompt(client, predictor):
    data = picture_bytes(53)
    predictor.set_image(data)
    corner = {"x": 40, "y": 30, "width": 100, "height": 80}
    anything = PostProcess(score_threshold=0.0)
    wanted = [one.rle for one in predictor.predict_exemplars([[40, 30, 140, 110]], [1], anything).instances]
    for box in (corner, {"x0": 40, "y0": 30, "x1": 140, "y1": 110}):
        prompts = [{"type": "visual", "boxes": [box], "box_labels": [1], "output_prob_thresh": 0.0}]
        body = {"image": image(data), "prompts": prompts, "format": "rle"}
        (found,) = client.post("/sam3/concept_segment", json=body).json()["prompt_results"]
        assert [one["masks"] for one in found["predictions"]] == wanted
    points = [{"x": 100, "y": 90, "positive": True}, {"x": 10, "y": 20, "positive": False}]
    prompts = {"prompts": [{"box": {"x": 90, "y": 70, "width": 100, "height": 80}}, {"points": points}]}
    body = {"image": image(data), "prompts": prompts, "multimask_output": False, "format": "rle"}
    found = client.post("/sam3/visual_segment", json=body).json()["predictions"]
    wanted = [
        predictor.predict_box([40, 30, 140, 110], multimask=False).best,
        predictor.predict_points([[100, 90], [10, 20]], [1, 0], multimask=False).best,
    ]
    assert [(one["masks"], one["confidence"]) for one in found] == [(one.rle, one.score) for one in wanted]


def test_polygons_are_lists_of_x_and_y(client):
    body = {"image": image(picture_bytes(54)), "prompts": {"prompts": [{"points": [{"x": 100, "y": 90}]}]}}
    ((prediction),) = client.post("/sam3/visual_segment", json=body).json()["predictions"]
    assert prediction["format"] == "polygon"
    for outline in prediction["masks"]:
        assert len(outline) >= 3 and all(len(corner) == 2 for corner in outline)


@pytest.mark.parametrize(
    "path, change, field",
    [
        ("concept", {"nms_iou_threshold": 0.5}, "nms_iou_threshold"),
        ("concept", {"image": {"type": "url", "value": "http://example.org/a.png"}}, "image.type"),
        ("concept", {"prompts": [{"type": "text", "text": ""}]}, "prompts[0].text"),
        ("concept", {"prompts": [{"type": "visual", "boxes": [{"x": 1}]}]}, "prompts[0].boxes[0]"),
        ("visual", {"load_logits_from_cache": True}, "load_logits_from_cache"),
        ("visual", {"prompts": {"prompts": [{"points": [{"x": 999, "y": 1}]}]}}, "prompts.prompts[0].points[0]"),
    ],
)
def test_what_is_not_done_here_is_refused(client, path, change, field):
    prompts = {"concept": [{"type": "text", "text": "star"}], "visual": {"prompts": [{"points": [{"x": 9, "y": 9}]}]}}
    body = {"image": image(picture_bytes(54)), "prompts": prompts[path]} | change
    answer = client.post(f"/sam3/{path}_segment", json=body)
    assert answer.status_code == 422 and answer.json()["error"]["field"] == field, answer.text


def test_coco_and_brush_say_the_same():
    mask = next(iter(masks()))
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    np.testing.assert_array_equal(
        coco_mask.decode(rle).astype(bool), unbrush(label_studio.brush_rle(mask)).reshape(*mask.shape, 4)[..., 0] > 0
    )
