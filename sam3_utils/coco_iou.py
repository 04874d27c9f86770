# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""COCO Mean IoU: one sample's record, the summary of a run's records, and overlay pictures of the worst and best."""

import logging
from pathlib import Path

import numpy as np
from pycocotools import mask as coco_mask

from sam3_utils.datasets import Sample, union_rle
from sam3_utils.images import PictureError, load_rgb
from sam3_utils.metrics import mask_iou
from sam3_utils.pipeline import RecordFile
from sam3_utils.postprocess import encode_rle, union_mask
from sam3_utils.report import overlay

logger = logging.getLogger(__name__)


def judge(sample: Sample, scores: np.ndarray, mask_logits: np.ndarray, settings: dict) -> dict:
    """One sample's record from its (Q,) scores and (Q, M, M) mask logits."""
    kept = np.flatnonzero(scores > settings["score_threshold"])
    if settings["max_detections"]:
        kept = kept[np.argsort(-scores[kept], kind="stable")[: settings["max_detections"]]]
    predicted = encode_rle(union_mask(mask_logits[kept], sample.size, settings["mask_threshold"]))
    record = {
        "image_id": sample.image_id,
        "category_id": sample.category_id,
        "prompt": sample.prompt,
        "instances": len(kept),
        "score": round(float(scores.max()), 6),
        "pred_area": _area(predicted),
    }
    if sample.segmentations:
        truth = union_rle(sample)
        record |= {"iou": mask_iou(truth, predicted), "gt_area": _area(truth), "mask": predicted}
    return record


def _area(rle: dict) -> int:
    """Pixels of a COCO RLE."""
    return int(coco_mask.area(rle))


def summarise(folder: Path, samples: list[Sample]) -> dict:
    """The figures of a run from its record files, in the samples' order; the sums do not depend on restarts."""
    records = {(r["image_id"], r["category_id"]): r for r in RecordFile(folder / "samples.jsonl").read()}
    absent = RecordFile(folder / "absent.jsonl").read()
    ordered = [records[sample.key] for sample in samples if sample.segmentations and sample.key in records]
    # Annotations so thin that no pixel is inside: nothing to agree with.
    drawn = [record for record in ordered if record["gt_area"]]
    without_area, ordered = len(ordered) - len(drawn), drawn
    by_category: dict[str, list[float]] = {}
    for record in ordered:
        by_category.setdefault(record["prompt"], []).append(record["iou"])
    summary = {
        "metric": "Mean IoU",
        "value": sum(r["iou"] for r in ordered) / len(ordered) if ordered else None,
        "samples": len(ordered),
        "samples_without_area": without_area,
        "failed": len(RecordFile(folder / "failed.jsonl").read()),
        "per_category": {
            name: {"samples": len(values), "iou": sum(values) / len(values)} for name, values in by_category.items()
        },
    }
    if absent:
        summary["presence"] = {
            "present_found": sum(r["instances"] > 0 for r in ordered),
            "present": len(ordered),
            "absent_empty": sum(r["instances"] == 0 for r in absent),
            "absent": len(absent),
        }
    return summary


def draw_overlays(folder: Path, samples: list[Sample], count: int) -> None:
    """Draw the worst and the best samples side by side with their annotation."""
    by_key = {sample.key: sample for sample in samples}
    ranked = sorted(
        RecordFile(folder / "samples.jsonl").read(), key=lambda r: (r["iou"], str(r["image_id"]), r["prompt"])
    )
    (folder / "overlays").mkdir(exist_ok=True)
    picks = [("worst", r) for r in ranked[:count]] + [("best", r) for r in ranked[::-1][:count]]
    for position, (kind, record) in enumerate(picks):
        sample = by_key[record["image_id"], record["category_id"]]
        try:
            image = load_rgb(sample.path, sample.size)
        except PictureError as error:  # gone since it was evaluated; the figures stand
            logger.warning("no overlay: %s", error)
            continue
        truth, predicted = (coco_mask.decode(rle).astype(bool) for rle in (union_rle(sample), record["mask"]))
        panels = overlay(image, truth, predicted, f"{sample.prompt}: IoU {record['iou']:.3f}")
        name = f"{kind}_{position % count + 1:02d}_{sample.image_id}_{sample.category_id}.png"
        panels.save(folder / "overlays" / name)
