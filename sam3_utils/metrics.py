# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""How well predictions agree with annotations: mask IoU, and SA-Co's cgF1.

cgF1 follows the official evaluator (facebookresearch/sam3, sam3/eval/cgf1_eval.py) to the last digit, its epsilons
and its order of comparisons included.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from scipy.optimize import linear_sum_assignment

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)  # the ninth is one bit below 0.9, as in the official tool
SCORE_THRESHOLD = 0.5  # inclusive, fixed in the official tool
EPSILON = 1e-4  # added to counts of objects
IL_EPSILON = 1e-6  # added to counts of pairs ("image level")


def mask_iou(first: dict, second: dict) -> float:
    """Intersection over union of two COCO RLEs of one size; 0 when both are empty.

    Areas are whole numbers of pixels, so the value is exact up to one division.
    """
    from pycocotools import mask as coco_mask

    intersection = int(coco_mask.area(coco_mask.merge([first, second], intersect=True)))
    union = int(coco_mask.area(first)) + int(coco_mask.area(second)) - intersection
    return intersection / union if union else 0.0


def match(ious: np.ndarray) -> np.ndarray:
    """IoUs of the one-to-one assignment with the largest sum, (P, G) to (min(P, G),): one for all thresholds."""
    if 1 in ious.shape:
        return ious.max(keepdims=True).reshape(1)
    rows, columns = linear_sum_assignment(ious, maximize=True)
    return ious[rows, columns]


def pair_ious(predictions: list, objects: list, iou_type: str) -> np.ndarray:
    """(P, G) IoUs of COCO RLEs, or of xywh boxes, by pycocotools' rules without crowds."""
    from pycocotools import mask as coco_mask

    if iou_type == "bbox":
        predictions, objects = (np.asarray(boxes, dtype=np.float64) for boxes in (predictions, objects))
    return coco_mask.iou(predictions, objects, [0] * len(objects))


def score_pairs(
    pairs: list[int], annotators: list[dict], predictions: dict, iou_type: str, score_thresholds: np.ndarray
) -> np.ndarray:
    """Judge every pair against its best annotator, for each score threshold.

    Args:
        pairs: the pairs to evaluate.
        annotators: for each annotator, pair -> its objects (COCO RLEs or boxes).
        predictions: pair -> (scores, COCO RLEs or boxes).
        score_thresholds: (S,); a prediction counts when its score is at least the threshold.

    Returns:
        (S, pairs, 12) int: number of predictions, number of objects, true positives at the ten IoU thresholds. A
        pair's kind follows from the first two.
    """
    count = len(annotators)
    sizes = np.zeros((len(score_thresholds), count, len(pairs), 2), dtype=np.int64)
    matched_values, matched_cells = [], []
    for column, pair in enumerate(pairs):
        objects = [annotator.get(pair, ()) for annotator in annotators]
        sizes[:, :, column, 1] = [len(items) for items in objects]
        scores, items = predictions.get(pair, ((), ()))
        kept_counts = np.count_nonzero(np.asarray(scores) >= score_thresholds[:, None], axis=1) if scores else 0
        sizes[:, :, column, 0] = np.reshape(kept_counts, (-1, 1))
        if not np.any(kept_counts) or not any(objects):
            continue
        usable = [index for index, score in enumerate(scores) if score >= score_thresholds[0]]
        # One call for all annotators: each prediction's RLE is read once.
        ious = pair_ious([items[i] for i in usable], [item for part in objects for item in part], iou_type)
        ends = np.cumsum([len(part) for part in objects])
        for level, threshold in enumerate(score_thresholds):
            rows = ious[[scores[i] >= threshold for i in usable]] if level else ious
            for annotator, end in enumerate(ends):
                block = rows[:, end - len(objects[annotator]) : end]
                if block.size:
                    values = match(block)
                    matched_values.append(values)
                    matched_cells.append(
                        np.full(len(values), (level * count + annotator) * len(pairs) + column, dtype=np.int64)
                    )
    cells = sizes.shape[0] * count * len(pairs)
    values = np.concatenate(matched_values) if matched_values else np.zeros(0)
    where = np.concatenate(matched_cells) if matched_cells else np.zeros(0, dtype=np.int64)
    true_positives = np.stack(
        [np.bincount(where[values >= threshold], minlength=cells) for threshold in IOU_THRESHOLDS], axis=-1
    ).reshape(*sizes.shape[:3], -1)
    return best_annotator(np.concatenate([sizes, true_positives], axis=-1))


def score_pairs_in_processes(
    pairs: list[int],
    annotators: list[dict],
    predictions: dict,
    iou_type: str,
    score_thresholds: np.ndarray,
    workers: int,
) -> np.ndarray:
    """`score_pairs` with the pairs cut into runs, one a process; the result is the same.

    Processes are forked where the system can: they see the parsed files without a copy, and nothing here holds a
    thread or a device. A run's masks lie together in memory, so that a process touches (and so copies) its own only.
    """
    if workers == 1 or len(pairs) < 2000 or "fork" not in multiprocessing.get_all_start_methods():
        return score_pairs(pairs, annotators, predictions, iou_type, score_thresholds)
    _chunk_arguments.update(pairs=pairs, rest=(annotators, predictions, iou_type, score_thresholds), workers=workers)
    # Not multiprocessing.Pool, which waits forever for a process that was killed.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        chunks = list(pool.map(_score_chunk, range(workers)))
    _chunk_arguments.clear()
    return np.concatenate(chunks, axis=1)


_chunk_arguments: dict = {}  # what forked workers inherit instead of receiving it through a pipe


def _score_chunk(number: int) -> np.ndarray:
    pairs, workers = _chunk_arguments["pairs"], _chunk_arguments["workers"]
    start, end = (len(pairs) * edge // workers for edge in (number, number + 1))
    return score_pairs(pairs[start:end], *_chunk_arguments["rest"])


def f1_vectors(rows: np.ndarray) -> np.ndarray:
    """F1 at the ten IoU thresholds of (..., 12) rows; 0 for a pair without objects or without predictions."""
    predicted, wanted, true_positives = rows[..., :1], rows[..., 1:2], rows[..., 2:]
    precision = true_positives / (predicted + EPSILON)
    recall = true_positives / (wanted + EPSILON)
    return 2 * precision * recall / (precision + recall + EPSILON)


def best_annotator(rows: np.ndarray) -> np.ndarray:
    """The official oracle over annotators: (S, K, pairs, 12) to (S, pairs, 12).

    In the order of the files a later annotator wins with a strictly larger mean F1, or by leaving a pair empty that
    has no predictions (a true negative).
    """
    best = rows[:, 0].copy()
    for annotator in range(1, rows.shape[1]):
        challenger = rows[:, annotator]
        is_negative = ~challenger[..., :2].any(axis=-1)  # nothing predicted, nothing there
        best_is_negative = ~best[..., :2].any(axis=-1)
        better = f1_vectors(challenger).mean(axis=-1) > f1_vectors(best).mean(axis=-1)
        replace = is_negative | (~best_is_negative & better)
        best[replace] = challenger[replace]
    return best


def cgf1_metrics(rows: np.ndarray, iou_type: str) -> tuple[dict[str, float], dict]:
    """The official evaluator's 26 metrics and its counts from (pairs, 12) rows of `score_pairs`.

    cgF1 = positive micro F1 x image-level MCC; names without @ are means over the ten IoU thresholds.
    """
    predicted, wanted, true_positives = rows[:, 0], rows[:, 1], rows[:, 2:]
    has_predictions, has_objects = predicted > 0, wanted > 0
    tp = true_positives.sum(axis=0)
    fp = predicted.sum() - tp
    fn = wanted.sum() - tp
    positive_fp = predicted[has_objects].sum() - tp  # every true positive lies in a pair with objects
    n_tp, n_fp, n_fn, n_tn = (
        int(np.count_nonzero(kind))
        for kind in (
            has_predictions & has_objects, has_predictions & ~has_objects,
            ~has_predictions & has_objects, ~has_predictions & ~has_objects,
        )
    )  # fmt: skip

    def f1(precision, recall, epsilon):
        return 2 * precision * recall / (precision + recall + epsilon)

    precision, recall = tp / (tp + fp + EPSILON), tp / (tp + fn + EPSILON)
    positive_precision = tp / (tp + positive_fp + EPSILON)
    micro_f1 = f1(positive_precision, recall, EPSILON)
    il_precision, il_recall = n_tp / (n_tp + n_fp + IL_EPSILON), n_tp / (n_tp + n_fn + IL_EPSILON)
    # In floats: the product of four counts of the real size passes 2**63.
    margins = float(n_tp + n_fp) * (n_tp + n_fn) * (n_tn + n_fp) * (n_tn + n_fn)
    mcc = (n_tp * n_tn - n_fp * n_fn) / (margins**0.5 + IL_EPSILON)
    # Missed pairs add zeros to the sum but are not in the denominator; without any found pair it is undefined.
    macro_f1 = f1_vectors(rows[has_objects]).sum(axis=0) / n_tp if n_tp else np.full(len(IOU_THRESHOLDS), -1.0)
    by_threshold = {
        "cgF1": micro_f1 * mcc,
        "precision": precision,
        "recall": recall,
        "F1": f1(precision, recall, EPSILON),
        "positive_macro_F1": macro_f1,
        "positive_micro_F1": micro_f1,
        "positive_micro_precision": positive_precision,
    }
    single = {
        "IL_precision": il_precision,
        "IL_recall": il_recall,
        "IL_F1": f1(il_precision, il_recall, IL_EPSILON),
        "IL_FPR": n_fp / (n_fp + n_tn + IL_EPSILON),
        "IL_MCC": mcc,
    }
    metrics = {name: mean_of_defined(values) for name, values in by_threshold.items()} | single
    for suffix, index in (("@0.5", 0), ("@0.75", 5)):
        metrics |= {f"{name}{suffix}": float(values[index]) for name, values in by_threshold.items()}
    counts = {
        "n_eval_pairs": len(rows), "n_predictions": int(predicted.sum()), "iou_thresholds": IOU_THRESHOLDS.tolist(),
        "TPs": tp.tolist(), "FPs": fp.tolist(), "positive_micro_FPs": positive_fp.tolist(), "FNs": fn.tolist(),
        "IL_TP": n_tp, "IL_FP": n_fp, "IL_TN": n_tn, "IL_FN": n_fn,
    }  # fmt: skip
    return {f"cgF1_eval_{iou_type}_{name}": value for name, value in metrics.items()}, counts


def mean_of_defined(values: np.ndarray) -> float:
    """Mean of the values above -1, the official tool's mark of "undefined"; -1 if there are none."""
    defined = values[values > -1]
    return float(defined.mean()) if len(defined) else -1.0
