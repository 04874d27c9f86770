# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Box exemplars of the split layout against transformers' own Sam3Model and torchvision's roi_align."""

import json
import shutil

import numpy as np
import onnx
import pytest
import torch
import torchvision
from conftest import TINY, error_line, run_script
from make_om import make_om
from safetensors.torch import load_file, save_file
from test_graph import DYNAMIC

from sam3_utils import contract, graph, preflight, text_graph
from sam3_utils.backends import open_model
from sam3_utils.checkpoint import load_model
from sam3_utils.cli import CheckFailed, UsageError
from sam3_utils.compare import random_feeds
from sam3_utils.exemplar_model import ExemplarEncoder, RoiPooling

COUNT = 3
NO_BOX = contract.NO_BOX
GRID, BINS, CHANNELS = 72, 7, 256  # facebook/sam3's


def export(folder, *extra, model=TINY):
    return run_script(
        "sam3_export_onnx.py", "--target_device", "300I", "--model_path", model, "--output_dir", folder, *extra
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny checkpoint with noise on its encoder of boxes, whose biases are 0 and norms 1 otherwise."""
    folder = tmp_path_factory.mktemp("shaken") / "tiny_sam3"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    names = [name for name in weights if "geometry_encoder" in name]
    assert len(names) > 30
    for name in names:
        weights[name] += 0.1 * torch.randn(weights[name].shape, generator=noise)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    result = export(folder, "--layout", "split", "--exemplars", COUNT, model=checkpoint)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def split(folder):
    return open_model(folder)


@pytest.fixture(scope="module")
def feeds(processor):
    return random_feeds(processor, 224, 3)


def boxes_of(processor, lists, labels) -> dict[str, np.ndarray]:
    """The two feeds from xyxy boxes in pixels of 600 x 400 pictures, normalised and padded by Sam3Processor."""
    encoded = processor(
        original_sizes=[[400, 600]] * len(lists), input_boxes=lists, input_boxes_labels=labels, return_tensors="pt"
    )
    return {name: encoded[name].numpy() for name in contract.BOXES}


@pytest.fixture(scope="module")
def answers_of_transformers(checkpoint):
    """feeds -> the outputs of Sam3Model itself."""
    sam3 = load_model(checkpoint)

    def answer(feeds) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            outputs = sam3(**{name: torch.from_numpy(array) for name, array in feeds.items()})
        return {name: outputs[name].numpy() for name in contract.OUTPUTS}

    return answer


@pytest.fixture(scope="module")
def torch_model(checkpoint):
    return open_model(checkpoint)


def assert_close(found, expected, bound=1e-4):
    for name in contract.OUTPUTS:
        assert np.abs(found[name] - expected[name]).max() <= bound, name


LEFT, SMALL, WHOLE, CORNER = [30, 40, 250, 380], [400, 100, 412, 109], [0, 0, 600, 400], [590, 396, 600, 400]


@pytest.mark.parametrize(
    "lists, labels",
    [
        ([[LEFT]] * 3, [[1]] * 3),
        ([[LEFT, SMALL]] * 3, [[1, 1]] * 3),
        ([[WHOLE, LEFT]] * 3, [[1, 0]] * 3),
        ([[CORNER]] * 3, [[0]] * 3),
        ([[LEFT], [SMALL, WHOLE, CORNER], [CORNER, LEFT]], [[1], [0, 1, 1], [0, 0]]),
    ],
    ids=("one", "two", "positive and negative", "negative", "lists of different length"),
)
def test_answers_with_boxes_are_transformers_answers(
    answers_of_transformers, torch_model, split, processor, feeds, lists, labels
):
    boxes = boxes_of(processor, lists, labels)
    expected = answers_of_transformers(feeds | boxes)
    alone = split.infer(feeds)
    for model in (split, torch_model):
        found = model.infer(feeds | boxes)
        assert_close(found, expected)
        for row in range(3):  # each list matters in each row: the bound above is not kept by leaving it out
            assert np.abs(found["pred_masks"][row] - alone["pred_masks"][row]).max() > 0.1


def test_the_label_matters(split, feeds):
    boxes = np.full((3, 1, 4), 0.5, np.float32)
    shown, not_shown = (
        split.infer(feeds | {"input_boxes": boxes, "input_boxes_labels": np.full((3, 1), label)})["pred_masks"]
        for label in (1, 0)
    )
    assert np.abs(shown - not_shown).max() > 0.1


def test_without_a_box_the_phrase_alone_decides(answers_of_transformers, split, feeds):
    """No lists, lists of padding whatever stands in it, and lists of length 0 are the same, to the bit."""
    alone = split.infer(feeds)
    assert_close(alone, answers_of_transformers(feeds))
    for length, value in ((COUNT, NO_BOX), (1, np.nan), (0, 0.0)):
        padding = {
            "input_boxes": np.full((3, length, 4), value, np.float32),
            "input_boxes_labels": np.full((3, length), NO_BOX),
        }
        found = split.infer(feeds | padding)
        for name in contract.OUTPUTS:
            assert np.array_equal(found[name], alone[name]), (length, name)


def test_a_list_without_a_box_among_others_is_the_phrase_alone_and_padding_may_stand_anywhere(
    answers_of_transformers, torch_model, split, feeds
):
    boxes = np.random.default_rng(0).uniform(0.3, 0.5, (3, 3, 4)).astype(np.float32)
    labels = np.array([[1, 0, NO_BOX], [NO_BOX] * 3, [1, 1, 1]])
    behind = feeds | {"input_boxes": boxes, "input_boxes_labels": labels}
    between = feeds | {"input_boxes": boxes[:, [0, 2, 1]], "input_boxes_labels": labels[:, [0, 2, 1]]}
    alone = answers_of_transformers(feeds)
    given = answers_of_transformers(behind)
    expected = {name: np.stack([given[name][0], alone[name][1], given[name][2]]) for name in contract.OUTPUTS}
    # transformers itself gives the empty list of a batch a token that counts.
    assert np.abs(given["pred_masks"][1] - alone["pred_masks"][1]).max() > 0.1
    assert_close(split.infer(behind), expected)
    assert_close(split.infer(between), expected)
    assert_close(torch_model.infer(behind), expected)


def pooling_cases() -> torch.Tensor:
    """(1, boxes, 4) cxcywh: everywhere and of every size; whole picture; no size; less than a grid line at an edge; as
    wide as a multiple of the bins, where the number of samples changes."""
    rng = np.random.default_rng(0)
    size = rng.uniform(0, 1, (60, 2)) ** 2
    cases = [np.concatenate([size / 2 + rng.uniform(0, 1, (60, 2)) * (1 - size), size], axis=1)]
    cases.append(
        [[0.5, 0.5, 1, 1], [0.5, 0.5, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0.5, 1, 1, 0], [0.999, 0.001, 0.001, 0]]
    )
    cases.append([[0.25, 0.75, 0.5, 0.5], [0.95, 0.5, 0.1, 1], [0.5, 0.05, 1, 0.1]])
    for lines in range(BINS, GRID, BINS):
        start = rng.integers(0, GRID - lines + 1, 2)
        cases.append([[*((start + lines / 2) / GRID), lines / GRID, lines / GRID]])
    return torch.from_numpy(np.concatenate(cases))[None]


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_pooling_is_torchvision_s_roi_align_at_full_size(dtype, bound):
    torch.manual_seed(0)
    boxes = pooling_cases().to(dtype)
    count = boxes.shape[1]
    features = torch.randn(2, CHANNELS, GRID, GRID, dtype=dtype)
    projection = torch.nn.Conv2d(CHANNELS, CHANNELS, BINS).to(dtype)
    both = torch.cat([boxes, boxes.flip(1)])
    # As Sam3GeometryEncoder does it.
    centre, size = both.split(2, dim=-1)
    corners = torch.cat([centre - 0.5 * size, centre + 0.5 * size], dim=-1) * GRID
    with torch.no_grad():
        pooled = torchvision.ops.roi_align(features, list(corners), BINS)
        expected = projection(pooled).reshape(2, count, CHANNELS)
        module = RoiPooling(projection, count, GRID).to(dtype)
        found = module(features.flatten(2).transpose(1, 2), both)
    assert pooled.flatten(1).abs().amax(1).min() == 0 < pooled.abs().max()  # a box at the edge is partly beyond it
    assert (found - expected).abs().max() <= bound


def test_the_encoder_is_transformers_geometry_encoder_at_full_size():
    """facebook/sam3's sizes, random weights, lists of different length; tokens that count, in transformers' order."""
    from transformers import Sam3Config
    from transformers.models.sam3.modeling_sam3 import Sam3GeometryEncoder, Sam3SinePositionEmbedding

    torch.manual_seed(0)
    config = Sam3Config().geometry_encoder_config
    config._attn_implementation = "sdpa"
    source = Sam3GeometryEncoder(config).eval().requires_grad_(False)
    for parameter in source.parameters():
        parameter += 0.05 * torch.randn(parameter.shape)
    features = torch.randn(2, CHANNELS, GRID, GRID)
    position = Sam3SinePositionEmbedding(num_pos_feats=CHANNELS // 2, normalize=True)(
        features.shape, "cpu", torch.float32
    )
    boxes = pooling_cases().float()[0, :8].reshape(2, 4, 4)
    labels = torch.tensor([[1, 0, 1, 1], [0, 1, NO_BOX, NO_BOX]])
    with torch.no_grad():
        expected = source(boxes, labels != NO_BOX, labels.clamp(min=0), (features,), (position,)).last_hidden_state
        tokens = position.flatten(2).transpose(1, 2)
        found, mask = ExemplarEncoder(source, 4, GRID, tokens[:1])(features, boxes, labels)
    assert len(source.layers) == 3 and mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]
    assert (found[0] - expected[0]).abs().max() <= 1e-4
    assert (found[1, [0, 1, 4]] - expected[1, :3]).abs().max() <= 1e-4


@pytest.fixture(scope="module")
def full_width():
    """The parts at facebook/sam3's width with few layers, on the meta device; no weight exists."""
    from transformers import Sam3Config, Sam3Model

    config = Sam3Config()
    backbone = config.vision_config.backbone_config
    backbone.num_hidden_layers, backbone.global_attn_indexes = 1, []
    config.text_config.num_hidden_layers = 1
    config.detr_encoder_config.num_layers = config.detr_decoder_config.num_layers = 2
    with torch.device("meta"):
        sam3 = Sam3Model(config).eval()
    return text_graph.build(sam3, parts=(*contract.SPLIT, "exemplar"), exemplars=COUNT)[0]


@pytest.mark.parametrize("part", ("exemplar", "detector"))
def test_nothing_dynamic_wide_or_of_unknown_size_is_in_the_graphs_of_the_full_width(full_width, part):
    model = full_width[part]
    operators = {node.op_type for node in model.graph.node}
    assert not operators & (DYNAMIC | {"RoiAlign"}) and operators <= preflight.OPERATORS
    constants = {tensor.name for tensor in model.graph.initializer}
    at_2, at_5 = graph.infer_shapes(model, 2), graph.infer_shapes(model, 5)
    for name, (dtype, small) in at_2.items():
        if dtype == onnx.TensorProto.INT64:
            assert name in constants or name in contract.BOXES | contract.INPUTS, name
        large = at_5[name][1]
        assert None not in small and None not in large, name
        changed = [(a, b) for a, b in zip(small, large, strict=True) if a != b]
        assert len(changed) <= 1 and all(5 * a == 2 * b for a, b in changed), (name, small, large)
        assert len(small) <= preflight.MAX_RANK
    assert sum(node.op_type == "Cast" for node in model.graph.node) == 1  # of the labels; of the attention mask


def test_what_16_bits_would_ruin_in_the_exemplar_graph_is_kept_in_float32(full_width):
    kept = text_graph.sensitive_nodes(full_width["exemplar"], "300I")
    of_boxes = {
        node.name for node in full_width["exemplar"].graph.node if node.op_type in {"Ceil", "Sign", "Sin", "Cos", "Abs"}
    }
    assert len(of_boxes) == 5 and of_boxes <= set(kept)
    assert all(
        name.startswith(("exemplar_encoder/pooling/weights/", "exemplar_encoder/box_embedding/waves/")) for name in kept
    )


def test_the_exported_parts_pass_the_preflight_and_are_listed(folder):
    parts = (*contract.SPLIT, "exemplar")
    assert json.loads((folder / "split.json").read_text()) == {part: f"sam3_{part}.onnx" for part in parts}
    for part in parts:
        model = preflight.check_model(folder / f"sam3_{part}.onnx", part)
        onnx.checker.check_model(str(folder / f"sam3_{part}.onnx"), full_check=True)
        inputs = [value.name for value in model.graph.input]
        wanted = contract.PARTS[part][0] | (contract.EXEMPLARS if part == "detector" else {})
        assert inputs == list(wanted)
    assert json.loads((folder / "export_report.json").read_text())["exemplars"] == COUNT


def test_an_exemplar_graph_with_other_numbers_fails_the_verification(tmp_path, checkpoint, folder):
    import sam3_export_onnx

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    model = onnx.load(tmp_path / "sam3_exemplar.onnx")
    tensor = next(entry for entry in model.graph.initializer if entry.name.endswith("final_proj.weight"))
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * 1.1, tensor.name))
    onnx.save(model, tmp_path / "sam3_exemplar.onnx")
    with pytest.raises(CheckFailed, match="differs from PyTorch"):
        sam3_export_onnx.verify(checkpoint, tmp_path, 1e-4)


def test_an_om_of_fixed_batches_answers_alike(tmp_path, folder, split, feeds):
    for part in json.loads((folder / "split.json").read_text()):
        make_om(folder / f"sam3_{part}.onnx", tmp_path / f"sam3_{part}.om", 2 if part == "detector" else 1)
    names = {part: f"sam3_{part}.om" for part in (*contract.SPLIT, "exemplar")}
    (tmp_path / "split.json").write_text(json.dumps(names))
    boxes = np.random.default_rng(0).uniform(0.3, 0.5, (3, 2, 4)).astype(np.float32)
    given = feeds | {"input_boxes": boxes, "input_boxes_labels": np.array([[1, 0], [NO_BOX] * 2, [0, NO_BOX]])}
    model = open_model(tmp_path)
    assert model.exemplars == COUNT
    assert_close(model.infer(given), split.infer(given), 5e-5)
    make_om(folder / "sam3_exemplar.onnx", tmp_path / "sam3_exemplar.om", 2)
    with pytest.raises(UsageError, match="compile exemplar for a batch of 1"):
        open_model(tmp_path)


def test_equal_lists_on_one_picture_are_encoded_once(split, feeds, monkeypatch):
    runs = []
    run = split._sessions["exemplar"].run
    monkeypatch.setattr(split._sessions["exemplar"], "run", lambda *args: runs.append(1) or run(*args))
    same = {name: np.repeat(array[:1], 3, axis=0) for name, array in feeds.items()}
    boxes = np.full((3, 1, 4), 0.5, np.float32)
    split.infer(same | {"input_boxes": boxes, "input_boxes_labels": np.array([[1], [1], [0]])})
    assert len(runs) == 2
    split.infer(same)
    assert len(runs) == 2


def test_a_model_that_takes_no_box_or_fewer_refuses_them(split, onnx_path, feeds):
    def given(length):
        return feeds | {
            "input_boxes": np.full((3, length, 4), 0.5, np.float32),
            "input_boxes_labels": np.ones((3, length), np.int64),
        }

    with pytest.raises(UsageError, match="takes no box exemplars, not 1; export .* --exemplars 1"):
        open_model(onnx_path).infer(given(1))
    with pytest.raises(UsageError, match=f"takes {COUNT} box exemplars, not 5; export .* --exemplars 5"):
        split.infer(given(5))


@pytest.mark.parametrize(
    "box, label, text",
    [
        ([0.5, 0.5, 1.1, 0.5], 1, r"box 1 of row 2, .* is not inside of the picture"),
        ([0.1, 0.5, 0.3, 0.5], 0, "is not inside of the picture"),
        ([0.5, 0.5, -0.1, 0.5], 1, "is not inside of the picture"),
        ([0.5, np.nan, 0.1, 0.5], 1, "is not inside of the picture"),
        ([NO_BOX, NO_BOX, 0, 0], 1, "is not inside of the picture"),
        ([0.5, 0.5, 0.1, 0.5], 2, "1, 0 and, for padding, -10 are known"),
    ],
)
def test_a_box_that_would_be_computed_wrongly_is_refused_in_one_line(split, torch_model, feeds, box, label, text):
    boxes, labels = np.full((3, 2, 4), 0.5, np.float32), np.ones((3, 2), np.int64)
    boxes[2, 1], labels[2, 1] = box, label
    for model in (split, torch_model):
        with pytest.raises(UsageError, match=text) as refused:
            model.infer(feeds | {"input_boxes": boxes, "input_boxes_labels": labels})
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"input_boxes": None}, "input_boxes_labels: .* belong together"),
        ({"input_boxes": np.zeros((3, 2, 4))}, "input_boxes: float64"),
        ({"input_boxes": np.zeros((3, 1, 4), np.float32)}, "input_boxes: "),
        ({"input_boxes_labels": np.ones((2, 2), np.int64)}, "input_boxes"),
    ],
)
def test_feeds_of_boxes_that_do_not_fit_are_stopped(split, feeds, change, text):
    given = {"input_boxes": np.full((3, 2, 4), 0.5, np.float32), "input_boxes_labels": np.ones((3, 2), np.int64)}
    given = {name: array for name, array in (given | change).items() if array is not None}
    with pytest.raises(ValueError, match=text):
        split.infer(feeds | given)


def test_a_split_model_whose_parts_disagree_about_boxes_is_refused(tmp_path, folder):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    names = json.loads((tmp_path / "split.json").read_text())
    (tmp_path / "split.json").write_text(json.dumps({part: names[part] for part in contract.SPLIT}))
    with pytest.raises(UsageError, match="only one of detector and exemplar knows boxes"):
        open_model(tmp_path)
    (tmp_path / "split.json").write_text(json.dumps(names))
    (tmp_path / "sam3_exemplar.onnx").unlink()
    with pytest.raises(UsageError, match="sam3_exemplar.onnx is missing"):
        open_model(tmp_path)


def test_the_flag_is_for_the_split_layout_and_positive_numbers(tmp_path):
    assert "give --layout split" in error_line(export(tmp_path / "out", "--exemplars", "2"))
    assert "positive" in error_line(export(tmp_path / "out", "--layout", "split", "--exemplars", "0"))
    assert not (tmp_path / "out").exists()


def test_an_export_without_the_flag_leaves_no_exemplar_graph_behind(tmp_path):
    for name in ("sam3_exemplar.onnx", "sam3_exemplar.onnx.data", "sam3_exemplar.keep_dtype.cfg"):
        (tmp_path / name).touch()
    result = export(tmp_path, "--layout", "split", "--verify", "never")
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.glob("*exemplar*"))
    assert open_model(tmp_path).exemplars == 0
