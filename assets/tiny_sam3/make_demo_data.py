#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Draw the demo data set in COCO's layout: pictures the tiny SAM3 has not seen, and the phrases that name their shapes.

Example:
    python3 assets/tiny_sam3/make_demo_data.py --output_dir ./demo_output/coco2017

Writes: <output_dir>/val2017/*.jpg, <output_dir>/annotations/instances_val2017.json. A category is a phrase; a picture
is annotated for some of them, and lists others that are absent in LVIS's field `neg_category_ids`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask
from scenes import all_phrases, choose_phrases, draw_scene

SIZES = ((240, 320), (320, 240), (256, 288), (224, 224), (300, 360))
SEED_SPACE = 2017  # training draws from other seeds, see train.py


def annotate(mask: np.ndarray, annotation_id: int, image_id: int, category_id: int) -> dict:
    """One COCO annotation with a compressed RLE."""
    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {
        "id": annotation_id,
        "image_id": image_id,
        "category_id": category_id,
        "iscrowd": 0,
        "area": int(coco_mask.area(rle)),
        "bbox": [float(value) for value in coco_mask.toBbox(rle)],
        "segmentation": {"size": [int(side) for side in rle["size"]], "counts": rle["counts"].decode("ascii")},
    }


def make(output_dir: Path, pictures: int, phrases: int, seed: int) -> dict:
    """Write the data set; returns the annotation file's content."""
    category_ids = {phrase: index for index, phrase in enumerate(all_phrases(), 1)}
    images, annotations = [], []
    (output_dir / "val2017").mkdir(parents=True, exist_ok=True)
    (output_dir / "annotations").mkdir(exist_ok=True)
    for image_id in range(1, pictures + 1):
        rng = np.random.default_rng([SEED_SPACE, seed, image_id])
        height, width = SIZES[rng.integers(len(SIZES))]
        picture, objects = draw_scene(rng, height, width)
        present, absent = choose_phrases(rng, objects, phrases, phrases)
        name = f"{image_id:012d}.jpg"
        Image.fromarray(picture).save(output_dir / "val2017" / name, quality=95)
        for phrase in present:
            for scene_object in objects:
                if scene_object.matches(phrase):
                    annotations.append(
                        annotate(scene_object.mask, len(annotations) + 1, image_id, category_ids[phrase])
                    )
        images.append(
            {"id": image_id, "file_name": name, "height": height, "width": width,
             "neg_category_ids": [category_ids[phrase] for phrase in absent]}
        )  # fmt: skip
    categories = [{"id": index, "name": phrase} for phrase, index in category_ids.items()]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (output_dir / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    return content


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="the COCO root to write")
    parser.add_argument("--pictures", type=int, default=120, help="how many pictures (default: 120)")
    parser.add_argument("--phrases", type=int, default=3, help="present and absent phrases a picture (default: 3 each)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws another set (default: 0)")
    args = parser.parse_args(argv)
    content = make(args.output_dir, args.pictures, args.phrases, args.seed)
    print(f"{args.output_dir}: {len(content['images'])} pictures, {len(content['annotations'])} annotations")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
