#!/usr/bin/env python3
# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Train the click branch of the tiny SAM3 on drawn scenes; its trunk, shared with the text branch, stays as it is.

Example:
    python3 assets/tiny_sam3/train_clicks.py --checkpoint assets/tiny_sam3

Reads and writes: <checkpoint>/model.safetensors, of which only `tracker_neck.` and the click parts of `tracker_model.`
change. What is there was trained twice: 3000 steps (half an hour on one core of a CPU), then `--go_on --seed 4 --steps
2500 --learning_rate 7e-4` (20 minutes on two).

Every scene gives `PROMPTS` prompts: a click on an object or on the background, or a box. Two corrections follow, each a
click in what is still wrong, half of them with the previous mask as `input_masks`. From the masks alone the model only
learns to draw every object, wherever the click is (IoU 0.37, for good): helper heads, dropped afterwards, make the mask
tokens say which object was meant.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from recipe import GRID, IMAGE_SIZE
from scenes import COLOURS, SHAPES, draw_scene
from scipy.ndimage import distance_transform_edt
from torch import nn
from tqdm import tqdm
from training import boxes_of_masks, learning_rate

MASK_SIZE = 4 * GRID
CELL = IMAGE_SIZE / MASK_SIZE
PICTURE_SIZES = ((224, 224), (240, 320), (320, 240), (256, 288), (288, 256))
PROMPTS = 4
CORRECTIONS = 2
SEED_SPACE = 61  # other scenes than the detector's training and the demo


class Scenes(torch.utils.data.Dataset):
    """Item `index` depends on the seed and the index alone: pixel_values, and for PROMPTS prompts of each scene a mask,
    one of ten empty, with the numbers of its colour and shape, 0 for none."""

    def __init__(self, image_processor, seed: int, steps: int, scenes: int):
        self.image_processor, self.seed, self.steps, self.scenes = image_processor, seed, steps, scenes

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        rng = np.random.default_rng([SEED_SPACE, self.seed, index])
        pictures, masks = [], np.zeros((self.scenes, PROMPTS, MASK_SIZE, MASK_SIZE), np.float32)
        kinds = np.zeros((self.scenes, PROMPTS, 2), np.int64)
        for scene in range(self.scenes):
            picture, objects = draw_scene(rng, *PICTURE_SIZES[rng.integers(len(PICTURE_SIZES))])
            pictures.append(picture)
            for slot in range(PROMPTS):
                wanted = objects[rng.integers(len(objects))]
                if rng.random() < 0.9:
                    small = Image.fromarray(wanted.mask.astype(np.float32)).resize((MASK_SIZE, MASK_SIZE), Image.BOX)
                    masks[scene, slot] = np.asarray(small)
                    kinds[scene, slot] = list(COLOURS).index(wanted.colour) + 1, SHAPES.index(wanted.shape) + 1
        pixel_values = self.image_processor(images=pictures, return_tensors="pt").pixel_values
        return pixel_values, torch.from_numpy(masks), torch.from_numpy(kinds)


def click_in(region: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A point of a (MASK_SIZE, MASK_SIZE) bool region, in model pixels: its middle, or anywhere in it."""
    if rng.random() < 0.5:
        depth = distance_transform_edt(np.pad(region, 1))[1:-1, 1:-1]
        row, column = np.unravel_index(depth.argmax(), depth.shape)
    else:
        rows, columns = np.nonzero(region)
        chosen = rng.integers(len(rows))
        row, column = rows[chosen], columns[chosen]
    return (np.array([column, row]) + rng.uniform(0, 1, 2)) * CELL - 0.5


def first_prompts(targets: np.ndarray, rng: np.random.Generator):
    """Clicks on every target, and the boxes around all, (scenes, PROMPTS, 1, 2) and (scenes, PROMPTS, 4).

    An empty target gets a click on the background, and a box where nothing is.
    """
    taken = targets.max(axis=1) > 0.05
    points, boxes = np.zeros((*targets.shape[:2], 1, 2)), np.zeros((*targets.shape[:2], 4))
    for scene, slot in np.ndindex(targets.shape[:2]):
        solid = targets[scene, slot] > 0.5
        region = solid if solid.any() else ~taken[scene]
        points[scene, slot, 0] = click_in(region, rng)
        rows, columns = np.nonzero(solid)
        edges = [0, 0, 8, 8] if not len(rows) else [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        boxes[scene, slot] = np.array(edges) * CELL - 0.5 + rng.normal(0, 0.5 * CELL, 4)
    return points, boxes


def corrections(logits: np.ndarray, targets: np.ndarray, rng: np.random.Generator):
    """A click in the larger of what is missing and what is too much: (scenes, PROMPTS, 1, 2), labels without the 2."""
    points, labels = np.zeros((*targets.shape[:2], 1, 2)), np.zeros((*targets.shape[:2], 1), np.int64)
    for scene, slot in np.ndindex(targets.shape[:2]):
        solid = targets[scene, slot] > 0.5
        drawn = logits[scene, slot] > 0
        missing, surplus = solid & ~drawn, drawn & ~solid
        label = int(missing.sum() > surplus.sum()) if (missing.any() or surplus.any()) else int(solid.any())
        region = (missing if label else surplus) if (missing.any() or surplus.any()) else (solid if label else ~solid)
        points[scene, slot, 0], labels[scene, slot, 0] = click_in(region, rng), label
    return points, labels


def mask_losses(logits: torch.Tensor, targets: torch.Tensor, quality: torch.Tensor) -> torch.Tensor:
    """The loss of each mask, (..., K): BCE, dice where there is an object, and the predicted IoU's error.

    Args:
        logits: (scenes, PROMPTS, K, M, M).
        targets: (scenes, PROMPTS, M, M) in 0..1.
        quality: (scenes, PROMPTS, K), the predicted IoU.
    """
    wanted = targets[:, :, None].expand_as(logits)
    probability = logits.sigmoid()
    cross = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean((-1, -2))
    inter, total = (probability * wanted).sum((-1, -2)), probability.sum((-1, -2)) + wanted.sum((-1, -2))
    present = (targets.amax((-1, -2)) > 0.5)[..., None].float()
    dice = (1 - (2 * inter + 1) / (total + 1)) * present
    with torch.no_grad():
        drawn, solid = logits > 0, wanted > 0.5
        union = (drawn | solid).sum((-1, -2)).clamp(min=1)
        iou = (drawn & solid).sum((-1, -2)) / union
    return 10 * cross + 5 * dice + (quality - iou) ** 2


def helper_losses(guesses: torch.Tensor, kinds: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """What mask tokens say of the object that is meant: its colour, its shape, its box.

    Args:
        guesses: (prompts, K, numbers) of the helper heads. kinds: (prompts, 2). boxes: (prompts, 4) cxcywh in 0..1.
    """
    colour, shape, box = guesses.split([len(COLOURS) + 1, len(SHAPES) + 1, 4], dim=-1)
    present = (kinds[:, 0] > 0).float()[:, None, None]
    total = 5 * ((box.sigmoid() - boxes[:, None]).abs() * present).sum(-1).mean()
    for column, guess in enumerate((colour, shape)):
        wanted = kinds[:, None, column].expand(-1, guess.shape[1])
        total = total + F.cross_entropy(guess.flatten(0, 1), wanted.flatten())
    return total


def step_losses(
    model, heads, pixel_values: torch.Tensor, targets: torch.Tensor, kinds: torch.Tensor, rng: np.random.Generator
) -> torch.Tensor:
    """The mean loss of the first prompts and their corrections."""
    with torch.no_grad():
        tokens = model.vision_encoder.backbone(pixel_values).last_hidden_state
        side = pixel_values.shape[-1] // model.config.vision_config.backbone_config.patch_size
        grid = tokens.view(len(tokens), side, side, -1).permute(0, 3, 1, 2)
    levels, _ = model.vision_encoder.neck(grid)
    features = [model.mask_decoder.conv_s0(levels[0]), model.mask_decoder.conv_s1(levels[1])]
    features.append(levels[2])  # transformers 5.0.0 adds no_memory_embedding to levels[3], which it then drops
    position = model.get_image_wide_positional_embeddings().repeat(len(levels[0]), 1, 1, 1)
    everywhere, object_boxes = targets.numpy(), boxes_of_masks(targets).flatten(0, 1)
    points, boxes = first_prompts(everywhere, rng)
    labels = np.ones(points.shape[:3], np.int64)
    present = torch.from_numpy((everywhere.max((-1, -2)) > 0.5).astype(np.float32))
    # A batch is either boxes or clicks: a prompt with a box has no point of its own for "no box".
    use_box, masks, total = rng.random() < 0.35, None, 0.0
    for turn in range(1 + CORRECTIONS):
        first_box = use_box and turn == 0
        # One embedding of the image for each prompt: the dense part of previous masks differs by prompt.
        sparse, dense = model.prompt_encoder(
            input_points=None if first_box else torch.from_numpy(points).float(),
            input_labels=None if first_box else torch.from_numpy(labels),
            input_boxes=torch.from_numpy(boxes).float() if use_box else None,
            input_masks=None,
        )
        dense = dense.expand(len(targets), -1, -1, -1).repeat_interleave(PROMPTS, dim=0)
        if masks is not None:
            dense = model.prompt_encoder.mask_embed(masks.flatten(0, 1)[:, None])
        arguments = {
            "image_embeddings": features[2].repeat_interleave(PROMPTS, dim=0),
            "image_positional_embeddings": position.repeat_interleave(PROMPTS, dim=0),
            "sparse_prompt_embeddings": sparse.flatten(0, 1)[:, None],
            "dense_prompt_embeddings": dense,
            "high_resolution_features": [level.repeat_interleave(PROMPTS, dim=0) for level in features[:2]],
        }
        logits, quality, tokens, presence = model.mask_decoder(multimask_output=False, **arguments)
        total = total + helper_losses(heads(tokens[:, 0]), kinds.flatten(0, 1), object_boxes)
        shape = targets.shape[:2]
        single = logits.view(*shape, 1, MASK_SIZE, MASK_SIZE)
        total = total + mask_losses(single, targets, quality.view(*shape, 1)).mean()
        total = total + 0.2 * F.binary_cross_entropy_with_logits(presence.view(*shape), present)
        best = single[:, :, 0]
        if turn == 0:
            logits, quality, tokens, _ = model.mask_decoder(multimask_output=True, **arguments)
            total = total + helper_losses(heads(tokens[:, 0]), kinds.flatten(0, 1), object_boxes)
            three = logits.view(*shape, -1, MASK_SIZE, MASK_SIZE)
            quality = quality.view(*shape, -1)
            each = mask_losses(three, targets, quality)
            # The best of three learns the object, and all a little, so that none is left behind.
            total = total + each.amin(-1).mean() + 0.1 * each.mean()
            chosen = quality.argmax(-1)[..., None, None, None].expand(-1, -1, 1, MASK_SIZE, MASK_SIZE)
            best = torch.gather(three, 2, chosen)[:, :, 0]
        best = best.detach()
        masks = best if rng.random() < 0.5 else None
        more, more_labels = corrections(best.numpy(), everywhere, rng)
        if first_box:
            points, labels = more, more_labels
        else:
            points, labels = np.concatenate([points, more], 2), np.concatenate([labels, more_labels], 2)
    return total


@torch.no_grad()
def initialise(model) -> None:
    """Xavier for all but the trunk."""
    for name, module in model.named_modules():
        if name.startswith("vision_encoder.backbone"):
            continue
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)


def save(model, checkpoint: Path) -> None:
    """Replace the click branch's tensors in model.safetensors, as float16; written aside, then renamed."""
    from safetensors.torch import load_file, save_file

    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    for name, tensor in model.state_dict().items():
        if name.startswith("vision_encoder.backbone."):
            continue
        neck = name.startswith("vision_encoder.neck.")
        key = name.replace("vision_encoder.neck.", "tracker_neck.") if neck else f"tracker_model.{name}"
        tensors[key] = tensor.to(tensors[key].dtype).contiguous()
    aside = weights.with_suffix(".saving")
    save_file(tensors, aside, metadata={"format": "pt"})
    aside.replace(weights)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).resolve().parent, help="folder to change")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--scenes", type=int, default=8, help="scenes a step, four prompts each")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--go_on", action="store_true", help="from the click branch as it is, not from new weights")
    args = parser.parse_args(argv)
    from transformers import AutoImageProcessor, Sam3TrackerModel

    torch.manual_seed(args.seed)
    model = Sam3TrackerModel.from_pretrained(args.checkpoint, dtype=torch.float32).train()
    heads = nn.Linear(model.mask_decoder.hidden_size, len(COLOURS) + len(SHAPES) + 6)
    model.vision_encoder.backbone.requires_grad_(False)
    if not args.go_on:
        initialise(model)
    parameters = [one for one in (*model.parameters(), *heads.parameters()) if one.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=1e-4)
    processor = AutoImageProcessor.from_pretrained(args.checkpoint)
    scenes = Scenes(processor, args.seed, args.steps, args.scenes)
    loader = torch.utils.data.DataLoader(scenes, batch_size=None, num_workers=1, prefetch_factor=4)
    mean = None
    progress = tqdm(loader, mininterval=5, unit="step", disable=None)
    for step, batch in enumerate(progress):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        loss = step_losses(model, heads, *batch, np.random.default_rng([args.seed, step]))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0:
            progress.write(f"{step} loss {mean:.3f}")
        if (step + 1) % 500 == 0 or step + 1 == args.steps:
            save(model, args.checkpoint)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
