# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Two models on the same inputs: how far their outputs lie apart."""

from pathlib import Path

import numpy as np

from sam3_utils import contract
from sam3_utils.prompts import encode_phrases

# Phrases of different lengths, so that every row of a batch has another attention mask.
PHRASES = ("star", "small red circle", "two dogs on the grass")


def random_feeds(processor, image_size: int, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs by the contract: blocky random pictures in -1..1 (as textured as photographs) and `PHRASES`."""
    rng = np.random.default_rng(seed)
    cells = rng.uniform(-1, 1, (batch, 3, 12, 12)).astype(np.float32)
    index = np.arange(image_size) * 12 // image_size
    pixel_values = np.clip(
        cells[:, :, index][..., index] + rng.normal(0, 0.1, (batch, 3, image_size, image_size)), -1, 1
    ).astype(np.float32)
    input_ids, attention_mask, _ = encode_phrases(processor, [PHRASES[row % len(PHRASES)] for row in range(batch)])
    return {"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask}


def output_differences(reference: dict, candidate: dict) -> dict[str, dict[str, float]]:
    """Per output: `max_abs`, the largest difference, and `max_ref`, the largest reference value."""
    return {
        name: {
            "max_abs": float(np.abs(candidate[name] - reference[name]).max()),
            "max_ref": float(np.abs(reference[name]).max()),
        }
        for name in contract.OUTPUTS
    }


def verify_onnx(checkpoint_path: Path, onnx_path: Path, batches: tuple[int, ...]) -> dict[int, dict]:
    """`output_differences` of an exported graph against the untouched PyTorch model, for each batch size.

    The reference uses transformers' own modules and default attention, so that rewrites, tracing and graph passes
    are all under test. Called in a process of its own: both models are in memory.
    """
    from sam3_utils.backends import open_model
    from sam3_utils.checkpoint import load_processor

    processor = load_processor(checkpoint_path)
    reference, candidate = open_model(checkpoint_path), open_model(onnx_path)
    differences = {}
    for batch in batches:
        feeds = random_feeds(processor, reference.shapes.image_size, batch, seed=batch)
        differences[batch] = output_differences(reference.infer(feeds), candidate.infer(feeds))
    return differences
