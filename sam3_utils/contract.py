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

In the split layout three graphs share the work: `vision` runs once a picture, `text` once a phrase, `detector` once a
pair of both. Between them go

    fpn_feat_0..2    float32  P x C x A x A and so on    the picture's feature levels, fine to coarse
    text_features    float32  N x 32 x C                 the phrase's features

where P is N, or 1: all phrases of the batch belong to one picture.
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

# The neck's feature levels: where float16 goes wrong first. A single graph may give them as further outputs.
TAPS = ("fpn_feat_0", "fpn_feat_1", "fpn_feat_2")
_LEVELS = {name: ("float32", ("P", "C", side, side)) for name, side in zip(TAPS, "ABG")}
_TEXT = {"text_features": ("float32", ("N", TEXT_LENGTH, "C"))}
# part: (inputs, outputs)
PARTS = {
    "single": (INPUTS, OUTPUTS),
    "vision": ({"pixel_values": ("float32", ("P", 3, "S", "S"))}, _LEVELS),
    "text": ({name: INPUTS[name] for name in ("input_ids", "attention_mask")}, _TEXT),
    "detector": (_LEVELS | _TEXT | {"attention_mask": INPUTS["attention_mask"]}, OUTPUTS),
}
SPLIT = ("vision", "text", "detector")
STEMS = {"single": "sam3"} | {part: f"sam3_{part}" for part in SPLIT}  # of the files' names, .onnx and .om


@dataclass(frozen=True)
class ModelShapes:
    """The numbers a model fixes: picture side S, query count Q, mask side M; `batch` is None when N is free."""

    image_size: int
    num_queries: int
    mask_size: int
    batch: int | None


def with_sizes(tensors: dict, sizes: dict) -> dict[str, tuple[str, tuple]]:
    """`tensors`, such as INPUTS, with `sizes` in place of the letters: "N" may become None, a number, another name."""
    return {
        name: (dtype, tuple(sizes.get(size, size) for size in pattern)) for name, (dtype, pattern) in tensors.items()
    }


def single_inputs(shapes: ModelShapes) -> dict[str, tuple[str, tuple]]:
    """INPUTS with a model's own sizes, None for a free batch."""
    return with_sizes(INPUTS, {"N": shapes.batch, "S": shapes.image_size})


def _rows(tensors: dict) -> str:
    return ", ".join(
        f"{name} {dtype} {' x '.join('?' if size is None else str(size) for size in shape)}"
        for name, (dtype, shape) in tensors.items()
    )


def check_io(inputs: dict, outputs: dict, where: str, part: str = "single") -> dict[str, int | None]:
    """Match a model's tensors with the contract; returns the number of each letter, None for a free batch.

    Args:
        inputs, outputs: name -> (numpy dtype name, shape); None in a shape is a free dimension. Outputs may be
            float16 (an OM compiled with `--output_type=FP16`).
        where: the model's path, for the message.
        part: which of `PARTS` the model is.

    Raises:
        UsageError: a name, dtype or shape is off, or a size other than the batch is free; both sides are printed.
    """
    sizes, faults = {}, []
    for kind, found, wanted in zip(("input", "output"), (inputs, outputs), PARTS[part]):
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
    faults += [f"{symbol} is not fixed" for symbol, size in sizes.items() if size is None and symbol not in "NP"]
    if faults:
        wanted = " -> ".join(map(_rows, PARTS[part]))
        raise UsageError(
            f"{where}: its tensors are not SAM3's: {'; '.join(sorted(set(faults)))}. "
            f"The model has: {_rows(inputs)} -> {_rows(outputs)}. Wanted: {wanted}"
        )
    return sizes


def check_feeds(feeds: dict, inputs: dict) -> None:
    """Check arrays before they go to a runtime that would not (ais_bench compares byte counts only).

    Args:
        feeds: name -> array.
        inputs: name -> (numpy dtype name, shape), None for a free batch, which must be the same throughout.

    Raises:
        ValueError: a name, dtype, shape or batch does not fit.
    """
    batch: dict[str, int] = {}
    for name, (dtype, shape) in inputs.items():
        array = feeds[name]
        symbol = "P" if name in TAPS else "N"
        first = shape[0] if shape[0] is not None else batch.setdefault(symbol, len(array))
        if array.dtype.name != dtype or array.shape != (first, *shape[1:]):
            raise ValueError(f"{name}: {array.dtype.name} {array.shape}, the model takes {dtype} {(first, *shape[1:])}")
