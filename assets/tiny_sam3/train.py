#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Train the tiny SAM3 on drawn scenes and save it in facebook/sam3's layout.

Example:
    python3 assets/tiny_sam3/train.py --output_dir assets/tiny_sam3

Reads: nothing (scenes are drawn from the seed). Writes: the checkpoint folder, and every 500 steps `--state`, from
which an interrupted run goes on. Two CPU cores with other work beside took 1.7 hours.
"""

import argparse
from pathlib import Path


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).resolve().parent, help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=7000)
    parser.add_argument("--scenes", type=int, default=8, help="scenes a step, four phrases each")
    parser.add_argument("--learning_rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--state", type=Path, default=Path("train_state.pt"), help="where to keep what a restart needs")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    args = parse_args(argv)
    from training import train

    train(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
