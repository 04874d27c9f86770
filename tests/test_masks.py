# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Masks after the model: areas, boxes, outlines and what they lose, by hand and against pycocotools."""

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from sam3_utils.masks import box_of, clean_mask, cut_out, middle_of, polygons

Y, X = np.mgrid[:60, :90]
DISK = np.hypot(Y - 30, X - 45) < 20
RING = DISK & ~(np.hypot(Y - 30, X - 45) < 8)
HOLE = int(DISK.sum() - RING.sum())


def square(top, left, side, shape=(20, 30)):
    mask = np.zeros(shape, bool)
    mask[top : top + side, left : left + side] = True
    return mask


def test_nothing_is_changed_where_nothing_is_asked():
    noise = np.random.default_rng(0).random((50, 40)) > 0.5
    np.testing.assert_array_equal(clean_mask(noise), noise)


def test_holes_and_islands_go_by_their_area():
    np.testing.assert_array_equal(clean_mask(RING, max_hole_area=HOLE), DISK)
    np.testing.assert_array_equal(clean_mask(RING, max_hole_area=HOLE - 1), RING)
    both = square(2, 2, 10) | square(15, 20, 3)
    np.testing.assert_array_equal(clean_mask(both, max_island_area=9), square(2, 2, 10))
    np.testing.assert_array_equal(clean_mask(both, max_island_area=8), both)


def test_a_gap_to_the_outside_is_no_hole_and_a_diagonal_holds_together():
    open_ring = RING.copy()
    open_ring[30, 45:] = False  # a slit through the ring
    assert not clean_mask(open_ring, max_hole_area=HOLE)[30, 45]
    steps = np.eye(12, dtype=bool)
    assert clean_mask(steps, max_island_area=11).all() == steps.all() and clean_mask(steps, max_island_area=11).any()
    assert not clean_mask(steps, max_island_area=12).any()


def test_opening_removes_a_thread_and_closing_shuts_a_slit():
    thread = square(4, 4, 10)
    thread[8, 14:28] = True
    opened = clean_mask(thread, opening=1)
    assert not opened[8, 18:].any() and opened[6:12, 6:12].all()
    slit = square(4, 4, 12)
    slit[:, 9] = False
    assert clean_mask(slit, closing=1)[6:14, 9].all()


def test_the_picture_s_edge_is_no_edge_of_the_mask():
    everywhere = np.ones((12, 15), bool)
    assert clean_mask(everywhere, opening=3, closing=3).all()
    assert not clean_mask(~everywhere, opening=3, closing=3).any()


def test_a_box_goes_around_whole_pixels():
    assert box_of(square(3, 5, 4)) == [5, 3, 9, 7]
    assert box_of(square(3, 5, 1)) == [5, 3, 6, 4]
    assert box_of(np.zeros((5, 5), bool)) is None


def test_the_middle_lies_inside_also_of_a_ring():
    x, y = middle_of(RING)
    assert RING[int(y), int(x)]
    assert middle_of(square(4, 6, 3)) == [7.5, 5.5]
    with pytest.raises(ValueError, match="no middle"):
        middle_of(np.zeros((4, 4), bool))


def test_an_outline_encloses_the_mask_and_says_what_it_loses():
    outlines, kept = polygons(DISK, 0.5)
    assert len(outlines) == 1 and kept > 0.97
    drawn = coco_mask.merge(coco_mask.frPyObjects([line.ravel().tolist() for line in outlines], *DISK.shape))
    truth = coco_mask.encode(np.asfortranarray(DISK, dtype=np.uint8))
    assert kept == pytest.approx(coco_mask.iou([drawn], [truth], [0])[0, 0])
    coarse, less = polygons(DISK, 5)
    assert len(coarse[0]) < len(outlines[0]) and less < kept


def test_a_hole_is_lost_and_said_to_be():
    outlines, kept = polygons(RING, 0.5)
    assert len(outlines) == 1
    assert kept == pytest.approx(RING.sum() / DISK.sum(), abs=0.02)


def test_two_islands_are_two_outlines_the_larger_first():
    outlines, kept = polygons(square(1, 1, 4) | square(8, 10, 9), 0.0)
    assert [tuple(line.min(0)) for line in outlines] == [(10, 8), (1, 1)] and kept > 0.95
    assert all((line >= 0).all() for line in outlines)


def test_no_mask_has_no_outline_and_loses_nothing():
    assert polygons(np.zeros((5, 5), bool)) == ([], 1.0)


def test_a_mask_over_the_whole_picture_stays_within_it():
    (outline,), kept = polygons(np.ones((7, 11), bool), 0.0)
    assert outline.min() == 0 and tuple(outline.max(0)) == (11, 7) and kept == 1


def test_a_cut_out_is_transparent_around_the_object():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))
    cut = cut_out(image, RING)
    assert cut.size == (39, 39) and cut.mode == "RGBA"
    alpha = np.asarray(cut)[..., 3]
    left, top, right, bottom = map(int, box_of(RING))
    np.testing.assert_array_equal(alpha > 0, RING[top:bottom, left:right])
    np.testing.assert_array_equal(np.asarray(cut)[..., :3], np.asarray(image)[top:bottom, left:right])
