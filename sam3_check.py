#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What works on this machine, what is missing, and how to get it.

Example:
    python3 sam3_check.py
    python3 sam3_check.py --model_path ./sam3_model --smoke
    python3 sam3_check.py --model_path ./sam3_model --download modelscope

Reads:  the environment, and what --model_path names. Nothing is fetched unless --download asks for it.
Writes: nothing but --report, and with --download the weights
Exit:   0 all that is needed is there, 1 something that is needed is missing or wrong, 2 wrong usage.
"""

import logging
import textwrap
from dataclasses import asdict
from pathlib import Path

from sam3_utils.cli import UsageError, make_parser, run

logger = logging.getLogger("sam3_check")


def parse_args(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--model_path", type=Path, help="a checkpoint folder, an .onnx, an .om or a split model")
    parser.add_argument(
        "--processor_path", type=Path, help="folder of the processor and tokenizer files; not given: the checkpoint"
    )
    parser.add_argument("--sha256", type=Path, metavar="FILE", help="lines of sha256sum to hold the weights against")
    parser.add_argument("--device", help="for --smoke, as in all scripts")
    parser.add_argument("--smoke", action="store_true", help="run a known picture and judge the answer")
    parser.add_argument(
        "--download", choices=("modelscope", "huggingface"), help="fetch facebook/sam3 into --model_path first"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all findings as JSON")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    if (args.smoke or args.download or args.sha256) and args.model_path is None:
        raise UsageError("--model_path is missing: which model is to be looked at?")
    if args.sha256 and not args.sha256.is_file():
        raise UsageError(f"--sha256 {args.sha256}: no such file")
    from sam3_utils import files, health
    from sam3_utils.backends import is_split

    if args.download:
        args.model_path.mkdir(parents=True, exist_ok=True)
        health.download(args.download, args.model_path)
    findings = [
        *health.check_python(), *health.check_torch(), *health.check_onnxruntime(), *health.check_openvino(),
        *health.check_ascend(), *health.check_libraries(), *health.check_memory(Path.cwd()),
    ]  # fmt: skip
    path = args.model_path
    if path is not None:
        if is_split(path) or path.suffix == ".onnx":
            findings += health.check_graph(path)
        elif path.suffix != ".om":
            findings += health.check_weights(path, args.sha256)
        wrong = any(finding.level == health.MISSING for finding in findings)
        if args.smoke and not wrong:
            findings += health.smoke(path, args.processor_path or path, args.device)
    for finding in findings:
        mark = {health.OK: "ok     ", health.NOTE: "note   ", health.MISSING: "MISSING"}[finding.level]
        text = f"{finding.subject}: {finding.text}"
        print(textwrap.fill(text, 100, initial_indent=f"{mark} ", subsequent_indent=" " * 10, break_long_words=False))
        if finding.remedy:
            print(textwrap.fill(finding.remedy, 100, initial_indent=" " * 8 + "-> ", subsequent_indent=" " * 11,
                                break_long_words=False))  # fmt: skip
    if args.report:
        files.write_json(args.report, {"findings": [asdict(finding) for finding in findings]})
    missing = sum(finding.level == health.MISSING for finding in findings)
    print(f"{missing} missing, {sum(finding.level == health.NOTE for finding in findings)} notes")
    return 1 if missing else 0


if __name__ == "__main__":
    run(main)
