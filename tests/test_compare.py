# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""What computes the same passes; each fault that once got through somewhere fails, and by the gate that should see it.

The faults are planted in the exported graph. Most runs call the script's `main` in this process, to save the start.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from conftest import ROOT, TINY, error_line, export_tiny, run_script
from make_om import make_om
from onnx import helper, numpy_helper

import sam3_compare
from sam3_utils import compare, contract, differences, files
from sam3_utils.backends import open_model
from sam3_utils.cli import CheckFailed, UsageError
from sam3_utils.coco_iou import judge as judge_coco
from sam3_utils.images import load_rgb, prepare
from sam3_utils.metrics import mask_iou
from sam3_utils.postprocess import encode_rle, instance_scores, resize_masks
from sam3_utils.prompts import encode_phrases

PHRASES = ("circle", "triangle", "star")


@pytest.fixture(scope="module")
def tapped(tmp_path_factory) -> Path:
    """The tiny checkpoint as ONNX with the three FPN levels as further outputs."""
    return export_tiny(tmp_path_factory.mktemp("tapped"), "--taps", "--verify", "never") / "sam3.onnx"


@pytest.fixture(scope="module")
def images(demo_data) -> list[Path]:
    return sorted((demo_data / "val2017").glob("*.jpg"))[:2]


@pytest.fixture
def run(tmp_path, images):
    """Compare in this process: arguments -> (exit code, JSON record)."""

    def run(reference, candidate, *extra):
        report = tmp_path / "report.json"
        code = sam3_compare.main(
            [
                *("--reference", str(reference), "--candidate", str(candidate), "--processor_path", str(TINY)),
                *("--images", *map(str, images), "--phrases", *PHRASES, "--report", str(report), *map(str, extra)),
            ]
        )
        return code, json.loads(report.read_text())

    return run


def failed(record) -> dict[str, set[str]]:
    """gate -> what failed it."""
    found: dict[str, set[str]] = {}
    for gate in record["gates"]:
        if not gate["passed"]:
            found.setdefault(gate["gate"], set()).add(gate["of"])
    return found


def edited(source: Path, folder: Path, edit) -> Path:
    """A copy of an ONNX file, weights inside, after `edit(model)`."""
    model = onnx.load(source)
    edit(model)
    onnx.save(model, folder / "faulty.onnx")
    return folder / "faulty.onnx"


def insert(model, tensor: str, *steps) -> None:
    """Put nodes behind `tensor`: each step is (operator, constants, attributes); the last one gives the old name."""
    graph = model.graph
    place, producer = next((i, node) for i, node in enumerate(graph.node) if tensor in node.output)
    name = f"{tensor}_before"
    producer.output[list(producer.output).index(tensor)] = name
    for step, (operator, constants, attributes) in enumerate(steps, 1):
        names = [f"{tensor}_{step}_{index}" for index in range(len(constants))]
        graph.initializer.extend(map(numpy_helper.from_array, constants, names))
        output = tensor if step == len(steps) else f"{tensor}_after_{step}"
        graph.node.insert(place + step, helper.make_node(operator, [name, *names], [output], **attributes))
        name = output


def gather(axis: int, indices) -> tuple:
    return "Gather", [np.array(indices, dtype=np.int64)], {"axis": axis}


def answers(model, processor, image: Path, phrase: str = "circle") -> dict[str, np.ndarray]:
    """A model's outputs for one picture and phrase."""
    input_ids, attention_mask, _ = encode_phrases(processor, [phrase])
    pixel_values = prepare(processor, load_rgb(image))[None]
    return model.infer({"pixel_values": pixel_values, "input_ids": input_ids, "attention_mask": attention_mask})


def limits() -> dict[str, float]:
    """The script's defaults."""
    values = vars(sam3_compare.parse_args(["--reference", "a", "--candidate", "b"]))
    return {name: value for name, value in values.items() if name.startswith(("min_", "max_"))}


def compared(**changes) -> dict:
    """`compare_models`' answer where nothing is detected."""
    counts = dict.fromkeys(("reference", "candidate", "gained", "lost"), 0)
    nothing = dict.fromkeys(("mask_ious", "mask_shifts", "box_ious", "merged_ious"), [])
    return {"outputs": {}, "detections": counts} | nothing | changes


def shapes_of(path: Path) -> dict[str, tuple]:
    graph = onnx.load(path, load_external_data=False).graph
    return {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in graph.output}


def test_onnx_passes_against_the_checkpoint_with_a_wide_margin(run, tapped):
    code, record = run(TINY, tapped, "--taps", "--batch_size", 2)
    assert code == 0 and record["passed"] and record["error"] is None
    assert set(record["outputs"]) == {*contract.OUTPUTS, *contract.TAPS}
    for name, row in record["outputs"].items():
        assert row["cosine"] >= 0.999999 and row["relative"] <= 1e-4 and row["max_abs"] <= 2e-4, (name, row)
    assert record["detections"]["reference"] >= 4
    assert record["detections"]["gained"] == record["detections"]["lost"] == 0
    assert record["mask_iou"]["min"] >= 0.999 and record["mask_shift"]["max"] <= 1e-4 and record["value"] >= 0.999
    assert {side: slots["batch"] for side, slots in record["slots"].items()} == {"reference": 2, "candidate": 2}


@pytest.mark.parametrize("dtype, margin", [("float16", 0.1), ("bfloat16", 0.7)])
def test_a_faithful_lower_precision_passes(run, dtype, margin):
    """Real 16-bit arithmetic; `margin` says how much of each limit on differences it may use up."""
    code, record = run(TINY, TINY, "--dtype", dtype, "--taps")
    assert code == 0, record["error"]
    assert 0 < record["outputs"]["pred_masks"]["relative"]
    for gate in record["gates"]:
        if gate["sign"] == "<=" and gate["bound"]:
            assert gate["value"] <= margin * gate["bound"], gate


def test_a_graph_rounded_to_float16_after_every_product_passes(run, tapped, tmp_path):
    def edit(model):
        for node in list(model.graph.node):
            if node.op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose", "Softmax", "LayerNormalization"):
                half, whole = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
                insert(model, node.output[0], ("Cast", [], {"to": half}), ("Cast", [], {"to": whole}))

    code, record = run(tapped, edited(tapped, tmp_path, edit), "--taps")
    assert code == 0, record["error"]
    assert all(1e-5 < row["relative"] < 0.02 for row in record["outputs"].values()), record["outputs"]


@pytest.mark.parametrize("levels", [(0,), (2,), (0, 1, 2)])
def test_saturated_neck_features_fail(run, tapped, tmp_path, levels):
    """Features scaled so that fp16 stops at half a standard deviation, and scaled back."""
    half_deviation = (0.29, 1.9, 2.3)  # of the tiny checkpoint's levels

    def edit(model):
        for level in levels:
            scale = np.float32(65504 / half_deviation[level])
            limits = [np.float32(-65504), np.float32(65504)]
            insert(model, f"fpn_feat_{level}", ("Mul", [scale], {}), ("Clip", limits, {}), ("Div", [scale], {}))

    code, record = run(tapped, edited(tapped, tmp_path, edit), "--taps")
    names = {f"fpn_feat_{level}" for level in levels}
    assert code == 1
    assert failed(record)["cosine"] >= names and failed(record)["level difference"] == names
    assert run(tapped, tmp_path / "faulty.onnx")[0] == 1  # and without looking at the levels


@pytest.mark.parametrize("kind", ("uniform", "normal"))
def test_noise_of_the_reported_size_on_the_levels_fails(run, tapped, tmp_path, kind):
    """Reported: largest difference about 1.5, measured on an Ascend 910B3 in mixed precision."""
    rng = np.random.default_rng(0)

    def edit(model):
        for name, (_, *shape) in shapes_of(tapped).items():
            if name in contract.TAPS:
                noise = rng.uniform(-1, 1, (1, *shape)) if kind == "uniform" else rng.normal(0, 1, (1, *shape))
                insert(model, name, ("Add", [(1.5 * noise / np.abs(noise).max()).astype(np.float32)], {}))

    code, record = run(tapped, edited(tapped, tmp_path, edit), "--taps")
    assert code == 1
    assert failed(record)["level difference"] == set(contract.TAPS)
    assert all(1.4 <= record["outputs"][name]["max_abs"] <= 1.6 for name in contract.TAPS)
    code, record = run(tapped, tmp_path / "faulty.onnx")
    assert code == 1 and failed(record)["relative difference"] >= {"pred_masks", "semantic_seg"}


@pytest.mark.parametrize(
    "name, axis, order",
    [
        ("pred_boxes", 2, [1, 0, 3, 2]),  # x and y
        ("pred_masks", 1, [*range(1, 16), 0]),  # each query has its neighbour's mask
        ("pred_masks", 2, range(63, -1, -1)),  # upside down
    ],
)
def test_swapped_values_of_an_output_fail(run, tapped, tmp_path, name, axis, order):
    code, record = run(tapped, edited(tapped, tmp_path, lambda model: insert(model, name, gather(axis, order))))
    assert code == 1
    assert failed(record)["relative difference"] == {name}
    assert ("mask IoU" in failed(record)) == (name == "pred_masks")


@pytest.mark.parametrize("name", ("semantic_seg", "pred_masks", "presence_logits"))
def test_swapped_rows_of_a_batch_fail(run, tapped, tmp_path, name):
    faulty = edited(tapped, tmp_path, lambda model: insert(model, name, gather(0, [1, 0, 3, 2])))
    make_om(faulty, tmp_path / "faulty.om", 4)
    code, record = run(tapped, tmp_path / "faulty.om")
    assert code == 1
    assert failed(record)["relative difference"] == {name}


def test_masks_shifted_by_one_cell_fail(run, tapped, tmp_path):
    shift = gather(3, [0, *range(63)])
    code, record = run(tapped, edited(tapped, tmp_path, lambda model: insert(model, "pred_masks", shift)))
    assert code == 1
    assert set(failed(record)) == {"relative difference", "mask IoU", "mask shift (cells)", "Mean IoU"}
    assert 0.8 <= record["mask_shift"]["max"] <= 1.5


def test_a_single_shifted_mask_fails(run, tapped, tmp_path, images, processor):
    """One query of one sample: among all cells of pred_masks it is little, as a mask it is wrong."""
    outputs = answers(open_model(tapped), processor, images[0])
    query = int(outputs["pred_logits"][0].argmax())
    cells = np.broadcast_to(np.arange(64), outputs["pred_masks"].shape).copy()
    cells[0, query] = [0, *range(63)]
    shift = ("GatherElements", [cells], {"axis": 3})  # which fixes the batch to 1
    make_om(edited(tapped, tmp_path, lambda model: insert(model, "pred_masks", shift)), tmp_path / "faulty.om", 1)
    code, record = run(tapped, tmp_path / "faulty.om")
    assert code == 1
    assert {"mask IoU", "mask shift (cells)"} <= set(failed(record))
    assert record["mask_shift"]["min"] <= 1e-6 and 0.8 <= record["mask_shift"]["max"] <= 1.5


def test_the_sample_that_agrees_least_is_kept_for_the_picture(tapped, processor, demo_data):
    """The second of three samples has its masks moved by three cells."""
    model, calls = open_model(tapped), []

    def infer(feeds):
        outputs = model.infer(feeds)
        calls.append(len(calls))
        return outputs | {"pred_masks": np.roll(outputs["pred_masks"], 3 * (calls[-1] == 1), axis=-1)}

    samples = compare.demo_samples(demo_data)[:3]
    pair = (compare.named(model, "reference", ()), SimpleNamespace(shapes=model.shapes, infer=infer))
    tokens = compare.encode_prompts(processor, samples)
    found = compare.compare_models(pair, (1, 1), processor, samples, tokens, 0.5)
    sample, reference, candidate = found["worst"]
    assert sample == samples[1] and reference.any() and candidate.any()
    assert [iou == 1 for iou in found["merged_ious"]] == [True, False, True]
    assert min(found["merged_ious"]) == pytest.approx(mask_iou(encode_rle(reference), encode_rle(candidate)))


@pytest.mark.parametrize("slot", (0, 3))
def test_one_wrong_batch_slot_fails_and_is_named(run, tapped, tmp_path, slot):
    scale = np.ones((4, 1, 1, 1), dtype=np.float32)
    scale[slot] = 0.5
    faulty = edited(tapped, tmp_path, lambda model: insert(model, "fpn_feat_2", ("Mul", [scale], {})))
    make_om(faulty, tmp_path / "faulty.om", 4)
    code, record = run(tapped, tmp_path / "faulty.om")
    assert code == 1 and "relative difference" in failed(record)
    where = failed(record)["candidate's slots"].pop()
    assert (
        re.search(r"row (\d) of 4", where)[1] == str(slot + 1) or slot == 0
    )  # row 1 is what the others are held against
    assert record["slots"]["candidate"]["relative"] > 0.05 and "reference" not in record["slots"]


@pytest.mark.parametrize("leak", ([0, 0], [0, 0, 0], [0, 0, 2, 3], [0, 1, 2, 2], [0, 0, 2, 2], [1, 0, 2, 3], [0] * 6))
def test_a_batch_whose_places_see_each_other_s_pictures_fails(run, tapped, tmp_path, leak):
    def change(model):
        model.graph.initializer.append(numpy_helper.from_array(np.array(leak), "leak"))
        for node in model.graph.node:
            node.input[:] = ["leaked" if name == "pixel_values" else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("Gather", ["pixel_values", "leak"], ["leaked"], axis=0))

    make_om(edited(tapped, tmp_path, change), tmp_path / "faulty.om", len(leak))
    code, record = run(tapped, tmp_path / "faulty.om")
    assert code == 1 and "candidate's slots" in failed(record)


def test_an_output_that_is_averaged_over_the_batch_fails(run, tapped, tmp_path):
    """Places may be exchanged at will, and one sample in all of them changes nothing."""
    turn, mean = ("Transpose", [], {"perm": [1, 0]}), ("MatMul", [np.full((4, 4), 0.25, np.float32)], {})
    faulty = edited(tapped, tmp_path, lambda model: insert(model, "presence_logits", turn, mean, turn))
    make_om(faulty, tmp_path / "faulty.om", 4)
    code, record = run(tapped, tmp_path / "faulty.om")
    assert code == 1 and "candidate's slots" in failed(record)


def detecting_few_of_many(box):
    """Outputs of facebook/sam3's 200 queries of which two detect, their boxes moved by `box`."""
    rng = np.random.default_rng(0)
    centre, size = rng.uniform(0.3, 0.7, (200, 2)), rng.uniform(0.1, 0.3, (200, 2))
    masks = np.where(np.hypot(*np.mgrid[-8:8, -8:8]) < 5, 4.0, -4.0)
    boxes = np.concatenate([centre - size / 2, centre + size / 2], axis=1)
    boxes[:2] += box
    logits = np.where(np.arange(200) < 2, 3.0, -6.0)
    return {
        "pred_masks": np.repeat(masks[None], 200, axis=0).astype(np.float32),
        "pred_logits": logits.astype(np.float32), "pred_boxes": boxes.astype(np.float32),
        "presence_logits": np.array([6.0], np.float32),
    }  # fmt: skip


def test_wrong_boxes_of_what_is_detected_fail_although_198_other_queries_agree(demo_data):
    sample = compare.demo_samples(demo_data)[0]
    right, wrong = detecting_few_of_many(0.0), detecting_few_of_many(0.15)
    found = differences.compare_detections(sample, right, wrong, 0.5)
    assert found["reference"] == found["candidate"] == len(found["box_ious"]) == 2
    figures = differences.difference_figures([differences.difference_row(right["pred_boxes"], wrong["pred_boxes"])])
    assert figures["relative"] < limits()["max_relative_difference"]
    values = {"mask_ious": found["ious"], "mask_shifts": found["shifts"], "box_ious": found["box_ious"]}
    gates = differences.judge(compared(outputs={"pred_boxes": figures}, **values), {}, limits())
    assert {gate["gate"] for gate in gates if not gate["passed"]} == {"box IoU"}


@pytest.mark.parametrize(
    "first, second, expected",
    [
        ((0, 0, 2, 2), (0, 0, 2, 2), 1),
        ((0, 0, 2, 2), (1, 0, 3, 2), 1 / 3),
        ((0, 0, 1, 1), (2, 2, 3, 3), 0),
        ((0, 0, 0, 0), (0, 0, 0, 0), 1),
        ((1, 1, 0, 0), (0, 0, 1, 1), 0),
    ],
)
def test_box_iou_by_hand(first, second, expected):
    assert differences.box_iou(np.array(first), np.array(second)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ("pred_masks", "pred_logits", "semantic_seg"))
def test_nan_in_one_element_fails_the_finite_check_and_is_named(run, tapped, tmp_path, capsys, name):
    shape = (1, *shapes_of(tapped)[name][1:])
    addend = np.zeros(shape, dtype=np.float32)
    addend.flat[-1] = np.nan
    faulty = edited(tapped, tmp_path, lambda model: insert(model, name, ("Add", [addend], {})))
    code, record = run(tapped, faulty)
    assert code == 1 and record["passed"] is False
    assert record["error"].startswith(f"finite check: candidate {faulty}: the model gave 1 non-finite values of ")
    assert f" in {name};" in record["error"]
    assert "FAIL: finite check" in capsys.readouterr().out
    assert run(faulty, tapped)[1]["error"].startswith("finite check: reference")


@pytest.mark.parametrize("name", ("fpn_feat_1", "pred_masks"))
def test_unrelated_values_of_equal_mean_and_variance_fail(run, tapped, tmp_path, name):
    """The same values in other places."""
    order = np.random.default_rng(0).permutation(shapes_of(tapped)[name][2])
    faulty = edited(tapped, tmp_path, lambda model: insert(model, name, gather(2, order), gather(3, order)))
    code, record = run(tapped, faulty, "--taps")
    assert code == 1
    gates = failed(record)
    assert name in gates["cosine"] and name in gates["level difference" if "fpn" in name else "relative difference"]


def test_unrelated_values_far_from_zero_fail_although_their_cosine_does_not():
    rng = np.random.default_rng(0)
    first, second = (20 + rng.normal(0, 1, (2, 1000)) for _ in range(2))
    figures = differences.difference_figures([differences.difference_row(*pair) for pair in zip(first, second)])
    assert figures["cosine"] > 0.99
    assert figures["relative"] == pytest.approx(np.sqrt(2), rel=0.1)  # two independent deviations of 1


def test_figures_of_a_difference_by_hand():
    reference = np.array([[1, -1, 3], [5, 1, 3]], dtype=np.float32)  # mean 2, mean square 46 / 6
    candidate = np.array([[1, -1, 3], [5, 1, 7]], dtype=np.float32)
    figures = differences.difference_figures([differences.difference_row(*pair) for pair in zip(reference, candidate)])
    assert figures["max_abs"] == 4 and figures["mean_abs"] == pytest.approx(4 / 6)
    assert figures["cosine"] == pytest.approx(47 / np.sqrt(35 * 75))  # of the second sample
    assert figures["relative"] == pytest.approx(np.sqrt((16 / 6) / (46 / 6 - 4)))
    assert figures["saturated"] == 0


def test_values_closer_together_than_16_bits_resolve_are_measured_against_their_size():
    reference = 100 + np.array([[0.0, 0.001, -0.001, 0.002]])
    figures = differences.difference_figures([differences.difference_row(reference, reference + 0.05)])
    assert figures["relative"] == pytest.approx(0.05 / (100 / 20), rel=1e-4)


def test_one_value_a_sample_is_judged_in_units_of_its_size_and_by_the_cosine_over_all_samples():
    reference, candidate = np.array([[3.0], [-4.0]]), np.array([[3.0], [-3.0]])
    figures = differences.difference_figures([differences.difference_row(*pair) for pair in zip(reference, candidate)])
    assert figures["cosine"] == pytest.approx(21 / (5 * np.sqrt(18)))
    assert figures["relative"] == pytest.approx(np.sqrt(1 / 2) / np.sqrt(25 / 2))
    small = differences.difference_figures([differences.difference_row(np.array([0.01]), np.array([0.05]))])
    assert small["relative"] == pytest.approx(0.04)  # a logit of 0.04 is nothing, whatever the reference's


def test_values_at_the_end_of_float16_are_counted_where_the_reference_has_none():
    reference, candidate = np.array([[1e5, 70000, 3]]), np.array([[65504, 70000, -65504]])
    figures = differences.difference_figures([differences.difference_row(*pair) for pair in zip(reference, candidate)])
    assert figures["saturated"] == 1
    gates = differences.judge(compared(outputs={"fpn_feat_0": figures}), {}, limits())
    assert not next(gate for gate in gates if gate["gate"] == "saturated values")["passed"]


def test_equal_and_constant_outputs_differ_by_nothing():
    for value in (0.0, 7.0):
        array = np.full((1, 5), value, dtype=np.float32)
        figures = differences.difference_figures([differences.difference_row(array, array)])
        assert figures["relative"] == figures["max_abs"] == 0 and figures["cosine"] == pytest.approx(1)
    zeros = np.zeros((1, 5), dtype=np.float32)
    assert differences.difference_figures([differences.difference_row(zeros, zeros + 1)])["cosine"] == 0


def test_outputs_of_different_shapes_are_not_compared():
    with pytest.raises(CheckFailed, match=r"\(3,\) in the reference, \(1,\)"):
        differences.difference_row(np.zeros(3), np.zeros(1))


@pytest.mark.parametrize("shift", (0.0, 0.25, 1.0))
def test_the_shift_of_a_mask_is_measured(shift):
    """A round blob's logits, drawn twice."""
    y, x = np.mgrid[:64, :64]

    def blob(right):
        return 12 - np.hypot(x - 30 - right, y - 24).astype(np.float32)

    noise = np.random.default_rng(0).normal(0, 0.05, (64, 64))
    assert differences.mask_shift(blob(0), blob(shift) + noise) == pytest.approx(shift, abs=0.02)
    assert differences.mask_shift(blob(0).T, blob(shift).T) == pytest.approx(shift, abs=0.02)


def test_detections_are_counted_and_masks_measured_as_the_evaluators_do(tapped, processor, images, tmp_path):
    """Against coco_iou.judge and pycocotools' own IoU."""
    sample = compare.given_samples(images[:1], ["circle"])[0]
    reference = {name: array[0] for name, array in answers(open_model(tapped), processor, images[0]).items()}
    best = int(reference["pred_logits"].argmax())
    other = (best + 1) % 16
    reference["presence_logits"][:] = 9
    reference["pred_logits"][:] = -9
    reference["pred_logits"][best] = 2
    candidate = {name: array.copy() for name, array in reference.items()}
    reference["pred_logits"][other] = -0.9  # 0.289, under a threshold of 0.3
    candidate["pred_logits"][other] = -0.8  # 0.310
    candidate["pred_masks"] = np.roll(candidate["pred_masks"], 2, axis=1)
    found = differences.compare_detections(sample, reference, candidate, 0.3)
    counts = {name: found[name] for name in ("reference", "candidate", "gained", "lost")}
    assert counts == {"reference": 1, "candidate": 2, "gained": 1, "lost": 0}
    turned = differences.compare_detections(sample, candidate, reference, 0.3)
    assert turned["lost"] == 1 and len(turned["ious"]) == len(turned["shifts"]) == 1
    settings = {"score_threshold": 0.3, "mask_threshold": 0.5, "max_detections": None}
    for side, union in zip((reference, candidate), found["unions"]):
        scores = instance_scores(side["pred_logits"][None], side["presence_logits"][None])[0]
        record = judge_coco(
            replace(sample, segmentations=([[0, 0, 9, 0, 9, 9]],)), scores, side["pred_masks"], settings
        )
        assert encode_rle(union) == record["mask"]
    alone = [encode_rle(next(resize_masks(side["pred_masks"][[best]], sample.size, 0.5))[0])
             for side in (reference, candidate)]  # fmt: skip
    assert found["ious"] == [pytest.approx(mask_iou(*alone), abs=1e-12)] and 0.1 < found["ious"][0] < 0.9


def test_an_om_of_batch_4_is_compared_with_a_dynamic_graph_and_its_padding_does_not_count(
    run, tapped, tmp_path, images
):
    make_om(tapped, tmp_path / "sam3.om", 4)
    code, record = run(tapped, tmp_path / "sam3.om", "--taps")  # 6 samples: a batch and a half
    assert code == 0, record["error"]
    assert record["samples"] == len(images) * len(PHRASES) == 6
    assert (record["reference"]["batch_size"], record["candidate"]["batch_size"]) == (1, 4)
    assert set(contract.TAPS) <= set(record["outputs"])


def test_float16_outputs_of_an_om_pass(run, tapped, tmp_path):
    make_om(tapped, tmp_path / "sam3.om", 2, output_dtypes=dict.fromkeys(contract.OUTPUTS, "float16"))
    code, record = run(tapped, tmp_path / "sam3.om")
    assert code == 0 and record["candidate"]["precision"] == "as compiled, float16 outputs"
    assert 0 < record["outputs"]["semantic_seg"]["relative"] <= 1e-3


def random_checkpoint(folder: Path, seed: int) -> Path:
    """The tiny architecture with random weights; its presence says no."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, folder)
    torch.manual_seed(seed)
    weights = load_file(TINY / "model.safetensors")
    weights = {name: torch.randn(tensor.shape) * 0.05 if tensor.is_floating_point() else tensor
               for name, tensor in weights.items()}  # fmt: skip
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_models_that_detect_nothing_are_judged_by_their_values_and_told_so(run, tmp_path, capsys):
    first, second = (random_checkpoint(tmp_path / name, seed) for seed, name in enumerate(("first", "second")))
    code, record = run(first, first, "--dtype", "float16", "--taps", "--output_dir", tmp_path / "out")
    assert code == 0, record["error"]
    output = capsys.readouterr().out
    assert "PASS, on numbers alone: neither model detected anything" in output
    assert record["value"] is None and record["mask_iou"] is None
    assert not (tmp_path / "out" / "worst.png").exists()
    code, record = run(first, second, "--taps")
    assert code == 1 and failed(record)["cosine"] >= {"pred_masks", "pred_logits", *contract.TAPS}


def test_a_candidate_that_detects_where_the_reference_does_not_fails(run, tapped, tmp_path):
    silent = edited(tapped, tmp_path, lambda model: insert(model, "presence_logits", ("Sub", [np.float32(30)], {})))
    for pair in ((silent, tapped), (tapped, silent)):
        code, record = run(*pair)
        assert code == 1 and {"changed detections", "Mean IoU"} <= set(failed(record))
        assert record["value"] == 0


def test_limits_are_options(run, tapped, tmp_path):
    shift = gather(3, [0, *range(63)])
    faulty = edited(tapped, tmp_path, lambda model: insert(model, "pred_masks", shift))
    loose = ("--min_cosine", 0.5, "--max_relative_difference", 9, "--min_mask_iou", 0.1, "--max_mask_shift", 3)
    assert run(tapped, faulty, *loose, "--min_mean_iou", 0.1)[0] == 0
    assert set(failed(run(tapped, faulty, *loose)[1])) == {"Mean IoU"}
    assert run(TINY, tapped, "--max_relative_difference", 0)[0] == 1


def test_the_script_draws_the_demo_pictures_once_and_reports(tmp_path, tapped):
    arguments = ("--reference", TINY, "--candidate", tapped, "--batch_size", 4, "--output_dir", tmp_path / "out")
    result = run_script("sam3_compare.py", *arguments, "--report", tmp_path / "r" / "report.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "PASS"
    paths = (str(tmp_path), str(tapped))
    lines = [line for line in result.stdout.splitlines() if not any(path in line for path in paths)]
    assert max(map(len, lines)) <= 100
    record = json.loads((tmp_path / "r" / "report.json").read_text())
    assert record["pictures"] == compare.DEMO_PICTURES and record["samples"] >= 40
    assert {sample.segmentations == () for sample in compare.demo_samples(tmp_path / compare.DEMO_ROOT)} == {
        True,
        False,
    }
    assert (tmp_path / "out" / "worst.png").stat().st_size > 1000
    annotations = tmp_path / compare.DEMO_ROOT / "annotations" / "instances_val2017.json"
    before = annotations.stat().st_mtime_ns
    compare.demo_samples(tmp_path / compare.DEMO_ROOT)
    assert annotations.stat().st_mtime_ns == before


def test_a_failed_gate_ends_the_script_with_1_and_is_named(tmp_path, tapped, images):
    faulty = edited(tapped, tmp_path, lambda model: insert(model, "pred_boxes", gather(2, [1, 0, 3, 2])))
    result = run_script(
        "sam3_compare.py", "--reference", TINY, "--candidate", faulty, "--images", images[0], "--phrases", "circle"
    )
    assert result.returncode == 1, result.stderr
    assert "FAIL: cosine: pred_boxes\nFAIL: relative difference: pred_boxes\n" in result.stdout
    assert "Traceback" not in result.stderr


def test_a_manifest_is_reported_and_a_missing_or_foreign_one_only_warns(tmp_path, tapped, run, caplog):
    hashes = {name: files.sha256(tapped.with_name(name)) for name in ("sam3.onnx", "sam3.onnx.data")}
    assert compare.read_manifest(tapped, hashes, "candidate")["sha256"].items() >= hashes.items()
    assert compare.read_manifest(TINY, {}, "reference") is None and not caplog.text
    make_om(tapped, tmp_path / "sam3.om", 1)
    code, record = run(tapped, tmp_path / "sam3.om")
    assert code == 0 and record["candidate"]["manifest"] is None
    assert "candidate: no sam3.manifest.json beside it" in caplog.text
    manifest = {"precision": {"precision_mode_v2": "fp16"}, "soc_version": "Ascend310P3", "om": {"sha256": "0" * 64}}
    (tmp_path / "sam3.manifest.json").write_text(json.dumps(manifest))
    assert run(tapped, tmp_path / "sam3.om")[1]["candidate"]["manifest"] is None
    assert "sam3.manifest.json speaks of another file (SHA-256 of sam3.om)" in caplog.text
    manifest["om"]["sha256"] = record["candidate"]["sha256"]["sam3.om"]
    (tmp_path / "sam3.manifest.json").write_text(json.dumps(manifest))
    assert run(tapped, tmp_path / "sam3.om")[1]["candidate"]["manifest"] == manifest
    assert compare.manifest_line(manifest) == "soc_version Ascend310P3, precision_mode_v2 fp16"
    for damaged in ("{", "[]"):
        caplog.clear()
        (tmp_path / "sam3.manifest.json").write_text(damaged)
        assert run(tapped, tmp_path / "sam3.om")[0] == 0
        assert "sam3.manifest.json cannot be read" in caplog.text


def test_taps_that_one_side_lacks_are_named_and_refused_when_none_is_left(run, tapped, tmp_path, caplog):
    def without(*names):
        def edit(model):
            kept = [value for value in model.graph.output if value.name not in names]
            del model.graph.output[:]
            model.graph.output.extend(kept)

        return edited(tapped, tmp_path, edit)

    code, record = run(TINY, without("fpn_feat_0", "fpn_feat_2"), "--taps")
    assert code == 0 and set(record["outputs"]) == {*contract.OUTPUTS, "fpn_feat_1"}
    assert "faulty.onnx has no fpn_feat_0, fpn_feat_2" in caplog.text
    with pytest.raises(UsageError, match=r"--taps: .*faulty.onnx has no fpn_feat_0.*sam3_export_onnx.py --taps"):
        run(TINY, without(*contract.TAPS), "--taps")
    assert run(TINY, tmp_path / "faulty.onnx")[0] == 0


def test_models_of_different_sizes_are_refused_with_both():
    first, second = (
        SimpleNamespace(shapes=contract.ModelShapes(224, queries, 64, None), taps=()) for queries in (16, 200)
    )
    with pytest.raises(UsageError, match=r"a.onnx has \(224, 16, 64\), b.om has \(224, 200, 64\)"):
        compare.check_same_shapes(
            {"reference": first, "candidate": second}, {"reference": "a.onnx", "candidate": "b.om"}
        )


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("--report", "figures.txt"), "--report figures.txt: .* ends in .json"),
        (("--images", "{image}"), "--images and --phrases belong together"),
        (("--phrases", "star"), "--images and --phrases belong together"),
        (("--images", "gone.jpg", "--phrases", "star"), "--images: gone.jpg: no such file"),
        (("--images", "gone.jpg", "lost.jpg", "--phrases", "star"), "gone.jpg: no such file; lost.jpg: no such file"),
        (("--images", "{image}", "--phrases", " "), "is empty"),
        (("--images", "{image}", "--phrases", "star " * 40), "tokens, the model takes 32"),
        (("--reference", "{onnx}"), "--processor_path: name the folder of the processor and tokenizer files"),
        (("--images", "{folder}", "--phrases", "star"), "a folder; give its pictures, such as"),
        (("--candidate", "gone.onnx"), "--candidate: nothing matches gone.onnx"),
        (("--candidate", "{om}", "--batch_size", "2"), "compiled for batches of 4"),
        (("--dtype", "float16"), "only a checkpoint folder"),
        (("--device", "0"), "--device 0: .*cpu"),
        (("--reference_device", "npu:0"), "--device npu:0"),
    ],
)
def test_misuse_is_refused_before_anything_is_computed(tmp_path, tapped, images, capsys, arguments, text):
    make_om(tapped, tmp_path / "sam3.om", 4)
    names = {"image": images[0], "onnx": tapped, "om": tmp_path / "sam3.om", "folder": tmp_path}
    arguments = [argument.format(**names) for argument in arguments]
    defaults = ["--reference", str(TINY), "--candidate", str(tapped)]
    if "--images" not in arguments and "--phrases" not in arguments:
        defaults += ["--images", str(images[0]), "--phrases", "star"]
    with pytest.raises(UsageError, match=text) as refused:
        sam3_compare.main([*defaults, *arguments])
    assert "\n" not in str(refused.value)


def test_misuse_ends_the_script_with_2_and_one_line(tmp_path):
    result = run_script("sam3_compare.py", "--reference", TINY, "--candidate", TINY, "--images", "x.jpg")
    assert "belong together" in error_line(result)
    assert run_script("sam3_compare.py", "--reference", TINY).returncode == 2


def test_the_page_on_precision_has_flags_that_exist_and_the_limits_of_the_script():
    text = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 130
    for command in re.findall(r"^python3 (?:\$kit/)?sam3_\w+\.py.*?[^\\]$", text, re.MULTILINE | re.DOTALL):
        script, *flags = re.findall(r"sam3_\w+\.py|--\w+", command)
        usage = run_script(script, "--help").stdout
        assert flags and all(re.search(rf"{flag}\b", usage) for flag in flags), command
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = {re.split(r",| \(| of a", row[0])[0]: row[1].split()[0] for row in cells}
    known = limits()
    for row, limit in (
        ("cosine", known["min_cosine"]),
        ("relative difference", known["max_relative_difference"]),
        ("level difference", known["max_level_difference"]),
        ("mask IoU", known["min_mask_iou"]),
        ("mask shift", known["max_mask_shift"]),
        ("box IoU", known["min_box_iou"]),
        ("Mean IoU of the two", known["min_mean_iou"]),
        ("changed detections", known["max_changed_detections"]),
        ("slots", differences.SLOT_BOUND),
    ):
        assert float(rows[row]) == limit, row
