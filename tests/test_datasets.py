# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""COCO files, clean, dirty and broken, become samples; what is passed over is counted."""

import json

import numpy as np
import pytest
from conftest import SHARED
from pycocotools import mask as coco_mask

from sam3_utils.cli import UsageError
from sam3_utils.datasets import read_coco, union_rle

SQUARE = [[1, 1, 5, 1, 5, 5, 1, 5]]
CROWD = {"size": [10, 12], "counts": [0, 20, 100]}


def coco_root(tmp_path, annotations, images=None, categories=None):
    (tmp_path / "annotations").mkdir(exist_ok=True)
    content = {
        "images": images or [{"id": 0, "file_name": "a.jpg", "height": 10, "width": 12}],
        "annotations": annotations,
        "categories": categories or [{"id": 0, "name": "star"}, {"id": 7, "name": "ring"}],
    }
    (tmp_path / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    return tmp_path


def annotation(**change):
    return {"id": 0, "image_id": 0, "category_id": 0, "iscrowd": 0, "segmentation": SQUARE} | change


def test_ids_of_zero_count_and_instances_of_a_category_form_one_sample(tmp_path):
    root = coco_root(tmp_path, [annotation(), annotation(id=1, segmentation=[[6, 6, 9, 6, 9, 9, 6, 9]])])
    data = read_coco(root, "exclude")
    assert [sample.key for sample in data.samples] == [(0, 0)] and data.problems == {}
    assert coco_mask.area(union_rle(data.samples[0])) == 16 + 9


def test_overlapping_instances_are_counted_once(tmp_path):
    root = coco_root(tmp_path, [annotation(), annotation(id=1)])
    assert coco_mask.area(union_rle(read_coco(root, "exclude").samples[0])) == 16


def test_the_crowd_rule_decides_over_iscrowd_masks(tmp_path):
    crowd_only = annotation(id=2, category_id=7, iscrowd=1, segmentation=CROWD)
    root = coco_root(tmp_path, [annotation(), annotation(id=1, iscrowd=1, segmentation=CROWD), crowd_only])
    excluded, included = read_coco(root, "exclude"), read_coco(root, "include")
    assert [sample.key for sample in excluded.samples] == [(0, 0)]
    assert [sample.key for sample in included.samples] == [(0, 0), (0, 7)]
    assert excluded.counts == included.counts == {"exclude": 1, "include": 2}
    assert coco_mask.area(union_rle(excluded.samples[0])) == 16
    # The crowd's run covers the first two columns, 4 of whose pixels the square has too.
    assert coco_mask.area(union_rle(included.samples[0])) == 16 + 20 - 4


def test_broken_annotations_are_passed_over_and_counted(tmp_path):
    root = coco_root(
        tmp_path,
        [
            annotation(segmentation=[[1, 1, 5, 5], *SQUARE]),
            annotation(category_id=7, segmentation=[[1, 1, 5, 5]]),
            annotation(category_id=7, segmentation=[]),
            annotation(category_id=7, segmentation=None),
            annotation(category_id=7, segmentation={"size": [3, 3], "counts": [9]}),
            annotation(category_id=7, segmentation={"size": [10, 12], "counts": [9, 9]}),
            annotation(category_id=7, segmentation={"size": [10, 12], "counts": "garbage!!"}),
            annotation(category_id=7, segmentation={"size": [10, 12], "counts": "52"}),
            annotation(category_id=7, segmentation={"size": [10, 12], "counts": ""}),
            annotation(category_id=7, segmentation={"size": [10, 12], "counts": [-5, 125]}),
            annotation(category_id=7, segmentation=[[float("nan")] * 6]),
            annotation(category_id=7, segmentation=[[1e300] * 6]),
            annotation(image_id=[1]),
            annotation(image_id=99),
            annotation(category_id=99),
            {"id": 5},
        ],
    )
    data = read_coco(root, "exclude")
    assert [sample.key for sample in data.samples] == [(0, 0)]
    assert data.problems == {
        "polygons of fewer than three points, odd length, or values that are no coordinates": 4,
        "annotations without a usable mask": 5,
        "RLE masks that do not fill their picture": 6,
        "annotations of an unknown image or category": 2,
        "annotations without image_id or category_id": 2,
    }


def test_missing_iscrowd_means_no_crowd_and_empty_categories_give_no_sample(tmp_path):
    whole = annotation()
    del whole["iscrowd"]
    assert len(read_coco(coco_root(tmp_path, [whole]), "exclude").samples) == 1


def test_categories_of_one_name_stay_apart_and_are_counted(tmp_path):
    twins = [{"id": 0, "name": "star"}, {"id": 7, "name": "star"}]
    data = read_coco(coco_root(tmp_path, [annotation(), annotation(category_id=7)], categories=twins), "exclude")
    assert [sample.prompt for sample in data.samples] == ["star", "star"]
    assert data.problems == {"categories that share their name with another": 2}


def test_absent_categories_come_from_lvis_field(tmp_path):
    images = [{"id": 3, "file_name": "a.jpg", "height": 10, "width": 12, "neg_category_ids": [7, 7, 0, 55]}]
    data = read_coco(coco_root(tmp_path, [annotation(image_id=3)], images=images), "exclude")
    assert [sample.key for sample in data.absent] == [(3, 7)]


def test_samples_follow_the_images_order(tmp_path):
    images = [{"id": key, "file_name": f"{key}.jpg", "height": 10, "width": 12} for key in (9, 2)]
    root = coco_root(
        tmp_path, [annotation(image_id=2), annotation(image_id=9, category_id=7), annotation(image_id=9)], images
    )
    assert [sample.key for sample in read_coco(root, "exclude").samples] == [(9, 0), (9, 7), (2, 0)]


def test_a_compressed_rle_is_read_as_pycocotools_wrote_it(tmp_path):
    mask = np.random.default_rng(0).random((10, 12)) > 0.5
    encoded = coco_mask.encode(np.asfortranarray(mask, np.uint8))
    rle = {"size": [10, 12], "counts": encoded["counts"].decode()}
    data = read_coco(coco_root(tmp_path, [annotation(segmentation=rle)]), "exclude")
    assert coco_mask.area(union_rle(data.samples[0])) == mask.sum()


def test_unusable_images_and_categories_cost_only_themselves(tmp_path):
    good = {"id": 0, "file_name": "a.jpg", "height": 10, "width": 12}
    images = [
        good,
        {"id": 1, "file_name": "b.jpg", "height": None, "width": 12},
        {"id": 2, "height": 10, "width": 12},
        good | {"id": 3, "file_name": "/etc/passwd"},
        good | {"id": 4, "file_name": "../secret.jpg"},
        good | {"id": [5]},
    ]
    categories = [
        {"id": 0, "name": "star"},
        {"id": 1, "name": " "},
        {"id": 2, "name": None},
        {"id": 3, "name": "\ud800"},
    ]
    data = read_coco(coco_root(tmp_path, [annotation()], images, categories), "exclude")
    assert [sample.key for sample in data.samples] == [(0, 0)]
    assert data.problems == {
        "images without a usable id, size or file name": 5,
        "categories without a usable id or name": 3,
    }


def test_a_pair_whose_masks_are_all_broken_is_neither_a_sample_nor_absent(tmp_path):
    images = [{"id": 0, "file_name": "a.jpg", "height": 10, "width": 12, "neg_category_ids": [0, None, [7]]}]
    data = read_coco(coco_root(tmp_path, [annotation(segmentation=[])], images), "exclude")
    assert data.samples == data.absent == [] and data.counts == {"exclude": 0, "include": 0}


@pytest.mark.parametrize("text", ("", "[]", "{}", '{"images": [], "annotations": null, "categories": []}'))
def test_a_file_of_another_format_is_refused(tmp_path, text):
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_val2017.json").write_text(text)
    with pytest.raises(UsageError, match="not COCO's instances format"):
        read_coco(tmp_path, "exclude")


def test_a_missing_file_is_named_with_the_wanted_tree(tmp_path):
    with pytest.raises(UsageError, match="instances_val2017.json: missing; --coco_root must hold"):
        read_coco(tmp_path, "exclude")


def test_real_coco_gives_every_sample_with_its_exact_area():
    expected_path = SHARED / "data" / "coco2017_pairs_expected.json"
    if not expected_path.exists():
        pytest.skip("the COCO sample is not beside the repository")
    expected = json.loads(expected_path.read_text())["pairs"]
    for rule, key in (("exclude", "union_area_noncrowd"), ("include", "union_area_all")):
        data = read_coco(SHARED / "data" / "coco2017", rule)
        areas = {sample.key: int(coco_mask.area(union_rle(sample))) for sample in data.samples}
        assert areas == {(pair["image_id"], pair["category_id"]): pair[key] for pair in expected if pair[key]}
        assert len(areas) == 446 and data.problems == {}
    assert np.all([sample.path.is_file() for sample in data.samples])
