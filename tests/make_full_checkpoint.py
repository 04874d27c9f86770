#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Make a checkpoint of facebook/sam3's size and file layout with random weights, for memory and speed at full size.

Its answers mean nothing. Weights: 3.4 GB, most of a minute.

Example:
    python3 tests/make_full_checkpoint.py --output_dir ./sam3_random

Reads:  tokenizer and processor files in assets/tiny_sam3
Writes: config.json, model.safetensors, tokenizer and processor files
Exit:   0 written, 2 wrong usage.
"""

import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sam3_utils.cli import UsageError, make_parser, run  # noqa: E402

TINY = ROOT / "assets/tiny_sam3"
COPIED = ("merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json")


def parse_args(argv=None):
    parser = make_parser(__doc__)
    parser.add_argument("--output_dir", type=Path, required=True, help="a new folder")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    if args.output_dir.exists():
        raise UsageError(f"--output_dir {args.output_dir}: exists already; give a new folder")
    import torch
    import transformers
    from transformers import Sam3VideoConfig, Sam3VideoModel

    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    aside = args.output_dir.with_name(f".{args.output_dir.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    model = Sam3VideoModel(Sam3VideoConfig())
    model.save_pretrained(aside)
    side = model.config.detector_config.vision_config.backbone_config.image_size
    for name in COPIED:
        shutil.copy(TINY / name, aside)
    settings = json.loads((TINY / "processor_config.json").read_text(encoding="utf-8"))
    settings["target_size"] = side
    settings["image_processor"] |= {
        "size": {"height": side, "width": side},
        "mask_size": {"height": 2 * side // 7, "width": 2 * side // 7},  # 4 x 4 cells to a patch of 14 x 14
    }
    (aside / "processor_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    aside.replace(args.output_dir)
    print(f"{args.output_dir}: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters")
    return 0


if __name__ == "__main__":
    run(main)
