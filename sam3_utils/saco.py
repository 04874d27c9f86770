# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""SA-Co gold: where its files lie, and annotation and prediction files as plain lists per pair.

A pair is one entry of `images`: a picture and a noun phrase. Strict reading refuses what the official evaluator gets
silently wrong or stops at; lenient reading does what that tool does, and what was meant where it stops.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sam3_utils.cli import UsageError
from sam3_utils.datasets import runs_fill, usable_polygon

# Subset: (stem of its annotation files, folder of its pictures, cgF1 published by Meta for SAM3, in percent).
SUBSETS = {
    "metaclip_nps": ("gold_metaclip_merged", "metaclip-images", 47.26),
    "sa1b_nps": ("gold_sa1b_merged", "sa1b-images", 53.69),
    "crowded": ("gold_crowded_merged", "metaclip-images", 61.08),
    "fg_food": ("gold_fg_food_merged", "metaclip-images", 53.41),
    "fg_sports_equipment": ("gold_fg_sports_equipment_merged", "metaclip-images", 65.52),
    "attributes": ("gold_attributes_merged", "metaclip-images", 54.93),
    "wiki_common": ("gold_wiki_common_merged", "metaclip-images", 42.53),
}
PUBLISHED_MEAN = 54.06  # unweighted mean of the above, Meta's SA-Co/Gold table
GUIDE_MEAN = 55.05  # the Ascend guide, 910B4


def annotation_path(gt_base: Path, subset: str, annotator: str) -> Path:
    """The annotation file of one annotator, "a", "b" or "c"."""
    return gt_base / f"{SUBSETS[subset][0]}_{annotator}_release_test.json"


def annotation_paths(gt_base: Path, subset: str) -> list[Path]:
    """The files to evaluate against: a alone, or a, b and c, in this order (which decides ties).

    Raises:
        UsageError: a is missing, or only one of b and c is there.
    """
    paths = [annotation_path(gt_base, subset, annotator) for annotator in "abc"]
    missing = [path for path in paths if not path.is_file()]
    if not missing:
        return paths
    if missing == paths[1:]:
        return paths[:1]
    raise UsageError(f"{missing[0]}: missing; {subset} is judged by file a alone or by a, b and c together")


def prediction_path(pred_dir: Path, subset: str) -> Path:
    """Where the official evaluator looks for a subset's predictions."""
    name = f"gold_{subset}"
    return pred_dir / name / "dumps" / name / "coco_predictions_segm.json"


def read_json(path: Path):
    """Parse a JSON file.

    Raises:
        UsageError: it is missing, empty or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path}: missing") from None
    except ValueError as error:
        raise UsageError(
            f"{path}: not valid JSON ({error}); {path.stat().st_size} bytes; fetch or make it again"
        ) from None


@dataclass(frozen=True)
class Pair:
    """A picture and a phrase to run; `id` is the pair's id in the annotation file."""

    id: int
    prompt: str
    path: Path
    size: tuple[int, int]  # (height, width)


def read_pairs(dataset_root: Path, subset: str) -> list[Pair]:
    """Every pair of a subset's file a, exhaustive or not, pairs of one picture in a row.

    Raises:
        UsageError: the file is missing or not SA-Co's, a pair is listed twice, or a phrase is empty.
    """
    path = annotation_path(dataset_root / "gt-annotations", subset, "a")
    root = dataset_root / SUBSETS[subset][1]
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder; {subset} needs its pictures there")
    by_picture: dict[str, list[Pair]] = {}
    seen = set()
    try:
        for image in read_json(path)["images"]:
            name, size = image["file_name"], (int(image["height"]), int(image["width"]))
            pair = Pair(image["id"], image["text_input"], root / name, size)
            (name + pair.prompt).encode("utf-8")  # a lone surrogate can be neither tokenised nor written
            if not isinstance(pair.id, int):
                raise TypeError(f"pair id {pair.id!r} is not a whole number")
            if pair.id in seen:
                raise UsageError(f"{path}: pair {pair.id} is listed twice; keep one entry")
            if not pair.prompt.strip():
                raise UsageError(f"{path}: pair {pair.id} has an empty phrase")
            seen.add(pair.id)
            by_picture.setdefault(name, []).append(pair)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: not SA-Co's annotation format ({type(error).__name__}: {error})") from None
    if not seen:
        raise UsageError(f"{path}: holds no pair")
    return [pair for pairs in by_picture.values() for pair in pairs]


@dataclass
class Annotations:
    """One annotator's file: pairs in file order; objects of a pair without crowd masks."""

    pairs: dict[int, dict]  # pair id -> its entry of `images`
    objects: dict[int, list] = field(default_factory=dict)  # pair id -> COCO RLEs or xywh boxes
    repeats: list[int] = field(default_factory=list)  # pair ids listed again, in order (lenient reading only)
    categories: frozenset = frozenset()


def _fault_handler(path: Path, lenient: bool, notes: Counter):
    """`fault(what, where, remedy)`: refuses with file, pair and remedy, or counts what lenient reading passes over.

    `where` is a tuple of words, put together only when they are needed.
    """

    def fault(what: str, where: tuple, remedy: str) -> None:
        if not lenient:
            raise UsageError(f"{path}: {' '.join(map(str, where))}: {what}; {remedy}, or evaluate with --lenient")
        notes[f"{path.name}: {what}"] += 1

    return fault


RLE_CHARACTERS = bytes(range(48, 112))  # of a compressed RLE, "0" to "o"
SHORT_RLE = 8  # characters up to which a text is decoded to be checked


def _as_rle(segmentation, size: list[int]) -> dict | None:
    """A compressed RLE of a mask in any of COCO's three forms, or None when it is none of them.

    Polygons are drawn at `size` = [height, width]. Long RLE texts are looked at only as far as their characters go:
    decoding half a million of them in Python would take longer than the evaluation.
    """
    if isinstance(segmentation, dict):
        counts, own = segmentation.get("counts"), segmentation.get("size")
        if own != size and not (
            isinstance(own, list) and len(own) == 2 and all(isinstance(side, int) and side > 0 for side in own)
        ):
            return None
        if isinstance(counts, str):
            if len(counts) <= SHORT_RLE:
                return segmentation if runs_fill(counts, own[0] * own[1]) else None
            return None if not counts.isascii() or counts.encode().translate(None, RLE_CHARACTERS) else segmentation
        return _draw(segmentation, own) if runs_fill(counts, own[0] * own[1]) else None
    if not isinstance(segmentation, list) or not segmentation:
        return None
    if not all(usable_polygon(polygon, tuple(size)) for polygon in segmentation):
        return None
    return _draw(segmentation, size)


def _draw(segmentation, size: list[int]) -> dict:
    from pycocotools import mask as coco_mask

    drawn = coco_mask.frPyObjects(segmentation, *size)
    return coco_mask.merge(drawn) if isinstance(drawn, list) else drawn


def _as_box(box) -> list | None:
    """Four finite numbers, or None."""
    numbers = isinstance(box, list) and len(box) == 4 and all(isinstance(value, (int, float)) for value in box)
    return box if numbers and all(abs(value) < float("inf") for value in box) else None


def read_annotations(path: Path, iou_type: str, lenient: bool, notes: Counter) -> Annotations:
    """Read one annotator's file.

    Args:
        iou_type: "segm" keeps masks, "bbox" boxes.
        notes: what lenient reading passed over, counted.

    Raises:
        UsageError: the file is not SA-Co's format, or (strict) holds something that would be judged wrongly.
    """
    data, fault = read_json(path), _fault_handler(path, lenient, notes)
    try:
        images, annotations = data["images"], data["annotations"]
        categories = frozenset(category["id"] for category in data["categories"])
        result = Annotations({}, categories=categories)
        for image in images:
            pair = image["id"]
            if pair in result.pairs:
                fault("a pair listed twice", ("pair", pair), "keep one entry")
                result.repeats.append(pair)
            result.pairs[pair] = image
            if "is_instance_exhaustive" not in image:
                fault("no is_instance_exhaustive", ("pair", pair), "add it (0 or 1)")
            elif image["is_instance_exhaustive"] not in (0, 1):
                fault("is_instance_exhaustive is neither 0 nor 1", ("pair", pair), "mend it (text counts as true)")
        if not result.pairs:
            raise UsageError(f"{path}: holds no pair")
        latest = {annotation["id"]: annotation for annotation in annotations}
        if len(latest) < len(annotations):
            twice = next(key for key, n in Counter(a["id"] for a in annotations).items() if n > 1)
            fault("annotation ids used twice", ("annotation", twice), "number them anew")
        for annotation in latest.values():  # a later annotation replaces the earlier, as in the official tool
            pair = annotation["image_id"]
            where = ("pair", pair, "annotation", annotation["id"])
            if pair not in result.pairs:
                fault("annotation of an unknown pair", where, "add the pair or drop it")
                continue
            if annotation["category_id"] not in categories:
                fault("annotation of an unknown category", where, f"use one of {sorted(categories)}")
                continue
            if "iscrowd" not in annotation:
                fault("no iscrowd", where, "add it (0 or 1)")
            elif annotation["iscrowd"] not in (0, 1):
                fault("iscrowd is neither 0 nor 1", where, "mend it (text counts as true)")
            if annotation.get("iscrowd"):
                continue
            if iou_type == "bbox":
                item = _as_box(annotation.get("bbox"))
                if item is None:
                    fault("bbox is not four numbers", where, "write it as normalised xywh")
                    continue
            else:
                image = result.pairs[pair]
                size = [image["height"], image["width"]]
                item = _as_rle(annotation["segmentation"], size)
                if item is None:
                    fault("segmentation is no RLE and no polygon", where, "mend or drop it")
                    continue
                if item["size"] != size:
                    fault(f"mask of size {item['size']}", where, f"the picture's is {size}")
            result.objects.setdefault(pair, []).append(item)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not SA-Co's annotation format ({type(error).__name__}: {error})") from None
    return result


def read_predictions(
    path: Path, first: Annotations, annotators: int, iou_type: str, lenient: bool, notes: Counter
) -> dict[int, tuple[list[float], list]]:
    """Read a COCO result list: pair id -> (scores, COCO RLEs or xywh boxes), in file order.

    Args:
        first: annotator a's file, whose pairs, sizes and categories count.
        annotators: how many files judge; with several the official loader needs `bbox`.

    Raises:
        UsageError: not a list of results, or (strict) an entry that the official tool would drop or stop at.
    """
    data, fault = read_json(path), _fault_handler(path, lenient, notes)
    if not isinstance(data, list):
        raise UsageError(f"{path}: not a list of COCO results")
    result: dict[int, tuple[list[float], list]] = {}
    seen: set = set()
    try:
        for index, entry in enumerate(data):
            pair = entry["image_id"]
            image = first.pairs.get(pair)
            where = ("entry", index, "pair", pair)
            if image is None:
                fault("prediction for an unknown pair", where, "check image_id and the subset")
                continue
            if entry.get("category_id") not in first.categories:
                fault("prediction of an unknown category", where, f"use one of {sorted(first.categories)}")
                continue
            score = entry.get("score")
            if not isinstance(score, (int, float)) or score != score:
                fault("prediction without a score", where, "write its score")
                continue
            if isinstance(score, bool) or not 0 <= score <= 1:
                fault(f"score {score} is not between 0 and 1", where, "write a probability")
            segmentation, box = entry.get("segmentation"), entry.get("bbox")
            if box is None and (annotators > 1 or not isinstance(segmentation, dict) or iou_type == "bbox"):
                fault("prediction without bbox", where, "write it as normalised xywh")
            if iou_type == "bbox":
                item = _as_box(box)
                if item is None:
                    fault("bbox is not four numbers", where, "write it as normalised xywh")
                    continue
            else:
                size = [image["height"], image["width"]]
                if not segmentation:
                    fault("prediction without segmentation", where, "write its mask")
                    if _as_box(box) is None:
                        continue
                    x, y, width, height = box
                    segmentation = [[x, y, x, y + height, x + width, y + height, x + width, y]]
                item = _as_rle(segmentation, size)
                if item is None:
                    fault("segmentation is no RLE and no polygon", where, "mend or drop it")
                    continue
                if item["size"] != size:
                    fault(f"mask of size {item['size']}", where, f"the picture's is {size}")
            same = pair, score, tuple(item) if iou_type == "bbox" else item["counts"]
            if same in seen:
                fault("prediction given twice", where, "drop one")
            seen.add(same)
            scores, items = result.setdefault(pair, ([], []))
            scores.append(score)
            items.append(item)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: not COCO's result format ({type(error).__name__}: {error})") from None
    return result


def evaluated_pairs(annotators: list[Annotations], names: list[str], lenient: bool, notes: Counter) -> list[int]:
    """Pairs that every annotator calls exhaustive, in the order of file a.

    Raises:
        UsageError: none is left, or (strict) a pair of file a is missing from another file.
    """
    first, others = annotators[0], annotators[1:]
    pairs = [
        pair
        for pair in [*first.pairs, *first.repeats]
        if first.pairs[pair].get("is_instance_exhaustive")
        and all(other.pairs.get(pair, {}).get("is_instance_exhaustive", 1) for other in others)
    ]
    for other, name in zip(others, names[1:], strict=True):
        missing = [pair for pair in pairs if pair not in other.pairs]
        if missing and not lenient:
            raise UsageError(
                f"{name}: pair {missing[0]} of the first file is missing here ({len(missing)} in all), which would "
                "count as 'nothing there'; complete the file, or evaluate with --lenient"
            )
        if missing:
            notes[f"{name}: pairs missing"] += len(missing)
    if not pairs:
        raise UsageError(f"{names[0]}: no pair is exhaustive for all annotators; there is nothing to evaluate")
    return pairs
