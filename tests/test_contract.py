# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""A model whose tensors are not SAM3's is refused, with both sides in the message."""

import numpy as np
import pytest

from sam3_utils.cli import UsageError
from sam3_utils.contract import ModelShapes, check_feeds, check_io, single_inputs

INPUTS = {
    "pixel_values": ("float32", (4, 3, 1008, 1008)),
    "input_ids": ("int64", (4, 32)),
    "attention_mask": ("int64", (4, 32)),
}
OUTPUTS = {
    "pred_masks": ("float32", (4, 200, 288, 288)),
    "pred_logits": ("float32", (4, 200)),
    "pred_boxes": ("float32", (4, 200, 4)),
    "presence_logits": ("float32", (4, 1)),
    "semantic_seg": ("float32", (4, 1, 288, 288)),
}


def test_sizes_are_read_from_the_model():
    assert check_io(INPUTS, OUTPUTS, "m") == {"N": 4, "S": 1008, "Q": 200, "M": 288}
    free = {name: (dtype, (None, *shape[1:])) for name, (dtype, shape) in INPUTS.items()}
    free_out = {name: (dtype, (None, *shape[1:])) for name, (dtype, shape) in OUTPUTS.items()}
    assert check_io(free, free_out, "m") == {"N": None, "S": 1008, "Q": 200, "M": 288}


def test_float16_outputs_are_taken_and_extra_outputs_ignored():
    halves = {name: ("float16", shape) for name, (_, shape) in OUTPUTS.items()}
    assert check_io(INPUTS, halves | {"debug": ("int8", (1,))}, "m")["N"] == 4


@pytest.mark.parametrize(
    "change, text",
    [
        ({"input_ids": ("int32", (4, 32))}, "input input_ids is int32, not int64"),
        ({"attention_mask": ("int64", (4, 77))}, "input attention_mask has a dimension of 77, not 32"),
        ({"pixel_values": ("float16", (4, 3, 1008, 1008))}, "input pixel_values is float16, not float32"),
        ({"pixel_values": ("float32", (4, 3, 1008, 560))}, "S is 560, elsewhere 1008"),
        ({"pixel_values": ("float32", (4, 3, None, None))}, "S is not fixed"),
        ({"input_ids": ("int64", (1, 32))}, "N is 1, elsewhere 4"),
        ({"pixel_values": ("float32", (4, 3, 1008))}, "has 3 dimensions, not 4"),
        ({"input_boxes": ("float32", (4, 1, 4))}, "input input_boxes is unknown"),
    ],
)
def test_a_wrong_input_is_named(change, text):
    with pytest.raises(UsageError, match=text) as refused:
        check_io(INPUTS | change, OUTPUTS, "model.om")
    assert "The model has: " in str(refused.value) and "Wanted: " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_output_and_a_wrong_one_are_named():
    outputs = OUTPUTS | {"pred_logits": ("float32", (4, 199))}
    del outputs["semantic_seg"]
    with pytest.raises(UsageError, match="pred_logits: Q is 199.*semantic_seg is missing"):
        check_io(INPUTS, outputs, "m")


def test_feeds_are_checked_where_a_runtime_would_compare_bytes_only():
    inputs = single_inputs(ModelShapes(4, 2, 2, 2))
    feeds = {
        "pixel_values": np.zeros((2, 3, 4, 4), np.float32),
        "input_ids": np.zeros((2, 32), np.int64),
        "attention_mask": np.ones((2, 32), np.int64),
    }
    check_feeds(feeds, inputs)
    wrong = [
        {"pixel_values": feeds["pixel_values"].view(np.int32)},  # as many bytes, another type
        {"pixel_values": feeds["pixel_values"].reshape(2, 4, 3, 4)},
        {"input_ids": feeds["input_ids"][:1]},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match=next(iter(change))):
            check_feeds(feeds | change, inputs)
