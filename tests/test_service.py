# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The service over real HTTP: what it answers, what it refuses, and that nothing is lost or mixed up."""

import base64
import hashlib
import io
import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from conftest import TINY, error_line, run_script
from PIL import Image
from pycocotools import mask as coco_mask
from serving import base64_of, picture_bytes, service

from sam3_utils.backends import open_model
from sam3_utils.devices import Busy, DeviceThread, NotReady
from sam3_utils.predictor import Predictor, image_id_of
from sam3_utils.results import as_json


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with service(tmp_path_factory.mktemp("service") / "state", "--max_mb", "1", "--max_megapixels", "4") as (client, _):
        yield client


@pytest.fixture(scope="module")
def predictor(processor):
    """The same model without the service."""
    return Predictor(open_model(TINY), processor)


def send(client, data: bytes) -> str:
    answer = client.post("/v1/images", content=data, headers={"Content-Type": "image/png"})
    assert answer.status_code == 200, answer.text
    return answer.json()["image_id"]


def decode(rle: dict) -> np.ndarray:
    return coco_mask.decode(rle | {"counts": rle["counts"].encode()}).astype(bool)


def masks_of(result: dict) -> list:
    return [(round(one["score"], 5), one["mask"]) for one in result["instances"]]


def fault(answer: httpx.Response) -> tuple:
    body = answer.json()["error"]
    assert body.keys() == {"code", "message", "field"} and "\n" not in body["message"]
    return answer.status_code, body["code"], body["field"]


def test_an_image_id_is_the_sha256_of_the_bytes_however_they_are_sent(client):
    data = picture_bytes(1)
    wanted = hashlib.sha256(data).hexdigest()
    first = client.post("/v1/images", files={"file": ("a b/../c.png", data)}).json()
    assert first["image_id"] == wanted and (first["width"], first["height"]) == (320, 240)
    assert first["name"] == "c.png" and not first["cached"] and first["encode_ms"] > 0
    for sent in (
        {"content": data, "headers": {"Content-Type": "image/png"}},
        {"json": {"image": base64_of(data)}},
        {"json": {"image": f"data:image/png;base64,{base64_of(data)}"}},
    ):
        again = client.post("/v1/images", **sent)
        assert again.json()["image_id"] == wanted and again.json()["cached"]
        assert len(again.content) < 1000


def test_answers_are_those_of_the_predictor(client, predictor):
    data = picture_bytes(2)
    image_id = send(client, data)
    predictor.set_image(data)
    answer = client.post("/v1/segment/text", json={"image_id": image_id, "prompts": ["circle", "red star", "nothing"]})
    assert [result["prompt"]["text"] for result in answer.json()["results"]] == ["circle", "red star", "nothing"]
    for result in answer.json()["results"]:
        wanted = as_json(predictor.predict_text(result["prompt"]["text"]), {})
        assert masks_of(result) == masks_of(wanted) and result["presence"] == wanted["presence"]
    body = {
        "image_id": image_id,
        "points": [{"x": 100, "y": 80}, {"x": 20.5, "y": 30, "label": 0}],
        "box": [40, 20, 200, 180],
    }
    (result,) = client.post("/v1/segment/points", json=body).json()["results"]
    wanted = as_json(predictor.predict_points([[100, 80], [20.5, 30]], [1, 0], [40, 20, 200, 180]), {})
    assert result["kind"] == "visual" and masks_of(result) == masks_of(wanted)


def test_masks_in_other_forms_are_the_same(client):
    image_id = send(client, picture_bytes(3))
    body = {"image_id": image_id, "points": [{"x": 160, "y": 120}], "save": False}
    answers = {form: client.post("/v1/segment/points", json=body | {"format": form}).json()["results"][0]["instances"]
               for form in ("rle", "png", "polygon")}  # fmt: skip
    assert len(answers["rle"]) == 3
    for rle, png, polygon in zip(*answers.values()):
        mask = decode(rle["mask"])
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(png["mask"]))))
        np.testing.assert_array_equal(picture > 0, mask)
        assert 0 <= polygon["polygon_iou"] <= 1 and isinstance(polygon["mask"], list)


def test_a_session_corrects_its_last_mask_as_the_predictor_does(client, predictor):
    data = picture_bytes(4)
    image_id = send(client, data)
    predictor.set_image(data)
    first = client.post("/v1/segment/points", json={"image_id": image_id, "points": [{"x": 100, "y": 80}]}).json()
    session = first["results"][0]["session_id"]
    chosen = client.patch(f"/v1/sessions/{session}", json={"best": 2, "name": "thing"}).json()
    assert chosen["result"]["best"] == 2 and chosen["name"] == "thing"
    more = {"image_id": image_id, "points": [{"x": 150, "y": 100, "label": 0}], "session_id": session}
    (second,) = client.post("/v1/segment/points", json=more).json()["results"]
    earlier = predictor.predict_points([[100, 80]]).logits[2]
    wanted = as_json(predictor.predict_points([[100, 80], [150, 100]], [1, 0], mask_input=earlier), {})
    assert second["session_id"] == session and masks_of(second) == masks_of(wanted)
    assert second["prompt"] == {"points": [[100, 80], [150, 100]], "labels": [1, 0]}
    undone = client.post(f"/v1/sessions/{session}/undo").json()
    assert undone["steps"] == 1 and masks_of(undone["result"]) == masks_of(first["results"][0])
    again = client.post("/v1/segment/points", json=more | {"reset": True}).json()["results"][0]
    assert again["prompt"]["points"] == [[150, 100]]
    assert client.get(f"/v1/sessions/{session}").json()["steps"] == 1
    assert client.delete(f"/v1/sessions/{session}").json() == {"dropped": True}
    assert fault(client.get(f"/v1/sessions/{session}")) == (404, "unknown_session", "session_id")


def test_the_blog_s_call_takes_a_file_and_a_point(client, predictor):
    data = picture_bytes(5)
    for sent in ({"data": {"x": 160, "y": 120}}, {"params": {"x": 160, "y": 120}}):
        answer = client.post("/segment", files={"file": ("a.png", data)}, **sent).json()
        predictor.set_image(data)
        best = predictor.predict_points([[160, 120]]).best
        mask = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["mask_base64"]))))
        np.testing.assert_array_equal(mask > 0, best.mask)
        assert answer["score"] == pytest.approx(best.score, abs=1e-6)
    assert fault(client.post("/segment", files={"file": ("a.png", data)}, data={"x": 1})) == (422, "bad_prompt", "y")


def test_exports_hold_every_object(client):
    image_id = send(client, picture_bytes(6))
    body = {"image_id": image_id, "prompts": ["circle", "square", "star", "triangle", "cross"]}
    found = sum(len(r["instances"]) for r in client.post("/v1/segment/text", json=body).json()["results"])
    clicked = client.post("/v1/segment/points", json={"image_id": image_id, "box": [60, 40, 200, 160]}).json()
    client.patch(f"/v1/sessions/{clicked['results'][0]['session_id']}", json={"name": "Ding"})
    content = client.get(f"/v1/images/{image_id}/coco.json").json()
    assert found > 0 and len(content["annotations"]) == found + 1
    assert "Ding" in {category["name"] for category in content["categories"]}
    labels = client.get(f"/v1/images/{image_id}/labels.png")
    numbers = np.asarray(Image.open(io.BytesIO(labels.content)))
    assert numbers.shape == (240, 320) and numbers.max() == found + 1
    shapes = client.get(f"/v1/images/{image_id}/labelme.json").json()["shapes"]
    assert {shape["label"] for shape in shapes} >= {"Ding"} and all(len(shape["points"]) >= 3 for shape in shapes)


def prompts_of(image_id):
    """(body of /v1/segment/points or /text, field that must be named)."""
    point = {"x": 10, "y": 10}
    for value in ("NaN", "Infinity"):
        yield "points", f'{{"image_id": "{image_id}", "points": [{{"x": {value}, "y": 1}}]}}', "points[0].x"
    for body, field in (
        ({"points": []}, "points"),
        ({"points": [{"x": 321, "y": 10}]}, "points[0]"),
        ({"points": [{"x": -1, "y": 10}]}, "points[0]"),
        ({"points": [point | {"label": 2}]}, "points[0].label"),
        ({"points": [{"x": "left", "y": 1}]}, "points[0].x"),
        ({"points": [{"x": 1}]}, "points[0].y"),
        ({"points": [point | {"z": 1}]}, "points[0].z"),
        ({"box": [100, 10, 50, 60]}, "box"),
        ({"box": [10, 10, 50]}, "box"),
        ({"box": [10, 10, 50, 999]}, "box"),
        ({"points": [point], "session_id": "../../etc/passwd"}, "session_id"),
        ({"points": [point], "multimask": "perhaps"}, "multimask"),
        ({"points": [point], "threshold": 1}, "threshold"),
    ):
        yield "points", json.dumps({"image_id": image_id} | body), field
    for body, field in (
        ({}, "prompts"),
        ({"prompts": [""]}, "prompts[0]"),
        ({"prompts": ["star", "   "]}, "prompts[1]"),
        ({"prompts": ["word " * 40]}, "prompts[0]"),
        ({"prompts": ["star"] * 33}, "prompts"),
        ({"prompts": ["star"], "score_threshold": 2}, "score_threshold"),
        ({"prompts": ["star"], "exemplars": [{"box": [5, 5, 4, 9]}]}, "exemplars[0]"),
        ({"prompts": ["star"], "format": "bmp"}, "format"),
    ):
        yield "text", json.dumps({"image_id": image_id} | body), field


def test_a_wrong_prompt_is_a_422_that_names_the_field(client):
    image_id = send(client, picture_bytes(7))
    for path, body, field in prompts_of(image_id):
        answer = client.post(f"/v1/segment/{path}", content=body, headers={"Content-Type": "application/json"})
        assert fault(answer) == (422, "bad_prompt", field), (body, answer.text)


def test_what_is_not_json_or_not_a_picture_is_a_400(client):
    headers = {"Content-Type": "application/json"}
    assert fault(client.post("/v1/segment/text", content="{", headers=headers)) == (400, "bad_json", None)
    assert fault(client.post("/v1/images", content="[1", headers=headers)) == (400, "bad_json", None)
    data = picture_bytes(8, "JPEG")
    for broken in (b"", b"not a picture", data[: len(data) // 2], b"GIF89a"):
        answer = client.post("/v1/images", content=broken, headers={"Content-Type": "image/jpeg"})
        assert fault(answer) == (400, "bad_image", "image"), broken[:10]
        assert fault(client.post("/segment", files={"file": ("a.jpg", broken)}, data={"x": 1, "y": 1}))[0] == 400
    assert fault(client.post("/v1/images", json={"image": "%%%"})) == (400, "bad_image", "image")
    assert fault(client.post("/v1/images", json={"image": "http://127.0.0.1/a.png"})) == (422, "bad_prompt", "image")
    answer = client.post("/v1/images", content=b"a,b", headers={"Content-Type": "text/csv"})
    assert fault(answer) == (415, "unsupported_media_type", None)


def test_too_many_bytes_or_pixels_are_a_413_before_anything_is_decoded(client):
    answer = client.post("/v1/images", content=bytes(1_000_001), headers={"Content-Type": "image/png"})
    assert fault(answer) == (413, "too_large", "image")
    assert fault(client.post("/v1/images", content=bytes(3_000_000))) == (413, "too_large", None)
    chunks = (bytes(100_000) for _ in range(40))  # no Content-Length
    answer = client.post("/v1/images", content=chunks, headers={"Content-Type": "image/png"})
    assert fault(answer) == (413, "too_large", None)
    buffer = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(buffer, "PNG")
    answer = client.post("/v1/images", content=buffer.getvalue(), headers={"Content-Type": "image/png"})
    assert fault(answer) == (413, "too_large", "image") and "900,000,000 pixels" in answer.text


def test_unknown_things_are_404_and_malformed_ids_422(client):
    assert fault(client.get(f"/v1/images/{'0' * 64}")) == (404, "unknown_image", "image_id")
    body = {"image_id": "f" * 64, "prompts": ["star"]}
    assert fault(client.post("/v1/segment/text", json=body)) == (404, "unknown_image", "image_id")
    assert fault(client.get(f"/v1/sessions/{'0' * 32}")) == (404, "unknown_session", "session_id")
    for bad in ("0" * 63, "..%2f..%2fetc%2fpasswd", "G" * 64):
        assert client.get(f"/v1/images/{bad}").status_code in (404, 422)
        assert client.get(f"/v1/images/{bad}/file").status_code in (404, 422)
    assert client.get("/static/../service.py").status_code == 404
    assert client.get("/static/%2e%2e/service.py").status_code == 404
    assert fault(client.get("/nowhere"))[:2] == (404, "not_found")
    assert fault(client.put("/v1/images"))[:2] == (405, "method_not_allowed")


def test_a_deleted_picture_is_gone_with_its_sessions(client):
    image_id = send(client, picture_bytes(9))
    answer = client.post("/v1/segment/points", json={"image_id": image_id, "points": [{"x": 9, "y": 9}]}).json()
    assert client.delete(f"/v1/images/{image_id}").json() == {"dropped": True}
    assert fault(client.get(f"/v1/images/{image_id}"))[0] == 404
    assert fault(client.get(f"/v1/sessions/{answer['results'][0]['session_id']}"))[0] == 404


def test_a_turned_photo_is_answered_as_it_is_seen(client):
    picture = Image.open(io.BytesIO(picture_bytes(10)))
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[274] = 6
    picture.save(buffer, "JPEG", exif=exif)
    answer = client.post("/v1/images", content=buffer.getvalue(), headers={"Content-Type": "image/jpeg"}).json()
    assert (answer["width"], answer["height"]) == (240, 320)
    shown = Image.open(io.BytesIO(client.get(f"/v1/images/{answer['image_id']}/file").content))
    assert shown.size == (240, 320)
    body = {"image_id": answer["image_id"], "points": [{"x": 100, "y": 310}]}
    (result,) = client.post("/v1/segment/points", json=body).json()["results"]
    assert result["instances"][0]["mask"]["size"] == [320, 240]


def test_many_clients_get_the_answers_of_a_serial_run(client, predictor):
    pictures = [picture_bytes(seed) for seed in range(20, 24)]
    ids = [send(client, data) for data in pictures]
    wanted = {}
    for data, image_id in zip(pictures, ids):
        predictor.set_image(data)
        for phrase in ("circle", "star"):
            wanted[image_id, phrase] = masks_of(as_json(predictor.predict_text(phrase), {}))
        for x in (60, 160):
            wanted[image_id, x] = masks_of(as_json(predictor.predict_points([[x, 100]]), {}))
    questions = list(wanted) * 4
    random.Random(0).shuffle(questions)

    def ask(question):
        image_id, what = question
        path, body = (
            ("text", {"prompts": [what]}) if isinstance(what, str) else ("points", {"points": [{"x": what, "y": 100}]})
        )
        answer = client.post(f"/v1/segment/{path}", json={"image_id": image_id, "save": False} | body)
        return question, masks_of(answer.json()["results"][0])

    with ThreadPoolExecutor(16) as pool:
        for question, found in pool.map(ask, questions):
            assert found == wanted[question], question


def test_the_service_tells_of_itself(client):
    (model,) = client.get("/v1/models").json()
    assert model["prompts"] == ["text", "exemplar", "box", "point"] and model["limits"]["tokens"] == 32
    assert model["sha256"]["model.safetensors"] == hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest()
    (device,) = client.get("/v1/stats").json()["devices"]
    assert device["cache"]["bytes"] > 0 and device["timings_ms"]["predict_points"]["count"] > 0
    assert "sam3_stage_seconds_bucket" in client.get("/metrics").text
    assert client.get("/healthz").json() == {"status": "ok"}
    described = client.get("/openapi.json").json()
    assert "/v1/segment/points" in described["paths"]
    page = client.get("/").text
    assert "http://" not in page and "https://" not in page
    for name in ("app.js", "style.css"):
        code = client.get(f"/static/{name}").text
        assert len(code) > 100 and "http://" not in code and "https://" not in code


def test_a_foreign_host_name_is_refused_on_loopback(client):
    assert client.get("/healthz", headers={"Host": "evil.example"}).status_code == 400


def test_a_killed_service_goes_on_with_its_sessions(tmp_path):
    data = picture_bytes(11)
    with service(tmp_path / "state") as (client, process):
        image_id = send(client, data)
        first = client.post("/v1/segment/points", json={"image_id": image_id, "points": [{"x": 90, "y": 90}]}).json()
        words = client.post("/v1/segment/text", json={"image_id": image_id, "prompts": ["circle"]}).json()
        process.send_signal(signal.SIGKILL)
        process.wait()
    with service(tmp_path / "state") as (client, process):
        kept = client.get(f"/v1/images/{image_id}").json()
        assert [one["kind"] for one in kept["sessions"]] == ["visual", "concept"]
        for one, answer in zip(kept["sessions"], (first, words)):
            assert masks_of(one["result"]) == masks_of(answer["results"][0])
        session = first["results"][0]["session_id"]
        more = {"image_id": image_id, "points": [{"x": 120, "y": 90}], "session_id": session}
        after = client.post("/v1/segment/points", json=more).json()
        assert client.get(f"/v1/sessions/{session}").json()["steps"] == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, -signal.SIGTERM, 143)
    with service(tmp_path / "other") as (client, _):  # never killed: the answer is the same
        send(client, data)
        first = client.post("/v1/segment/points", json={"image_id": image_id, "points": [{"x": 90, "y": 90}]}).json()
        again = client.post("/v1/segment/points", json=more | {"session_id": first["results"][0]["session_id"]}).json()
        assert masks_of(again["results"][0]) == masks_of(after["results"][0])


def test_a_token_is_wanted_where_one_is_set(tmp_path):
    with service(tmp_path / "state", env={"SAM3_TOKEN": "s3cret"}) as (client, _):
        assert client.get("/healthz").status_code == 200 and client.get("/").status_code == 200
        answer = client.get("/v1/images")
        assert fault(answer)[:2] == (401, "unauthorised") and answer.headers["WWW-Authenticate"] == "Bearer"
        assert client.get("/v1/images", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/v1/images", headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_before_the_model_is_there_the_service_says_so(tmp_path):
    with service(tmp_path / "state", wait=False) as (client, _):
        answer, deadline = None, time.monotonic() + 60
        while answer is None and time.monotonic() < deadline:
            try:
                answer = client.get("/readyz")
            except httpx.TransportError:
                time.sleep(0.05)
        if answer.status_code == 503:  # else it was faster than we
            assert answer.json()["state"] == "loading" and answer.headers["Retry-After"]


class Slow:
    """In the place of a predictor."""

    model = type("Model", (), {"close": lambda self: None})()


def test_a_full_queue_refuses_and_an_empty_one_takes_again():
    thread, gate = DeviceThread(Slow, lambda predictor: None, 2), threading.Event()
    with pytest.raises(NotReady, match="loading"):
        thread.submit(print)
    thread.start()
    while thread.state != "ready":
        time.sleep(0.01)
    first = thread.submit(lambda _: gate.wait(30))
    while thread.waiting():
        time.sleep(0.01)
    rest = [thread.submit(lambda _: "done") for _ in range(2)]
    with pytest.raises(Busy, match="2 requests are waiting"):
        thread.submit(print)
    gate.set()
    assert first.result(30) and [future.result(30) for future in rest] == ["done", "done"]
    failing = thread.submit(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(30)
    assert thread.submit(lambda _: "still here").result(30) == "still here"
    thread.stop()
    assert not thread.is_alive()


def test_a_model_that_cannot_be_loaded_is_told_by_readyz():
    def fail():
        raise RuntimeError("no such weights")

    thread = DeviceThread(fail, lambda predictor: None, 2)
    thread.start()
    thread.join()
    with pytest.raises(NotReady, match="no such weights"):
        thread.submit(print)


@pytest.mark.parametrize(
    "options, env, text",
    [
        ([], {}, "--model_path (or SAM3_MODEL_PATH) is missing"),
        (["--model_path", "nowhere"], {}, "nothing matches nowhere"),
        ([], {"SAM3_MODEL_PATH": "nowhere"}, "nothing matches nowhere"),
        (["--model_path", TINY], {"SAM3_PORT": "99999"}, "99999"),
        (["--model_path", TINY], {"SAM3_CACHE_MB": "none"}, "none"),
        (["--model_path", TINY, "--state_dir", "/dev/null/state"], {}, "/dev/null/state: cannot be used"),
    ],
)
def test_wrong_flags_and_variables_are_one_line(options, env, text, tmp_path):
    assert text in error_line(run_script("sam3_serve.py", *options, env=env, cwd=tmp_path))


def test_a_port_that_is_taken_ends_the_service(tmp_path):
    with service(tmp_path / "one") as (client, _):
        result = run_script(
            "sam3_serve.py", "--model_path", TINY, "--state_dir", tmp_path / "two", "--port", client.base_url.port
        )
        assert result.returncode != 0 and "Traceback" not in result.stderr


def test_ids_of_pictures_do_not_depend_on_how_they_come(tmp_path):
    data = picture_bytes(12)
    (tmp_path / "a.png").write_bytes(data)
    assert image_id_of(data) == image_id_of(tmp_path / "a.png") == hashlib.sha256(data).hexdigest()
