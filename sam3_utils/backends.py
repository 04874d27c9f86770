# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch, ONNX Runtime and OM behind one interface: `open_model(path, device)`, then `infer(feeds)`.

Every backend has `shapes` (`contract.ModelShapes`), `runtime` ("torch", "onnx", "openvino" or "om"), `device` (as it is
in use), `precision`, `taps` (which of `contract.TAPS` it offers), `batch_size` (what it computes at once where nobody
asks for another: what an OM was compiled for, otherwise 1), `infer(feeds, taps=())` and `close()`. Feeds and results
are numpy arrays by the contract's names; results are float32 whatever the runtime computes in. Taps come back beside
the outputs, and only those that are asked for.

`exemplars` says how many boxes a list of `contract.BOXES`, the two optional feeds, may hold, `clicks` how many points a
prompt of `click`; None: any number.

For one picture and many questions there is a second way, in steps: `encode_picture` once, then `find` for phrases, and
`encode_clicks` once before `click`. What the first and third return belongs to the caller, who may keep it for as many
pictures as there is memory for. Their answers are those of `infer`.
"""

import json
import logging
from collections import OrderedDict
from pathlib import Path

import numpy as np

from sam3_utils import checkpoint, clicks, contract, files, graph
from sam3_utils.cli import CheckFailed, UsageError
from sam3_utils.sessions import OmSession, OnnxSession, OpenVinoSession, fastest_cpu, split_device
from sam3_utils.stages import stage

logger = logging.getLogger(__name__)
# {"vision": file name, "text": ..., "detector": ...}, and more where boxes or clicks are known; makes its folder a
# split model. Where several models lie in one folder, as OMs of several batch sizes do, the manifest has another name
# and is itself what `path` names.
SPLIT_MANIFEST = "split.json"
TEXT_CACHE = 4096  # phrases, 32 KB each for facebook/sam3


def open_model(path: Path, device: str | None = None, dtype: str = "float32", image_size: int | None = None):
    """Open a model; what `path` is decides the runtime.

    Args:
        path: a checkpoint folder (PyTorch), an `.onnx` file (ONNX Runtime), an `.om` file (ais_bench), or a split
            model, several files of one of the last two kinds: the folder of a `split.json`, or another `.json` like it.
        device: NPU id for an OM (default "0"); `cpu` (default), `cuda:0`, `npu:0` for a checkpoint; `cpu`, `cuda:0`,
            `trt:0`, `cann:0`, `openvino` for ONNX, `auto` for the fastest way on the CPU.
        dtype: computing type of a checkpoint, "float32", "bfloat16" or "float16", or of `openvino`, one of the first
            two; the other files carry theirs, and `auto` chooses.
        image_size: side of the pictures for a checkpoint, None for its own; the other files have theirs fixed.

    Raises:
        UsageError: the path is none of these, the device does not exist or does not fit, or the model is not SAM3.
    """
    split = is_split(path)
    if path.is_dir() and not split:
        if (path / "sam3.onnx").is_file() and not (path / "config.json").exists():
            raise UsageError(f"{path}: a folder of an exported model; name its file, {path / 'sam3.onnx'}")
        if (path / "sam3_vision.onnx").is_file():
            raise UsageError(f"{path}: a split export that was not finished, without {SPLIT_MANIFEST}; export it again")
        return TorchModel(path, "cpu" if device is None else device, dtype, image_size)
    graphs = split_parts(path).values() if split else [path]
    if device == "auto" and all(file.suffix == ".onnx" for file in graphs):
        if dtype != "float32":
            raise UsageError(f"--dtype {dtype}: --device auto chooses the type itself; leave --dtype out")
        device, dtype = fastest_cpu()
    if dtype != "float32" and (device, dtype) != ("openvino", "bfloat16"):
        raise UsageError(
            f"--dtype {dtype}: only a checkpoint folder can be computed in another type (and an .onnx in bfloat16 by "
            f"--device openvino), not {path}"
        )
    model = (SplitModel if split else GraphModel)(path, device, dtype)
    if image_size not in (None, model.shapes.image_size):
        model.close()
        raise UsageError(
            f"--image_size {image_size}: {path} is made for {model.shapes.image_size}; export it for another size with "
            "sam3_export_onnx.py --image_size"
        )
    return model


def open_session(path: Path, device: str | None, dtype: str):
    """The session of one file; `dtype` is for OpenVINO.

    Raises:
        UsageError: it is neither ONNX nor OM, or cannot be opened.
    """
    if path.suffix == ".onnx" and device == "openvino":
        return OpenVinoSession(path, dtype)
    if path.suffix == ".onnx":
        return OnnxSession(path, "cpu" if device is None else device)
    if path.suffix == ".om":
        return OmSession(path, "0" if device is None else device)
    raise UsageError(f"{path}: not a checkpoint folder, a split folder, an .onnx or an .om file")


def is_split(path: Path) -> bool:
    """Is this a split model: the folder of a `split.json`, or a file like that?"""
    return (path / SPLIT_MANIFEST).is_file() or (path.suffix == ".json" and path.is_file())


def is_om(path: Path) -> bool:
    """Does this model run on an NPU id: an OM, or a split model of OMs?"""
    return (split_parts(path)["vision"] if is_split(path) else path).suffix == ".om"


def split_parts(path: Path) -> dict[str, Path]:
    """part -> file of a split model.

    Raises:
        UsageError: the manifest cannot be read, or a part is missing.
    """
    manifest = path / SPLIT_MANIFEST if path.is_dir() else path
    try:
        names = json.loads(manifest.read_text(encoding="utf-8"))
        wanted = (*contract.SPLIT, *(part for part in contract.OPTIONAL if part in names))
        parts = {part: manifest.parent / Path(names[part]).name for part in wanted}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{manifest}: not a split model's manifest ({error}); export or convert it again") from None
    missing = [path.name for path in parts.values() if not path.is_file()]
    if missing:
        raise UsageError(f"{manifest}: {', '.join(missing)} is missing beside it; export or convert it again")
    return parts


class NotFinite(CheckFailed):
    """An output holds NaN or infinity."""


def _finite(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs as float32, refused when one holds NaN or infinity: they would pass as "nothing found"."""
    for name, array in outputs.items():
        outputs[name] = array = np.asarray(array, dtype=np.float32)
        if not (np.isfinite(array.min()) and np.isfinite(array.max())):
            bad = array.size - int(np.isfinite(array).sum())
            raise NotFinite(f"the model gave {bad} non-finite values of {array.size} in {name}; check its precision")
    return outputs


class TorchModel:
    """A checkpoint folder through PyTorch: the reference of every comparison.

    Pictures are encoded one by one, and one that follows itself, also from one call to the next, only once.
    """

    runtime, taps, exemplars, batch_size = "torch", contract.TAPS, None, 1

    def __init__(self, path: Path, device: str, dtype: str, image_size: int | None = None):
        import torch

        kind, index = split_device(device, ("cpu", "cuda", "npu"), path)
        if kind == "npu":
            try:
                import torch_npu  # noqa: F401  registers the device with torch
            except Exception as error:  # a missing CANN library shows as OSError or RuntimeError, not ImportError
                raise UsageError(f"--device {device}: torch_npu cannot be used here ({error})") from None
        module = getattr(torch, kind)
        if kind != "cpu" and not (module.is_available() and index < module.device_count()):
            count = module.device_count() if module.is_available() else 0
            raise UsageError(f"--device {device}: PyTorch sees {count} {kind} devices here; use cpu or another index")
        if kind == "cuda":  # TF32 would make the reference differ with the batch size
            torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "ieee"
        self.device, self.precision = device, dtype
        self._device = torch.device(kind if kind == "cpu" else f"{kind}:{index}")
        self._path, self._model = path, checkpoint.load_model(path, dtype, image_size).to(self._device)
        self.shapes = checkpoint.model_shapes(self._model.config)
        self.clicks, self._tracker = None if checkpoint.has_clicks(path) else 0, None
        self._picture = self._features = None

    def encode_picture(self, pixel_values: np.ndarray) -> dict:
        """`contract.TAPS` and `contract.BACKBONE`, on the device, of one picture, 3 x S x S; the last one is kept."""
        import torch

        if self._picture is None or not np.array_equal(pixel_values, self._picture):
            self._picture = self._features = None
            tensor = torch.from_numpy(np.ascontiguousarray(pixel_values[None])).to(self._device, self._model.dtype)
            with torch.inference_mode(), stage("vision"):
                vision = self._model.vision_encoder(tensor)
            self._features = dict(zip(contract.TAPS, vision.fpn_hidden_states))
            side = vision.fpn_hidden_states[2].shape[-1]
            self._features["backbone_features"] = vision.last_hidden_state.transpose(1, 2).unflatten(2, (side, side))
            self._picture = pixel_values.copy()
        return self._features

    def infer(self, feeds: dict[str, np.ndarray], taps: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Run one batch; see the module's docstring."""
        contract.check_feeds(feeds, contract.single_inputs(self.shapes))
        rows = []
        for picture in feeds["pixel_values"]:
            features = self.encode_picture(picture)
            rows.append([features[name] for name in contract.TAPS])
        return self._detect(rows, feeds, taps)

    def find(self, features: dict, prompts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The contract's outputs of n phrases on one picture.

        Args:
            features: from `encode_picture`.
            prompts: the contract's inputs but `pixel_values`, n rows.
        """
        row = [features[name] for name in contract.TAPS]
        return self._detect([row] * len(prompts["input_ids"]), prompts, ())

    def _detect(self, levels: list, prompts: dict[str, np.ndarray], taps: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Rows without a box are run as transformers runs those that come without a list of boxes: an empty list would
        count for it, as a token of its own."""
        contract.check_boxes(prompts, len(levels), self.exemplars, str(self._path))
        labels = prompts.get("input_boxes_labels", np.empty((len(levels), 0)))
        boxed = (labels != contract.NO_BOX).any(axis=1)
        results: dict[str, np.ndarray] = {}
        words = ("input_ids", "attention_mask")
        for rows, names in ((~boxed, words), (boxed, (*words, *contract.BOXES))):
            if rows.any():
                chosen = [row for row, wanted in zip(levels, rows) if wanted]
                for name, array in self._answer(chosen, {name: prompts[name][rows] for name in names}, taps).items():
                    results.setdefault(name, np.empty((len(rows), *array.shape[1:]), np.float32))[rows] = array
        return results

    def _answer(self, levels: list, prompts: dict[str, np.ndarray], taps: tuple[str, ...]) -> dict[str, np.ndarray]:
        import torch
        from transformers.models.sam3.modeling_sam3 import Sam3VisionEncoderOutput

        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
                   for name, array in prompts.items()}  # fmt: skip
        if "input_boxes" in tensors:
            tensors["input_boxes"] = tensors["input_boxes"].to(self._model.dtype)
        with torch.inference_mode(), stage("text and detector"):
            maps = [torch.cat(level) for level in zip(*levels, strict=True)]
            encoding = self._model.vision_encoder.neck.position_encoding
            places = [encoding(level.shape, level.device, level.dtype) for level in maps]
            # transformers leaves the coarsest level out, which is not kept here.
            vision = Sam3VisionEncoderOutput(fpn_hidden_states=(*maps, None), fpn_position_encoding=(*places, None))
            outputs = self._model(vision_embeds=vision, **tensors)
        results = {name: outputs[name] for name in contract.OUTPUTS}
        results |= {name: maps[contract.TAPS.index(name)] for name in taps}
        return _finite({name: tensor.float().cpu().numpy() for name, tensor in results.items()})

    def encode_clicks(self, features: dict) -> dict:
        """`contract.CLICK_FEATURES` of a picture from `encode_picture`, on the device."""
        import torch

        _check_clicks(self, 1)
        if self._tracker is None:
            self._tracker = checkpoint.load_tracker(self._path, self._model)
        with torch.inference_mode(), stage("click_neck"):
            decoder = self._tracker.mask_decoder
            (fine, middle, coarse, _), _ = self._tracker.vision_encoder.neck(features["backbone_features"])
            return dict(zip(contract.CLICK_FEATURES, (decoder.conv_s0(fine), decoder.conv_s1(middle), coarse)))

    def click(
        self,
        features: dict,
        points: np.ndarray,
        labels: np.ndarray,
        masks: np.ndarray | None = None,
        multimask: bool = False,
    ) -> dict[str, np.ndarray]:
        """See `SplitModel.click`."""
        import torch

        _check_clicks(self, points.shape[1])
        levels = [features[name] for name in contract.CLICK_FEATURES]
        dtype, answers = self._tracker.dtype, []
        for row, (places, kinds) in enumerate(zip(points, labels)):
            corners = [places[kinds == kind] for kind in (contract.TOP_LEFT, contract.BOTTOM_RIGHT)]
            clicked = np.isin(kinds, (0, 1))
            box = points_given = kinds_given = None
            if len(corners[0]):
                box = torch.from_numpy(np.concatenate(corners, axis=1)[None]).to(self._device, dtype)
            if clicked.any():
                points_given = torch.from_numpy(places[clicked][None, None]).to(self._device, dtype)
                kinds_given = torch.from_numpy(kinds[clicked][None, None]).to(self._device)
            earlier = None if masks is None else torch.from_numpy(masks[row : row + 1]).to(self._device, dtype)
            with torch.inference_mode(), stage("click"):
                outputs = self._tracker(
                    image_embeddings=levels, input_points=points_given, input_labels=kinds_given, input_boxes=box,
                    input_masks=earlier, multimask_output=multimask,
                )  # fmt: skip
            answers.append([outputs[name][0].float().cpu().numpy() for name in contract.CLICK_OUTPUTS])
        return _finite(dict(zip(contract.CLICK_OUTPUTS, map(np.concatenate, zip(*answers, strict=True)))))

    def close(self) -> None:
        """Free the model's memory."""
        self._model = self._tracker = self._picture = self._features = None


def _check_clicks(model, points: int) -> None:
    """Raises UsageError unless the model takes clicks, and as many points."""
    if model.clicks is not None and points > model.clicks:
        where = model._path
        if model.runtime == "torch":
            raise UsageError(f"{where}: holds no click branch (no tracker_neck. in its weights)")
        remedy = f"export it with --layout split --clicks {points}"
        raise UsageError(f"{where}: takes {model.clicks or 'no'} points in a prompt, not {points}; {remedy}")


def _shapes(sizes: dict, batch: int | None) -> contract.ModelShapes:
    return contract.ModelShapes(sizes["S"], sizes["Q"], sizes["M"], batch)


class GraphModel:
    """The single graph on one runtime."""

    exemplars = clicks = 0

    def __init__(self, path: Path, device: str | None, dtype: str = "float32"):
        self._path, self._session = path, open_session(path, device, dtype)
        session = self._session
        try:
            sizes = contract.check_io(session.inputs, session.outputs, str(path))
        except UsageError:
            self.close()
            raise
        self.shapes = _shapes(sizes, sizes["N"])
        self.batch_size = sizes["N"] or 1
        self.runtime, self.device, self.precision = session.runtime, session.device, session.precision
        self.taps = tuple(name for name in contract.TAPS if name in session.outputs)

    def infer(self, feeds: dict[str, np.ndarray], taps: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Run one batch; see the module's docstring."""
        contract.check_feeds(feeds, self._session.inputs)
        contract.check_boxes(feeds, len(feeds["input_ids"]), self.exemplars, str(self._path))
        with stage("model"):
            return _finite(self._session.run(feeds, [*contract.OUTPUTS, *taps]))

    def encode_picture(self, pixel_values: np.ndarray) -> dict[str, np.ndarray]:
        """Nothing is kept apart from the picture itself: the graph is one."""
        return {"pixel_values": pixel_values[None]}

    def find(self, features: dict, prompts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `SplitModel.find`."""
        count, size, found = len(prompts["input_ids"]), self.batch_size, []
        for start in range(0, count, size):
            rows = np.arange(start, start + size).clip(max=count - 1)
            feeds = {name: array[rows] for name, array in prompts.items()}
            feeds["pixel_values"] = np.repeat(features["pixel_values"], size, axis=0)
            found.append({name: array[: count - start] for name, array in self.infer(feeds).items()})
        return {name: np.concatenate([part[name] for part in found]) for name in contract.OUTPUTS}

    def encode_clicks(self, features: dict) -> dict:
        """Raises UsageError: clicks need a split model."""
        _check_clicks(self, 1)

    def compute_times(self) -> list[float]:
        """See `OmSession.compute_times`."""
        return self._session.compute_times()

    def close(self) -> None:
        """Free the model's memory, or its place on the device."""
        self._session.close()


class SplitModel:
    """The split layout: a picture is encoded once, a phrase is encoded once, their pairs are detected.

    `infer` takes the same feeds as the single graph and finds out itself which rows show the same picture: rows of one
    picture that follow each other, also from one call to the next, cost one encoding. Pictures, phrases and lists of
    boxes are encoded one by one, so that their features do not depend on what else is in the batch.
    """

    taps = contract.TAPS

    def __init__(self, path: Path, device: str | None, dtype: str = "float32"):
        self._path, self._sessions = path, {}
        self._picture, self._levels = None, {}
        self._texts: OrderedDict[bytes, np.ndarray] = OrderedDict()
        sizes: dict[str, int | None] = {}
        try:
            for part, file in split_parts(path).items():
                self._sessions[part] = session = open_session(file, device, dtype)
                found = contract.check_io(session.inputs, session.outputs, str(file), part)
                self._check_batches(file, part, found)
                other = [
                    letter for letter in found.keys() & sizes.keys() - {"N", "P"} if found[letter] != sizes[letter]
                ]
                if other:
                    raise UsageError(f"{path}: its parts belong to different models, {file.name} differs in {other[0]}")
                sizes |= found
            if ("exemplar" in self._sessions) != ("exemplar_mask" in self._sessions["detector"].inputs):
                raise UsageError(f"{path}: only one of detector and exemplar knows boxes; export or convert it again")
            clicking = [part in self._sessions for part in contract.CLICKS]
            if any(clicking) and not (all(clicking) and "backbone_features" in self._sessions["vision"].outputs):
                raise UsageError(f"{path}: only a part of its files knows clicks; export or convert it again")
        except UsageError:
            self.close()
            raise
        detector = self._sessions["detector"].inputs
        self._rows, self._pictures = (detector[name][1][0] for name in ("text_features", "fpn_feat_0"))
        # What a detector that knows boxes gets without any: tokens that do not count.
        self._no_exemplars = {
            name: np.zeros((1, *detector[name][1][1:]), np.float32) for name in contract.EXEMPLARS if name in detector
        }
        self.exemplars, self.clicks = sizes.get("K", 0), sizes.get("L", 0)
        self._kept = [*contract.TAPS, *(contract.BACKBONE if self.clicks else ())]
        self.shapes = _shapes(sizes, None)
        self.batch_size = self._rows or 1
        first = self._sessions["vision"]
        self.runtime, self.device = first.runtime, first.device
        words = (word for session in self._sessions.values() for word in session.precision.split(", "))
        self.precision = ", ".join(dict.fromkeys(words))

    @staticmethod
    def _check_batches(path: Path, part: str, sizes: dict) -> None:
        batch = sizes["N" if part in ("text", "click") else "P"]
        if part != "detector" and batch not in (None, 1):
            raise UsageError(f"{path}: compiled for batches of {batch}; compile {part} for a batch of 1")
        if part == "detector" and sizes["P"] not in (None, 1, sizes["N"]):
            raise UsageError(f"{path}: takes {sizes['P']} pictures with {sizes['N']} phrases; compile it again")

    def _run(self, part: str, feeds: dict[str, np.ndarray], names) -> dict[str, np.ndarray]:
        contract.check_feeds(feeds, self._sessions[part].inputs)
        with stage(part):
            return _finite(self._sessions[part].run(feeds, list(names)))

    def encode_picture(self, pixel_values: np.ndarray) -> dict[str, np.ndarray]:
        """`contract.TAPS`, and `contract.BACKBONE` where clicks are known, of one picture, 3 x S x S; the last one is
        kept."""
        if self._picture is None or not np.array_equal(pixel_values, self._picture):
            # Forgotten first: two pictures' features need not be in memory at once.
            self._picture, self._levels = None, {}
            self._levels = self._run("vision", {"pixel_values": pixel_values[None]}, self._kept)
            self._picture = pixel_values.copy()
        return self._levels

    def encode_phrase(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Text features, 1 x 32 x C, of one phrase's tokens, 32 each; the last `TEXT_CACHE` phrases are kept."""
        key = input_ids.tobytes() + attention_mask.tobytes()
        if key not in self._texts:
            feeds = {"input_ids": input_ids[None], "attention_mask": attention_mask[None]}
            self._texts[key] = self._run("text", feeds, ["text_features"])["text_features"]
            if len(self._texts) > TEXT_CACHE:
                self._texts.popitem(last=False)
        self._texts.move_to_end(key)
        return self._texts[key]

    def encode_boxes(self, levels: dict[str, np.ndarray], boxes: np.ndarray, labels: np.ndarray) -> dict:
        """`contract.EXEMPLARS` of one list, at most `exemplars` x 4 boxes and their labels, in one picture."""
        room = self.exemplars - len(labels)
        feeds = {
            "fpn_feat_2": levels["fpn_feat_2"],
            "input_boxes": np.pad(np.where(labels[:, None] == contract.NO_BOX, 0, boxes), ((0, room), (0, 0)))[None],
            "input_boxes_labels": np.pad(labels, (0, room), constant_values=contract.NO_BOX)[None],
        }
        return self._run("exemplar", feeds, contract.EXEMPLARS)

    def detect(
        self,
        levels: dict[str, np.ndarray],
        text_features: np.ndarray,
        attention_mask: np.ndarray,
        boxes: np.ndarray | None = None,
        labels: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """The contract's outputs of n phrases, n x 32 x C and n x 32, on one picture.

        Args:
            boxes, labels: `contract.BOXES`, a list for each phrase, which `contract.check_boxes` has let pass, or
                neither. Equal lists are encoded once.
        """
        count = len(text_features)
        lists = [self._no_exemplars] * count
        if boxes is not None:
            keys = [pair[0].tobytes() + pair[1].tobytes() for pair in zip(boxes, labels)]
            different = dict(zip(keys, zip(boxes, labels)))
            encoded = {key: self.encode_boxes(levels, *pair) for key, pair in different.items()}
            lists = [encoded[key] for key in keys]
        found: dict[str, list] = {name: [] for name in contract.OUTPUTS}
        for start in range(0, count, self._rows or count):
            rows = np.arange(start, start + (self._rows or count)).clip(max=count - 1)  # a short last batch is padded
            feeds = {"text_features": text_features[rows], "attention_mask": attention_mask[rows]}
            copies = self._pictures or 1
            feeds |= {name: np.repeat(levels[name], copies, axis=0) for name in contract.TAPS}
            feeds |= {name: np.concatenate([lists[row][name] for row in rows]) for name in self._no_exemplars}
            for name, array in self._run("detector", feeds, contract.OUTPUTS).items():
                found[name].append(array[: count - start])
        return {name: np.concatenate(arrays) for name, arrays in found.items()}

    def find(self, features: dict, prompts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The contract's outputs of n phrases on one picture.

        Args:
            features: from `encode_picture`.
            prompts: the contract's inputs but `pixel_values`, n rows.
        """
        ids, masks = prompts["input_ids"], prompts["attention_mask"]
        contract.check_boxes(prompts, len(ids), self.exemplars, str(self._path))
        texts = np.concatenate([self.encode_phrase(*pair) for pair in zip(ids, masks)])
        return self.detect(features, texts, masks, *(prompts[name] for name in contract.BOXES if name in prompts))

    def encode_clicks(self, features: dict) -> dict[str, np.ndarray]:
        """`contract.CLICK_FEATURES` of a picture from `encode_picture`."""
        _check_clicks(self, 1)
        feeds = {name: features[name] for name in contract.BACKBONE}
        return self._run("click_neck", feeds, contract.CLICK_FEATURES)

    def click(
        self,
        features: dict,
        points: np.ndarray,
        labels: np.ndarray,
        masks: np.ndarray | None = None,
        multimask: bool = False,
    ) -> dict[str, np.ndarray]:
        """Answer N prompts on one picture, one by one.

        Args:
            features: from `encode_clicks`.
            points: (N, n, 2) float32 x, y in pixels of the S x S picture. labels: (N, n) int64, see `contract`.
            masks: (N, 1, A, A) float32 logits of earlier answers, or None.
            multimask: three masks a prompt, otherwise one, see `clicks.choose`.

        Returns:
            pred_masks (N, K, A, A) logits, iou_scores (N, K), object_score_logits (N, 1).

        Raises:
            UsageError: the model takes no clicks, or fewer points.
        """
        _check_clicks(self, points.shape[1])
        room = self.clicks - points.shape[1]
        shape = self._sessions["click"].inputs["input_masks"][1][1:]
        answers = []
        for row in range(len(points)):
            feeds = {name: features[name] for name in contract.CLICK_FEATURES} | {
                "input_points": np.pad(points[row], ((0, room), (0, 0)))[None],
                "input_labels": np.pad(labels[row], (0, room), constant_values=contract.NO_POINT)[None],
                "input_masks": np.zeros((1, *shape), np.float32) if masks is None else masks[row : row + 1],
                "has_input_masks": np.full((1, 1), masks is not None, np.float32),
            }
            answers.append(self._run("click", feeds, contract.CLICK_OUTPUTS))
        answers = {name: np.concatenate([answer[name] for answer in answers]) for name in contract.CLICK_OUTPUTS}
        return clicks.choose(answers, multimask)

    def infer(self, feeds: dict[str, np.ndarray], taps: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Run any number of rows; see the module's docstring."""
        contract.check_feeds(feeds, contract.single_inputs(self.shapes))
        pictures, prompts = feeds["pixel_values"], {name: feeds[name] for name in feeds if name != "pixel_values"}
        count, parts = len(pictures), []
        contract.check_boxes(feeds, count, self.exemplars, str(self._path))  # with the rows' numbers in the batch
        starts = [row for row in range(count) if not row or not np.array_equal(pictures[row], pictures[row - 1])]
        for start, end in zip(starts, [*starts[1:], count]):
            levels = self.encode_picture(pictures[start])
            outputs = self.find(levels, {name: array[start:end] for name, array in prompts.items()})
            parts.append(outputs | {name: np.repeat(levels[name], end - start, axis=0) for name in taps})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def compute_times(self) -> dict[str, list[float]]:
        """part -> see `OmSession.compute_times`."""
        return {part: session.compute_times() for part, session in self._sessions.items()}

    def close(self) -> None:
        """Free the models' memory, or their places on the device."""
        for session in self._sessions.values():
            session.close()


def model_files(path: Path) -> list[Path]:
    """The files whose bytes decide a model's answers, for hashing."""
    if is_split(path):
        return [file for part in split_parts(path).values() for file in model_files(part)]
    if path.is_dir():
        return [path / "config.json", path / checkpoint.WEIGHTS]
    if path.suffix == ".onnx":
        return [path, *graph.check_external_files(graph.load_structure(path), path)]
    return [path]


def describe_model(path: Path, runtime: str, precision: str) -> dict:
    """What a result says of the model it came from: name, runtime, precision and hashes."""
    return {
        "name": path.resolve().name,
        "runtime": runtime,
        "precision": precision,
        "sha256": {file.name: files.sha256(file) for file in model_files(path)},
    }


def fit_processor(processor, model, processor_path: Path, model_path: Path) -> None:
    """Make the processor's pictures as large as the model takes them, where that is another size of the same SAM3.

    Raises:
        UsageError: the sizes differ, and the folder's config.json does not say that SAM3 takes such pictures.
    """
    size, side = dict(processor.image_processor.size), model.shapes.image_size
    if (size.get("height"), size.get("width")) == (side, side):
        return
    made = " x ".join(str(value) for value in size.values() if value)
    try:
        unit = checkpoint.size_unit(json.loads((processor_path / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        unit = None
    if unit is None or side % unit:
        raise UsageError(
            f"{processor_path}: makes pictures of {made}, {model_path} takes {side} x {side}; "
            "they belong to different models"
        )
    processor.image_processor.size = type(processor.image_processor.size)(height=side, width=side)
    logger.warning("%s takes pictures of %d x %d; %s made them %s", model_path, side, side, processor_path, made)
