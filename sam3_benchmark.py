#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Speed of the model alone on any backend, beside what the chip can do at most, with rows for README's table.

A loop is one batch of prepared inputs through the model, without pictures and decoding. "infer" is what a caller waits
for, every picture with a phrase of its own: for an OM with the copies to and from the NPU. An OM also gets "NPU
compute", ais_bench's time without copies. A checkpoint also gets its stages, and a split model its parts, each timed
alone: "vision" of one picture, "text" of one phrase, "detector" of --batch_size phrases on one picture. So a further
phrase on the same picture costs text and its share of the detector. fps is batch / median, for text phrases and for the
detector pairs a second; ais_bench itself prints batch / mean. "of peak" is the share of what the chip could do at most.

With --coco_root a run of sam3_coco_iou_eval.py is timed instead: from files to results, stage by stage.

Example:
    python3 sam3_benchmark.py --model_path ./sam3_om/sam3_300I_bs4*.om --device 0 --loop 50
    python3 sam3_benchmark.py --model_path ./sam3_onnx_300I --processor_path ./sam3_model --coco_root ./coco2017

Reads:  the model, and what was written beside it; the ONNX file whose matrix products are counted;
        with --ais_bench_summary that file instead of a run
Writes: tables; with --report also everything as JSON.
Exit:   0 measured, 1 the model's answers cannot be used or --onnx_path's work not be counted, 2 wrong usage.
"""

import shlex
import sys
import textwrap
from pathlib import Path

from sam3_utils.cli import UsageError, add_dtype, add_model_path, make_parser, one_path, positive_int, run
from sam3_utils.speed import CHIPS


def parse_args(argv=None):
    parser = make_parser(__doc__)
    add_model_path(parser, required=False)
    parser.add_argument(
        "--device", help="NPU id for an .om (0 if not given); otherwise cpu (if not given), cuda:0, ..."
    )
    parser.add_argument(
        "--batch_size",
        type=positive_int,
        help="pictures, or phrases for a detector, at once; not given: an .om's own, otherwise 1",
    )
    add_dtype(parser, "a checkpoint")
    parser.add_argument("--loop", type=positive_int, default=20, help="timed runs")
    parser.add_argument("--warmup_count", type=positive_int, default=3, help="runs before them, which do not count")
    parser.add_argument(
        "--soc_version", choices=tuple(CHIPS),
        help="the NPU whose roofline is wanted; not given: the one that an .om's manifest names",
    )  # fmt: skip
    parser.add_argument(
        "--onnx_path", type=Path,
        help="graph, or split export, to count the work of; not given: the model's own, for an .om the one that its "
        "manifest names",
    )  # fmt: skip
    parser.add_argument(
        "--ais_bench_summary", type=Path, metavar="FILE",
        help="run nothing, take these figures: ais_bench's _summary.json, or what the command printed",
    )  # fmt: skip
    parser.add_argument(
        "--coco_root", type=Path, help="time the evaluation of this folder's samples, from file to result"
    )
    parser.add_argument("--processor_path", type=Path, help="with --coco_root: folder of the processor files")
    parser.add_argument("--max_samples", type=positive_int, help="with --coco_root: the first so many only")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write everything as JSON")
    return parser.parse_args(argv)


def run_model(model_path: Path, args) -> tuple[list[dict], dict]:
    """Open the model and time it: a row for each kind of latency, and what goes on record of the run."""
    from sam3_utils.backends import is_split, open_model
    from sam3_utils.pipeline import batch_size_for
    from sam3_utils.speed import latency_row, measure, measure_parts
    from sam3_utils.stages import peak_memory_mib

    memory = {"before": peak_memory_mib()}
    model = open_model(model_path, args.device, args.dtype)
    memory["opened"] = peak_memory_mib()
    batch = batch_size_for(model, args.batch_size)
    milliseconds = measure(model, batch, args.loop, args.warmup_count)
    rows = [latency_row(name, times, batch) for name, times in milliseconds.items()]
    if is_split(model_path):
        for name, (count, times) in measure_parts(model, batch, args.loop, args.warmup_count).items():
            rows.append(latency_row(name, times, count))
            milliseconds[name] = times
    memory["peak"] = peak_memory_mib()
    model.close()
    return rows, {
        "runtime": model.runtime, "device": model.device, "precision": model.precision, "host_memory_mib": memory,
        "milliseconds": milliseconds, "warmup_count": args.warmup_count,
    }  # fmt: skip


def add_roofline(record: dict, args, model_path: Path | None) -> None:
    """Put `chip`, `work`, `roofline` and the reasons for what is missing into the record."""
    from sam3_utils.flops import graph_of, work_of
    from sam3_utils.speed import bounds, measured_cpu

    runtime, device, manifest = record["model"]["runtime"], record["device"], record["manifest"]
    record |= {"chip": device, "work": None, "roofline": None, "not_known": []}
    # ATC may leave some weights in float32; taken as float16, the bound stays a lower one.
    float_bytes = 2 if runtime == "om" or args.dtype != "float32" else None
    graph_path = args.onnx_path or graph_of(model_path, manifest)
    try:
        if graph_path is None:
            raise UsageError("name its graph with --onnx_path")
        record["work"] = work_of(graph_path, record["batch_size"], float_bytes)
    except UsageError as error:
        record["not_known"].append(f"the work of a picture: {error}")
    chip, remedy = None, ""
    if runtime == "om" or device.startswith(("npu", "cann")):
        soc_version = args.soc_version or (manifest or {}).get("soc_version")
        chip, remedy = CHIPS.get(soc_version), f"; --soc_version takes {', '.join(CHIPS)}"
        record["chip"] = soc_version or "NPU"
    elif device in ("cpu", "openvino"):
        dtype = "bfloat16" if "bfloat16" in record["model"]["precision"] else "float32"
        chip, record["chip"] = measured_cpu(runtime, dtype), record["machine"]["cpu"]
    if chip is None:
        record["not_known"].append(f"the peak of {record['chip']}{remedy}")
    elif record["work"]:
        record["roofline"] = bounds(chip, record["work"]["flops"], record["work"]["least_bytes"])


def print_results(record: dict) -> None:
    """Latencies, memory, work, roofline, and the rows for README, on stdout."""
    from sam3_utils.flops import stage_flops
    from sam3_utils.report import columns

    def cell(value, form):
        return "-" if value is None else format(value, form)

    def number(value):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

    work, roofline, memory, model = (record[name] for name in ("work", "roofline", "host_memory_mib", "model"))
    print(f"{model['name']}: {model['runtime']} on {record['device']}, {model['precision']}")
    print(f"{'':22s}{'batch':>6}{'loops':>6}{'median ms':>12}{'p90 ms':>12}{'p99 ms':>12}{'fps':>12}{'of peak':>9}")
    for row in record["measurements"]:
        times = "".join(f"{cell(row[key], '.2f'):>12}" for key in ("median_ms", "p90_ms", "p99_ms"))
        flops = work and stage_flops(work, row["name"])
        share = cell(roofline and flops and row["fps"] * flops / roofline["peak"], ".1%")
        print(f"{row['name']:22s}{row['batch']:6d}{cell(row['loops'], 'd'):>6}{times}{row['fps']:12.4f}{share:>9}")
    if memory:
        print(
            f"host memory, MiB: {memory['before']} before opening, {memory['opened']} after, {memory['peak']} at most"
        )
    if work:
        scale, unit = (1e12, "TFLOP") if work["flops"] > 1e11 else (1e9, "GFLOP")
        print(f"work of a picture: {work['flops'] / scale:.4g} {unit}, 2 for each multiply-add")
        for kind in ("operators", "parts"):
            shares = work[kind].items()
            print(columns([f"  {name} {value / scale:.3f} ({value / work['flops']:.1%})" for name, value in shares]))
    if roofline:
        print(f"peak of {record['chip']}: {roofline['peak'] / 1e12:.4g} TFLOP/s in {roofline['dtype']}")
        print(f"  by {roofline['source']}")
        print(f"  at most {number(roofline['compute_fps'])} fps by compute")
        if roofline["bandwidth_fps"]:
            print(
                f"  at most {number(roofline['bandwidth_fps'])} fps by memory: {roofline['bandwidth'] / 1e9:.4g} GB/s, "
                f"{work['least_bytes'] / 1e9:.3g} GB (weights, inputs, outputs; a lower bound)"
            )
    for reason in record["not_known"]:
        print(textwrap.fill(f"not known: {reason}", 100))
    # ais_bench, which the guide's figures come from, leaves the copies out: for an OM only that row compares. The parts
    # of a split model have no such row, only a whole picture compares.
    rows = [row for row in record["measurements"] if row["name"].startswith(("NPU", "ais_bench"))]
    rows = rows or record["measurements"][:1]
    print("\nfor README's table:\n| Chip | Model | Batch size | Speed (fps) | Note |\n|---|---|---|---|---|")
    for row in rows:
        note = f"model alone, {row['name']}, {model['precision']}"
        print(f"| {record['chip']} | {Path(model['name']).stem} | {row['batch']} | {row['fps']:.4f} | {note} |")


def run_evaluation(model_path: Path, args) -> int:
    """Time sam3_coco_iou_eval.py on this model and print where its time went."""
    from sam3_utils import files
    from sam3_utils.speed import end_to_end, machine

    wanted = {
        "--model_path": model_path, "--coco_root": args.coco_root, "--processor_path": args.processor_path,
        "--device": args.device, "--batch_size": args.batch_size, "--dtype": args.dtype,
        "--max_samples": args.max_samples,
    }  # fmt: skip
    summary = end_to_end([str(word) for pair in wanted.items() if pair[1] is not None for word in pair])
    pairs, seconds = summary["samples"] + summary.get("presence", {}).get("absent", 0), summary["seconds"]
    print(f"{summary['model']['name']}: {summary['model']['runtime']} on {summary['device']}, "
          f"{summary['model']['precision']}")  # fmt: skip
    print(f"{pairs} pairs of picture and phrase in {seconds:.1f} s: {pairs / seconds:.3f} a second")
    for name, value in sorted(summary["seconds_by_stage"].items(), key=lambda item: -item[1]):
        print(f"  {name:20s}{value:10.2f} s{value / seconds:9.1%}{1000 * value / pairs:12.1f} ms a pair")
    print("  pictures are decoded and prepared while the model computes: the sum may exceed the whole")
    print(f"peak memory: {summary['peak_memory_mib']} MiB")
    if args.report:
        files.write_json(args.report, {"command": shlex.join(sys.argv), "machine": machine(), "summary": summary})
        print(f"report: {args.report}")
    return 0


def main(argv=None) -> int:
    args = parse_args(argv)
    if not args.model_path and not args.ais_bench_summary:
        raise UsageError("--model_path: nothing to measure; give a model, or --ais_bench_summary")
    if args.report and args.report.suffix != ".json":
        raise UsageError(f"--report {args.report}: the name must end in .json")
    model_path = one_path(args.model_path, "--model_path") if args.model_path else None
    from sam3_utils import files, graph
    from sam3_utils.backends import describe_model, is_om, is_split, split_parts
    from sam3_utils.compare import read_manifest
    from sam3_utils.report import versions
    from sam3_utils.speed import machine, read_ais_bench

    on_npu = args.ais_bench_summary or is_om(model_path) or (args.device or "").startswith(("npu", "cann"))
    if args.soc_version and not on_npu:
        raise UsageError(f"--soc_version {args.soc_version}: {model_path} does not run on an NPU here; leave it out")
    if args.coco_root:
        if not (model_path and args.processor_path):
            raise UsageError("--coco_root: give --model_path and --processor_path too")
        return run_evaluation(model_path, args)
    if args.onnx_path:  # a wrong file is refused before the run, not after it
        for path in split_parts(args.onnx_path).values() if is_split(args.onnx_path) else [args.onnx_path]:
            graph.load_structure(path)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
    if args.ais_bench_summary:
        rows = read_ais_bench(args.ais_bench_summary)
        measured = {
            "runtime": "om", "device": args.device or "npu", "precision": "as compiled", "host_memory_mib": None,
            "ais_bench_summary": {args.ais_bench_summary.name: files.sha256(args.ais_bench_summary)},
        }  # fmt: skip
    else:
        rows, measured = run_model(model_path, args)
    kind = {name: measured.pop(name) for name in ("runtime", "precision")}
    model, manifest = {"name": "sam3", "sha256": {}} | kind, None
    if model_path:
        model = describe_model(model_path, **kind)
        manifest = read_manifest(model_path, model["sha256"], str(model_path))
    if manifest and "precision" in manifest:  # what ATC was told says more than the OM's outputs
        model["precision"] = " ".join("=".join(pair) for pair in manifest["precision"].items())
    record = measured | {
        "command": shlex.join(sys.argv), "machine": machine(), "versions": versions(), "model": model,
        "manifest": manifest, "batch_size": rows[0]["batch"], "measurements": rows,
    }  # fmt: skip
    add_roofline(record, args, model_path)
    print_results(record)
    if args.report:
        files.write_json(args.report, record)
        print(f"report: {args.report}")
    return 1 if args.onnx_path and not record["work"] else 0


if __name__ == "__main__":
    run(main)
