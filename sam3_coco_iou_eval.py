#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Mean IoU of a SAM3 model over COCO val2017, each category's name used as the phrase.

One sample is one (image, category) pair: the union of the annotated instances against the union of the predicted
ones. The model may be an OM, an ONNX file or a checkpoint folder.

Example:
    python3 sam3_coco_iou_eval.py --model_path ./sam3_onnx_300I/sam3.onnx --processor_path ./sam3_model \\
        --coco_root ./coco2017 --batch_size 4

Reads:  <coco_root>/annotations/instances_val2017.json, <coco_root>/val2017/
Writes: <output_dir>/summary.json, samples.jsonl (one line a sample), run.json; failed.jsonl and overlays/ if any.
        Where images carry LVIS's neg_category_ids, absent.jsonl and how often presence is right.
        A killed run goes on where it stopped when the same command is given again.
Exit:   0 all samples evaluated, 1 some failed (listed), 2 wrong usage.
"""

import logging
import time
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

logger = logging.getLogger("sam3_coco_iou_eval")
OUTPUT_NAMES = ("summary.json", "samples.jsonl", "absent.jsonl", "failed.jsonl", "overlays")


def parse_args(argv=None):
    parser = make_parser(__doc__)
    add_model_path(parser, required=True)
    parser.add_argument(
        "--processor_path", type=Path, required=True, help="folder of the processor and tokenizer files"
    )
    parser.add_argument("--coco_root", type=Path, required=True, help="folder with val2017/ and annotations/")
    parser.add_argument(
        "--device", help="NPU id for an .om (0 if not given); otherwise cpu (if not given), cuda:0, ..."
    )
    parser.add_argument("--batch_size", type=positive_int, help="samples at once; not given: an .om's own, otherwise 1")
    parser.add_argument("--output_dir", type=Path, default=Path("./coco_iou_results"), help="where results go")
    add_dtype(parser, "a checkpoint")
    parser.add_argument(
        "--score_threshold", type=unit_interval, default=0.5,
        help="instances with a higher score x presence count; 0.5 as in the model card's example",
    )  # fmt: skip
    parser.add_argument(
        "--mask_threshold", type=unit_interval, default=0.5,
        help="pixels with a higher probability belong to the mask; 0.5 as in the model card's example",
    )  # fmt: skip
    parser.add_argument(
        "--max_detections", type=positive_int,
        help="keep this many best instances of a sample; not given: all above the threshold, as transformers does",
    )  # fmt: skip
    parser.add_argument(
        "--crowd", default="exclude", choices=("exclude", "include"),
        help="iscrowd masks outline groups, not instances: left out of the annotated union, or taken in",
    )  # fmt: skip
    parser.add_argument(
        "--image_size", type=positive_int,
        help="side of the pictures for a checkpoint, a multiple of patch x window; smaller is faster and less accurate",
    )  # fmt: skip
    parser.add_argument("--max_samples", type=positive_int, help="evaluate the first so many samples only")
    parser.add_argument("--overlays", type=positive_int, help="draw so many worst and best samples into overlays/")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier run in --output_dir")
    return parser.parse_args(argv)


def evaluate(model, processor, samples, settings, folder) -> list[str]:
    """Evaluate what the folder does not hold yet, batch by batch; returns the phrases that had to be cut.

    Batches are fixed by the order of the samples, so that a run that was killed and goes on computes exactly what
    an undisturbed one does.
    """
    from tqdm import tqdm

    from sam3_utils.coco_iou import judge
    from sam3_utils.pipeline import RecordFile, run_batches
    from sam3_utils.postprocess import instance_scores
    from sam3_utils.prompts import encode_phrases
    from sam3_utils.stages import stage

    present, absent, failures = (
        RecordFile(folder / name) for name in ("samples.jsonl", "absent.jsonl", "failed.jsonl")
    )
    failures.path.unlink(missing_ok=True)  # a picture that failed is tried again
    done = {(r["image_id"], r["category_id"]) for file in (present, absent) for r in file.read()}
    size = settings["batch_size"]
    batches = [samples[start : start + size] for start in range(0, len(samples), size)]
    pending = [batch for batch in batches if any(sample.key not in done for sample in batch)]
    phrases = list(dict.fromkeys(sample.prompt for sample in samples))
    input_ids, attention_mask, cut = encode_phrases(processor, phrases, truncate=True)
    tokens = {phrase: pair for phrase, *pair in zip(phrases, input_ids, attention_mask)}
    progress = tqdm(total=len(samples), initial=len(done), unit="sample", disable=None, smoothing=0.02)
    for batch, outputs, errors in run_batches(model, processor, pending, tokens):
        scores = instance_scores(outputs["pred_logits"], outputs["presence_logits"])
        records, failed = [], []
        for row, (sample, error) in enumerate(zip(batch, errors)):
            if sample.key in done:
                continue
            if error:
                logger.warning("%s", error)
                failed.append(dict(zip(("image_id", "category_id"), sample.key), prompt=sample.prompt, error=error))
            else:
                with stage("masks and IoU"):
                    records.append(judge(sample, scores[row], outputs["pred_masks"][row], settings))
        with stage("write"):
            present.append([record for record in records if "iou" in record])
            absent.append([record for record in records if "iou" not in record])
            failures.append(failed)
        progress.update(len(records) + len(failed))
    progress.close()
    return cut


def print_summary(summary, counts, folder) -> None:
    """The result on stdout."""
    from sam3_utils.report import columns

    print("IoU, samples and name of each category, worst first")
    rows = sorted(summary["per_category"].items(), key=lambda item: item[1]["iou"])
    print(columns([f"{row['iou']:.3f} {row['samples']:4d} {name}" for name, row in rows]))
    print(f"samples with iscrowd masks left out: {counts['exclude']}, with them: {counts['include']}")
    if "presence" in summary:
        p = summary["presence"]
        print(
            f"presence: {p['present_found']}/{p['present']} present phrases with an instance "
            f"({p['present_found'] / max(1, p['present']):.1%}), {p['absent_empty']}/{p['absent']} absent ones without "
            f"({p['absent_empty'] / p['absent']:.1%})"
        )
    print(f"samples: {summary['samples']}, failed: {summary['failed']}, details: {folder / 'summary.json'}")
    if summary["value"] is not None:
        print(f"Mean IoU ({summary['model']['runtime']}): {summary['value']:.6f}")


def main(argv=None) -> int:
    args = parse_args(argv)
    model_path = one_path(args.model_path, "--model_path")
    from sam3_utils import files
    from sam3_utils.backends import describe_model, fit_processor, open_model
    from sam3_utils.checkpoint import load_processor, processor_files
    from sam3_utils.coco_iou import draw_overlays, summarise
    from sam3_utils.datasets import read_coco
    from sam3_utils.pipeline import batch_size_for, open_run_folder
    from sam3_utils.report import versions
    from sam3_utils.stages import peak_memory_mib, seconds_by_stage

    dataset = read_coco(args.coco_root, args.crowd)
    samples = dataset.samples[: args.max_samples]
    evaluated = {sample.image_id for sample in samples}
    # In the samples' order, so that a picture is decoded once for all of its phrases.
    order = {image_id: position for position, image_id in enumerate(dict.fromkeys(s.image_id for s in samples))}
    absent = [sample for sample in dataset.absent if sample.image_id in evaluated]
    todo = sorted([*samples, *absent], key=lambda sample: order[sample.image_id])
    if not samples:
        raise UsageError(f"{args.coco_root}: no sample to evaluate; problems in the annotations: {dataset.problems}")
    for text, count in dataset.problems.items():
        logger.warning("annotations: %d %s", count, text)
    processor = load_processor(args.processor_path)
    model = open_model(model_path, args.device, args.dtype, args.image_size)
    fit_processor(processor, model, args.processor_path, model_path)
    names = ("batch_size", "dtype", "score_threshold", "mask_threshold", "max_detections", "crowd", "max_samples")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"batch_size": batch_size_for(model, args.batch_size), "image_size": model.shapes.image_size}
    annotation_file = args.coco_root / "annotations" / "instances_val2017.json"
    identity = {
        "model": describe_model(model_path, model.runtime, model.precision),
        "processor": {path.name: files.sha256(path) for path in processor_files(args.processor_path)},
        "annotations": files.sha256(annotation_file),
        "device": model.device,
        "settings": settings,
        "versions": versions(),
    }
    if open_run_folder(args.output_dir, identity, OUTPUT_NAMES, args.overwrite):
        raise UsageError(f"{args.output_dir}: holds a finished run; give another --output_dir or --overwrite")
    started = time.perf_counter()
    cut = evaluate(model, processor, todo, settings, args.output_dir)
    model.close()
    summary = identity | summarise(args.output_dir, todo)
    summary |= {
        "samples_by_crowd_rule": dataset.counts,
        "annotation_problems": dataset.problems,
        "truncated_prompts": cut,
        "seconds": round(time.perf_counter() - started, 2),
        "seconds_by_stage": {name: round(value, 3) for name, value in seconds_by_stage().items()},
        "peak_memory_mib": peak_memory_mib(),
    }
    files.write_json(args.output_dir / "summary.json", summary)
    if args.overlays:
        draw_overlays(args.output_dir, todo, args.overlays)
    print_summary(summary, dataset.counts, args.output_dir)
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    run(main)
