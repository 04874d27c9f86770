# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which of the click branch's four masks count, as transformers 5.0.0's `Sam3TrackerMaskDecoder` decides it."""

import numpy as np

# Sam3TrackerMaskDecoderConfig: dynamic_multimask_stability_delta and _thresh
STABILITY_DELTA, STABILITY_THRESHOLD = 0.05, 0.98


def choose(outputs: dict[str, np.ndarray], multimask: bool) -> dict[str, np.ndarray]:
    """The masks of a prompt's answer.

    Args:
        outputs: `contract.CLICK_OUTPUTS`, of N prompts.
        multimask: the three masks of a prompt that leaves open what is meant (a part, the thing, its group); otherwise
            the single mask, or, where its edge is uncertain, the best of the three.

    Returns:
        The outputs with pred_masks (N, K, A, A) and iou_scores (N, K), K being 3 or 1.
    """
    masks, scores = outputs["pred_masks"], outputs["iou_scores"]
    if multimask:
        return outputs | {"pred_masks": masks[:, 1:], "iou_scores": scores[:, 1:]}
    single = masks[:, 0].reshape(len(masks), -1)
    inner, outer = ((single > limit).sum(1) for limit in (STABILITY_DELTA, -STABILITY_DELTA))
    # float32, as the model computes it: close to the threshold the last digit decides.
    stability = np.where(outer > 0, inner.astype(np.float32) / outer.clip(1).astype(np.float32), np.float32(1))
    index = np.where(stability >= np.float32(STABILITY_THRESHOLD), 0, 1 + scores[:, 1:].argmax(1))
    rows = np.arange(len(masks))
    return outputs | {"pred_masks": masks[rows, index][:, None], "iou_scores": scores[rows, index][:, None]}
