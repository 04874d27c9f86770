#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Export a SAM3 checkpoint's text branch to ONNX, in forms that ATC compiles well, and prove that it still agrees.

Example:
    python3 sam3_export_onnx.py --target_device 300I --model_path ./sam3_model --output_dir ./sam3_onnx_300I

Reads:  config.json, model.safetensors, tokenizer and processor files in --model_path
Writes: <output_dir>/sam3.onnx, sam3.onnx.data (the weights), keep_dtype.cfg (for ATC), export_report.json;
        with --layout split instead of the first three sam3_vision.onnx and so on, sam3_text..., sam3_detector..., each
        with its .data and .keep_dtype.cfg, and split.json, which makes the folder a model; with --exemplars also
        sam3_exemplar..., with --clicks sam3_click_neck... and sam3_click...
Exit:   0 exported (float32 weights verified, others only measured), 1 the graph's answers differ from PyTorch's, which
        export_report.json then says and sam3_convert_om.sh refuses, 2 wrong usage.
"""

import logging
import multiprocessing
import shutil
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from sam3_utils.cli import CheckFailed, UsageError, make_parser, positive_int, run

logger = logging.getLogger("sam3_export_onnx")
VERIFY_BATCHES = (1, 2, 3)
VERIFY_BOUND = 1e-4  # of float32 weights, see verify()
AUTO_VERIFY_PARAMETERS = 100_000_000
REWRITES = ("patch_embed", "qkv", "rope", "windows")  # static_model.REWRITES, without importing torch for --help


def parse_args(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument(
        "--target_device", required=True,
        help="300I (Atlas 300V PRO) or 800I (Atlas 800I A2, and any other value): which nodes keep_dtype.cfg names; "
        "the graph is the same, with attention written out, which is exact in float16 where fused forms are not",
    )  # fmt: skip
    parser.add_argument("--model_path", type=Path, required=True, help="folder of the weights and processor files")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for sam3.onnx")
    parser.add_argument(
        "--layout", default="single", choices=("single", "split"),
        help="one graph, or three: a picture is encoded once for all of its phrases, a phrase once for all pictures",
    )  # fmt: skip
    parser.add_argument(
        "--exemplars", type=positive_int, metavar="COUNT",
        help="let a split model take, beside the phrase, up to COUNT boxes that show what is meant, or what is not; "
        "none without it",
    )  # fmt: skip
    parser.add_argument(
        "--clicks", type=positive_int, metavar="COUNT",
        help="let a split model take clicks as well: up to COUNT points, of which a box counts as two; none without it",
    )  # fmt: skip
    parser.add_argument(
        "--image_size", type=positive_int,
        help="side of the pictures, a multiple of patch x window (336 for facebook/sam3); not given: the checkpoint's "
        "own; smaller is faster and less accurate",
    )  # fmt: skip
    parser.add_argument(
        "--verify", default="auto", choices=("auto", "always", "never"),
        help="compare with PyTorch at batch 1, 2 and 3 in a second process; auto: up to 100 M parameters",
    )  # fmt: skip
    parser.add_argument(
        "--skip_rewrite", nargs="+", default=[], choices=REWRITES, metavar="NAME",
        help=f"leave a rewrite of the ViT out, to compare: {', '.join(REWRITES)}",
    )  # fmt: skip
    parser.add_argument(
        "--conv_transpose", default="operator", choices=("operator", "matmul"),
        help="the neck's transposed convolutions as they are, or as equal matrix products",
    )  # fmt: skip
    parser.add_argument(
        "--layer_norm", default="operator", choices=("operator", "decomposed"),
        help="layer normalisation as one operator, or as the chain that ATC's fusion pass looks for",
    )  # fmt: skip
    parser.add_argument(
        "--weights", default="float32", choices=("float32", "float16", "int8"),
        help="what they are stored as: float16 halves the file; int8 quarters it, and ONNX Runtime and OpenVINO "
        "compute products in 8 bits (not for ATC)",
    )  # fmt: skip
    parser.add_argument(
        "--taps", action="store_true",
        help="give the neck's feature levels fpn_feat_0 to 2 as further outputs, for sam3_compare.py --taps",
    )  # fmt: skip
    return parser.parse_args(argv)


def export(args) -> dict:
    """Write the graph, its weights and the list for ATC; returns what the report says of them."""
    from tqdm import tqdm

    from sam3_utils import checkpoint, contract, files, graph, preflight, text_graph
    from sam3_utils.atc import keep_list_path
    from sam3_utils.backends import SPLIT_MANIFEST

    sam3 = checkpoint.load_model(args.model_path, image_size=args.image_size)
    image_size = sam3.config.image_size
    parameters = sum(parameter.numel() for parameter in sam3.parameters())
    free = shutil.disk_usage(args.output_dir).free
    if free < 4.2 * parameters:  # float32, and some for the graph and the tables that are computed
        raise UsageError(
            f"--output_dir {args.output_dir}: {free / 1e9:.1f} GB free, {4.2 * parameters / 1e9:.1f} GB needed"
        )
    applied = [name for name in REWRITES if name not in args.skip_rewrite]
    logger.info("tracing %.1f M parameters, rewrites: %s", parameters / 1e6, ", ".join(applied) or "none")
    parts = ("single",) if args.layout == "single" else contract.SPLIT
    if args.exemplars:
        parts = (*parts, "exemplar")
    tracker = None
    if args.clicks:
        parts = (*parts, *contract.CLICKS)
        tracker = checkpoint.load_tracker(args.model_path, sam3)
    models, weight, nodes_traced = text_graph.build(
        sam3, applied, args.conv_transpose, args.layer_norm, parts, args.taps, args.exemplars or 0, args.weights,
        tracker, args.clicks or 0,
    )  # fmt: skip
    del sam3, tracker
    paths = {part: args.output_dir / f"{contract.STEMS[part]}.onnx" for part in parts}
    (args.output_dir / SPLIT_MANIFEST).unlink(missing_ok=True)
    for part in contract.OPTIONAL:
        for left in args.output_dir.glob(f"{contract.STEMS[part]}.*"):
            left.unlink()  # of an export with --exemplars or --clicks, whose other parts are replaced
    operators, kept = Counter(), {}
    with tqdm(total=4 * parameters, unit="B", unit_scale=True, desc="weights", disable=not sys.stderr.isatty()) as bar:
        for part, model in models.items():
            keep_list_path(paths[part]).unlink(missing_ok=True)  # never an old list beside a new graph
            graph.save(model, paths[part], weight, bar.update)
            if args.weights != "int8":  # DequantizeLinear is none of ATC's operators
                try:
                    preflight.check_model(paths[part], part)
                except UsageError:
                    paths[part].unlink()
                    raise
            operators.update(graph.operator_counts(model))
            kept[part] = text_graph.sensitive_nodes(model, args.target_device)
            files.write_text(keep_list_path(paths[part]), "".join(f"{name}\n" for name in kept[part]))
    if args.layout == "split":
        files.write_json(args.output_dir / SPLIT_MANIFEST, {part: path.name for part, path in paths.items()})
    return {
        "layout": args.layout,
        "parts": {part: path.name for part, path in paths.items()},
        "image_size": image_size,
        "parameters": parameters,
        "rewrites": applied,
        "conv_transpose": args.conv_transpose,
        "layer_norm": args.layer_norm,
        "weights": args.weights,
        "taps": args.taps,
        "exemplars": args.exemplars,
        "clicks": args.clicks,
        "opset": graph.OPSET,
        "ir_version": graph.IR_VERSION,
        "nodes_traced": nodes_traced,
        "nodes": sum(operators.values()),
        "operators": dict(operators.most_common()),
        "keep_dtype_nodes": sum(map(len, kept.values())),
    }


def verify(model_path: Path, exported: Path, bound: float | None, image_size: int | None = None) -> dict[str, dict]:
    """Run an exported model against PyTorch in a process of its own; the worst difference of each output.

    Args:
        exported: an .onnx, or the folder of a split model.
        bound: of the difference, in units of the output's largest value where that is over 1; None judges nothing.

    Raises:
        CheckFailed: an output differs by more than `bound`.
    """
    from sam3_utils.compare import verify_onnx

    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            by_batch = pool.submit(verify_onnx, model_path, exported, VERIFY_BATCHES, image_size).result()
        except BrokenProcessPool:
            raise CheckFailed(
                f"{exported}: written, but the process that compares it with PyTorch was killed, probably for memory; "
                "give --verify never, or more memory"
            ) from None
    worst = {
        name: max((rows[name] for rows in by_batch.values()), key=lambda row: row["max_abs"] / max(1.0, row["max_ref"]))
        for name in by_batch[VERIFY_BATCHES[0]]
    }
    for name, row in worst.items():
        print(f"  {name:26s} largest difference {row['max_abs']:.2e} (largest value {row['max_ref']:.1f})")
    if bound is None:
        return worst
    off = [name for name, row in worst.items() if not row["max_abs"] <= bound * max(1.0, row["max_ref"])]
    if off:
        raise CheckFailed(f"{exported}: differs from PyTorch by more than {bound:g} in {', '.join(off)}")
    return worst


def main(argv=None) -> int:
    args = parse_args(argv)
    for flag, count, what in (("--exemplars", args.exemplars, "boxes"), ("--clicks", args.clicks, "clicks")):
        if count and args.layout == "single":
            raise UsageError(f"{flag} {count}: only a split model takes {what}; give --layout split")
    if args.output_dir.exists() and not args.output_dir.is_dir():
        raise UsageError(f"--output_dir {args.output_dir}: a file of that name is in the way")
    if args.target_device not in ("300I", "800I"):
        logger.warning("--target_device %s is exported like 800I; the guide knows 300I and 800I", args.target_device)
    from sam3_utils import checkpoint, files
    from sam3_utils.report import versions

    other = "sam3_vision.onnx" if args.layout == "single" else "sam3.onnx"
    if (args.output_dir / other).exists():
        raise UsageError(f"--output_dir {args.output_dir}: holds {other}, the other layout; give another folder")
    checkpoint.check_weight_files(args.model_path)
    checkpoint.check_processor_files(args.model_path)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for left in args.output_dir.glob(".saving-*"):
        shutil.rmtree(left)  # of an export that was killed
    report_path = args.output_dir / "export_report.json"
    report_path.unlink(missing_ok=True)  # a report never speaks of another graph
    started = time.perf_counter()
    report = {"target_device": args.target_device} | export(args)
    exported = args.output_dir / "sam3.onnx" if args.layout == "single" else args.output_dir
    seconds = time.perf_counter() - started
    print(f"{exported}: {report['nodes']} nodes (traced: {report['nodes_traced']}), {seconds:.0f} s")
    if args.verify == "always" or (args.verify == "auto" and report["parameters"] <= AUTO_VERIFY_PARAMETERS):
        print(f"against PyTorch at batch {', '.join(map(str, VERIFY_BATCHES))}:")
        bound = VERIFY_BOUND if args.weights == "float32" else None
        report["verification"] = {"batches": VERIFY_BATCHES, "bound": bound}
        try:
            outputs = verify(args.model_path, exported, bound, args.image_size)
        except CheckFailed as error:  # on record, so that nobody converts it
            files.write_json(report_path, report | {"verification": report["verification"] | {"error": str(error)}})
            raise
        report["verification"]["outputs"] = outputs
        if bound is None:
            print(
                f"is {args.weights} good enough? sam3_compare.py --reference {args.model_path} --candidate {exported}"
            )
    else:
        report["verification"] = None
        logger.warning("not verified against PyTorch; --verify always does it, with both models in memory")
    report["sha256"] = {
        path.name: files.sha256(path)
        for path in (args.model_path / checkpoint.WEIGHTS, args.model_path / "config.json", *args.output_dir.iterdir())
        if path.is_file()
    }
    report["versions"] = versions()
    files.write_json(report_path, report)
    print(f"report: {report_path}")
    return 0


if __name__ == "__main__":
    run(main)
