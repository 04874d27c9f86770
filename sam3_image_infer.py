#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Run SAM3 over SA-Co gold on one or several devices, and write predictions that batch_eval.py and Meta's tool read.

Example:
    python3 sam3_image_infer.py --model_path ./sam3_om/sam3_800I_bs4.om --processor_path ./sam3_model \\
        --dataset_root ./dataset --device "0,1,2,3" --batch_size 4

Reads:  <dataset_root>/gt-annotations/, metaclip-images/, sa1b-images/
Writes: <output_dir>/gold_<subset>/dumps/gold_<subset>/coco_predictions_segm.json, and beside dumps/ run.json and
        summary.json. Until a subset is complete its results lie in work/; a run that was interrupted, killed or cut
        off goes on when the same command is given again, and a finished subset is left as it is.
Exit:   0 all pairs done, 1 some failed (listed) or every device died, 2 wrong usage.
"""

import json
import logging
import os
import time
from collections import deque
from pathlib import Path

from sam3_utils.cli import (
    UsageError,
    add_dtype,
    add_model_path,
    make_parser,
    one_path,
    positive_int,
    run,
    unit_interval,
)

logger = logging.getLogger("sam3_image_infer")
OUTPUT_NAMES = ("summary.json", "dumps", "work")


def parse_args(argv=None):
    parser = make_parser(__doc__)
    add_model_path(parser, required=True)
    parser.add_argument(
        "--processor_path", type=Path, required=True, help="folder of the processor and tokenizer files"
    )
    parser.add_argument("--dataset_root", type=Path, required=True, help="folder with gt-annotations/ and the pictures")
    parser.add_argument(
        "--device",
        help='a worker each: NPU ids for an .om, "0,1,2,3" (0 if not given); otherwise "cpu,cpu" (cpu if not given)',
    )  # fmt: skip
    parser.add_argument("--batch_size", type=positive_int, help="pairs at once; not given: an .om's own, otherwise 1")
    parser.add_argument("--subset", nargs="+", metavar="NAME", help="run only these of the seven subsets")
    parser.add_argument("--output_dir", type=Path, default=Path("./gold_predictions"), help="where predictions go")
    parser.add_argument(
        "--score_threshold", type=unit_interval, default=0.3,
        help="keep instances with a higher score x presence; 0.3 as the official dumps do",
    )  # fmt: skip
    add_dtype(parser, "a checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace earlier results of the chosen subsets")
    return parser.parse_args(argv)


def work(device: str, settings: dict, receive, report) -> None:
    """A worker: load the model, then run units; a pair's line is on disk before its batch is reported."""
    from sam3_utils.backends import fit_processor, open_model
    from sam3_utils.checkpoint import load_processor
    from sam3_utils.pipeline import RecordFile, batch_size_for, hold_shared, run_batches
    from sam3_utils.postprocess import instance_scores
    from sam3_utils.saco_predict import predictions_of, work_folder

    processor = load_processor(settings["processor_path"])
    model = open_model(settings["model_path"], device, settings["dtype"])
    fit_processor(processor, model, settings["processor_path"], settings["model_path"])
    report("ready", (batch_size_for(model, settings["batch_size"]), model.runtime, model.precision))
    record_files, tokens = {}, {}
    taken: deque = deque()  # (unit, is its last batch) for every batch on its way

    def batches():
        for unit in receive():
            if unit is None:
                yield None
                continue
            if unit.subset not in record_files:
                folder = work_folder(settings["output_dir"], unit.subset)
                hold_shared(folder)
                record_files[unit.subset] = RecordFile(folder / f"{os.getpid()}.jsonl")
            tokens.update(unit.tokens)
            for batch in unit.batches:
                taken.append((unit, batch is unit.batches[-1]))
                yield batch

    for batch, outputs, errors in run_batches(model, processor, batches(), tokens):
        unit, is_last = taken.popleft()
        scores = instance_scores(outputs["pred_logits"], outputs["presence_logits"])
        records = []
        for row, (pair, error) in enumerate(zip(batch, errors)):
            if error:
                records.append({"pair": pair.id, "error": error})
            elif pair.id not in unit.finished:
                arrays = scores[row], outputs["pred_boxes"][row], outputs["pred_masks"][row]
                found = predictions_of(pair, *arrays, settings["score_threshold"])
                records.append({"pair": pair.id, "predictions": found})
        record_files[unit.subset].append(records)
        report("progress", (len(records), [record["error"] for record in records if "error" in record]))
        if is_last:
            report("done")
    model.close()


def open_subsets(args, pairs_of: dict[str, list], batch_size: int, model: dict) -> dict[str, tuple]:
    """Open each subset's result folder: subset -> (its pairs, its identity); finished ones are left out."""
    from sam3_utils import files, saco
    from sam3_utils.checkpoint import processor_files
    from sam3_utils.pipeline import open_run_folder, wait_for_workers
    from sam3_utils.report import versions
    from sam3_utils.saco_predict import work_folder

    todo = {}
    for subset, pairs in pairs_of.items():
        annotations = saco.annotation_path(args.dataset_root / "gt-annotations", subset, "a")
        identity = {
            "model": model,
            "processor": {path.name: files.sha256(path) for path in processor_files(args.processor_path)},
            "annotations": files.sha256(annotations),
            "settings": {"batch_size": batch_size, "dtype": args.dtype, "score_threshold": args.score_threshold},
            "versions": versions(),
        }
        folder = args.output_dir / f"gold_{subset}"
        lines = work_folder(args.output_dir, subset)
        if lines.exists():
            wait_for_workers(lines)
        if open_run_folder(folder, identity, OUTPUT_NAMES, args.overwrite):
            path = saco.prediction_path(args.output_dir, subset)
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            if not path.is_file() or files.sha256(path) != summary["sha256"]:
                raise UsageError(f"{path}: missing or changed since it was written; make it anew with --overwrite")
            print(f"{subset}: already complete")
            continue
        lines.mkdir(exist_ok=True)
        todo[subset] = pairs, identity
    return todo


def main(argv=None) -> int:
    args = parse_args(argv)
    model_path = one_path(args.model_path, "--model_path")
    from sam3_utils import saco
    from sam3_utils.backends import describe_model, is_om

    subsets = list(dict.fromkeys(args.subset or saco.SUBSETS))
    unknown = [subset for subset in subsets if subset not in saco.SUBSETS]
    if unknown:
        raise UsageError(f"--subset {unknown[0]}: choose from {', '.join(saco.SUBSETS)}")
    for subset in subsets:  # before any model is loaded
        path = saco.annotation_path(args.dataset_root / "gt-annotations", subset, "a")
        if not path.is_file():
            raise UsageError(f"{path}: missing; --subset runs some of the seven")
    default = "0" if is_om(model_path) else "cpu"
    devices = (default if args.device is None else args.device).replace(" ", "").split(",")
    if "" in devices:
        raise UsageError(f"--device {args.device!r}: a name is empty; separate devices by single commas")
    pairs_of = {subset: saco.read_pairs(args.dataset_root, subset) for subset in subsets}
    from tqdm import tqdm

    from sam3_utils.checkpoint import load_processor
    from sam3_utils.prompts import encode_phrases
    from sam3_utils.saco_predict import finished_pairs, make_units, merge, rest_of, work_folder
    from sam3_utils.workers import run_units

    started = time.perf_counter()
    processor = load_processor(args.processor_path)
    todo: dict[str, tuple] = {}
    failures: list[str] = []
    progress = tqdm(unit="pair", disable=None, smoothing=0.02)

    def plan(facts) -> list:
        """The units of what is not on disk yet."""
        batch_size, runtime, precision = facts
        todo.update(open_subsets(args, pairs_of, batch_size, describe_model(model_path, runtime, precision)))
        units = []
        for subset, (pairs, _) in todo.items():
            phrases = list(dict.fromkeys(pair.prompt for pair in pairs))
            input_ids, attention_mask, cut = encode_phrases(processor, phrases, truncate=True)
            if cut:
                logger.warning("%s: %d phrases of over 32 tokens are cut", subset, len(cut))
            tokens = dict(zip(phrases, zip(input_ids, attention_mask)))
            done = finished_pairs(work_folder(args.output_dir, subset))
            units += [rest_of(unit, done) for unit in make_units(subset, pairs, batch_size, tokens)]
        units = [unit for unit in units if unit is not None]
        total = sum(len(pairs) for pairs, _ in todo.values())
        left = sum(len(batch) for unit in units for batch in unit.batches) - sum(len(unit.finished) for unit in units)
        progress.reset(total)
        progress.update(total - left)
        return units

    def rest_on_disk(unit):
        return rest_of(unit, finished_pairs(work_folder(args.output_dir, unit.subset)))

    def on_progress(value) -> None:
        count, errors = value
        failures.extend(errors)
        for error in errors:
            logger.warning("%s", error)
        progress.update(count)
        progress.set_postfix(failed=len(failures), refresh=False)

    settings = {name: getattr(args, name) for name in ("processor_path", "dtype", "batch_size", "score_threshold")}
    settings |= {"model_path": model_path, "output_dir": args.output_dir}
    run_units(plan, devices, work, settings, on_progress, rest_on_disk)
    progress.close()
    code = 0
    for subset, (pairs, identity) in todo.items():
        seconds = round(time.perf_counter() - started, 2)
        missing = merge(args.output_dir, subset, pairs, identity | {"seconds": seconds})
        if missing:
            code = 1
            print(
                f"{subset}: {len(missing)} of {len(pairs)} pairs failed (first: {missing[0]}); no predictions written. "
                "Mend what is listed above and give the same command again"
            )
        else:
            print(f"{subset}: {len(pairs)} pairs -> {saco.prediction_path(args.output_dir, subset)}")
    return code


if __name__ == "__main__":
    run(main)
