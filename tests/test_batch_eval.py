# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""batch_eval.py gives the official evaluator's numbers, refuses what that tool gets silently wrong, and says why."""

import json
import math

import numpy as np
import pytest
from conftest import SHARED, error_line, run_script
from pycocotools import mask as coco_mask

from sam3_utils.saco import SUBSETS, annotation_path, prediction_path

CASES = SHARED / "cases" / "cgf1"
SUBSET = "fg_food"


def rle(x, y, width, height, size=(20, 30)) -> dict:
    mask = np.zeros(size, np.uint8, order="F")
    mask[y : y + height, x : x + width] = 1
    encoded = coco_mask.encode(mask)
    return {"size": list(size), "counts": encoded["counts"].decode()}


def annotation_file(objects: dict[int, list], pairs=(1, 2, 3, 4), **image_change) -> dict:
    images = [
        {"id": pair, "file_name": "a.jpg", "text_input": "star", "width": 30, "height": 20, "is_instance_exhaustive": 1}
        | image_change.get(f"pair{pair}", {})
        for pair in pairs
    ]
    annotations = [
        {"id": 10 * pair + index, "image_id": pair, "category_id": 1, "iscrowd": 0, "segmentation": segmentation,
         "bbox": [0, 0, 0.1, 0.1]}
        for pair, segmentations in objects.items() for index, segmentation in enumerate(segmentations)
    ]  # fmt: skip
    return {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "object"}]}


def prediction(pair, segmentation, score=0.9, **change) -> dict:
    entry = {"image_id": pair, "category_id": 1, "segmentation": segmentation, "score": score, "bbox": [0, 0, 0.1, 0.1]}
    return {key: value for key, value in (entry | change).items() if value is not Ellipsis}


def write(tmp_path, annotators: list[dict], predictions: list, subset=SUBSET):
    for content, letter in zip(annotators, "abc"):
        path = annotation_path(tmp_path / "gt", subset, letter)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    path = prediction_path(tmp_path / "pred", subset)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(predictions))


def run(tmp_path, *extra, subset=SUBSET):
    subsets = ("--subset", subset) if subset else ()
    return run_script("batch_eval.py", "--gt_base", tmp_path / "gt", "--pred_dir", tmp_path / "pred", *subsets, *extra)


def evaluate(tmp_path, *extra) -> dict:
    result = run(tmp_path, "--report", tmp_path / "report.json", *extra)
    assert result.returncode == 0, result.stderr
    return json.loads((tmp_path / "report.json").read_text())["subsets"][SUBSET]


OBJECTS = {1: [rle(0, 0, 10, 10)], 2: [rle(0, 0, 4, 4), rle(10, 10, 8, 8)]}
RIGHT = [prediction(1, OBJECTS[1][0]), *(prediction(2, segmentation) for segmentation in OBJECTS[2])]


def test_a_hand_computed_set(tmp_path):
    """Pair 1 and 2 right but for one object at IoU 0.8, pair 3 empty on both sides, pair 4 a false positive."""
    near = rle(0, 0, 8, 10)  # 80 of 100 pixels
    write(tmp_path, [annotation_file(OBJECTS)], [prediction(1, near), *RIGHT[1:], prediction(4, rle(0, 0, 3, 3))])
    values = evaluate(tmp_path)
    counts = values["counts"]
    assert counts["TPs"] == [3] * 7 + [2] * 3 and counts["FPs"] == [1] * 7 + [2] * 3
    assert (counts["IL_TP"], counts["IL_FP"], counts["IL_TN"], counts["IL_FN"]) == (2, 1, 1, 0)
    mcc = (2 * 1 - 1 * 0) / (math.sqrt((2 + 1) * (2 + 0) * (1 + 1) * (1 + 0)) + 1e-6)
    assert values["cgF1_eval_segm_IL_MCC"] == pytest.approx(mcc, abs=1e-12)

    def f1(precision, recall):
        return 2 * precision * recall / (precision + recall + 1e-4)

    low, high = f1(3 / 3.0001, 3 / 3.0001), f1(2 / 3.0001, 2 / 3.0001)
    assert values["cgF1_eval_segm_positive_micro_F1"] == pytest.approx(0.7 * low + 0.3 * high, abs=1e-12)
    assert values["cgF1_eval_segm_cgF1"] == pytest.approx((0.7 * low + 0.3 * high) * mcc, abs=1e-12)
    assert values["cgF1_eval_segm_cgF1@0.75"] == pytest.approx(low * mcc, abs=1e-12)
    assert len([name for name in values if name.startswith("cgF1_eval_segm_")]) == 26


def test_a_score_of_exactly_one_half_counts(tmp_path):
    write(
        tmp_path,
        [annotation_file(OBJECTS)],
        [prediction(1, OBJECTS[1][0], 0.5), prediction(2, rle(0, 0, 4, 4), 0.49999)],
    )
    assert evaluate(tmp_path)["counts"]["n_predictions"] == 1


def test_assignment_maximises_the_sum_of_ious_and_is_not_greedy(tmp_path):
    """Greedy takes the 0.9 first and leaves 0; the best sum is 0.8 + 0.8."""
    from sam3_utils.metrics import match

    assert sorted(match(np.array([[0.9, 0.8], [0.8, 0.0]]))) == [0.8, 0.8]
    assert match(np.array([[-1.0, -1.0, 0.2]])).tolist() == [0.2]


def test_an_empty_annotator_decides_a_pair_without_predictions(tmp_path):
    """With no prediction the pair is right as soon as any annotator left it empty."""
    some, none = annotation_file(OBJECTS), annotation_file({1: OBJECTS[1]})
    write(tmp_path, [some, none, some], [RIGHT[0]])
    counts = evaluate(tmp_path)["counts"]
    assert (counts["IL_TP"], counts["IL_TN"], counts["IL_FN"], counts["annotators"]) == (1, 3, 0, 3)


def test_a_pair_counts_only_where_all_annotators_call_it_exhaustive(tmp_path):
    whole = annotation_file(OBJECTS)
    write(tmp_path, [whole, annotation_file(OBJECTS, pair2={"is_instance_exhaustive": 0}), whole], RIGHT)
    assert evaluate(tmp_path)["counts"]["n_eval_pairs"] == 3


def changed(content: dict, kind: str, index: int, **change) -> dict:
    content = json.loads(json.dumps(content))
    content[kind][index].update(change)
    return content


WHOLE = annotation_file(OBJECTS)
WRONG_SIZE = rle(0, 0, 4, 4, size=(30, 20))
FAULTS = {
    "pair missing in b": ([WHOLE, annotation_file(OBJECTS, pairs=(1, 2, 3)), WHOLE], RIGHT, "pair 4 .*missing here"),
    "pair twice": ([annotation_file(OBJECTS, pairs=(1, 2, 3, 3))], RIGHT, "pair 3: a pair listed twice"),
    "annotation id twice": ([changed(WHOLE, "annotations", 1, id=10)], RIGHT, "annotation 10: .*used twice"),
    "annotation category": ([changed(WHOLE, "annotations", 0, category_id=2)], RIGHT, "category; use one of .1."),
    "annotation size": ([changed(WHOLE, "annotations", 0, segmentation=WRONG_SIZE)], RIGHT, r"mask of size \[30, 20\]"),
    "unknown image": ([changed(WHOLE, "annotations", 0, image_id=9)], RIGHT, "annotation of an unknown pair"),
    "prediction category": ([WHOLE], [prediction(1, rle(0, 0, 1, 1), category_id=0)], "entry 0 pair 1: .*category"),
    "prediction size": ([WHOLE], [prediction(1, WRONG_SIZE)], r"entry 0 pair 1: mask of size \[30, 20\]"),
    "prediction pair": ([WHOLE], [prediction("1", rle(0, 0, 1, 1))], "entry 0 pair 1: prediction for an unknown pair"),
    "no score": ([WHOLE], [prediction(1, rle(0, 0, 1, 1), score=...)], "entry 0 pair 1: prediction without a score"),
    "score NaN": ([WHOLE], [prediction(1, rle(0, 0, 1, 1), score=float("nan"))], "prediction without a score"),
    "no bbox": ([WHOLE] * 3, [prediction(1, rle(0, 0, 1, 1), bbox=...)], "entry 0 pair 1: prediction without bbox"),
    "twice": ([WHOLE], [RIGHT[0], RIGHT[0]], "prediction given twice"),
    "score in percent": ([WHOLE], [prediction(1, rle(0, 0, 1, 1), score=95)], "score 95 is not between 0 and 1"),
    "flag as text": ([changed(WHOLE, "images", 1, is_instance_exhaustive="0")], RIGHT, "is neither 0 nor 1"),
    "crowd as text": ([changed(WHOLE, "annotations", 0, iscrowd="0")], RIGHT, "iscrowd is neither 0 nor 1"),
    **{  # a compressed text of other characters, one too short, runs that do not add up, polygons that are none
        f"mask {number}": ([WHOLE], [RIGHT[0], prediction(2, segmentation)], "segmentation is no RLE and no polygon")
        for number, segmentation in enumerate(
            [{"size": [20, 30], "counts": text} for text in ("zzzzzzzzzz", "garbage!!", "01", "日本", [1, 2], ["x"])]
            + [[[1, 2]], [[float("nan")] * 6], [[0, 0, 1e9, 0, 1e9, 1e9]], "abc", {"size": None, "counts": "0"}]
        )
    },
    "annotated mask": ([changed(WHOLE, "annotations", 0, segmentation=[["a"] * 6])], RIGHT, "no RLE and no polygon"),
    "no mask": ([WHOLE], [prediction(1, ...)], "prediction without segmentation"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_the_official_tool_judges_wrongly_is_refused_and_lenient_counts_it(tmp_path, name):
    annotators, predictions, text = FAULTS[name]
    write(tmp_path, annotators, predictions)
    line = error_line(run(tmp_path))
    import re

    assert re.search(text, line), line
    assert "--lenient" in line and str(tmp_path) in line
    result = run(tmp_path, "--lenient")
    assert result.returncode == 0, result.stderr
    assert "note: fg_food: " in result.stdout


@pytest.mark.parametrize("box", ([1, 2], ["a"] * 4, [None] * 4, [float("nan")] * 4, [], [[1, 2, 3, 4]]))
def test_boxes_that_are_not_four_numbers_are_refused_where_boxes_count(tmp_path, box):
    write(tmp_path, [WHOLE], [prediction(1, OBJECTS[1][0], bbox=box)])
    assert "bbox is not four numbers" in error_line(run(tmp_path, "--iou_type", "bbox"))
    assert run(tmp_path).returncode == 0


@pytest.mark.parametrize(
    "content", ("", "{", "[]", '{"images": [], "annotations": [], "categories": []}', '{"images": [{}]}')
)
def test_an_annotation_file_that_is_none_is_refused(tmp_path, content):
    write(tmp_path, [WHOLE], RIGHT)
    annotation_path(tmp_path / "gt", SUBSET, "a").write_text(content)
    assert "fg_food_merged_a" in error_line(run(tmp_path))


def test_missing_files_are_named_and_a_mean_of_fewer_says_so(tmp_path):
    write(tmp_path, [WHOLE], RIGHT)
    assert "files in all); --subset" in error_line(run(tmp_path, subset=None))
    assert "mean of 1 of 7" in run(tmp_path).stdout
    annotation_path(tmp_path / "gt", SUBSET, "b").write_text("{}")
    assert "c_release_test.json: missing" in error_line(run(tmp_path))
    assert "must end in .json or .csv" in error_line(run(tmp_path, "--report", tmp_path / "report.txt"))


def test_reports_and_plots_are_written(tmp_path):
    write(tmp_path, [WHOLE], RIGHT)
    result = run(tmp_path, "--report", tmp_path / "report.csv", "--plot", tmp_path / "plots")
    assert result.returncode == 0, result.stderr
    header, row, mean = (line.split(",") for line in (tmp_path / "report.csv").read_text().splitlines())
    assert len(header) == len(row) == len(mean) == 27 and row[1:] == mean[1:]
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"threshold_sweep.png", "subsets.png"}


def test_chunks_over_processes_give_the_same_counts(tmp_path):
    pairs = range(1, 2401)
    rng = np.random.default_rng(0)
    boxes = {
        pair: [rle(*rng.integers(0, 15, 2), 4, 4), rle(*rng.integers(0, 15, 2), 4, 4)] for pair in pairs if pair % 3
    }
    write(
        tmp_path,
        [annotation_file(boxes, pairs)],
        [prediction(pair, rle(*rng.integers(0, 15, 2), 4, 4), float(rng.uniform(0.4, 1))) for pair in pairs],
    )
    one, several = evaluate(tmp_path, "--workers", 1), evaluate(tmp_path, "--workers", 3)
    assert one == several and one["counts"]["TPs"][0] > 0


def official_cases():
    if not CASES.exists():
        return []
    return [
        (path.parent.name, key)
        for path in sorted(CASES.glob("*/expected.json"))
        for key in json.loads(path.read_text())
        if key in ("segm", "bbox", "lenient_segm", "only_a", "gt_order_cba") and (path.parent / "gt_a.json").exists()
    ]


@pytest.mark.skipif(not CASES.exists(), reason="the official evaluator's cases are not beside the repository")
@pytest.mark.parametrize("name, key", official_cases())
def test_every_metric_and_count_of_the_official_evaluator(tmp_path, name, key):
    folder = CASES / name
    expected = json.loads((folder / "expected.json").read_text())[key]
    files = sorted(folder.glob("gt_*.json"))
    if key == "only_a":
        files = files[:1]
    if key == "gt_order_cba":
        files.reverse()
    write(tmp_path, [json.loads(path.read_text()) for path in files], json.loads((folder / "pred.json").read_text()))
    iou_type = "bbox" if key == "bbox" else "segm"
    extra = ("--iou_type", iou_type, *(("--lenient",) if key.startswith("lenient") else ()))
    if "error" in expected:
        error_line(run(tmp_path, *extra))
        return
    values = evaluate(tmp_path, *extra)
    metrics = expected.get("metrics") or {"cgF1": expected["cgF1"], "IL_MCC": expected["IL_MCC"]}
    for metric, value in metrics.items():
        full = metric if metric.startswith("cgF1_eval") else f"cgF1_eval_{iou_type}_{metric}"
        assert values[full] == pytest.approx(value, abs=1e-9), full
    for count, value in expected["counts"].items():
        assert values["counts"][count] == value, count


@pytest.mark.skipif(not CASES.exists(), reason="the official evaluator's cases are not beside the repository")
@pytest.mark.parametrize("iou_type", ("segm", "bbox"))
def test_the_seven_subsets_and_their_mean_through_the_command_line(tmp_path, iou_type):
    folder = CASES / "seven_subsets"
    expected = json.loads((folder / "expected.json").read_text())
    result = run_script(
        "batch_eval.py", "--gt_base", folder / "dataset" / "gt-annotations", "--pred_dir", folder / "gold_predictions",
        "--iou_type", iou_type, "--report", tmp_path / "report.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(SUBSETS) == [line.split()[0] for line in result.stdout.splitlines()[1:8]]
    for subset, values in expected["subsets"].items():
        for metric, value in values[iou_type]["metrics"].items():
            assert report["subsets"][subset][metric] == pytest.approx(value, abs=1e-9), (subset, metric)
        for count, value in values[iou_type]["counts"].items():
            assert report["subsets"][subset]["counts"][count] == value
    for short, metric in (("cgF1", "cgF1"), ("IL_MCC", "IL_MCC"), ("pmF1", "positive_micro_F1")):
        value = report["mean"][f"cgF1_eval_{iou_type}_{metric}"]
        assert value == pytest.approx(expected[f"mean_{iou_type}"][short], abs=1e-9)
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
