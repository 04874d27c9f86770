# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""SAM3's text branch written for compilers: the weights and maths of transformers 5.0.0's `Sam3Model`, every size but
the batch fixed, nothing computed that is constant, nothing computed twice.

Against the original: tokens stay in window order between windowed ViT layers; the text mask is made once, as an
additive bias that all layers share; position encodings are tables; the part of the decoder that no input reaches is
computed when the model is built; only the last decoder layer gets scores, boxes and presence; reference boxes travel
as logits. The module names are the node names of the exported graph (`vision_encoder/layers.7/attention/qkv/MatMul`).
"""

import math

import torch
from torch import nn

from sam3_utils import rewrites
from sam3_utils.cli import UsageError
from sam3_utils.contract import TEXT_LENGTH
from sam3_utils.exemplar_model import ExemplarEncoder
from sam3_utils.rewrites import (
    MASKED,
    Attention,
    BoxWaves,
    Convolution,
    GroupNorm,
    SelfAttention,
    linear,
    nearest_upsample,
    padding_bias,
)

REWRITES = ("patch_embed", "qkv", "rope", "windows")
# transformers' inverse_sigmoid clamps a box coordinate to [1e-3, 1 - 1e-3] before it takes the logit.
BOX_LOGIT_LIMIT = math.log((1 - 1e-3) / 1e-3)
PRESENCE_LIMIT = 10.0  # Sam3DetrDecoder.clamp_presence_logit_max_val


class ViTLayer(nn.Module):
    """One layer on (N * windows, window * window, hidden) tokens; `window` is the grid for global attention."""

    def __init__(self, source: nn.Module, grid: int, fuse_qkv: bool, half_rope: bool):
        super().__init__()
        self.window = source.window_size or grid
        attention, rotary = source.attention, source.rotary_emb
        self.layer_norm1 = source.layer_norm1
        self.attention = SelfAttention(
            (attention.q_proj, attention.k_proj, attention.v_proj), attention.o_proj, attention.num_attention_heads,
            self.window**2, attention.scaling, (rotary.rope_embeddings_cos, rotary.rope_embeddings_sin),
            fuse_qkv, half_rope,
        )  # fmt: skip
        self.layer_norm2 = source.layer_norm2
        self.mlp = source.mlp

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.attention(self.layer_norm1(states))
        return states + self.mlp(self.layer_norm2(states))


class FPNLayer(nn.Module):
    """One level of the neck, (N, C, grid, grid) to (N, C', s * grid, s * grid)."""

    def __init__(self, source: nn.Module, grid: int, conv_transpose: str):
        super().__init__()
        self.scale_layers = nn.ModuleList()
        for layer in source.scale_layers:
            if isinstance(layer, nn.ConvTranspose2d):
                as_matmul = conv_transpose == "matmul"
                layer = rewrites.MatMulUpscale(layer, grid, grid) if as_matmul else Convolution(layer)
                grid *= 2
            self.scale_layers.append(layer)
        self.proj1, self.proj2 = Convolution(source.proj1), Convolution(source.proj2)
        self.size = grid

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for layer in self.scale_layers:
            states = layer(states)
        return self.proj2(self.proj1(states))


class VisionEncoder(nn.Module):
    """ViT and neck: (N, 3, S, S) pictures to the three feature levels that the text branch uses, fine to coarse, and
    the ViT's own (N, hidden, grid, grid) states, which the click branch takes."""

    def __init__(self, source: nn.Module, names: tuple[str, ...], conv_transpose: str):
        super().__init__()
        backbone, config = source.backbone, source.backbone.config
        self.hidden, self.grid = config.hidden_size, config.image_size // config.patch_size
        windows = {layer.window_size for layer in backbone.layers if layer.window_size}
        if config.image_size % config.patch_size or any(self.grid % window for window in windows):
            raise UsageError(
                f"image_size {config.image_size}: not a multiple of patch {config.patch_size} x window {windows}; "
                "such a model cannot be exported"
            )
        self.keep_windows = "windows" in names
        embedding = rewrites.LinearPatchEmbedding if "patch_embed" in names else rewrites.ConvPatchEmbedding
        self.patch_embeddings = embedding(backbone.embeddings.patch_embeddings.projection, self.grid)
        # The learnt table belongs to a smaller picture and is repeated, not resized.
        table = backbone.embeddings.position_embeddings.detach()
        side = math.isqrt(table.shape[1])
        table = table.reshape(side, side, self.hidden).tile(-(-self.grid // side), -(-self.grid // side), 1)
        table = table[: self.grid, : self.grid].reshape(1, self.grid**2, self.hidden)
        self.register_buffer("position_embeddings", table)
        self.layer_norm = backbone.layer_norm
        self.layers = nn.ModuleList(
            ViTLayer(layer, self.grid, "qkv" in names, "rope" in names) for layer in backbone.layers
        )
        # The coarsest level serves only other branches.
        self.neck = nn.ModuleList(FPNLayer(layer, self.grid, conv_transpose) for layer in source.neck.fpn_layers[:-1])

    def _to_windows(self, states: torch.Tensor, window: int) -> torch.Tensor:
        count = self.grid // window
        states = states.reshape(-1, count, window, count, window, self.hidden).permute(0, 1, 3, 2, 4, 5)
        return states.reshape(-1, window * window, self.hidden)

    def _from_windows(self, states: torch.Tensor, window: int) -> torch.Tensor:
        count = self.grid // window
        states = states.reshape(-1, count, count, window, window, self.hidden).permute(0, 1, 3, 2, 4, 5)
        return states.reshape(-1, self.grid * self.grid, self.hidden)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = self.layer_norm(self.patch_embeddings(pixel_values) + self.position_embeddings)
        window = self.grid
        for layer in self.layers:
            # All but attention works on single tokens: runs of windowed layers need no way back in between.
            if layer.window != window:
                states = states if window == self.grid else self._from_windows(states, window)
                states = states if layer.window == self.grid else self._to_windows(states, layer.window)
                window = layer.window
            states = layer(states)
            if window != self.grid and not self.keep_windows:
                states, window = self._from_windows(states, window), self.grid
        if window != self.grid:
            states = self._from_windows(states, window)
        states = states.permute(0, 2, 1).reshape(-1, self.hidden, self.grid, self.grid)
        return *(level(states) for level in self.neck), states


class TextLayer(nn.Module):
    """One layer of the CLIP text encoder on (N, 32, hidden) states."""

    def __init__(self, source: nn.Module, fuse_qkv: bool):
        super().__init__()
        attention = source.self_attn
        self.layer_norm1 = source.layer_norm1
        self.attention = SelfAttention(
            (attention.q_proj, attention.k_proj, attention.v_proj), attention.out_proj, attention.num_heads,
            TEXT_LENGTH, attention.scale, fuse_qkv=fuse_qkv,
        )  # fmt: skip
        self.layer_norm2, self.mlp = source.layer_norm2, source.mlp

    def forward(self, states: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        states = states + self.attention(self.layer_norm1(states), bias)
        return states + self.mlp(self.layer_norm2(states))


class TextEncoder(nn.Module):
    """(N, 32) token ids and (N, 1, 1, 32) padding bias to (N, 32, hidden) text features of the detector's width."""

    def __init__(self, source: nn.Module, projection: nn.Linear, fuse_qkv: bool):
        super().__init__()
        text = source.text_model
        self.token_embedding = text.embeddings.token_embedding
        position = text.embeddings.position_embedding.weight[:TEXT_LENGTH].detach()[None]
        self.register_buffer("position_embeddings", position)
        self.register_buffer("causal_bias", torch.full((1, 1, TEXT_LENGTH, TEXT_LENGTH), MASKED).triu(1))
        self.layers = nn.ModuleList(TextLayer(layer, fuse_qkv) for layer in text.encoder.layers)
        self.final_layer_norm, self.projection = text.final_layer_norm, projection

    def forward(self, input_ids: torch.Tensor, padding_bias: torch.Tensor) -> torch.Tensor:
        # INT64 is no type of the AI Core: cast once, here, and never again.
        states = self.token_embedding(input_ids.int()) + self.position_embeddings
        bias = padding_bias + self.causal_bias
        for layer in self.layers:
            states = layer(states, bias)
        return self.projection(self.final_layer_norm(states))


class DetrEncoderLayer(nn.Module):
    """Picture tokens attend to each other, then to the prompt."""

    def __init__(self, source: nn.Module, tokens: int, prompt: int):
        super().__init__()
        self.layer_norm1, self.self_attn = source.layer_norm1, Attention(source.self_attn, tokens, tokens)
        self.layer_norm2, self.cross_attn = source.layer_norm2, Attention(source.cross_attn, tokens, prompt)
        self.layer_norm3, self.mlp = source.layer_norm3, source.mlp

    def forward(self, states, position, text, padding_bias, zero=None) -> torch.Tensor:
        normed = self.layer_norm1(states)
        placed = normed + position
        states = states + self.self_attn(placed, placed, normed)
        if zero is not None:  # here one picture's tokens become those of all phrases
            states = states + zero
        states = states + self.cross_attn(self.layer_norm2(states), text, text, padding_bias)
        return states + self.mlp(self.layer_norm3(states))


class DetrEncoder(nn.Module):
    """The coarsest feature level fused with the prompt: (N, C, grid, grid) to (N, grid * grid, C) tokens, without and
    with their position encoding, which all decoder layers share."""

    def __init__(self, source: nn.Module, channels: int, grid: int, prompt: int):
        super().__init__()
        from transformers.models.sam3.modeling_sam3 import Sam3SinePositionEmbedding

        self.channels, self.tokens = channels, grid * grid
        encoding = Sam3SinePositionEmbedding(num_pos_feats=channels // 2, normalize=True)
        table = encoding(torch.Size((1, channels, grid, grid)), "cpu", torch.float32)
        self.register_buffer("position_encoding", table.flatten(2).transpose(1, 2).contiguous())
        self.layers = nn.ModuleList(DetrEncoderLayer(layer, self.tokens, prompt) for layer in source.layers)

    def forward(self, features, text, padding_bias, zero) -> tuple[torch.Tensor, torch.Tensor]:
        states = features.reshape(-1, self.channels, self.tokens).permute(0, 2, 1)
        for index, layer in enumerate(self.layers):
            states = layer(states, self.position_encoding, text, padding_bias, None if index else zero)
        return states, states + self.position_encoding


class QueryPosition(nn.Module):
    """Position embedding of the queries from their boxes, (N, rows, 4) cxcywh to (N, rows, C); 0 where `is_query`,
    (1, rows, 1), is 0.

    transformers interleaves sine and cosine and puts y before x; here the columns of the first layer are reordered
    instead of the numbers.
    """

    def __init__(self, head: nn.Module, encoding: nn.Module, rows: int):
        super().__init__()
        weight, channels = head.layer1.weight, encoding.num_pos_feats
        self.waves = BoxWaves(encoding, rows, 4, weight.device)
        order = torch.arange(4 * channels).reshape(4, channels // 2, 2)[[1, 0, 2, 3]].permute(2, 0, 1).flatten()
        self.layer1, self.layer2 = linear(weight[:, order.to(weight.device)], head.layer1.bias), head.layer2

    def forward(self, boxes: torch.Tensor, is_query: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.layer1(self.waves(boxes)).relu()) * is_query


class EdgeDistances(nn.Module):
    """Signed logarithmic distance of each grid line to both edges of each box: (N, rows, 4) cxcywh to x and y, each
    (N, rows, grid, 2)."""

    def __init__(self, rows: int, grid: int, device: torch.device):
        super().__init__()
        self.rows, self.grid = rows, grid
        self.register_buffer("lines", (torch.arange(grid) / grid).reshape(grid, 1).to(device))
        self.register_buffer("halves", torch.tensor([-0.5, 0.5], device=device))

    def forward(self, boxes: torch.Tensor) -> list[torch.Tensor]:
        centre, size = (part.unsqueeze(-1) for part in boxes.split(2, dim=-1))
        edges = centre + size * self.halves  # (N, rows, axis, edge)
        distance = (self.lines - edges.unsqueeze(3)) * 8
        # sign(d) log2(|d| + 1) / log2(8), as Sam3DetrDecoder._get_rpb_matrix encodes distances
        encoded = distance.sign() * ((distance.abs() + 1).log() * (1 / math.log(8)))
        return [part.reshape(-1, self.rows, self.grid, 2) for part in encoded.split(1, dim=2)]


class BoxBias(nn.Module):
    """How near each picture token is to the edges of each query's box, added to the scores of the cross-attention:
    (N, rows, 4) cxcywh to (N, heads, rows, grid * grid); 0 where `is_query`, (1, rows, 1), is 0.

    The two axes are embedded apart, and brought into the scores' layout before they are added up: what is transposed
    is grid long, not grid * grid.
    """

    def __init__(self, embed_x: nn.Module, embed_y: nn.Module, rows: int, grid: int):
        super().__init__()
        self.embed_x, self.embed_y = embed_x, embed_y
        self.shape = (embed_x.layer2.out_features, rows, grid * grid)
        self.distances = EdgeDistances(rows, grid, embed_x.layer1.weight.device)

    def forward(self, boxes: torch.Tensor, is_query: torch.Tensor) -> torch.Tensor:
        x, y = self.distances(boxes)
        x = self.embed_x(x).permute(0, 3, 1, 2) * is_query
        y = self.embed_y(y).permute(0, 3, 1, 2) * is_query
        return (y.unsqueeze(4) + x.unsqueeze(3)).reshape(-1, *self.shape)


class QuerySelfAttention(nn.Module):
    """Queries attend to each other."""

    def __init__(self, source: nn.Module, rows: int):
        super().__init__()
        self.attention, self.layer_norm = Attention(source.self_attn, rows, rows), source.self_attn_layer_norm

    def forward(self, states, position) -> torch.Tensor:
        placed = states + position
        return self.layer_norm(states + self.attention(placed, placed, states))


class DetrDecoderLayer(nn.Module):
    """Queries attend to the prompt, then to the picture, with the bias of their boxes."""

    def __init__(self, source: nn.Module, rows: int, tokens: int, prompt: int):
        super().__init__()
        self.text_cross_attn = Attention(source.text_cross_attn, rows, prompt)
        self.text_cross_attn_layer_norm = source.text_cross_attn_layer_norm
        self.vision_cross_attn = Attention(source.vision_cross_attn, rows, tokens)
        self.vision_cross_attn_layer_norm = source.vision_cross_attn_layer_norm
        self.mlp, self.mlp_layer_norm = source.mlp, source.mlp_layer_norm

    def forward(self, states, position, text, padding_bias, vision, placed_vision, box_bias) -> torch.Tensor:
        attended = self.text_cross_attn(states + position, text, text, padding_bias)
        states = self.text_cross_attn_layer_norm(states + attended)
        attended = self.vision_cross_attn(states + position, placed_vision, vision, box_bias)
        states = self.vision_cross_attn_layer_norm(states + attended)
        return self.mlp_layer_norm(states + self.mlp(states))


class DetrDecoder(nn.Module):
    """Queries and the presence token, refined layer by layer.

    The presence token is row 0 of the queries all the way: its box is computed like the others' and multiplied away,
    which spares the graph a Slice and three Concats a layer. Boxes stay logits: the original takes their sigmoid and
    its inverse between layers, which costs float16 most of its digits near 0 and 1. The two differ only beyond the
    clamp, by less than 1e-3 in the logit of a coordinate nearer than 0.1 % to the picture's edge.
    """

    def __init__(self, source: nn.Module, grid: int, prompt: int):
        super().__init__()
        queries, channels = source.query_embed.weight.shape
        rows, tokens = queries + 1, grid * grid
        self.queries = queries
        self.query_position = QueryPosition(source.ref_point_head, source.position_encoding, rows)
        self.box_bias = BoxBias(source.box_rpb_embed_x, source.box_rpb_embed_y, rows, grid)
        self.box_head, self.output_layer_norm = source.box_head, source.output_layer_norm
        self.presence_head, self.presence_layer_norm = source.presence_head, source.presence_layer_norm
        device = source.query_embed.weight.device
        self.register_buffer("is_query", (torch.arange(rows) > 0).float().reshape(1, rows, 1).to(device))
        # What precedes the first meeting with the prompt depends on weights alone.
        with torch.no_grad():
            from transformers.models.sam3.modeling_sam3 import inverse_sigmoid

            boxes = torch.cat([torch.full((1, 4), 0.5, device=device), source.reference_points.weight.sigmoid()])[None]
            states = torch.cat([source.presence_token.weight, source.query_embed.weight])[None]
            position = self.query_position(boxes, self.is_query)
            bias = self.box_bias(boxes, self.is_query)
            self.register_buffer("initial_logits", inverse_sigmoid(boxes))
            self.register_buffer("initial_position", position)
            self.register_buffer("initial_states", QuerySelfAttention(source.layers[0], rows)(states, position))
            self.register_buffer("initial_bias", bias)
        self.self_attn = nn.ModuleList(QuerySelfAttention(layer, rows) for layer in source.layers[1:])
        self.layers = nn.ModuleList(DetrDecoderLayer(layer, rows, tokens, prompt) for layer in source.layers)

    def forward(self, vision, placed_vision, text, padding_bias, zero) -> tuple[torch.Tensor, ...]:
        """
        Args:
            zero: (N, 1, 1) zeros.

        Returns:
            (N, Q, C) states and (N, Q, 4) box logits of the queries, (N, 1) presence logits.
        """
        states, position, bias = self.initial_states + zero, self.initial_position, self.initial_bias
        logits = self.initial_logits
        for index, layer in enumerate(self.layers):
            if index:
                boxes = logits.sigmoid()
                position = self.query_position(boxes, self.is_query)
                bias = self.box_bias(boxes, self.is_query)
                states = self.self_attn[index - 1](states, position)
                logits = logits.clamp(-BOX_LOGIT_LIMIT, BOX_LOGIT_LIMIT)
            states = layer(states, position, text, padding_bias, vision, placed_vision, bias)
            normed = self.output_layer_norm(states)
            logits = self.box_head(normed) + logits
        presence, _ = states.split([1, self.queries], dim=1)
        _, normed = normed.split([1, self.queries], dim=1)
        _, logits = logits.split([1, self.queries], dim=1)
        presence = self.presence_head(self.presence_layer_norm(presence)).reshape(-1, 1)
        return normed, logits, presence.clamp(-PRESENCE_LIMIT, PRESENCE_LIMIT)


class Scoring(nn.Module):
    """Score logits: dot product of each query with the mean of the prompt."""

    def __init__(self, source: nn.Module, queries: int):
        super().__init__()
        self.text_mlp, self.text_mlp_out_norm = source.text_mlp, source.text_mlp_out_norm
        self.text_proj, self.query_proj = source.text_proj, source.query_proj
        self.scale, self.limit, self.queries = source.scale, source.clamp_max_val, queries

    def forward(self, states, text, mask, count) -> torch.Tensor:
        """(N, Q, C) states, (N, L, C) prompt, (N, L) float mask and (N, 1) number of tokens to (N, Q) logits."""
        text = self.text_mlp_out_norm(self.text_mlp(text) + text)
        mean = (mask.unsqueeze(1) @ text).reshape(-1, self.text_proj.in_features) / count.clamp(min=1.0)
        scores = self.query_proj(states) @ self.text_proj(mean).unsqueeze(-1) * self.scale
        return scores.clamp(-self.limit, self.limit).reshape(-1, self.queries)


class MaskDecoder(nn.Module):
    """Mask logits of each query, and of the union of all instances."""

    def __init__(self, source: nn.Module, sizes: list[int], queries: int, prompt: int):
        """
        Args:
            sizes: sides of the feature levels, fine to coarse. prompt: number of tokens.
        """
        super().__init__()
        self.channels, self.queries, self.sizes = source.config.hidden_size, queries, sizes
        self.prompt_cross_attn_norm = source.prompt_cross_attn_norm
        self.prompt_cross_attn = Attention(source.prompt_cross_attn, sizes[-1] ** 2, prompt)
        pixel = source.pixel_decoder
        finer = sizes[-2::-1]
        self.conv_layers = nn.ModuleList(Convolution(layer) for layer in pixel.conv_layers[: len(finer)])
        self.norms = nn.ModuleList(GroupNorm(norm, size, size) for norm, size in zip(pixel.norms, finer))
        self.mask_embedder = source.mask_embedder
        self.instance_projection = Convolution(source.instance_projection)
        self.semantic_projection = Convolution(source.semantic_projection)

    def forward(self, states, encoded, features, text, padding_bias) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, Q, C) queries, (N, tokens, C) encoded picture, the feature levels and the prompt to (N, Q, M, M) mask
        logits and (N, 1, M, M) semantic logits."""
        encoded = encoded + self.prompt_cross_attn(self.prompt_cross_attn_norm(encoded), text, text, padding_bias)
        size = self.sizes[-1]
        pixels = encoded.permute(0, 2, 1).reshape(-1, self.channels, size, size)
        for conv, norm, level in zip(self.conv_layers, self.norms, reversed(features[:-1])):
            pixels = norm(conv(nearest_upsample(pixels, norm.shape[-1] // size) + level)).relu()
            size = norm.shape[-1]
        instances = self.instance_projection(pixels).reshape(-1, self.channels, size * size)
        masks = (self.mask_embedder(states) @ instances).reshape(-1, self.queries, size, size)
        return masks, self.semantic_projection(pixels)


class PromptMask(nn.Module):
    """What the (N, length) mask of tokens is used as, made once: float mask, (N, 1, 1, length) bias against padding,
    (N, 1) number of tokens, and (N, 1, 1) zeros, which give constants the batch without an Expand to a computed shape.
    """

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def forward(self, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = mask if mask.is_floating_point() else mask.float()  # the tracer keeps Casts from float32 to float32
        bias = padding_bias(mask, self.length)
        count = mask.sum(-1, keepdim=True)
        return mask, bias, count, (count * 0).reshape(-1, 1, 1)


class BoxCorners(nn.Module):
    """(N, Q, 4) logits of cxcywh to (N, Q, 4) xyxy in 0..1."""

    def __init__(self, queries: int):
        super().__init__()
        self.queries = queries
        self.register_buffer("halves", torch.tensor([[-0.5], [0.5]]))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        centre, size = (part.unsqueeze(2) for part in logits.sigmoid().split(2, dim=-1))
        return (centre + size * self.halves).reshape(-1, self.queries, 4)


class TextBranch(nn.Module):
    """The contract's inputs to its outputs and, after them, what goes between the parts of the split layout."""

    def __init__(
        self,
        sam3: nn.Module,
        names: tuple[str, ...] = REWRITES,
        conv_transpose="operator",
        layer_norm="operator",
        exemplars=0,
    ):
        """
        Args:
            sam3: transformers' `Sam3Model` in eval mode; its modules are taken over. May be on the meta device.
            names: which of `REWRITES` to apply.
            conv_transpose: the neck's transposed convolutions as "operator" or as "matmul".
            layer_norm: layer normalisation as "operator" or "decomposed".
            exemplars: how many boxes a list of box exemplars holds; 0: the model takes none.
        """
        super().__init__()
        config = sam3.config
        queries, channels = sam3.detr_decoder.query_embed.weight.shape
        fuse_qkv = "qkv" in names
        self.vision_encoder = VisionEncoder(sam3.vision_encoder, names, conv_transpose)
        self.text_encoder = TextEncoder(sam3.text_encoder, sam3.text_projection, fuse_qkv)
        grid = self.vision_encoder.grid
        prompt = TEXT_LENGTH + (exemplars + 1 if exemplars else 0)
        self.detr_encoder = DetrEncoder(sam3.detr_encoder, config.detr_encoder_config.hidden_size, grid, prompt)
        self.detr_decoder = DetrDecoder(sam3.detr_decoder, grid, prompt)
        self.dot_product_scoring = Scoring(sam3.dot_product_scoring, queries)
        sizes = [level.size for level in self.vision_encoder.neck]
        self.mask_decoder = MaskDecoder(sam3.mask_decoder, sizes, queries, prompt)
        self.text_mask, self.box_corners = PromptMask(TEXT_LENGTH), BoxCorners(queries)
        if exemplars:
            position = self.detr_encoder.position_encoding
            self.exemplar_encoder = ExemplarEncoder(sam3.geometry_encoder, exemplars, grid, position)
            self.prompt_mask = PromptMask(prompt)
        if layer_norm == "decomposed":
            rewrites.decompose_layer_norms(self)
        self.eval().requires_grad_(False)

    def forward(self, pixel_values, input_ids, attention_mask, *boxes) -> tuple[torch.Tensor, ...]:
        """Inputs by the contract, `input_boxes` and `input_boxes_labels` where the model takes exemplars; outputs
        `pred_masks`, `pred_logits`, `pred_boxes`, `presence_logits`, `semantic_seg`, then the three feature levels of
        `contract.TAPS`, fine to coarse, `backbone_features`, `text_features`, and of exemplars `exemplar_features`,
        `exemplar_mask`."""
        mask, bias, count, zero = self.text_mask(attention_mask)
        *features, backbone_features = self.vision_encoder(pixel_values)
        prompt = self.text_encoder(input_ids, bias)
        between = [*features, backbone_features, prompt]
        if boxes:
            exemplars, exemplar_mask = self.exemplar_encoder(features[-1], *boxes)
            between += [exemplars, exemplar_mask]
            prompt = torch.cat([prompt, exemplars], dim=1)
            mask, bias, count, _ = self.prompt_mask(torch.cat([mask, exemplar_mask], dim=1))
        encoded, placed = self.detr_encoder(features[-1], prompt, bias, zero)
        states, box_logits, presence_logits = self.detr_decoder(encoded, placed, prompt, bias, zero)
        pred_logits = self.dot_product_scoring(states, prompt, mask, count)
        pred_masks, semantic_seg = self.mask_decoder(states, encoded, features, prompt, bias)
        return pred_masks, pred_logits, self.box_corners(box_logits), presence_logits, semantic_seg, *between
