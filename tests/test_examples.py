# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The examples, run as they are, and the Python of docs/own_pictures.md."""

import importlib.util
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, TINY
from PIL import Image
from scenes import draw_scene
from serving import service

from sam3_utils.backends import open_model
from sam3_utils.predictor import Predictor


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "street.jpg"
    Image.fromarray(draw_scene(np.random.default_rng([8, 3]), 240, 320)[0]).save(path)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with service(tmp_path_factory.mktemp("server") / "state") as (client, _):
        yield str(client.base_url).rstrip("/")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").iterdir()), ids=lambda path: path.name)
def test_an_example_is_short(path):
    if path.is_file():
        assert len(path.read_text().splitlines()) <= 40


def test_the_python_client(picture, server, tmp_path):
    command = [sys.executable, ROOT / "examples/client.py", picture, "circle", "160", "120", server]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"click: score 0\.\d+, \d+ pixels", done.stdout)
    assert Image.open(tmp_path / "click.png").size == (320, 240)


def test_curl(picture, server, tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "examples/curl.sh", picture, "circle", "160", "120", server],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in ("image_id ", '"kind":"concept"', '"kind":"visual"', '"mask_base64"', '"categories"'):
        assert text in done.stdout


def test_the_gradio_demo_s_answers(picture, processor):
    spec = importlib.util.spec_from_file_location("gradio_demo", ROOT / "examples/gradio_demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    predictor, image = Predictor(open_model(TINY), processor), np.asarray(Image.open(picture))
    shown, found = demo.sections(predictor, image, "circle")
    assert shown is image and all(mask.shape == (240, 320) for mask, _ in found)
    ((mask, label),) = demo.sections(predictor, image, "", [160, 120])[1]
    assert mask.dtype == bool and label.startswith("object 0.")


def test_the_python_of_the_page_on_own_pictures(picture, tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/own_pictures.md").read_text(), re.DOTALL)[1]
    code = code.replace('"sam3_model"', repr(str(TINY))).replace('"street.jpg"', repr(str(picture)))
    code = code.replace("(250, 120)", "(25, 12)")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"0\.\d+ \d+\n", done.stdout)
