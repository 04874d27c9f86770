# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""How well masks agree."""


def mask_iou(first: dict, second: dict) -> float:
    """Intersection over union of two COCO RLEs of one size; 0 when both are empty.

    Areas are whole numbers of pixels, so the value is exact up to one division.
    """
    from pycocotools import mask as coco_mask

    intersection = int(coco_mask.area(coco_mask.merge([first, second], intersect=True)))
    union = int(coco_mask.area(first)) + int(coco_mask.area(second)) - intersection
    return intersection / union if union else 0.0
