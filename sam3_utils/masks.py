# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What people do to masks after the model: cleaning, boxes, polygons, cut-outs."""

import numpy as np
from PIL import Image


def clean_mask(
    mask: np.ndarray, max_hole_area: int = 0, max_island_area: int = 0, opening: int = 0, closing: int = 0
) -> np.ndarray:
    """Fill holes and remove islands by area, then open and close; everything is off at 0.

    Args:
        mask: (H, W) bool.
        max_hole_area, max_island_area: in pixels; of 4-connected holes and 8-connected islands up to that area.
        opening, closing: radius of the disk in pixels.

    Returns:
        (H, W) bool, a new array.
    """
    from skimage import morphology

    mask = mask.copy()
    # Diagonal neighbours belong together in what is drawn, so they part what is not.
    if max_hole_area:
        mask = ~morphology.remove_small_objects(~mask, max_size=max_hole_area, connectivity=1)
    if max_island_area:
        mask = morphology.remove_small_objects(mask, max_size=max_island_area, connectivity=2)
    for radius, operation in ((opening, morphology.opening), (closing, morphology.closing)):
        if radius:
            # Beyond the picture's edge the mask goes on as it is at the edge.
            wide = operation(np.pad(mask, radius, mode="edge"), morphology.disk(radius))
            mask = wide[radius:-radius, radius:-radius]
    return mask


def box_of(mask: np.ndarray) -> list[float] | None:
    """xyxy of an (H, W) bool mask in pixel edges, so that a single pixel has a width of 1; None for an empty one."""
    rows, columns = np.nonzero(mask.any(axis=1))[0], np.nonzero(mask.any(axis=0))[0]
    if not len(rows):
        return None
    return [float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)]


def middle_of(mask: np.ndarray) -> list[float]:
    """x, y of the pixel of an (H, W) bool mask that lies deepest inside of it: where one would click.

    Raises:
        ValueError: the mask is empty.
    """
    from scipy.ndimage import distance_transform_edt

    if not mask.any():
        raise ValueError("an empty mask has no middle")
    depth = distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]
    row, column = np.unravel_index(depth.argmax(), depth.shape)
    return [float(column + 0.5), float(row + 0.5)]


def polygons(mask: np.ndarray, tolerance: float = 1.0) -> tuple[list[np.ndarray], float]:
    """Outlines of an (H, W) bool mask, and what is lost by them.

    Holes are left out, since neither COCO's nor labelme's polygons have any; parts of too few corners too.

    Args:
        tolerance: how far, in pixels, an outline may be from the mask's edge (Douglas and Peucker).

    Returns:
        (n, 2) float x, y in pixel edges for each part, largest first; the IoU of what they enclose with the mask.
    """
    from skimage import measure

    outlines = []
    for line in measure.find_contours(np.pad(mask, 1).astype(np.uint8), 0.5):
        line = line[:, ::-1] - 0.5  # row, column of pixel centres on the padded mask to x, y of pixel edges
        area = (line[:-1, 0] * line[1:, 1] - line[1:, 0] * line[:-1, 1]).sum() / 2
        line = measure.approximate_polygon(line, tolerance)[:-1]
        if area > 0 and len(line) >= 3:  # holes run the other way round
            outlines.append((area, np.clip(line, 0, mask.shape[::-1])))
    outlines = [line for _, line in sorted(outlines, key=lambda pair: -pair[0])]
    return outlines, _polygon_iou(outlines, mask)


def _polygon_iou(outlines: list[np.ndarray], mask: np.ndarray) -> float:
    from pycocotools import mask as coco_mask

    if not outlines:
        return float(not mask.any())
    drawn = coco_mask.merge(coco_mask.frPyObjects([line.ravel().tolist() for line in outlines], *mask.shape))
    truth = coco_mask.encode(np.asfortranarray(mask, dtype=np.uint8))
    return float(coco_mask.iou([drawn], [truth], [0])[0, 0])


def cut_out(image: Image.Image, mask: np.ndarray) -> Image.Image:
    """The object alone, everything else transparent, cropped to the mask's box; the whole picture's size if empty."""
    rgba = image.convert("RGBA")
    rgba.putalpha(Image.fromarray(mask.astype(np.uint8) * 255))
    box = box_of(mask)
    return rgba if box is None else rgba.crop(tuple(map(int, box)))
