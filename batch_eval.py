#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""cgF1 of predictions on SA-Co gold, equal to the official evaluator's, for each subset and their mean.

Example:
    python3 batch_eval.py --gt_base ./dataset/gt-annotations --pred_dir ./gold_predictions

Reads:  <gt_base>/gold_<subset>_merged_{a,b,c}_release_test.json (a alone, or all three),
        <pred_dir>/gold_<subset>/dumps/gold_<subset>/coco_predictions_segm.json
Writes: a table; with --report and --plot also files.
Exit:   0 evaluated, 1 a process was killed, 2 wrong usage or a file that would be judged wrongly.
"""

import gc
import os
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from sam3_utils.cli import CheckFailed, UsageError, make_parser, positive_int, run
from sam3_utils.saco import SUBSETS

SWEEP = [round(0.3 + 0.05 * step, 2) for step in range(14)]  # from what sam3_image_infer.py keeps, to 0.95


def parse_args(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--gt_base", type=Path, required=True, help="folder of the annotation files")
    parser.add_argument("--pred_dir", type=Path, required=True, help="folder that sam3_image_infer.py filled")
    parser.add_argument("--subset", nargs="+", choices=tuple(SUBSETS), help="evaluate only these; not given: all seven")
    parser.add_argument("--iou_type", default="segm", choices=("segm", "bbox"), help="compare masks or boxes")
    parser.add_argument(
        "--lenient", action="store_true",
        help="judge faulty files as the official evaluator does, and sensibly where that stops; the faults are counted",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all metrics and counts: .json or .csv")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write threshold_sweep.png and subsets.png there")
    parser.add_argument("--workers", type=positive_int, default=os.cpu_count() or 1, help="processes")
    return parser.parse_args(argv)


def evaluate_subset(subset, args, workers: int) -> dict:
    """Metrics and counts of one subset; with --plot also the metrics at each score threshold of the sweep."""
    import numpy as np

    from sam3_utils import metrics, saco

    # Hundreds of thousands of dicts and no cycle among them: looking for some takes as long as the evaluation.
    gc.disable()
    paths = saco.annotation_paths(args.gt_base, subset)
    notes: Counter = Counter()
    annotators = [saco.read_annotations(path, args.iou_type, args.lenient, notes) for path in paths]
    predictions = saco.read_predictions(
        saco.prediction_path(args.pred_dir, subset), annotators[0], len(paths), args.iou_type, args.lenient, notes
    )
    pairs = saco.evaluated_pairs(annotators, [str(path) for path in paths], args.lenient, notes)
    levels = np.array(sorted({metrics.SCORE_THRESHOLD, *(SWEEP if args.plot else ())}))
    objects = [annotator.objects for annotator in annotators]
    rows = metrics.score_pairs_in_processes(pairs, objects, predictions, args.iou_type, levels, workers)
    by_level = [metrics.cgf1_metrics(level_rows, args.iou_type) for level_rows in rows]
    values, counts = by_level[int(np.flatnonzero(levels == metrics.SCORE_THRESHOLD)[0])]
    sweep = {float(level): level_values for level, (level_values, _) in zip(levels, by_level)} if args.plot else None
    return {"metrics": values, "counts": counts | {"annotators": len(paths)}, "notes": notes, "sweep": sweep}


def evaluate(subsets, args) -> dict[str, dict]:
    """Every subset's result; several subsets run side by side, a single one is cut into chunks."""
    if len(subsets) == 1 or args.workers == 1:
        return {subset: evaluate_subset(subset, args, args.workers) for subset in subsets}
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(min(args.workers, len(subsets))) as pool:
        futures = {subset: pool.submit(evaluate_subset, subset, args, 1) for subset in subsets}
        return {subset: future.result() for subset, future in futures.items()}


def mean_metrics(results) -> dict[str, float]:
    """The unweighted mean of each metric over the subsets, as in Meta's table."""
    first, *others = (result["metrics"] for result in results.values())
    return {name: (value + sum(other[name] for other in others)) / len(results) for name, value in first.items()}


def print_table(results, mean, iou_type) -> None:
    """One row a subset with Meta's published cgF1 beside it, in percent (IL_MCC as it is)."""
    from sam3_utils import saco

    def row(name, metrics, pairs, predictions, published):
        cgf1, mcc, f1 = (metrics[f"cgF1_eval_{iou_type}_{key}"] for key in ("cgF1", "IL_MCC", "positive_micro_F1"))
        beside = f"{published:9.2f} {100 * cgf1 - published:+10.2f}" if published is not None else ""
        print(f"{name:20s} {100 * cgf1:7.2f} {mcc:7.3f} {100 * f1:7.2f} {pairs:>8} {predictions:>11} {beside}".rstrip())

    print(f"{'subset (' + iou_type + ')':20s} {'cgF1':>7} {'IL_MCC':>7} {'pmF1':>7} {'pairs':>8} {'predictions':>11} "
          f"{'published':>9} {'difference':>10}")  # fmt: skip
    for subset, result in results.items():
        counts = result["counts"]
        published = SUBSETS[subset][2] if iou_type == "segm" else None
        row(subset, result["metrics"], counts["n_eval_pairs"], counts["n_predictions"], published)
    complete = len(results) == len(SUBSETS)
    pairs, predictions = (
        sum(result["counts"][key] for result in results.values()) for key in ("n_eval_pairs", "n_predictions")
    )
    name = "mean of all seven" if complete else f"mean of {len(results)} of 7"
    row(name, mean, pairs, predictions, saco.PUBLISHED_MEAN if complete and iou_type == "segm" else None)
    if complete and iou_type == "segm":
        print(f"{'':62s} the guide {saco.GUIDE_MEAN:9.2f} {100 * mean['cgF1_eval_segm_cgF1'] - saco.GUIDE_MEAN:+10.2f}")


def write_report(path: Path, results, mean) -> None:
    """All metrics and counts as JSON, or the metrics as CSV with a row a subset."""
    from sam3_utils import files

    subsets = {name: result["metrics"] | {"counts": result["counts"]} for name, result in results.items()}
    if path.suffix == ".json":
        files.write_json(path, {"subsets": subsets, "mean": mean})
        return
    rows = [["subset", *mean]]
    rows += [[name, *(result["metrics"][key] for key in mean)] for name, result in results.items()]
    rows.append(["mean", *mean.values()])
    files.write_text(path, "".join(",".join(map(str, row)) + "\n" for row in rows))


def main(argv=None) -> int:
    args = parse_args(argv)
    if args.report and args.report.suffix not in (".json", ".csv"):
        raise UsageError(f"--report {args.report}: the name must end in .json or .csv")
    subsets = list(dict.fromkeys(args.subset or SUBSETS))
    from sam3_utils import saco

    if not args.subset:
        missing = [
            path
            for subset in subsets
            for path in (saco.annotation_path(args.gt_base, subset, "a"), saco.prediction_path(args.pred_dir, subset))
            if not path.is_file()
        ]
        if missing:
            raise UsageError(
                f"{missing[0]}: missing ({len(missing)} files in all); --subset evaluates some of the seven"
            )
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
    if args.plot:
        args.plot.mkdir(parents=True, exist_ok=True)
    try:
        results = evaluate(subsets, args)
    except BrokenProcessPool:
        raise CheckFailed("a process was killed, probably for memory; try --workers 1") from None
    mean = mean_metrics(results)
    print_table(results, mean, args.iou_type)
    for subset, result in results.items():
        for text, count in result["notes"].items():
            print(f"note: {subset}: {text}: {count}")
    if args.report:
        write_report(args.report, results, mean)
    if args.plot:
        from sam3_utils.report import plot_subsets, plot_sweep

        plot_sweep(args.plot / "threshold_sweep.png", {n: r["sweep"] for n, r in results.items()}, args.iou_type)
        published = {name: cgf1 for name, (_, _, cgf1) in SUBSETS.items()}
        metrics = {name: result["metrics"] for name, result in results.items()}
        plot_subsets(args.plot / "subsets.png", metrics, args.iou_type, published)
    return 0


if __name__ == "__main__":
    run(main)
