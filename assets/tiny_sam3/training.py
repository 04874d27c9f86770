# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""The training of the tiny SAM3: batches of drawn scenes, losses on every decoder layer, and the loop."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from recipe import GRID, WIDTH, build_model, build_processor, build_tokenizer, save_checkpoint
from scenes import COLOURS, MAX_OBJECTS, SHAPES, SIZES, choose_phrases, draw_scene
from scipy.optimize import linear_sum_assignment
from torch import nn
from torchvision.ops import generalized_box_iou
from tqdm import tqdm
from transformers.models.sam3.modeling_sam3 import box_cxcywh_to_xyxy, inverse_sigmoid

MASK_SIZE = 4 * GRID
PICTURE_SIZES = ((224, 224), (240, 320), (320, 240), (256, 288), (288, 256))
PHRASES_PER_SCENE = 4  # half of them absent


class SceneBatches(torch.utils.data.Dataset):
    """Batch `index` depends on the seed and the index alone, so that a resumed run sees what it would have seen."""

    def __init__(self, processor, seed: int, steps: int, scenes: int):
        self.processor, self.seed, self.steps, self.scenes = processor, seed, steps, scenes

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng([self.seed, index])
        pictures, phrases, owner, token_labels = [], [], [], []
        masks = np.zeros((self.scenes * PHRASES_PER_SCENE, MAX_OBJECTS, MASK_SIZE, MASK_SIZE), dtype=np.float32)
        counts = np.zeros(self.scenes * PHRASES_PER_SCENE, dtype=np.int64)
        for scene in range(self.scenes):
            picture, objects = draw_scene(rng, *PICTURE_SIZES[rng.integers(len(PICTURE_SIZES))])
            pictures.append(picture)
            small = [_shrink(scene_object.mask, MASK_SIZE) for scene_object in objects]
            token_labels.append(_token_labels(objects, small))
            wanted, unwanted = choose_phrases(rng, objects, PHRASES_PER_SCENE // 2, PHRASES_PER_SCENE)
            for phrase in (wanted + unwanted)[:PHRASES_PER_SCENE]:
                row = len(phrases)
                matching = [mask for mask, scene_object in zip(small, objects) if scene_object.matches(phrase)]
                masks[row, : len(matching)] = np.stack(matching) if matching else 0
                counts[row] = len(matching)
                phrases.append(phrase)
                owner.append(scene)
        rows = len(phrases)
        return {
            "pixel_values": self.processor(images=pictures, return_tensors="pt").pixel_values,
            **self.processor.tokenizer(phrases, return_tensors="pt", padding="max_length", max_length=32),
            "owner": torch.tensor(owner),
            "masks": torch.from_numpy(masks[:rows]),
            "counts": torch.from_numpy(counts[:rows]),
            "token_labels": torch.from_numpy(np.stack(token_labels)),
        }


def _shrink(mask: np.ndarray, size: int) -> np.ndarray:
    """Area-averaged mask, (size, size) float32 in 0..1."""
    return np.asarray(Image.fromarray(mask.astype(np.float32)).resize((size, size), Image.BOX))


def _token_labels(objects: list, small: list[np.ndarray]) -> np.ndarray:
    """What each ViT token mostly shows, (3, GRID * GRID): shape, colour, size; 0 is background."""
    labels = np.zeros((3, GRID, GRID), dtype=np.int64)
    for scene_object, mask in zip(objects, small):
        covered = mask.reshape(GRID, 4, GRID, 4).mean((1, 3)) > 0.5
        names = (SHAPES.index(scene_object.shape), list(COLOURS).index(scene_object.colour))
        for row, index in enumerate((*names, SIZES.index(scene_object.size))):
            labels[row][covered] = index + 1
    return labels.reshape(3, -1)


def boxes_of_masks(masks: torch.Tensor) -> torch.Tensor:
    """Normalised cxcywh boxes of soft masks, (..., H, W) to (..., 4); zeros where a mask is empty."""
    size = masks.shape[-1]
    columns, rows = masks.amax(-2), masks.amax(-1)
    index = torch.arange(size, dtype=masks.dtype)

    def edges(profile):
        # A border cell that the object covers in part moves the edge by that part of a cell.
        solid = profile > 0.05
        low = torch.where(solid, index + 1 - profile, float(size)).amin(-1)
        high = torch.where(solid, index + profile, 0.0).amax(-1)
        return low / size, high / size

    (left, right), (top, bottom) = edges(columns), edges(rows)
    boxes = torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], dim=-1)
    return boxes * (masks.amax((-1, -2)) > 0.05)[..., None]


def forward_all_layers(model, batch: dict) -> dict:
    """The detector's outputs for every decoder layer (deep supervision), vision encoded once per scene.

    Returns boxes_cxcywh and logits (layers, rows, queries, …), presence (layers, rows, 1), the decoder's queries,
    and what the mask decoder needs.
    """
    vision = model.vision_encoder(batch["pixel_values"])
    owner = batch["owner"]
    features = [level.index_select(0, owner) for level in vision.fpn_hidden_states[:-1]]
    position = vision.fpn_position_encoding[2].index_select(0, owner)
    text_mask = batch["attention_mask"].bool()
    text = model.get_text_features(batch["input_ids"], batch["attention_mask"]).pooler_output
    encoded = model.detr_encoder(
        vision_features=[features[-1]], text_features=text, vision_pos_embeds=[position], text_mask=text_mask
    )
    decoded = model.detr_decoder(
        vision_features=encoded.last_hidden_state,
        text_features=text,
        vision_pos_encoding=encoded.pos_embeds_flattened,
        text_mask=text_mask,
        spatial_shapes=encoded.spatial_shapes,
    )
    queries = decoded.intermediate_hidden_states
    offsets = model.detr_decoder.box_head(queries)
    return {
        "boxes": (inverse_sigmoid(decoded.reference_boxes) + offsets).sigmoid(),
        "logits": model.dot_product_scoring(queries, text, text_mask).squeeze(-1),
        "presence": decoded.presence_logits,
        "queries": queries,
        "mask_inputs": (features, encoded.last_hidden_state, text, text_mask),
        "vision_tokens": vision.last_hidden_state,
    }


@torch.no_grad()
def assign(boxes, logits, targets, counts, near: float, reference_points) -> list[tuple[np.ndarray, np.ndarray]]:
    """Hungarian assignment of queries to objects for one decoder layer.

    `near` weighs the distance from the object to the query's own reference point: large at first, when boxes mean
    nothing yet, then small.
    """
    pairs = []
    for row, count in enumerate(counts.tolist()):
        target = targets[row, :count]
        cost = 5 * torch.cdist(boxes[row], target, p=1) - 2 * logits[row].sigmoid()[:, None]
        cost -= 2 * generalized_box_iou(box_cxcywh_to_xyxy(boxes[row]), box_cxcywh_to_xyxy(target))
        cost += near * torch.cdist(reference_points[:, :2], target[:, :2])
        pairs.append(linear_sum_assignment(cost.numpy()))
    return pairs


def dice_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean dice loss over the leading dimension of (n, H, W) logits."""
    probability, target = logits.sigmoid().flatten(1), target.flatten(1)
    return (1 - (2 * (probability * target).sum(1) + 1) / (probability.sum(1) + target.sum(1) + 1)).mean()


def losses(model, heads, batch: dict, near: float) -> dict[str, torch.Tensor]:
    """All weighted loss terms of one batch."""
    out = forward_all_layers(model, batch)
    targets, counts = boxes_of_masks(batch["masks"]), batch["counts"]
    num_objects = counts.sum().clamp(min=1)
    reference = model.detr_decoder.reference_points.weight.detach().sigmoid()
    terms = dict.fromkeys(("l1", "giou", "mask", "dice", "score", "presence"), 0.0)
    matched_queries, matched_masks = [], []
    layers, rows = out["logits"].shape[:2]
    slots = torch.zeros(layers, rows, MAX_OBJECTS, dtype=torch.long)
    for layer in range(layers):
        boxes, logits = out["boxes"][layer], out["logits"][layer]
        pairs = assign(boxes.detach(), logits.detach(), targets, counts, near, reference)
        row_index = torch.from_numpy(np.concatenate([np.full(len(q), row) for row, (q, _) in enumerate(pairs)]))
        query_index = torch.from_numpy(np.concatenate([q for q, _ in pairs]))
        object_index = torch.from_numpy(np.concatenate([o for _, o in pairs]))
        slots[layer, row_index, object_index] = query_index
        predicted, wanted = boxes[row_index, query_index], targets[row_index, object_index]
        terms["l1"] += 5 * F.l1_loss(predicted, wanted, reduction="sum") / num_objects
        overlap = generalized_box_iou(box_cxcywh_to_xyxy(predicted), box_cxcywh_to_xyxy(wanted)).diagonal()
        terms["giou"] += 2 * (1 - overlap).sum() / num_objects
        label = torch.zeros_like(logits)
        label[row_index, query_index] = 1.0
        # Focal weight 2, positives lifted: one query of sixteen is right.
        focal = (logits.sigmoid() - label).abs() ** 2 * torch.where(label > 0, 1.0, 0.5)
        score = F.binary_cross_entropy_with_logits(logits, label, reduction="none")
        terms["score"] += 4 * (focal * score).sum() / num_objects
        present = (counts > 0).float()[:, None]
        terms["presence"] += 2 * F.binary_cross_entropy_with_logits(out["presence"][layer], present)
    # Masks of the matched queries only, all layers in one call: the mask decoder treats queries one by one.
    gathered = torch.gather(out["queries"], 2, slots[..., None].expand(-1, -1, -1, WIDTH))
    features, encoded, text, text_mask = out["mask_inputs"]
    decoded = model.mask_decoder(
        decoder_queries=gathered.transpose(0, 1).flatten(1, 2),
        backbone_features=features,
        encoder_hidden_states=encoded,
        prompt_features=text,
        prompt_mask=text_mask,
    )
    valid = torch.arange(MAX_OBJECTS)[None] < counts[:, None]
    per_layer = decoded.pred_masks.unflatten(1, (layers, MAX_OBJECTS)).transpose(0, 1)
    for layer in range(layers):
        matched_queries.append(per_layer[layer][valid])
        matched_masks.append(batch["masks"][valid])
    mask_logits, mask_targets = torch.cat(matched_queries), torch.cat(matched_masks)
    terms["mask"] = 10 * layers * F.binary_cross_entropy_with_logits(mask_logits, mask_targets)
    terms["dice"] = 2 * layers * dice_loss(mask_logits, mask_targets)
    union = batch["masks"].amax(1)
    semantic = decoded.semantic_seg[:, 0]
    terms["semantic"] = 10 * F.binary_cross_entropy_with_logits(semantic, union)
    if (counts > 0).any():
        terms["semantic"] += 2 * dice_loss(semantic[counts > 0], union[counts > 0])
    # Helper heads, dropped after training: every ViT token says what it shows, which teaches shapes early.
    guesses = heads(out["vision_tokens"]).split([len(SHAPES) + 1, len(COLOURS) + 1, len(SIZES) + 1], dim=-1)
    terms["tokens"] = sum(
        F.cross_entropy(guess.flatten(0, 1), batch["token_labels"][:, kind].flatten())
        for kind, guess in enumerate(guesses)
    )
    return terms


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 200 steps, then a half cosine to one hundredth of the peak."""
    if step < 200:
        return peak * (step + 1) / 200
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - 200) / max(1, steps - 200))))


def train(args) -> None:
    """Train and save; goes on from `args.state` when that file is there. Arguments: see train.py."""
    processor = build_processor(build_tokenizer())
    model = build_model(processor.tokenizer, args.seed).train()
    heads = nn.Linear(
        model.config.vision_config.backbone_config.hidden_size, len(SHAPES) + len(COLOURS) + len(SIZES) + 3
    )
    parameters = [*model.parameters(), *heads.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=1e-4)
    start = 0
    if args.state.is_file():
        state = torch.load(args.state, weights_only=True)
        model.load_state_dict(state["model"])
        heads.load_state_dict(state["heads"])
        optimiser.load_state_dict(state["optimiser"])
        start = state["step"]
    batches = SceneBatches(processor, args.seed, args.steps, args.scenes)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.Subset(batches, range(start, args.steps)), batch_size=None, num_workers=1, prefetch_factor=4
    )
    mean = {}
    progress = tqdm(loader, initial=start, total=args.steps, mininterval=5, unit="step")
    for step, batch in enumerate(progress, start):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        near = 20 * max(0.0, 1 - step / (0.4 * args.steps)) + 0.5
        terms = losses(model, heads, batch, near)
        optimiser.zero_grad(set_to_none=True)
        sum(terms.values()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        for name, term in terms.items():
            mean[name] = 0.98 * mean.get(name, term.item()) + 0.02 * term.item()
        if step % 50 == 0:
            progress.write(f"{step} " + " ".join(f"{name} {value:.3f}" for name, value in mean.items()))
        if (step + 1) % 500 == 0:
            torch.save(
                {
                    "model": model.state_dict(),
                    "heads": heads.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "step": step + 1,
                },
                args.state.with_suffix(".tmp"),
            )
            args.state.with_suffix(".tmp").replace(args.state)
            save_checkpoint(model, processor, args.output_dir, args.seed)
    save_checkpoint(model, processor, args.output_dir, args.seed)
