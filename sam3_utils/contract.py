# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors every SAM3 model of this kit takes and gives, and the check of a model against them.

    input   pixel_values     float32  N x 3 x S x S      normalised picture, NCHW
    input   input_ids        int64    N x 32             phrase tokens
    input   attention_mask   int64    N x 32             1 for tokens, 0 for padding
    output  pred_masks       float32  N x Q x M x M      mask logits of each query
    output  pred_logits      float32  N x Q              score logits of each query
    output  pred_boxes       float32  N x Q x 4          boxes, xyxy, 0..1 of the picture
    output  presence_logits  float32  N x 1              is there anything of that name?
    output  semantic_seg     float32  N x 1 x M x M      logits of the union of all instances

S, Q and M are read from the model (1008, 200 and 288 for facebook/sam3). N is free, or fixed in an OM.
"""

from dataclasses import dataclass

from sam3_utils.cli import UsageError

TEXT_LENGTH = 32  # fixed by Sam3Processor (padding="max_length", max_length=32) and the guide

# name: (dtype, shape); a letter stands for one number throughout, a number for itself.
INPUTS = {
    "pixel_values": ("float32", ("N", 3, "S", "S")),
    "input_ids": ("int64", ("N", TEXT_LENGTH)),
    "attention_mask": ("int64", ("N", TEXT_LENGTH)),
}
OUTPUTS = {
    "pred_masks": ("float32", ("N", "Q", "M", "M")),
    "pred_logits": ("float32", ("N", "Q")),
    "pred_boxes": ("float32", ("N", "Q", 4)),
    "presence_logits": ("float32", ("N", 1)),
    "semantic_seg": ("float32", ("N", 1, "M", "M")),
}

# The neck's feature levels, fine to coarse, N x C x H x W: where float16 goes wrong first. No part of the contract;
# a graph may give them as further outputs.
TAPS = ("fpn_feat_0", "fpn_feat_1", "fpn_feat_2")


@dataclass(frozen=True)
class ModelShapes:
    """The numbers a model fixes: picture side S, query count Q, mask side M; `batch` is None when N is free."""

    image_size: int
    num_queries: int
    mask_size: int
    batch: int | None


def contract_shapes(shapes: ModelShapes) -> dict[str, tuple]:
    """name -> shape of every tensor of the contract with a model's own numbers; a free batch is "N"."""
    numbers = {"S": shapes.image_size, "Q": shapes.num_queries, "M": shapes.mask_size, "N": shapes.batch or "N"}
    return {
        name: tuple(numbers.get(size, size) for size in pattern) for name, (_, pattern) in (INPUTS | OUTPUTS).items()
    }


def _rows(tensors: dict) -> str:
    return ", ".join(
        f"{name} {dtype} {' x '.join('?' if size is None else str(size) for size in shape)}"
        for name, (dtype, shape) in tensors.items()
    )


def check_io(inputs: dict, outputs: dict, where: str) -> ModelShapes:
    """Match a model's tensors with the contract.

    Args:
        inputs, outputs: name -> (numpy dtype name, shape); None in a shape is a free dimension. Outputs may be
            float16 (an OM compiled with `--output_type=FP16`).
        where: the model's path, for the message.

    Raises:
        UsageError: a name, dtype or shape is off, or a size other than the batch is free; both sides are printed.
    """
    sizes, faults = {}, []
    for kind, found, wanted in (("input", inputs, INPUTS), ("output", outputs, OUTPUTS)):
        faults += [f"{kind} {name} is missing" for name in wanted if name not in found]
        if kind == "input":  # an extra output does no harm, an extra input would be left empty
            faults += [f"input {name} is unknown" for name in found if name not in wanted]
        for name in (name for name in wanted if name in found):
            (dtype, shape), (wanted_dtype, pattern) = found[name], wanted[name]
            if dtype != wanted_dtype and not (kind == "output" and dtype == "float16"):
                faults.append(f"{kind} {name} is {dtype}, not {wanted_dtype}")
            if len(shape) != len(pattern):
                faults.append(f"{kind} {name} has {len(shape)} dimensions, not {len(pattern)}")
                continue
            for size, symbol in zip(shape, pattern):
                if isinstance(symbol, int) and size != symbol:
                    faults.append(f"{kind} {name} has a dimension of {size}, not {symbol}")
                elif isinstance(symbol, str) and size != sizes.setdefault(symbol, size):
                    faults.append(f"{kind} {name}: {symbol} is {size}, elsewhere {sizes[symbol]}")
    faults += [f"{symbol} is not fixed" for symbol in "SQM" if not faults and sizes[symbol] is None]
    if faults:
        raise UsageError(
            f"{where}: its tensors are not SAM3's: {'; '.join(sorted(set(faults)))}. "
            f"The model has: {_rows(inputs)} -> {_rows(outputs)}. Wanted: {_rows(INPUTS)} -> {_rows(OUTPUTS)}"
        )
    return ModelShapes(sizes["S"], sizes["Q"], sizes["M"], sizes["N"])


def check_feeds(feeds: dict, shapes: ModelShapes) -> None:
    """Check arrays before they go to a runtime that would not (ais_bench compares byte counts only).

    Args:
        feeds: name -> array.

    Raises:
        ValueError: a name, dtype, shape or batch does not fit.
    """
    known = {"S": shapes.image_size, "N": shapes.batch or len(feeds["pixel_values"])}
    for name, (dtype, pattern) in INPUTS.items():
        array, expected = feeds[name], tuple(known.get(symbol, symbol) for symbol in pattern)
        if array.dtype.name != dtype or array.shape != expected:
            raise ValueError(f"{name}: {array.dtype.name} {array.shape}, the model takes {dtype} {expected}")
