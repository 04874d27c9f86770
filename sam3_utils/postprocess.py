# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Model outputs to scores and masks, as `Sam3ImageProcessorFast.post_process_instance_segmentation` does it."""

from collections.abc import Iterator

import numpy as np

CHUNK_PIXELS = 16_000_000  # mask pixels resized at once: 64 MB of float32


def instance_scores(pred_logits: np.ndarray, presence_logits: np.ndarray) -> np.ndarray:
    """sigmoid(pred_logits) * sigmoid(presence_logits): (N, Q) and (N, 1) logits to (N, Q) float32 scores."""
    import torch

    return (torch.from_numpy(pred_logits).sigmoid() * torch.from_numpy(presence_logits).sigmoid()).numpy()


def resize_masks(mask_logits: np.ndarray, size: tuple[int, int], mask_threshold: float) -> Iterator[np.ndarray]:
    """Mask logits to masks of the picture's size, a bounded number at a time.

    Probabilities are resized (bilinear, half-pixel centres) and compared, in transformers' order: resizing logits
    instead would move edges.

    Args:
        mask_logits: (K, M, M) float32 of the instances that were kept.
        size: (height, width) of the picture.

    Yields:
        (k, height, width) bool, k masks at a time; all K in the end, in order.
    """
    import torch
    import torch.nn.functional as F

    step = max(1, CHUNK_PIXELS // (size[0] * size[1]))
    for start in range(0, len(mask_logits), step):
        probabilities = torch.from_numpy(np.ascontiguousarray(mask_logits[start : start + step])).sigmoid()
        resized = F.interpolate(probabilities[None], size=size, mode="bilinear", align_corners=False)[0]
        yield (resized > mask_threshold).numpy()


def union_mask(mask_logits: np.ndarray, size: tuple[int, int], mask_threshold: float) -> np.ndarray:
    """The union of instances: (K, M, M) logits to one (height, width) bool mask, empty when K is 0."""
    union = np.zeros(size, dtype=bool)
    for masks in resize_masks(mask_logits, size, mask_threshold):
        union |= masks.any(axis=0)
    return union


def decode_rle(rle: dict) -> np.ndarray:
    """(H, W) bool mask of what `encode_rle` gives."""
    from pycocotools import mask as coco_mask

    return coco_mask.decode(rle | {"counts": rle["counts"].encode()}).astype(bool)


def encode_rle(mask: np.ndarray) -> dict:
    """COCO's compressed RLE of an (H, W) bool mask, `counts` as text so that it goes into JSON."""
    from pycocotools import mask as coco_mask

    rle = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {"size": [int(side) for side in rle["size"]], "counts": rle["counts"].decode("ascii")}
