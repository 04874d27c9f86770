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

A split model may know box exemplars: boxes in the picture that show what is meant (or what is not), beside the phrase.
`infer` takes them as two further feeds, both or neither, in lists of one length, K:

    input   input_boxes         float32  N x K x 4       cxcywh, 0..1 of the picture
    input   input_boxes_labels  int64    N x K           1 what is meant, 0 what is not, -10 no box, only padding

A list without a box means the phrase alone. A fourth graph, `exemplar`, makes tokens of a picture's list, which the
detector gets as further inputs; T is K + 1:

    exemplar_features  float32  N x T x C                features of the boxes, and of the list as a whole
    exemplar_mask      float32  N x T                    1 for features that count, 0 for padding

A split model may know clicks, by SAM3's tracker, which shares the ViT. Then `vision` gives one tensor more, of which a
graph `click_neck` makes what `click` needs, once a picture:

    backbone_features  float32  P x D x G x G            the ViT's states
    click_feat_0..2    float32  P x U x A x A and so on  the picture's features for clicks, fine to coarse

    input   input_points         float32  N x L x 2      x, y in pixels of the S x S picture
    input   input_labels         int64    N x L          1 this, 0 not this, 2 and 3 a box's two corners, -10 no point
    input   input_masks          float32  N x 1 x A x A  logits of an earlier answer
    input   has_input_masks      float32  N x 1          1 where there is one, 0 where not
    output  pred_masks           float32  N x 4 x A x A  mask logits: for a clear prompt, then three to choose from
    output  iou_scores           float32  N x 4          how good each mask is thought to be, 0..1
    output  object_score_logits  float32  N x 1          is there an object?
"""

from dataclasses import dataclass

import numpy as np

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

NO_BOX = -10  # label of padding, as Sam3Processor writes it
BOXES = {"input_boxes": ("float32", ("N", "K", 4)), "input_boxes_labels": ("int64", ("N", "K"))}
# Further inputs of a detector that knows box exemplars.
EXEMPLARS = {"exemplar_features": ("float32", ("N", "T", "C")), "exemplar_mask": ("float32", ("N", "T"))}
BOX_MARGIN = 1e-5  # how far beyond the picture's edge roundings may put a box's
BACKBONE = {"backbone_features": ("float32", ("P", "D", "G", "G"))}
CLICK_FEATURES = {
    "click_feat_0": ("float32", ("P", "U", "A", "A")),
    "click_feat_1": ("float32", ("P", "V", "B", "B")),
    "click_feat_2": ("float32", ("P", "W", "G", "G")),
}
CLICK_MASKS = 4
NO_POINT, TOP_LEFT, BOTTOM_RIGHT = -10, 2, 3  # labels of input_labels beside 1 and 0
CLICK_PROMPT = {
    "input_points": ("float32", ("N", "L", 2)),
    "input_labels": ("int64", ("N", "L")),
    "input_masks": ("float32", ("N", 1, "A", "A")),
    "has_input_masks": ("float32", ("N", 1)),
}
CLICK_OUTPUTS = {
    "pred_masks": ("float32", ("N", CLICK_MASKS, "A", "A")),
    "iou_scores": ("float32", ("N", CLICK_MASKS)),
    "object_score_logits": ("float32", ("N", 1)),
}
# part: (inputs, outputs)
PARTS = {
    "single": (INPUTS, OUTPUTS),
    "vision": ({"pixel_values": ("float32", ("P", 3, "S", "S"))}, _LEVELS),
    "text": ({name: INPUTS[name] for name in ("input_ids", "attention_mask")}, _TEXT),
    "detector": (_LEVELS | _TEXT | {"attention_mask": INPUTS["attention_mask"]}, OUTPUTS),
    # Every list has its own picture here.
    "exemplar": tuple(
        {name: (dtype, ("P", *shape[1:])) for name, (dtype, shape) in tensors.items()}
        for tensors in ({"fpn_feat_2": _LEVELS["fpn_feat_2"]} | BOXES, EXEMPLARS)
    ),
    "click_neck": (BACKBONE, CLICK_FEATURES),
    "click": (CLICK_FEATURES | CLICK_PROMPT, CLICK_OUTPUTS),
}
SPLIT = ("vision", "text", "detector")
CLICKS = ("click_neck", "click")
OPTIONAL = ("exemplar", *CLICKS)  # parts of a split model that knows boxes, and clicks
STEMS = {"single": "sam3"} | {part: f"sam3_{part}" for part in (*SPLIT, *OPTIONAL)}  # of .onnx and .om files
_OF_THE_PICTURE = {*TAPS, *BACKBONE, *CLICK_FEATURES}


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
        part: which of `PARTS` the model is. A detector may have `EXEMPLARS` as further inputs.

    Raises:
        UsageError: a name, dtype or shape is off, or a size other than the batch is free; both sides are printed.
    """
    sizes, faults = {}, []
    wanted_inputs, wanted_outputs = PARTS[part]
    if part == "detector" and EXEMPLARS.keys() & inputs.keys():
        wanted_inputs = wanted_inputs | EXEMPLARS
    for kind, found, wanted in (("input", inputs, wanted_inputs), ("output", outputs, wanted_outputs)):
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
        raise UsageError(
            f"{where}: its tensors are not SAM3's: {'; '.join(sorted(set(faults)))}. "
            f"The model has: {_rows(inputs)} -> {_rows(outputs)}. "
            f"Wanted: {_rows(wanted_inputs)} -> {_rows(wanted_outputs)}"
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
        symbol = "P" if name in _OF_THE_PICTURE else "N"
        first = shape[0] if shape[0] is not None else batch.setdefault(symbol, len(array))
        if array.dtype.name != dtype or array.shape != (first, *shape[1:]):
            raise ValueError(f"{name}: {array.dtype.name} {array.shape}, the model takes {dtype} {(first, *shape[1:])}")


def check_boxes(feeds: dict, rows: int, capacity: int | None, where: str) -> None:
    """Check the optional feeds `BOXES`, if they are there.

    Args:
        feeds: name -> array.
        rows: how many lists there must be.
        capacity: how many boxes a list of the model may hold; None: any number.
        where: the model's path, for the message.

    Raises:
        UsageError: the model takes no boxes or fewer, a label is unknown, or a box is not inside of the picture.
        ValueError: one of the two is missing, or a dtype or shape does not fit.
    """
    given = BOXES.keys() & feeds.keys()
    if not given:
        return
    if len(given) == 1:
        raise ValueError(f"{given.pop()}: {' and '.join(BOXES)} belong together")
    boxes, labels = (feeds[name] for name in BOXES)
    check_feeds(feeds, with_sizes(BOXES, {"N": rows, "K": labels.shape[-1]}))
    if capacity is not None and labels.shape[1] > capacity:
        remedy = f"export it with --layout split --exemplars {labels.shape[1]}"
        raise UsageError(f"{where}: takes {capacity or 'no'} box exemplars, not {labels.shape[1]}; {remedy}")
    if not np.isin(labels, (1, 0, NO_BOX)).all():
        raise UsageError(f"input_boxes_labels: 1, 0 and, for padding, {NO_BOX} are known, not {np.unique(labels)}")
    centres, sizes = np.split(boxes[labels != NO_BOX], 2, axis=-1)
    inside = (sizes >= 0) & (centres - sizes / 2 >= -BOX_MARGIN) & (centres + sizes / 2 <= 1 + BOX_MARGIN)
    if not inside.all():  # nor is NaN
        row, place = np.argwhere(labels != NO_BOX)[np.argmin(inside.all(axis=-1))]
        raise UsageError(
            f"input_boxes: box {place} of row {row}, {boxes[row, place]}, is not inside of the picture; "
            "clip it to the picture, then write it as cxcywh in 0..1"
        )
