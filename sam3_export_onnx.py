#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Export a SAM3 checkpoint's text branch to ONNX, in forms that ATC compiles well, and prove that it still agrees.

Example:
    python3 sam3_export_onnx.py --target_device 300I --model_path ./sam3_model --output_dir ./sam3_onnx_300I

Reads:  config.json, model.safetensors, tokenizer and processor files in --model_path
Writes: <output_dir>/sam3.onnx, sam3.onnx.data (the weights), export_report.json
Exit:   0 exported (and verified), 1 the graph's answers differ from PyTorch's, 2 wrong usage.
"""

import logging
import multiprocessing
import shutil
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from sam3_utils.cli import CheckFailed, UsageError, make_parser, run

logger = logging.getLogger("sam3_export_onnx")
OPSET = 17  # the highest that CANN 8.5 maps every operator of; LayerNormalization needs at least 17
IR_VERSION = 8
VERIFY_BATCHES = (1, 2, 3)
VERIFY_BOUND = 1e-4  # largest difference, in units of the output's largest value where that is over 1
AUTO_VERIFY_PARAMETERS = 100_000_000
REWRITES = ("patch_embed", "qkv", "rope")


def parse_args(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument(
        "--target_device", required=True,
        help="300I: Atlas 300V PRO, eager attention everywhere; 800I and any other value: the default attention",
    )  # fmt: skip
    parser.add_argument("--model_path", type=Path, required=True, help="folder of the weights and processor files")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for sam3.onnx")
    parser.add_argument(
        "--verify", default="auto", choices=("auto", "always", "never"),
        help="compare with PyTorch at batch 1, 2 and 3 in a second process; auto: up to 100 M parameters",
    )  # fmt: skip
    parser.add_argument(
        "--skip_rewrite", nargs="+", default=[], choices=REWRITES, metavar="NAME",
        help=f"leave a ViT rewrite out, to compare: {', '.join(REWRITES)}",
    )  # fmt: skip
    return parser.parse_args(argv)


def trace(model, input_ids, attention_mask, path: Path) -> None:
    """Trace `model` at batch 2 into an ONNX file with its weights beside it, constants not folded.

    Folding inside the tracer copies every weight it transposes and runs out of 24 GiB at full size.
    """
    import torch

    from sam3_utils.contract import INPUTS, OUTPUTS

    class TextBranch(torch.nn.Module):
        """The contract's inputs and outputs, by position, as the tracer wants them."""

        def __init__(self):
            super().__init__()
            self.sam3 = model

        def forward(self, pixel_values, input_ids, attention_mask):
            outputs = self.sam3(pixel_values=pixel_values, input_ids=input_ids, attention_mask=attention_mask)
            return tuple(outputs[name] for name in OUTPUTS)

    size = model.config.vision_config.image_size
    inputs = (torch.zeros(2, 3, size, size), torch.from_numpy(input_ids), torch.from_numpy(attention_mask))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of constants that are meant to be constant, and of the legacy exporter
        torch.onnx.export(
            TextBranch(), inputs, path, dynamo=False, opset_version=OPSET, do_constant_folding=False,
            input_names=list(INPUTS), output_names=list(OUTPUTS),
            dynamic_axes={name: {0: "N"} for name in (*INPUTS, *OUTPUTS)},
        )  # fmt: skip


def contract_shapes(shapes) -> dict[str, tuple]:
    """The contract's shapes with this model's numbers, the batch left free."""
    from sam3_utils.contract import INPUTS, OUTPUTS

    numbers = {"S": shapes.image_size, "Q": shapes.num_queries, "M": shapes.mask_size}
    return {
        name: tuple(numbers.get(size, size) for size in pattern) for name, (_, pattern) in (INPUTS | OUTPUTS).items()
    }


def export(args) -> dict:
    """Write the graph and its weights; returns what the report says of them."""
    import onnx

    from sam3_utils import checkpoint, graph
    from sam3_utils.compare import PHRASES
    from sam3_utils.prompts import encode_phrases
    from sam3_utils.rewrites import apply_rewrites

    processor = checkpoint.load_processor(args.model_path)
    model = checkpoint.load_model(args.model_path, attention="eager" if args.target_device == "300I" else None)
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    applied = [name for name in REWRITES if name not in args.skip_rewrite]
    apply_rewrites(model, tuple(applied))
    input_ids, attention_mask, _ = encode_phrases(processor, list(PHRASES[:2]))
    logger.info("tracing %.1f M parameters, rewrites: %s", parameters / 1e6, ", ".join(applied) or "none")
    # In a folder of its own: above 2 GB the tracer writes one file per tensor.
    with tempfile.TemporaryDirectory(prefix=".tracing-", dir=args.output_dir) as aside:
        traced = Path(aside) / "traced.onnx"
        trace(model, input_ids, attention_mask, traced)
        attention = config._attn_implementation
        del model
        onnx_model = onnx.load(traced)
    before = graph.operator_counts(onnx_model)
    onnx_model = graph.simplify(onnx_model)
    onnx_model.ir_version = IR_VERSION
    graph.set_shapes(onnx_model, contract_shapes(checkpoint.model_shapes(config)))
    after = graph.operator_counts(onnx_model)
    graph.save(onnx_model, args.output_dir / "sam3.onnx")
    return {
        "attention": attention,
        "parameters": parameters,
        "rewrites": applied,
        "opset": OPSET,
        "ir_version": IR_VERSION,
        "nodes_traced": sum(before.values()),
        "nodes": sum(after.values()),
        "operators": after,
    }


def verify(args) -> dict[str, dict]:
    """Run the graph against PyTorch in a process of its own; the worst difference of each output over the batches.

    Raises:
        CheckFailed: an output differs by more than `VERIFY_BOUND`.
    """
    from sam3_utils.compare import verify_onnx

    onnx_path = args.output_dir / "sam3.onnx"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            by_batch = pool.submit(verify_onnx, args.model_path, onnx_path, VERIFY_BATCHES).result()
        except BrokenProcessPool:
            raise CheckFailed(
                f"{onnx_path}: written, but the process that compares it with PyTorch was killed, probably for memory; "
                "give --verify never, or more memory"
            ) from None
    worst = {
        name: max((rows[name] for rows in by_batch.values()), key=lambda row: row["max_abs"])
        for name in by_batch[VERIFY_BATCHES[0]]
    }
    for name, row in worst.items():
        print(f"  {name:16s} largest difference {row['max_abs']:.2e} (largest value {row['max_ref']:.1f})")
    off = [name for name, row in worst.items() if not row["max_abs"] <= VERIFY_BOUND * max(1.0, row["max_ref"])]
    if off:
        raise CheckFailed(f"{onnx_path}: differs from PyTorch by more than {VERIFY_BOUND:g} in {', '.join(off)}")
    return worst


def main(argv=None) -> int:
    args = parse_args(argv)
    if args.output_dir.exists() and not args.output_dir.is_dir():
        raise UsageError(f"--output_dir {args.output_dir}: a file of that name is in the way")
    if args.target_device not in ("300I", "800I"):
        logger.warning("--target_device %s is exported like 800I; the guide knows 300I and 800I", args.target_device)
    from sam3_utils import checkpoint, files
    from sam3_utils.report import versions

    checkpoint.check_weight_files(args.model_path)
    checkpoint.check_processor_files(args.model_path)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for left in [*args.output_dir.glob(".tracing-*"), *args.output_dir.glob(".saving-*")]:
        shutil.rmtree(left)  # of an export that was killed
    report_path = args.output_dir / "export_report.json"
    report_path.unlink(missing_ok=True)  # a report never speaks of another graph
    started = time.perf_counter()
    report = {"target_device": args.target_device} | export(args)
    onnx_path = args.output_dir / "sam3.onnx"
    seconds = time.perf_counter() - started
    print(f"{onnx_path}: {report['nodes']} nodes (traced: {report['nodes_traced']}), {seconds:.0f} s")
    if args.verify == "always" or (args.verify == "auto" and report["parameters"] <= AUTO_VERIFY_PARAMETERS):
        print(f"against PyTorch at batch {', '.join(map(str, VERIFY_BATCHES))}:")
        report["verification"] = {"batches": VERIFY_BATCHES, "bound": VERIFY_BOUND, "outputs": verify(args)}
    else:
        report["verification"] = None
        logger.warning("not verified against PyTorch; --verify always does it, with both models in memory")
    report["sha256"] = {
        path.name: files.sha256(path)
        for path in (
            args.model_path / checkpoint.WEIGHTS, args.model_path / "config.json", onnx_path,
            onnx_path.with_name("sam3.onnx.data"),
        )
    }  # fmt: skip
    report["versions"] = versions()
    files.write_json(report_path, report)
    print(f"report: {report_path}")
    return 0


if __name__ == "__main__":
    run(main)
