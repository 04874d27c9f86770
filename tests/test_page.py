# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: Debian's Chromium without a window, moved by Playwright. Screenshots are kept in the
folder that SAM3_SCREENSHOTS names, to be looked at."""

import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scenes import draw_scene
from serving import service

from sam3_utils.masks import middle_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if not CHROMIUM:
    pytest.skip("no chromium here: apt install chromium", allow_module_level=True)
from playwright.sync_api import expect, sync_playwright  # noqa: E402


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # A container has no user namespaces to make a sandbox of.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A picture file and its objects."""
    picture, objects = draw_scene(np.random.default_rng([31, 40]), 240, 320)
    path = tmp_path_factory.mktemp("page") / "scene.png"
    Image.fromarray(picture).save(path)
    return path, objects


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1100, "height": 700}, accept_downloads=True, locale="en-GB")
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("request", lambda request: page.faults.append(request.url) if "127.0.0.1" not in request.url
            and not request.url.startswith(("data:", "blob:")) else None)  # fmt: skip
    yield page
    assert not page.faults
    page.close()


def shot(page, name: str) -> np.ndarray:
    data = page.screenshot()
    if "SAM3_SCREENSHOTS" in os.environ:
        (Path(os.environ["SAM3_SCREENSHOTS"]) / f"{name}.png").write_bytes(data)
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def click(page, x: float, y: float, **options) -> None:
    """On the picture, in its own pixels."""
    box = page.locator("#canvas").bounding_box()
    place = {"x": x / 320 * box["width"], "y": y / 240 * box["height"]}
    page.locator("#canvas").click(position=place, **options)


def wait(page) -> None:
    expect(page.locator("#status")).to_contain_text("ready", timeout=30_000)


def test_a_picture_clicks_words_export_reload_and_all_is_still_there(page, scene, tmp_path):
    path, objects = scene
    x, y = middle_of(objects[0].mask)
    with service(tmp_path / "state") as (client, _):
        page.goto(str(client.base_url))
        page.set_input_files("#file", path)
        expect(page.locator("#canvas")).to_be_visible(timeout=30_000)
        wait(page)
        before = shot(page, "picture")
        click(page, x, y)
        expect(page.locator("#objects li")).to_have_count(1, timeout=30_000)
        expect(page.locator("#choices button")).to_have_count(3)
        page.keyboard.press("2")
        expect(page.locator("#choices button").nth(1)).to_have_attribute("aria-pressed", "true", timeout=30_000)
        click(page, 5, 5, button="right")
        expect(page.locator("#choices")).to_be_hidden(timeout=30_000)
        page.locator("#objects input").fill("first")
        page.locator("#objects input").press("Tab")
        page.keyboard.press("/")
        page.keyboard.type(objects[-1].shape)
        page.keyboard.press("Enter")
        expect(page.locator("#objects li")).to_have_count(2, timeout=30_000)
        wait(page)
        after = shot(page, "two_objects")
        assert (before != after).any(axis=-1).sum() > 500  # masks are drawn
        with page.expect_download() as download:
            page.locator("#coco").click()
        assert '"first"' in download.value.path().read_text()
        with page.expect_download() as download:
            page.locator("#png").click()
        assert np.asarray(Image.open(download.value.path())).max() >= 2
        page.reload()
        expect(page.locator("#objects li")).to_have_count(2, timeout=30_000)
        expect(page.locator("#objects input").first).to_have_value("first")
        wait(page)
        again = shot(page, "after_reload")
        # Only the marks of the clicks are gone: nothing is active yet.
        assert (again != after).any(axis=-1).mean() < 0.02
        image_id = page.url.split("#")[1]
        sessions = client.get(f"/v1/images/{image_id}").json()["sessions"]
        assert [(one["kind"], one["steps"]) for one in sessions] == [("visual", 2), ("concept", 1)]
        assert sessions[0]["result"]["prompt"]["labels"] == [1, 0]


def test_boxes_undo_delete_and_keys(page, scene, tmp_path):
    with service(tmp_path / "state") as (client, _):
        page.goto(str(client.base_url))
        page.set_input_files("#file", scene[0])
        wait(page)
        box = page.locator("#canvas").bounding_box()
        scale = box["width"] / 320
        page.mouse.move(box["x"] + 60 * scale, box["y"] + 40 * scale)
        page.mouse.down()
        page.mouse.move(box["x"] + 200 * scale, box["y"] + 160 * scale, steps=5)
        page.mouse.up()
        expect(page.locator("#objects li")).to_have_count(1, timeout=30_000)
        (session,) = client.get(f"/v1/images/{page.url.split('#')[1]}").json()["sessions"]
        assert np.allclose(session["result"]["prompt"]["box"], [60, 40, 200, 160], atol=1)
        # The keyboard alone: a cross in the middle, a click, another that says "not this", and back.
        page.keyboard.press("n")
        page.locator("#canvas").focus()
        for key in ("ArrowLeft", "ArrowUp", "Enter"):
            page.keyboard.press(key)
        expect(page.locator("#objects li")).to_have_count(2, timeout=30_000)
        page.keyboard.press("Shift+Enter")
        expect(page.locator("#choices")).to_be_hidden(timeout=30_000)
        page.keyboard.press("u")
        expect(page.locator("#choices button")).to_have_count(3, timeout=30_000)
        page.keyboard.press("u")
        expect(page.locator("#objects li")).to_have_count(1, timeout=30_000)
        page.locator("#objects li button").click()
        expect(page.locator("#objects li")).to_have_count(0, timeout=30_000)
        assert client.get(f"/v1/images/{page.url.split('#')[1]}").json()["sessions"] == []


def test_a_wrong_file_and_an_unknown_word_are_told(page, scene, tmp_path):
    (tmp_path / "no.png").write_text("no picture")
    with service(tmp_path / "state") as (client, _):
        page.goto(str(client.base_url))
        page.set_input_files("#file", tmp_path / "no.png")
        expect(page.locator("#status")).to_have_class("error", timeout=30_000)
        expect(page.locator("#status")).to_contain_text("no picture of a known format")
        page.set_input_files("#file", scene[0])
        wait(page)
        page.fill("#phrase", "word " * 39)
        page.click("#words button")
        expect(page.locator("#status")).to_contain_text("tokens", timeout=30_000)


def test_chinese_and_the_token(browser, scene, tmp_path):
    with service(tmp_path / "state", env={"SAM3_TOKEN": "s3cret"}) as (client, _):
        page = browser.new_page(locale="zh-CN")
        page.on("dialog", lambda dialog: dialog.accept("s3cret"))
        page.goto(str(client.base_url))
        expect(page.locator("#open")).to_have_text("打开图片")
        page.set_input_files("#file", scene[0])
        expect(page.locator("#status")).to_contain_text("就绪", timeout=30_000)
        click(page, 100, 100)
        expect(page.locator("#objects li")).to_have_count(1, timeout=30_000)
        with page.expect_download() as download:
            page.locator("#labelme").click()
        assert '"shapes"' in download.value.path().read_text()
        shot(page, "chinese")
        page.click("#language")
        expect(page.locator("#open")).to_have_text("Open picture")
        page.close()
