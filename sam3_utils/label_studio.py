# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Label Studio's way of saying things: its brush RLE, which is not COCO's, percent coordinates, requests, answers."""

import base64
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import numpy as np

from sam3_utils.cli import UsageError
from sam3_utils.predictor import Predictor

VERSION = "sam3"
RUN_BITS = (3, 4, 8, 16)  # of the lengths of runs, as Label Studio's converter writes them


def brush_rle(mask: np.ndarray) -> list[int]:
    """Label Studio's RLE of an (H, W) bool mask, bytes: the RGBA picture that is 255 where the mask is, row by row.

    A header (32 bits of how many values, 5 of the word's size, 4 x 4 of `RUN_BITS`, each less 1), then for each run a
    1, two bits that choose from `RUN_BITS`, the length less 1, and the value.
    """
    flat = mask.ravel()
    bits = [f"{4 * flat.size:032b}", f"{7:05b}", *(f"{size - 1:04b}" for size in RUN_BITS)]
    edges = np.flatnonzero(np.diff(flat)) + 1
    for start, end in zip([0, *edges], [*edges, flat.size]):
        left, value = 4 * int(end - start), 255 * int(flat[start])
        while left:
            length = min(left, 1 << RUN_BITS[-1])
            choice = next(index for index, size in enumerate(RUN_BITS) if length <= 1 << size)
            bits.append(f"1{choice:02b}{length - 1:0{RUN_BITS[choice]}b}{value:08b}")
            left -= length
    text = "".join(bits)
    text += "0" * (-len(text) % 8)
    return [int(text[at : at + 8], 2) for at in range(0, len(text), 8)]


def names_in(label_config: str) -> tuple[str, str]:
    """from_name and to_name of the labelling interface's brush.

    Raises:
        UsageError: it has no BrushLabels.
    """
    tag = None
    if "<!" not in label_config:  # no entities, which could grow without bound
        tag = ElementTree.fromstring(label_config).find(".//BrushLabels")
    if tag is None:
        raise UsageError("label_config: no BrushLabels in it; masks are drawn with that tag")
    return tag.get("name"), tag.get("toName")


def picture_of(value: str, root: Path | None) -> Path | bytes:
    """A task's picture: a data URI, or a file that Label Studio serves from local storage, below `root`.

    Raises:
        UsageError: another kind of address (nothing is fetched), or a file outside of `root`.
    """
    if value.startswith("data:"):
        return base64.b64decode(re.sub(r"^data:[^,]*,", "", value))
    parts = urlparse(value)
    given = parse_qs(parts.query).get("d", [None])[0] if parts.path == "/data/local-files/" else None
    if given is None or root is None:
        raise UsageError(f"{value[:80]}: only data URIs, and local files below --root, are taken")
    path = (root / given).resolve()
    if not path.is_relative_to(root.resolve()):
        raise UsageError(f"{given}: outside of --root")
    return path


def answer(predictor: Predictor, request: dict, root: Path | None) -> dict:
    """What `/predict` answers to Label Studio's request: a brush mask for the clicks and boxes of its context.

    Raises:
        UsageError: the picture or a prompt cannot be used. KeyError, TypeError: it is no such request.
    """
    context = (request.get("params") or {}).get("context") or {}
    marks = context.get("result") or []
    if not marks:
        return {"results": [{"result": [], "score": 0.0, "model_version": VERSION} for _ in request["tasks"]]}
    from_name, to_name = names_in(request["label_config"])
    (task,) = request["tasks"]
    predictor.set_image(picture_of(next(iter(task["data"].values())), root))
    height, width = predictor.size
    points, labels, box, label = [], [], None, None
    for mark in marks:
        value = mark["value"]
        x, y = value["x"] * width / 100, value["y"] * height / 100
        if mark["type"] == "keypointlabels":
            points.append([x, y])
            labels.append(int(bool(mark.get("is_positive", True))))
        elif mark["type"] == "rectanglelabels":
            box = [x, y, x + value["width"] * width / 100, y + value["height"] * height / 100]
        label = (value.get(mark["type"]) or [label])[0]
    best = predictor.predict_points(points, labels, box).best
    shape = {
        "id": "sam3", "type": "brushlabels", "from_name": from_name, "to_name": to_name, "origin": "prediction",
        "original_width": width, "original_height": height, "image_rotation": 0, "score": best.score,
        "value": {"format": "rle", "rle": brush_rle(best.mask), "brushlabels": [label]},
    }  # fmt: skip
    return {"results": [{"result": [shape], "score": best.score, "model_version": VERSION}]}
