# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""COCO annotation files as samples: one (image, category) pair with the masks of its instances."""

import json
from collections import Counter
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
    annotations are passed over and counted, never fatal; annotation, image and category ids may be 0.

    Raises:
        UsageError: the file is missing or is not COCO's JSON.
    """
    path = coco_root / "annotations" / "instances_val2017.json"
    if not path.is_file():
        raise UsageError(f"{path}: missing; --coco_root must hold annotations/instances_val2017.json and val2017/")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        images = {image["id"]: image for image in data["images"]}
        sizes = {key: (int(image["height"]), int(image["width"])) for key, image in images.items()}
        files = {key: coco_root / "val2017" / image["file_name"] for key, image in images.items()}
        names = {category["id"]: str(category["name"]) for category in data["categories"]}
        annotations = data["annotations"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not COCO's instances format ({type(error).__name__}: {error})") from None
    problems = Counter()
    problems["images listed twice"] = len(data["images"]) - len(images)
    repeats = Counter(names.values())
    problems["categories that share their name with another"] = sum(count for count in repeats.values() if count > 1)
    pairs: dict[tuple, list] = {}
    for annotation in annotations:
        try:
            key = annotation["image_id"], annotation["category_id"]
            segmentation, is_crowd = annotation.get("segmentation"), bool(annotation.get("iscrowd", 0))
        except (KeyError, AttributeError, TypeError):
            problems["annotations without image_id or category_id"] += 1
            continue
        if key[0] not in images or key[1] not in names:
            problems["annotations of an unknown image or category"] += 1
            continue
        usable = _usable_segmentation(segmentation, sizes[key[0]], problems)
        if usable is not None:
            pairs.setdefault(key, []).append((usable, is_crowd))
    order = {image_id: position for position, image_id in enumerate(images)}
    keys = sorted(pairs, key=lambda key: (order[key[0]], str(type(key[1])), key[1]))

    def sample(key, segmentations):
        return Sample(*key, names[key[1]], files[key[0]], sizes[key[0]], tuple(segmentations))

    samples = []
    for key in keys:
        kept = [segmentation for segmentation, is_crowd in pairs[key] if crowd == "include" or not is_crowd]
        if kept:
            samples.append(sample(key, kept))
    absent = [
        sample((image_id, category_id), ())
        for image_id, image in images.items()
        for category_id in dict.fromkeys(image.get("neg_category_ids", ()))
        if category_id in names and (image_id, category_id) not in pairs
    ]
    without_crowds = sum(not all(is_crowd for _, is_crowd in instances) for instances in pairs.values())
    counts = {"exclude": without_crowds, "include": len(pairs)}
    return CocoSamples(samples, absent, counts, {text: count for text, count in problems.items() if count})


def _usable_segmentation(segmentation, size: tuple[int, int], problems: Counter):
    """The segmentation with its broken polygons left out, or None when nothing is left."""
    if isinstance(segmentation, dict):
        counts = segmentation.get("counts")
        runs_fit = isinstance(counts, str) or (isinstance(counts, list) and sum(counts) == size[0] * size[1])
        if segmentation.get("size") == list(size) and runs_fit:
            return segmentation
        problems["RLE masks that do not fill their picture"] += 1
        return None
    polygons = segmentation if isinstance(segmentation, list) else []
    good = [
        polygon
        for polygon in polygons
        if isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0 and _are_numbers(polygon)
    ]
    problems["polygons with fewer than three points or odd length"] += len(polygons) - len(good)
    if not good:
        problems["annotations without a usable mask"] += 1
        return None
    return good


def _are_numbers(polygon: list) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in polygon)


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
