# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""SAM3's click branch from the building blocks of `rewrites`: transformers' `Sam3TrackerModel` behind the ViT that it
shares with the text branch, with every size but the batch fixed.

Against the original: clicks fill a fixed number of slots, of which unused ones are masked off (transformers' padding
label -10 still takes part in attention); a box is two further points, its corners, labelled 2 and 3; the one "not a
point" that transformers adds to every prompt is a constant; all four masks come out, and which of them count is decided
outside (`clicks.choose`).

transformers 5.0.0 adds `no_memory_embedding` to the coarsest level of the neck and then uses the three finer ones, so
that it has no effect; this follows.
"""

import math

import torch
from torch import nn

from sam3_utils.contract import CLICK_MASKS
from sam3_utils.rewrites import Attention, Convolution, MatMulUpscale, decompose_layer_norms, padding_bias
from sam3_utils.static_model import FPNLayer

POINT_KINDS = 4  # labels 0 and 1, and the two corners of a box


class ClickNeck(nn.Module):
    """The ViT's (N, hidden, grid, grid) states to the three levels that clicks use, `contract.CLICK_FEATURES`."""

    def __init__(self, tracker: nn.Module, grid: int, conv_transpose: str):
        super().__init__()
        layers = tracker.vision_encoder.neck.fpn_layers[:3]
        self.levels = nn.ModuleList(FPNLayer(layer, grid, conv_transpose) for layer in layers)
        self.conv_s0 = Convolution(tracker.mask_decoder.conv_s0)
        self.conv_s1 = Convolution(tracker.mask_decoder.conv_s1)

    def forward(self, backbone_features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fine, middle, coarse = (level(backbone_features) for level in self.levels)
        return self.conv_s0(fine), self.conv_s1(middle), coarse


class PointEmbedding(nn.Module):
    """(N, points, 2) pixels of the model's picture and (N, points) float labels to (N, points, C)."""

    def __init__(self, source: nn.Module):
        super().__init__()
        # Both axes: a pixel's middle, 0..1 of the picture, -1..1, and the angle of a whole turn.
        matrix = source.shared_embedding.positional_embedding.detach()
        self.register_buffer("frequencies", matrix * (2 * math.pi))
        self.scale = 2 / source.input_image_size
        device = matrix.device
        self.register_buffer("kinds", torch.arange(POINT_KINDS).float().to(device))
        self.register_buffer("kind_embeddings", source.point_embed.weight.detach())

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        angles = ((points + 0.5) * self.scale - 1) @ self.frequencies
        # One of POINT_KINDS, by arithmetic that any compiler takes; a padding label is none of them.
        kind = (1 - (labels.unsqueeze(-1) - self.kinds).abs()).relu()
        return torch.cat([angles.sin(), angles.cos()], dim=-1) + kind @ self.kind_embeddings


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of (N, C, H, W)."""

    def __init__(self, source: nn.LayerNorm):
        super().__init__()
        self.norm = nn.LayerNorm(source.normalized_shape, eps=source.eps, device="meta")
        self.norm.weight, self.norm.bias = source.weight, source.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(states.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class MaskEmbedding(nn.Module):
    """(N, 1, M, M) logits of an earlier mask, and (N, 1) whether there is one, to (N, C, grid, grid)."""

    def __init__(self, source: nn.Module):
        super().__init__()
        embed = source.mask_embed
        self.conv1, self.norm1 = Convolution(embed.conv1), ChannelNorm(embed.layer_norm1)
        self.conv2, self.norm2 = Convolution(embed.conv2), ChannelNorm(embed.layer_norm2)
        self.conv3, self.activation = Convolution(embed.conv3), embed.activation
        self.register_buffer("no_mask", source.no_mask_embed.weight.detach().reshape(1, -1, 1, 1))

    def forward(self, input_masks: torch.Tensor, has_input_masks: torch.Tensor) -> torch.Tensor:
        states = self.activation(self.norm1(self.conv1(input_masks)))
        states = self.conv3(self.activation(self.norm2(self.conv2(states))))
        return self.no_mask + has_input_masks.reshape(-1, 1, 1, 1) * (states - self.no_mask)


class TwoWayLayer(nn.Module):
    """Tokens attend to each other and to the picture, then the picture to the tokens."""

    def __init__(self, source: nn.Module, tokens: int, pixels: int):
        super().__init__()
        self.first = source.skip_first_layer_pe
        self.self_attn = Attention(source.self_attn, tokens, tokens)
        self.cross_attn_token_to_image = Attention(source.cross_attn_token_to_image, tokens, pixels)
        self.cross_attn_image_to_token = Attention(source.cross_attn_image_to_token, pixels, tokens)
        self.mlp = source.mlp
        self.layer_norm1, self.layer_norm2 = source.layer_norm1, source.layer_norm2
        self.layer_norm3, self.layer_norm4 = source.layer_norm3, source.layer_norm4

    def forward(self, states, position, image, image_position, bias) -> tuple[torch.Tensor, torch.Tensor]:
        if self.first:
            states = self.self_attn(states, states, states, bias)
        else:
            placed = states + position
            states = states + self.self_attn(placed, placed, states, bias)
        states = self.layer_norm1(states)
        placed_image = image + image_position
        attended = self.cross_attn_token_to_image(states + position, placed_image, image)
        states = self.layer_norm2(states + attended)
        states = self.layer_norm3(states + self.mlp(states))
        attended = self.cross_attn_image_to_token(placed_image, states + position, states, bias)
        return states, self.layer_norm4(image + attended)


class ClickDecoder(nn.Module):
    """Prompts on a picture's click features to four masks: the one of a clear prompt, and three for a single click."""

    def __init__(self, tracker: nn.Module, points: int, grid: int, conv_transpose: str):
        super().__init__()
        source, prompts = tracker.mask_decoder, tracker.prompt_encoder
        self.channels, self.points, self.grid = source.hidden_size, points, grid
        self.points_embedding, self.mask_embedding = PointEmbedding(prompts), MaskEmbedding(prompts)
        constant = [source.obj_score_token, source.iou_token, source.mask_tokens, prompts.not_a_point_embed]
        self.register_buffer("constant_tokens", torch.cat([token.weight.detach() for token in constant])[None])
        self.constants = self.constant_tokens.shape[1]
        self.register_buffer("constant_mask", torch.ones(1, self.constants, device=self.constant_tokens.device))
        with torch.no_grad():
            position = tracker.get_image_wide_positional_embeddings().flatten(2).transpose(1, 2).contiguous()
        self.register_buffer("image_position", position)
        tokens, pixels = self.constants + points, grid * grid
        transformer = source.transformer
        self.layers = nn.ModuleList(TwoWayLayer(layer, tokens, pixels) for layer in transformer.layers)
        self.final_attn_token_to_image = Attention(transformer.final_attn_token_to_image, tokens, pixels)
        self.layer_norm_final_attn = transformer.layer_norm_final_attn
        upscale, size = [], grid
        for layer in (source.upscale_conv1, source.upscale_conv2):
            upscale.append(MatMulUpscale(layer, size, size) if conv_transpose == "matmul" else Convolution(layer))
            size *= 2
        self.upscale_conv1, self.upscale_conv2 = upscale
        self.upscale_layer_norm, self.activation = ChannelNorm(source.upscale_layer_norm), source.activation
        self.output_hypernetworks_mlps = source.output_hypernetworks_mlps
        self.iou_prediction_head, self.pred_obj_score_head = source.iou_prediction_head, source.pred_obj_score_head
        self.size = size

    def forward(self, levels, input_points, input_labels, input_masks, has_input_masks) -> tuple[torch.Tensor, ...]:
        """Levels, fine to coarse, of N pictures or one, and inputs by the contract, to `contract.CLICK_OUTPUTS`."""
        fine, middle, coarse = levels
        labels = input_labels.float()  # the only use of INT64, which is no type of the AI Core
        is_point = (labels + 1).clamp(0.0, 1.0)
        constants = self.constant_tokens + (has_input_masks * 0).unsqueeze(-1)
        position = torch.cat([constants, self.points_embedding(input_points, labels)], dim=1)
        always = self.constant_mask + has_input_masks * 0
        bias = padding_bias(torch.cat([always, is_point], dim=1), self.constants + self.points)

        image = coarse + self.mask_embedding(input_masks, has_input_masks)
        image = image.reshape(-1, self.channels, self.grid * self.grid).permute(0, 2, 1)
        states = position
        for layer in self.layers:
            states, image = layer(states, position, image, self.image_position, bias)
        placed_image = image + self.image_position
        attended = self.final_attn_token_to_image(states + position, placed_image, image)
        states = self.layer_norm_final_attn(states + attended)

        pixels = image.permute(0, 2, 1).reshape(-1, self.channels, self.grid, self.grid)
        pixels = self.activation(self.upscale_layer_norm(self.upscale_conv1(pixels) + middle))
        pixels = self.activation(self.upscale_conv2(pixels) + fine)
        rest = self.constants - 2 - CLICK_MASKS + self.points
        presence, quality, masks, _ = states.split([1, 1, CLICK_MASKS, rest], dim=1)
        weights = [mlp(mask) for mlp, mask in zip(self.output_hypernetworks_mlps, masks.split(1, dim=1))]
        pixels = pixels.reshape(-1, self.channels // 8, self.size * self.size)
        masks = (torch.cat(weights, dim=1) @ pixels).reshape(-1, CLICK_MASKS, self.size, self.size)
        quality = self.iou_prediction_head(quality).reshape(-1, CLICK_MASKS)
        return masks, quality, self.pred_obj_score_head(presence).reshape(-1, 1)


class ClickBranch(nn.Module):
    """`contract.BACKBONE` and the prompts to `contract.CLICK_OUTPUTS` and, after them, `contract.CLICK_FEATURES`."""

    def __init__(self, tracker: nn.Module, points: int, conv_transpose="operator", layer_norm="operator"):
        """
        Args:
            tracker: transformers' `Sam3TrackerModel` in eval mode; its modules are taken over. Its ViT is not touched.
            points: how many points a prompt may hold; the corners of a box count as two.
            conv_transpose, layer_norm: as in `static_model.TextBranch`.
        """
        super().__init__()
        grid, _ = tracker.prompt_encoder.image_embedding_size
        self.click_neck = ClickNeck(tracker, grid, conv_transpose)
        self.click_decoder = ClickDecoder(tracker, points, grid, conv_transpose)
        if layer_norm == "decomposed":
            decompose_layer_norms(self)
        self.eval().requires_grad_(False)

    def forward(self, backbone_features, *prompt) -> tuple[torch.Tensor, ...]:
        levels = self.click_neck(backbone_features)
        return *self.click_decoder(levels, *prompt), *levels
