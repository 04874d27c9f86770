#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""How many SA-Co pairs a second the host manages around a model that answers at once, and where the time goes.

Example:
    taskset -c 0 python3 tests/host_throughput.py --processes 1

The model gives prepared outputs of facebook/sam3's size (200 x 288 x 288, three instances over the threshold); pictures
are noise-free JPEGs with five phrases each. Not a test: it prints figures, pytest does not collect it.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SIZES = ((480, 640), (1500, 2000))
PHRASES = 5


class InstantModel:
    """A stand-in for a device: the same outputs for every batch, as float32 arrays of the real size."""

    def __init__(self, batch: int):
        import numpy as np

        from sam3_utils.contract import ModelShapes

        self.shapes = ModelShapes(1008, 200, 288, batch)
        y, x = np.mgrid[0:288, 0:288]
        masks = np.stack([12 - np.hypot(x - 40 - i % 200, y - 60 - i // 2) / 3 for i in range(200)]).astype(np.float32)
        logits = np.where(np.arange(200) < 3, 3.0, -6.0).astype(np.float32)
        self.outputs = {
            "pred_masks": np.repeat(masks[None], batch, 0),
            "pred_logits": np.repeat(logits[None], batch, 0),
            "pred_boxes": np.full((batch, 200, 4), 0.25, np.float32),
            "presence_logits": np.full((batch, 1), 6.0, np.float32),
            "semantic_seg": np.zeros((batch, 1, 288, 288), np.float32),
        }

    def infer(self, feeds):
        from sam3_utils import contract
        from sam3_utils.backends import _finite

        contract.check_feeds(feeds, contract.single_inputs(self.shapes))
        return _finite(dict(self.outputs))


def run(size, pictures: int, folder: Path, barrier, results) -> None:
    """One process: `pictures` pictures through run_batches and predictions_of; puts seconds and seconds by stage."""
    import numpy as np
    import torch

    from sam3_utils import images, pipeline, saco_predict
    from sam3_utils.checkpoint import load_processor
    from sam3_utils.postprocess import instance_scores
    from sam3_utils.saco import Pair

    torch.set_num_threads(1)
    processor = load_processor(ROOT / "assets" / "tiny_sam3")
    processor.image_processor.size = type(processor.image_processor.size)(height=1008, width=1008)
    stages = dict.fromkeys(("decode", "prepare", "feed and check outputs", "masks and RLE", "write"), 0.0)

    def timed(stage, function):
        def wrapper(*args):
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                stages[stage] += time.perf_counter() - started

        return wrapper

    pipeline.load_rgb = timed("decode", images.load_rgb)
    pipeline.prepare = timed("prepare", images.prepare)
    model = InstantModel(4)
    model.infer = timed("feed and check outputs", model.infer)
    predictions_of = timed("masks and RLE", saco_predict.predictions_of)
    pairs = [
        Pair(index * PHRASES + phrase, "star", folder / f"{size[0]}_{index % 4}.jpg", size)
        for index in range(pictures) for phrase in range(PHRASES)
    ]  # fmt: skip
    batches = [pairs[start : start + 4] for start in range(0, len(pairs), 4)]
    tokens = {"star": (np.zeros(32, np.int64), np.ones(32, np.int64))}
    records = pipeline.RecordFile(folder / f"{os.getpid()}.jsonl")
    append = timed("write", records.append)
    barrier.wait()
    started = time.perf_counter()
    for batch, outputs, _ in pipeline.run_batches(model, processor, batches, tokens):
        scores = instance_scores(outputs["pred_logits"], outputs["presence_logits"])
        lines = []
        for row, pair in enumerate(batch):
            found = predictions_of(pair, scores[row], outputs["pred_boxes"][row], outputs["pred_masks"][row], 0.3)
            assert len(found) == 3
            lines.append({"pair": pair.id, "predictions": found})
        append(lines)
    results.put((len(pairs), time.perf_counter() - started, stages))


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="as many workers side by side (default: 1)")
    parser.add_argument("--pictures", type=int, default=40, help="pictures a process (default: 40)")
    args = parser.parse_args(argv)
    import numpy as np
    from PIL import Image

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for height, width in SIZES:
            for index in range(4):
                coarse = np.random.default_rng(index).integers(0, 256, (height // 20, width // 20, 3), dtype=np.uint8)
                Image.fromarray(coarse).resize((width, height), Image.BICUBIC).save(folder / f"{height}_{index}.jpg")
            barrier, results = context.Barrier(args.processes), context.Queue()
            arguments = ((height, width), args.pictures, folder, barrier, results)
            processes = [context.Process(target=run, args=arguments) for _ in range(args.processes)]
            for process in processes:
                process.start()
            answers = [results.get() for _ in processes]
            for process in processes:
                process.join()
            rate = sum(pairs / seconds for pairs, seconds, _ in answers)
            total = sum(sum(stages.values()) for _, _, stages in answers)
            shares = {stage: sum(answer[2][stage] for answer in answers) / total for stage in answers[0][2]}
            print(f"{width} x {height}, {PHRASES} phrases, {args.processes} processes: {rate:.1f} pairs/s; "
                  + ", ".join(f"{stage} {share:.0%}" for stage, share in shares.items()))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
