# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""SAM3's encoder of box exemplars from the building blocks of `rewrites`: transformers' `Sam3GeometryEncoder` with
every size but the batch fixed, and without a RoiAlign operator."""

import torch
from torch import nn

from sam3_utils.contract import NO_BOX
from sam3_utils.rewrites import Attention, BoxWaves, linear, padding_bias


class RoiWeights(nn.Module):
    """How much each grid line of a feature level counts in each bin of RoiAlign: (N, boxes, 4) cxcywh in 0..1 to x
    and y, each (N, boxes, 1, bins, grid).

    Bilinear samples, averaged over a bin of a box, are a weighted sum over the two axes one after the other:

        pooled[row, column] = sum over y, x of weight_y[row, y] * weight_x[column, x] * feature[y, x]

    where the weight of a grid line is the mean of the triangles 1 - |sample - line| over the samples. It is what
    `torchvision.ops.roi_align` (aligned=False, sampling_ratio=-1) computes, its cases included: a bin gets as many
    samples a side as its width has grid lines, rounded up; a box is taken to be at least one grid line wide; samples
    beyond the last line count as on it, and beyond the picture's edge as 0.

    The operator is not used: it wants the number of each box's picture, which for a free batch is a Range over a
    Shape, and whether an NPU's kernel picks the same number of samples is not documented. These are plain operators,
    and the two products that follow are the cube unit's.
    """

    def __init__(self, boxes: int, bins: int, grid: int, device: torch.device):
        super().__init__()
        self.boxes, self.bins, self.grid = boxes, bins, grid
        samples = grid // bins + 1  # of a box as wide as the picture, with a margin for roundings
        self.register_buffer("lines", torch.arange(grid).float().to(device))
        self.register_buffer("bin", torch.arange(bins).float().reshape(bins, 1).to(device))
        self.register_buffer("sample", torch.arange(samples).float().to(device))

    def forward(self, boxes: torch.Tensor) -> list[torch.Tensor]:
        centre, size = boxes.split(2, dim=-1)
        # The order of the operations is torchvision's: another one could round to another number of samples.
        start, end = (centre - 0.5 * size) * self.grid, (centre + 0.5 * size) * self.grid
        width = (end - start).clamp(min=1.0) / self.bins
        start, width = (part.reshape(-1, self.boxes, 2, 1, 1) for part in (start, width))
        count = width.ceil()
        samples = start + self.bin * width + (self.sample + 0.5) * width / count  # (N, boxes, axis, bins, samples)
        beyond = (samples - self.grid).sign().relu()
        share = (count - self.sample).clamp(0.0, 1.0) * (1 - beyond) / count
        distance = samples.clamp(0.0, self.grid - 1.0).unsqueeze(-1) - self.lines
        weights = ((1 - distance.abs()).relu() * share.unsqueeze(-1)).sum(-2)
        return weights.split(1, dim=2)


class RoiPooling(nn.Module):
    """RoiAlign and the convolution over its bins: normalised (N, grid * grid, C) tokens and (N, boxes, 4) boxes to
    (N, boxes, C)."""

    def __init__(self, projection: nn.Conv2d, boxes: int, grid: int):
        super().__init__()
        channels, self.channels, bins, _ = projection.weight.shape
        self.boxes, self.bins, self.grid = boxes, bins, grid
        self.weights = RoiWeights(boxes, bins, grid, projection.weight.device)
        # Columns first: the layout that the second product leaves.
        self.projection = linear(projection.weight.permute(0, 3, 2, 1).reshape(channels, -1), projection.bias)

    def forward(self, tokens: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        bins, grid = self.bins, self.grid
        x, y = self.weights(boxes)
        rows = tokens.reshape(-1, grid, grid * self.channels)
        pooled = y.reshape(-1, self.boxes * bins, grid) @ rows
        pooled = pooled.reshape(-1, bins, grid, self.channels).permute(0, 2, 1, 3)
        pooled = x.reshape(-1, bins, grid) @ pooled.reshape(-1, grid, bins * self.channels)
        return self.projection(pooled.reshape(-1, self.boxes, bins * bins * self.channels))


class BoxEmbedding(nn.Module):
    """Where a box lies: (N, boxes, 4) cxcywh to (N, boxes, C).

    Both of transformers' projections, of the four numbers and of the position encoding (sine and cosine interleaved, y
    before x, then height and width), as one.
    """

    def __init__(self, direct: nn.Linear, position: nn.Linear, encoding: nn.Module, boxes: int):
        super().__init__()
        channels, weight = encoding.num_pos_feats, position.weight
        self.waves = BoxWaves(encoding, boxes, 2, weight.device)
        order = torch.arange(2 * channels).reshape(2, channels // 2, 2)[[1, 0]].permute(2, 0, 1).flatten()
        height, width = weight[:, 2 * channels :].split(1, dim=1)
        plain = direct.weight + torch.cat([torch.zeros_like(direct.weight[:, :2]), width, height], dim=1)
        weight = torch.cat([plain, weight[:, order.to(weight.device)]], dim=1)
        self.projection = linear(weight, direct.bias + position.bias)

    def forward(self, boxes: torch.Tensor) -> torch.Tensor:
        centre, _ = boxes.split(2, dim=-1)
        return self.projection(torch.cat([boxes, self.waves(centre)], dim=-1))


class ExemplarLayer(nn.Module):
    """Exemplars attend to each other, then to the picture."""

    def __init__(self, source: nn.Module, rows: int, tokens: int):
        super().__init__()
        self.layer_norm1, self.self_attn = source.layer_norm1, Attention(source.self_attn, rows, rows)
        self.layer_norm2, self.cross_attn = source.layer_norm2, Attention(source.cross_attn, rows, tokens)
        self.layer_norm3, self.mlp = source.layer_norm3, source.mlp

    def forward(self, states, bias, vision, placed_vision) -> torch.Tensor:
        normed = self.layer_norm1(states)
        states = states + self.self_attn(normed, normed, normed, bias)
        states = states + self.cross_attn(self.layer_norm2(states), placed_vision, vision)
        return states + self.mlp(self.layer_norm3(states))


class ExemplarEncoder(nn.Module):
    """Lists of boxes in pictures to tokens that stand beside the phrase's.

    Behind the boxes is one token for the list as a whole. transformers puts it behind the last box that is not padding;
    no layer knows the tokens' order, so that only the mask matters. A list without a box has no token that counts:
    transformers, when it gets no list, has none either.
    """

    def __init__(self, source: nn.Module, boxes: int, grid: int, position: torch.Tensor):
        """
        Args:
            source: transformers' `Sam3GeometryEncoder`. boxes: in a list. grid: side of the coarsest feature level.
            position: (1, grid * grid, C) position encoding of the picture's tokens.
        """
        super().__init__()
        self.boxes, self.tokens, self.channels = boxes, grid * grid, source.hidden_size
        self.vision_layer_norm = source.vision_layer_norm
        self.pooling = RoiPooling(source.boxes_pool_project, boxes, grid)
        self.box_embedding = BoxEmbedding(
            source.boxes_direct_project, source.boxes_pos_enc_project, source.position_encoding, boxes
        )
        negative, positive = source.label_embed.weight.detach().reshape(2, 1, 1, -1)
        self.register_buffer("negative", negative)
        self.register_buffer("negative_to_positive", positive - negative)
        self.register_buffer("whole", source.cls_embed.weight.detach()[None])
        self.register_buffer("position_encoding", position)
        self.final_proj, self.prompt_layer_norm = source.final_proj, source.prompt_layer_norm
        self.layers = nn.ModuleList(ExemplarLayer(layer, boxes + 1, self.tokens) for layer in source.layers)
        self.output_layer_norm = source.output_layer_norm

    def forward(self, features, input_boxes, input_boxes_labels) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, C, grid, grid) features, (N, boxes, 4) boxes and (N, boxes) labels by the contract to (N, boxes + 1, C)
        tokens and their (N, boxes + 1) float mask."""
        labels = input_boxes_labels.float()  # 1, 0 or NO_BOX
        is_box = (labels - NO_BOX).clamp(max=1.0)
        is_positive = labels.relu().unsqueeze(-1)
        any_box = is_box.sum(-1, keepdim=True).clamp(max=1.0)
        mask = torch.cat([is_box, any_box], dim=1)
        bias = padding_bias(mask, self.boxes + 1)

        vision = features.reshape(-1, self.channels, self.tokens).permute(0, 2, 1)
        label = self.negative + is_positive * self.negative_to_positive
        pooled = self.pooling(self.vision_layer_norm(vision), input_boxes)
        states = label + self.box_embedding(input_boxes) + pooled
        states = torch.cat([states, self.whole + (any_box * 0).unsqueeze(-1)], dim=1)
        states = self.prompt_layer_norm(self.final_proj(states))
        placed = vision + self.position_encoding
        for layer in self.layers:
            states = layer(states, bias, vision, placed)
        return self.output_layer_norm(states), mask
