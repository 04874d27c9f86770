# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""How far two models' answers lie apart, and whether that matters: arrays in, figures and verdicts out."""

import numpy as np

from sam3_utils import contract
from sam3_utils.cli import CheckFailed
from sam3_utils.datasets import Sample
from sam3_utils.postprocess import instance_scores, resize_masks, union_mask

MASK_THRESHOLD = 0.5  # as the evaluators have it
LARGEST_HALF = 65504.0  # fp16's largest number; an NPU stops there instead of giving infinity
# Slots of one batch go through the same kernels: what may remain is another order of sums, 1e-6 in fp32, 1e-3 in fp16.
SLOT_BOUND = 0.01


def output_differences(reference: dict, candidate: dict) -> dict[str, dict[str, float]]:
    """Per output: `max_abs`, the largest difference, and `max_ref`, the largest reference value."""
    return {
        name: {
            "max_abs": float(np.abs(candidate[name] - reference[name]).max()),
            "max_ref": float(np.abs(reference[name]).max()),
        }
        for name in reference
    }


def difference_row(reference: np.ndarray, candidate: np.ndarray) -> tuple[float, ...]:
    """One sample's sums over one output, from which `difference_figures` makes its figures.

    Args:
        reference, candidate: one shape, float32, finite.

    Raises:
        CheckFailed: the shapes differ.
    """
    if reference.shape != candidate.shape:
        raise CheckFailed(f"the shapes differ: {reference.shape} in the reference, {candidate.shape} in the candidate")
    first, second = (array.ravel().astype(np.float64) for array in (reference, candidate))
    apart = np.abs(second - first)
    saturated = np.count_nonzero((np.abs(second) >= LARGEST_HALF) & (np.abs(first) < LARGEST_HALF))
    return (
        first.size, first.sum(), first @ first, second @ second, first @ second, apart @ apart, apart.max(),
        apart.sum(), saturated,
    )  # fmt: skip


def difference_figures(rows: list[tuple[float, ...]]) -> dict[str, float]:
    """How far one output of two models lies apart, from each sample's `difference_row`.

    Returns:
        max_abs, mean_abs: over all values.
        cosine: of the worst sample; of all samples as one vector where a sample has one value (presence_logits).
        relative: root mean square difference, in units of the reference's standard deviation, at least a twentieth of
            its root mean square: a random model's values lie closer together than 16 bits resolve. For one value a
            sample, a logit, in units of the root mean square, at least 1. Unlike the cosine it sees values that are
            unrelated but lie far from 0. The worst sample alone would judge masks of absent things, which drift most.
        saturated: values at fp16's limit that are not there in the reference. An NPU gives these, not infinity.
    """
    size, total, rr, cc, rc, dd, largest, absolute, saturated = np.array(rows, dtype=np.float64).T
    count, size = size.sum(), size[0]
    square = rr.sum() / count
    deviation = np.sqrt(max(0.0, square - (total.sum() / count) ** 2))
    scale = max(1.0, np.sqrt(square)) if size == 1 else max(deviation, np.sqrt(square) / 20) or 1.0
    if size == 1:
        rr, cc, rc = (values.sum(keepdims=True) for values in (rr, cc, rc))
    norms = np.sqrt(rr * cc)
    cosine = np.where(norms > 0, rc / np.where(norms > 0, norms, 1), rr == cc)
    return {
        "max_abs": float(largest.max()),
        "mean_abs": float(absolute.sum() / count),
        "cosine": float(cosine.min()),
        "relative": float(np.sqrt(dd.sum() / count) / scale),
        "saturated": int(saturated.sum()),
    }


def compare_detections(sample: Sample, reference: dict, candidate: dict, score_threshold: float) -> dict:
    """What two models detect on one sample, query slot by query slot.

    Args:
        reference, candidate: one sample's outputs by the contract's names, without the batch dimension.

    Returns:
        reference, candidate: how many queries score above the threshold; gained, lost: how many do so on one side only.
        ious: IoU of the picture-size masks of each query that both detect (1 when both masks are empty).
        shifts: `mask_shift` of the same queries.
        box_ious: IoU of their boxes. Over all queries the many that detect nothing would hide a wrong one.
        unions: both sides' merged masks, (height, width) bool, as the COCO evaluator merges them.
    """
    sides = (reference, candidate)
    first, second = (
        instance_scores(side["pred_logits"][None], side["presence_logits"][None])[0] > score_threshold for side in sides
    )
    both = first & second
    resized = (resize_masks(side["pred_masks"][both], sample.size, MASK_THRESHOLD) for side in sides)
    return {
        "reference": int(first.sum()),
        "candidate": int(second.sum()),
        "gained": int((second & ~first).sum()),
        "lost": int((first & ~second).sum()),
        "ious": [iou(*masks) for chunks in zip(*resized) for masks in zip(*chunks)],
        "shifts": [mask_shift(*masks) for masks in zip(*(side["pred_masks"][both] for side in sides))],
        "box_ious": [box_iou(*boxes) for boxes in zip(*(side["pred_boxes"][both] for side in sides))],
        "unions": [
            union_mask(side["pred_masks"][kept], sample.size, MASK_THRESHOLD)
            for side, kept in zip(sides, (first, second))
        ],
    }


def iou(first: np.ndarray, second: np.ndarray) -> float:
    """Intersection over union of two bool masks; 1 when both are empty."""
    union = np.count_nonzero(first | second)
    return np.count_nonzero(first & second) / union if union else 1.0


def box_iou(first: np.ndarray, second: np.ndarray) -> float:
    """Intersection over union of two boxes, xyxy; 1 when both are empty."""
    corners = np.stack([first, second]).astype(np.float64)
    sides = (corners[:, 2:] - corners[:, :2]).clip(min=0)
    common = (corners[:, 2:].min(0) - corners[:, :2].max(0)).clip(min=0).prod()
    union = sides.prod(1).sum() - common
    return float(common / union) if union > 0 else 1.0


def mask_shift(reference: np.ndarray, candidate: np.ndarray) -> float:
    """By how many cells, along its worse axis, one (M, M) mask of logits lies beside the other.

    The least-squares solution of `candidate - reference = -shift . gradient` (Lucas and Kanade 1981), about right up to
    a cell or two. A mask as fine as facebook/sam3's may lie one cell off at an IoU of 0.95; rounding moves none.
    """
    first, second = reference.astype(np.float64), candidate.astype(np.float64)
    gradients = np.stack([axis.ravel() for axis in np.gradient((first + second) / 2)], axis=1)
    return float(np.abs(np.linalg.lstsq(gradients, (first - second).ravel(), rcond=1e-3)[0]).max())


def judge(compared: dict, slots: dict[str, dict], limits: dict[str, float]) -> list[dict]:
    """Hold the figures of `compare_models` and `slot_difference` against the limits.

    Args:
        slots: side -> its `slot_difference`; sides with batches of one are left out.
        limits: min_cosine, max_relative_difference, max_level_difference, min_mask_iou, max_mask_shift, min_box_iou,
            min_mean_iou, max_changed_detections.

    Returns:
        For each gate: gate, of (what it judges), value, sign ("<=" or ">="), bound, passed. Gates that have nothing to
        judge are left out.
    """
    gates = []

    def gate(name: str, of: str, value: float, sign: str, bound: float) -> None:
        passed = value >= bound if sign == ">=" else value <= bound  # false for NaN
        gates.append({"gate": name, "of": of, "value": value, "sign": sign, "bound": bound, "passed": passed})

    for name, row in compared["outputs"].items():
        level = name not in contract.OUTPUTS
        gate("cosine", name, row["cosine"], ">=", limits["min_cosine"])
        if level:
            gate("level difference", name, row["relative"], "<=", limits["max_level_difference"])
        else:
            gate("relative difference", name, row["relative"], "<=", limits["max_relative_difference"])
        gate("saturated values", name, row["saturated"], "<=", 0)
    counts = compared["detections"]
    if compared["mask_ious"]:
        pairs = f"worst of {len(compared['mask_ious'])} masks"
        gate("mask IoU", pairs, min(compared["mask_ious"]), ">=", limits["min_mask_iou"])
        gate("mask shift (cells)", pairs, max(compared["mask_shifts"]), "<=", limits["max_mask_shift"])
        gate("box IoU", pairs.replace("masks", "boxes"), min(compared["box_ious"]), ">=", limits["min_box_iou"])
    if compared["merged_ious"]:
        samples = len(compared["merged_ious"])
        gate("Mean IoU", f"{samples} samples", sum(compared["merged_ious"]) / samples, ">=", limits["min_mean_iou"])
        changed = counts["gained"] + counts["lost"]
        share = changed / max(1, counts["reference"])
        limit = limits["max_changed_detections"]
        gate("changed detections", f"{changed} to {counts['reference']}", share, "<=", limit)
    for side, found in slots.items():
        where = f"{found['output']}, row {found['slot'] + 1} of {found['batch']}"
        gate(f"{side}'s slots", where, found["relative"], "<=", SLOT_BOUND)
    return gates


def spread(values: list[float]) -> dict[str, float] | None:
    """Count, smallest, mean and largest of some figures, or None."""
    if not values:
        return None
    return {"count": len(values), "min": min(values), "mean": sum(values) / len(values), "max": max(values)}
