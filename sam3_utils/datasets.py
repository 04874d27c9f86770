# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""COCO annotation files as samples: one (image, category) pair with the masks of its instances."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sam3_utils.cli import UsageError


@dataclass(frozen=True)
class Sample:
    """One picture and one phrase; `segmentations` are COCO polygons or RLEs, empty for a phrase known to be absent."""

    image_id: int
    category_id: int
    prompt: str
    path: Path
    size: tuple[int, int]  # (height, width) the annotations speak of
    segmentations: tuple

    @property
    def key(self) -> tuple[int, int]:
        return self.image_id, self.category_id


@dataclass
class CocoSamples:
    """`read_coco`'s answer: samples by image, then category; and what was passed over or noteworthy, counted."""

    samples: list[Sample]
    absent: list[Sample]
    counts: dict[str, int]  # samples under each crowd rule
    problems: dict[str, int]


def read_coco(coco_root: Path, crowd: str) -> CocoSamples:
    """Read `annotations/instances_val2017.json` under a COCO root.

    Args:
        crowd: "exclude" leaves iscrowd masks out of the unions (and a pair of crowds alone out of the samples),
            "include" takes them in.

    An image may carry LVIS's `neg_category_ids`, categories verified to be absent; they become `absent`. Broken
    entries are passed over and counted, never fatal; annotation, image and category ids may be 0.

    Raises:
        UsageError: the file is missing or is not COCO's JSON.
    """
    path = coco_root / "annotations" / "instances_val2017.json"
    if not path.is_file():
        raise UsageError(f"{path}: missing; --coco_root must hold annotations/instances_val2017.json and val2017/")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        lists = [data[name] for name in ("images", "annotations", "categories")]
        if not all(isinstance(entries, list) for entries in lists):
            raise TypeError("images, annotations and categories must be lists")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not COCO's instances format ({type(error).__name__}: {error})") from None
    problems: Counter = Counter()
    images = _keep(lists[0], _usable_image, problems, "images without a usable id, size or file name")
    names = {
        key: category["name"]
        for key, category in _keep(
            lists[2], _usable_category, problems, "categories without a usable id or name"
        ).items()
    }
    problems["categories that share their name with another"] = sum(
        count for count in Counter(names.values()).values() if count > 1
    )
    pairs: dict[tuple, list] = {}  # of any annotation, usable or not
    for annotation in lists[1]:
        key = (annotation.get("image_id"), annotation.get("category_id")) if isinstance(annotation, dict) else ()
        if not key or not all(isinstance(value, (int, str)) for value in key):
            problems["annotations without image_id or category_id"] += 1
        elif key[0] not in images or key[1] not in names:
            problems["annotations of an unknown image or category"] += 1
        else:
            instances = pairs.setdefault(key, [])
            segmentation = _usable_segmentation(annotation.get("segmentation"), _size(images[key[0]]), problems)
            if segmentation is not None:
                instances.append((segmentation, annotation.get("iscrowd", 0) in (1, "1")))
    order = {image_id: position for position, image_id in enumerate(images)}

    def sample(key, segmentations):
        image = images[key[0]]
        path = coco_root / "val2017" / image["file_name"]
        return Sample(*key, names[key[1]], path, _size(image), tuple(segmentations))

    samples = []
    for key in sorted(pairs, key=lambda key: (order[key[0]], str(type(key[1])), key[1])):
        kept = [segmentation for segmentation, is_crowd in pairs[key] if crowd == "include" or not is_crowd]
        if kept:
            samples.append(sample(key, kept))
    absent = []
    for image_id, image in images.items():
        negatives = image.get("neg_category_ids")
        for category_id in negatives if isinstance(negatives, list) else ():
            if isinstance(category_id, (int, str)) and category_id in names and (image_id, category_id) not in pairs:
                absent.append(sample((image_id, category_id), ()))
    counts = {
        "exclude": sum(any(not is_crowd for _, is_crowd in instances) for instances in pairs.values()),
        "include": sum(bool(instances) for instances in pairs.values()),
    }
    found = {text: count for text, count in problems.items() if count}
    return CocoSamples(samples, list(dict.fromkeys(absent)), counts, found)


def _keep(entries: list, usable: Callable, problems: Counter, fault: str) -> dict:
    """Usable entries by their id; the others, and ids given twice, are counted."""
    kept = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), (int, str)) or not usable(entry):
            problems[fault] += 1
        else:
            problems["ids given twice"] += entry["id"] in kept
            kept[entry["id"]] = entry
    return kept


def _size(image: dict) -> tuple[int, int]:
    return image["height"], image["width"]


def _usable_image(image: dict) -> bool:
    name = image.get("file_name")
    inside = isinstance(name, str) and name and not Path(name).is_absolute() and ".." not in Path(name).parts
    return bool(inside) and all(isinstance(image.get(side), int) and image[side] > 0 for side in ("height", "width"))


def _usable_category(category: dict) -> bool:
    name = category.get("name")
    # A lone surrogate cannot be encoded, and no tokenizer takes it.
    return (
        isinstance(name, str)
        and bool(name.strip())
        and name.isascii() | (name == name.encode(errors="replace").decode())
    )


def _usable_segmentation(segmentation, size: tuple[int, int], problems: Counter):
    """The segmentation with its broken polygons left out, or None when nothing is left.

    pycocotools trusts what it gets: runs that do not fill the picture make it loop or read beyond its memory, and so
    do coordinates that are not numbers or lie far outside.
    """
    if isinstance(segmentation, dict):
        if segmentation.get("size") == list(size) and runs_fill(segmentation.get("counts"), size[0] * size[1]):
            return segmentation
        problems["RLE masks that do not fill their picture"] += 1
        return None
    polygons = segmentation if isinstance(segmentation, list) else []
    good = [polygon for polygon in polygons if usable_polygon(polygon, size)]
    problems["polygons of fewer than three points, odd length, or values that are no coordinates"] += len(
        polygons
    ) - len(good)
    if not good:
        problems["annotations without a usable mask"] += 1
        return None
    return good


def usable_polygon(polygon, size: tuple[int, int]) -> bool:
    """Whether a polygon has three or more points of finite coordinates not far outside the (height, width) picture."""
    limit = 10 * max(size)
    return (
        isinstance(polygon, list)
        and len(polygon) >= 6
        and len(polygon) % 2 == 0
        and all(isinstance(value, (int, float)) and abs(value) <= limit for value in polygon)  # NaN compares false
    )


def runs_fill(counts, pixels: int) -> bool:
    """Whether an RLE's runs are non-negative and add up to the picture; a string is decoded as pycocotools does it."""
    if isinstance(counts, str):
        runs, value, shift = [], 0, 0
        for character in counts:
            code = ord(character) - 48
            if not 0 <= code < 64:
                return False
            value |= (code & 31) << shift
            shift += 5
            if not code & 32:
                if code & 16:
                    value -= 1 << shift
                runs.append(value + (runs[-2] if len(runs) > 2 else 0))
                value, shift = 0, 0
        if shift:
            return False
        counts = runs
    return (
        isinstance(counts, list) and all(isinstance(run, int) and run >= 0 for run in counts) and sum(counts) == pixels
    )


def union_rle(sample: Sample) -> dict:
    """The union of a sample's masks as COCO RLE, polygons drawn by pycocotools."""
    from pycocotools import mask as coco_mask

    height, width = sample.size
    parts = []
    for segmentation in sample.segmentations:
        if isinstance(segmentation, dict) and isinstance(segmentation["counts"], str):
            parts.append(segmentation)
        else:
            drawn = coco_mask.frPyObjects(segmentation, height, width)
            parts.extend(drawn if isinstance(drawn, list) else [drawn])
    return coco_mask.merge(parts)
