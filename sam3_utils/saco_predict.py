# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""SA-Co predictions: units of work, one pair's results, the lines on disk, and their merge into the final file."""

import json
import shutil
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sam3_utils import files, saco
from sam3_utils.cli import CheckFailed
from sam3_utils.pipeline import RecordFile
from sam3_utils.postprocess import encode_rle, resize_masks

UNIT_BATCHES = 8  # batches handed to a worker at once: seconds of work, so that a slow device holds nobody up


@dataclass(frozen=True)
class Unit:
    """Batches of one subset that a worker does in a row; a picture is never in two units."""

    subset: str
    number: int
    batches: tuple  # of tuples of saco.Pair
    tokens: dict  # phrase -> rows of input_ids and attention_mask
    finished: frozenset = frozenset()  # pairs whose lines are on disk already

    @property
    def key(self):
        return self.subset, self.number

    def __str__(self):
        pairs = [pair.id for batch in self.batches for pair in batch]
        return f"{self.subset} pairs {pairs[0]} to {pairs[-1]}"


def make_units(subset: str, pairs: list, batch_size: int, tokens: dict) -> list[Unit]:
    """Cut a subset into units of about `UNIT_BATCHES` batches, the same whenever and wherever it runs."""
    units, current = [], []

    def close():
        batches = tuple(tuple(current[i : i + batch_size]) for i in range(0, len(current), batch_size))
        units.append(Unit(subset, len(units), batches, {pair.prompt: tokens[pair.prompt] for pair in current}))
        current.clear()

    for pair in pairs:
        if len(current) >= UNIT_BATCHES * batch_size and pair.path != current[-1].path:
            close()
        current.append(pair)
    close()
    return units


def predictions_of(pair, scores, boxes, mask_logits, score_threshold: float) -> list[dict]:
    """One pair's COCO results from its (Q,) scores, (Q, 4) xyxy boxes and (Q, M, M) mask logits, best score first."""
    from pycocotools import mask as coco_mask

    kept = np.flatnonzero(scores > score_threshold)
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    rles = (encode_rle(mask) for masks in resize_masks(mask_logits[kept], pair.size, 0.5) for mask in masks)
    results = []
    for query, rle in zip(kept, rles):
        x1, y1, x2, y2 = (float(value) for value in boxes[query])
        results.append(
            {
                "image_id": pair.id,
                "category_id": 1,
                "segmentation": rle,
                "score": round(float(scores[query]), 5),
                "bbox": [round(value, 5) for value in (x1, y1, x2 - x1, y2 - y1)],
                "area": round(float(coco_mask.area(rle)) / (pair.size[0] * pair.size[1]), 8),
            }
        )
    return results


def work_folder(output_dir: Path, subset: str) -> Path:
    """Where the workers' lines of an unfinished subset lie, a file for each worker process."""
    return output_dir / f"gold_{subset}" / "work"


def finished_pairs(folder: Path) -> dict[int, list]:
    """The predictions of every pair whose line is on disk; failed ones are not among them.

    Raises:
        CheckFailed: a pair has two lines.
    """
    done: dict[int, list] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for record in RecordFile(path).read():
            if "error" in record:
                continue
            if record["pair"] in done:
                raise CheckFailed(f"{path}: pair {record['pair']} is there twice; start anew with --overwrite")
            done[record["pair"]] = record["predictions"]
    return done


def rest_of(unit: Unit, done: Container[int]) -> Unit | None:
    """What of a unit is not among the pairs that are `done`: whole batches, computed as they would have been."""
    batches = tuple(batch for batch in unit.batches if not all(pair.id in done for pair in batch))
    finished = frozenset(pair.id for batch in batches for pair in batch if pair.id in done)
    return replace(unit, batches=batches, finished=finished) if batches else None


def merge(output_dir: Path, subset: str, pairs: list, facts: dict) -> list[int]:
    """Write a subset's predictions, in `read_pairs`' order, once every pair is there.

    Args:
        facts: what summary.json says beside the counts.

    Returns:
        Pairs that are missing; with any, nothing is written.

    Raises:
        CheckFailed: a pair is there twice, or does not belong to the subset.
    """
    lines, final = work_folder(output_dir, subset), saco.prediction_path(output_dir, subset)
    done = finished_pairs(lines)
    strangers = done.keys() - {pair.id for pair in pairs}
    if strangers:
        raise CheckFailed(f"{lines}: holds pair {min(strangers)}, which {subset} does not have; start with --overwrite")
    missing = [pair.id for pair in pairs if pair.id not in done]
    if missing:
        return missing
    predictions = [entry for pair in pairs for entry in done[pair.id]]
    final.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(final, json.dumps(predictions, separators=(",", ":")))
    counts = {"metric": "predictions", "value": len(predictions), "pairs": len(pairs), "sha256": files.sha256(final)}
    files.write_json(lines.parent / "summary.json", facts | counts)
    shutil.rmtree(lines)
    return []
