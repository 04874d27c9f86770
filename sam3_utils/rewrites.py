# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Equal maths in forms that graph compilers like better: ViT patch embedding, QKV projection, RoPE.

Each rewrite stands alone and replaces modules of a loaded transformers 5.0.0 `Sam3Model` in place. Sizes come from
the configuration, so that the traced graph carries constants and no Shape operators for them.
"""

import torch
import torch.nn.functional as F
from torch import nn


class LinearPatchEmbedding(nn.Module):
    """Patch embedding as one MatMul.

        before   Conv 14x14, stride 14 -> Reshape -> Transpose
        after    Reshape -> Transpose -> Reshape -> MatMul

    A convolution with three input channels is padded to 16 on the NPU's cube unit; patches of 588 numbers are not.
    """

    def __init__(self, embedding: nn.Module, image_size: int):
        super().__init__()
        kernel = embedding.projection.weight  # (hidden, 3, patch, patch), no bias in SAM3
        self.patch, self.grid = kernel.shape[-1], image_size // kernel.shape[-1]
        self.weight = nn.Parameter(kernel.detach().flatten(1).t().contiguous())

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(N, 3, S, S) pictures to (N, grid * grid, hidden) embeddings."""
        patch, grid = self.patch, self.grid
        patches = pixel_values.reshape(-1, 3, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
        return patches.reshape(-1, grid * grid, 3 * patch * patch) @ self.weight


def half_rotation_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for channels ordered evens first, odds second, the sign of the rotation inside sin.

    Args:
        cos, sin: (length, head_dim), each angle twice in a row, as transformers' `Sam3ViTRotaryEmbedding` has them.
    """
    cos, sin = cos[:, 0::2], sin[:, 0::2]
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate_halves(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on (..., length, head_dim) states whose even channels come first, with `half_rotation_tables`.

    before   Reshape to (..., head_dim / 2, 2) -> Split/Squeeze -> Neg -> Unsqueeze/Concat -> Reshape -> Mul, Add
    after    Split -> Concat -> Mul, Add
    """
    even, odd = states.split(states.shape[-1] // 2, dim=-1)
    return states * cos + torch.cat([odd, even], dim=-1) * sin


class ViTAttention(nn.Module):
    """Stands in for transformers' `Sam3ViTRoPEAttention`.

    With `fuse_qkv` the three projections are one:

        before   3 x (MatMul -> Add -> Reshape -> Transpose)
        after    MatMul -> Add -> Reshape -> Transpose -> Split -> 3 x Squeeze

    which is the form that ATC's ViT QKV fusions look for (they miss three Slices). With `half_rope` the output
    channels of q and k are reordered when the model is loaded, evens before odds in each head: scores, being sums
    over channels, stay the same, the rotation becomes `rotate_halves`, and the softmax scale goes into q's tables.
    """

    def __init__(self, layer: nn.Module, grid: int, fuse_qkv: bool, half_rope: bool):
        super().__init__()
        source = layer.attention
        self.heads, self.head_dim = source.num_attention_heads, source.head_dim
        self.side = layer.window_size or grid  # tokens along a window, or along the whole picture
        self.eager = source.config._attn_implementation == "eager"
        self.half_rope, self.fuse_qkv = half_rope, fuse_qkv
        self.scaling = 1.0 if half_rope else source.scaling
        projections = [source.q_proj, source.k_proj, source.v_proj]
        weights = [projection.weight.detach() for projection in projections]
        biases = [projection.bias.detach() for projection in projections]
        if half_rope:
            order = torch.arange(self.heads * self.head_dim).reshape(self.heads, self.head_dim // 2, 2)
            order = order.transpose(1, 2).flatten()
            weights[:2] = [weight[order] for weight in weights[:2]]
            biases[:2] = [bias[order] for bias in biases[:2]]
            cos, sin = half_rotation_tables(layer.rotary_emb.rope_embeddings_cos, layer.rotary_emb.rope_embeddings_sin)
            for name, table in (("cos", cos), ("sin", sin)):
                self.register_buffer(f"q_{name}", table * source.scaling)
                self.register_buffer(f"k_{name}", table)
        if fuse_qkv:
            weights, biases = [torch.cat(weights)], [torch.cat(biases)]
        self.projections = nn.ModuleList(nn.Linear(1, 1, device="meta") for _ in weights)
        for projection, weight, bias in zip(self.projections, weights, biases):
            projection.weight, projection.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.o_proj = source.o_proj

    def forward(self, hidden_states: torch.Tensor, position_embeddings, **kwargs) -> tuple[torch.Tensor, None]:
        """(N * windows, side, side, hidden) states in and out; `position_embeddings` = (cos, sin) of transformers."""
        length = self.side * self.side
        states = hidden_states.reshape(-1, length, self.heads * self.head_dim)
        if self.fuse_qkv:
            qkv = self.projections[0](states).reshape(-1, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
            query, key, value = (part.squeeze(0) for part in qkv.split(1))
        else:
            query, key, value = (
                projection(states).reshape(-1, length, self.heads, self.head_dim).transpose(1, 2)
                for projection in self.projections
            )
        if self.half_rope:
            query = rotate_halves(query, self.q_cos, self.q_sin)
            key = rotate_halves(key, self.k_cos, self.k_sin)
        else:
            from transformers.models.sam3.modeling_sam3 import apply_rotary_pos_emb_2d

            query, key = apply_rotary_pos_emb_2d(query, key, *position_embeddings)
        if self.eager:
            scores = query @ key.transpose(-1, -2)
            output = (scores if self.scaling == 1.0 else scores * self.scaling).softmax(dim=-1) @ value
        else:
            output = F.scaled_dot_product_attention(query, key, value, scale=self.scaling)
        output = output.transpose(1, 2).reshape(-1, self.side, self.side, self.heads * self.head_dim)
        return self.o_proj(output), None


def apply_rewrites(model: nn.Module, names: tuple[str, ...]) -> None:
    """Apply rewrites named "patch_embed", "qkv" or "rope" to a `Sam3Model` in place; outputs stay the same."""
    backbone = model.vision_encoder.backbone
    config = backbone.config
    if "patch_embed" in names:
        embeddings = backbone.embeddings
        embeddings.patch_embeddings = LinearPatchEmbedding(embeddings.patch_embeddings, config.image_size)
    fuse_qkv, half_rope = "qkv" in names, "rope" in names
    if fuse_qkv or half_rope:
        for layer in backbone.layers:
            layer.attention = ViTAttention(layer, config.image_size // config.patch_size, fuse_qkv, half_rope)
