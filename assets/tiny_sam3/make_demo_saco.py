#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Draw the demo data set in SA-Co gold's layout: seven small subsets, each judged by three annotators.

Example:
    python3 assets/tiny_sam3/make_demo_saco.py --output_dir ./demo_output/dataset

Writes: <output_dir>/gt-annotations/gold_<subset>_merged_{a,b,c}_release_test.json, metaclip-images/, sa1b-images/.
Half of the pairs are negative. The annotators disagree a little: masks a pixel wider or narrower, an object left out,
a pair called non-exhaustive.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from make_demo_data import SIZES
from PIL import Image
from pycocotools import mask as coco_mask
from scenes import choose_phrases, draw_scene
from scipy.ndimage import binary_dilation, binary_erosion

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from sam3_utils.saco import SUBSETS, annotation_path  # noqa: E402  the kit's own package, two folders up

SEED_SPACE = 2025  # neither training nor the COCO demo draws from it
FIRST_PAIR_ID = 10_000_000  # as in the real files


def _seen_by(rng: np.random.Generator, annotator: str, mask: np.ndarray) -> np.ndarray | None:
    """The mask as one annotator drew it, or None when the object was overlooked."""
    if annotator == "a":
        return mask
    if rng.random() < 0.03:
        return None
    change = rng.choice(["same", "wider", "narrower"])
    return {"same": mask, "wider": binary_dilation(mask), "narrower": binary_erosion(mask)}[change]


def _annotation(mask: np.ndarray, annotation_id: int, pair: int) -> dict:
    height, width = mask.shape
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    x, y, box_width, box_height = (float(value) for value in coco_mask.toBbox(rle))
    return {
        "id": annotation_id,
        "image_id": pair,
        "category_id": 1,
        "iscrowd": 0,
        "source": "manual",
        "area": float(coco_mask.area(rle)) / (height * width),
        "bbox": [x / width, y / height, box_width / width, box_height / height],
        "segmentation": {"size": [height, width], "counts": rle["counts"].decode("ascii")},
    }


def make_subset(output_dir: Path, subset: str, pictures: int, phrases: int, seed: int) -> int:
    """Write one subset; returns how many pairs it has."""
    number = list(SUBSETS).index(subset)
    folder = output_dir / SUBSETS[subset][1]
    images = {annotator: [] for annotator in "abc"}
    annotations = {annotator: [] for annotator in "abc"}
    pair = FIRST_PAIR_ID
    for index in range(pictures):
        rng = np.random.default_rng([SEED_SPACE, seed, number, index])
        height, width = SIZES[rng.integers(len(SIZES))]
        picture, objects = draw_scene(rng, height, width)
        name = f"{subset}/{index:06d}.jpg"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / name, quality=95)
        present, absent = choose_phrases(rng, objects, phrases, phrases)
        for phrase in present + absent:
            for annotator in "abc":
                exhaustive = int(annotator == "a" or rng.random() > 0.02)
                images[annotator].append(
                    {"id": pair, "file_name": name, "text_input": phrase, "width": width, "height": height,
                     "queried_category": str(number), "is_instance_exhaustive": exhaustive,
                     "is_pixel_exhaustive": exhaustive}
                )  # fmt: skip
                for scene_object in objects:
                    mask = _seen_by(rng, annotator, scene_object.mask) if scene_object.matches(phrase) else None
                    if mask is not None:
                        annotations[annotator].append(_annotation(mask, len(annotations[annotator]) + 1, pair))
            pair += 1
    for annotator in "abc":
        path = annotation_path(output_dir / "gt-annotations", subset, annotator)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "info": {"version": "v1", "description": f"drawn scenes in SA-Co/Gold's layout, annotator {annotator}"},
            "images": images[annotator],
            "annotations": annotations[annotator],
            "categories": [{"id": 1, "name": "object", "supercategory": "object"}],
            "licenses": [],
        }
        path.write_text(json.dumps(content))
    return pair - FIRST_PAIR_ID


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="the data set's root")
    parser.add_argument("--pictures", type=int, default=12, help="pictures a subset (default: 12)")
    parser.add_argument("--phrases", type=int, default=2, help="present and absent phrases a picture (default: 2 each)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws another set (default: 0)")
    args = parser.parse_args(argv)
    pairs = sum(make_subset(args.output_dir, name, args.pictures, args.phrases, args.seed) for name in SUBSETS)
    print(f"{args.output_dir}: {pairs} pairs in {len(SUBSETS)} subsets")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
