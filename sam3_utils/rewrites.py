# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Equal maths in forms that graph compilers like better: the building blocks of `static_model`.

Each block takes its weights from a module of transformers 5.0.0 and stands alone. Sizes other than the batch are
fixed when a block is built, so that the traced graph has constants where the original computes shapes.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

# Added to the scores of padding. exp(-1e4) is 0 in float32 and float16, and -1e4 is far from float16's limit (65504);
# a row of padding only stays finite, unlike with the -inf or float32 minimum of other implementations.
MASKED = -1e4


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """An `nn.Linear` that holds exactly these tensors."""
    module = nn.Linear(1, 1, bias=bias is not None, device="meta")
    module.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias.detach(), requires_grad=False)
    module.out_features, module.in_features = weight.shape
    return module


def padding_bias(mask: torch.Tensor, length: int) -> torch.Tensor:
    """(N, length) float mask, 0 for padding, to the (N, 1, 1, length) bias against it that attention takes."""
    return ((1 - mask) * MASKED).reshape(-1, 1, 1, length)


class _Convolution(torch.autograd.Function):
    """One ONNX convolution. On the meta device, where models are traced without their weights, only the shape is
    computed: PyTorch 2.9's own shape function for convolutions cannot run inside the tracer."""

    @staticmethod
    def forward(ctx, states, weight, bias, stride, padding, transposed):
        if not states.is_meta:
            convolve = F.conv_transpose2d if transposed else F.conv2d
            return convolve(states, weight, bias, stride=stride, padding=padding)
        batch, _, *sizes = map(int, states.shape)
        kernel = weight.shape[-1]
        if transposed:
            sizes, channels = [(size - 1) * stride - 2 * padding + kernel for size in sizes], weight.shape[1]
        else:
            sizes, channels = [(size + 2 * padding - kernel) // stride + 1 for size in sizes], weight.shape[0]
        return states.new_empty((batch, int(channels), *map(int, sizes)))

    @staticmethod
    def symbolic(g, states, weight, bias, stride, padding, transposed):
        kernel = weight.type().sizes()[-1]
        operands = (states, weight) if bias is None else (states, weight, bias)
        return g.op(
            "ConvTranspose" if transposed else "Conv", *operands, kernel_shape_i=[kernel, kernel],
            strides_i=[stride, stride], pads_i=[padding] * 4, dilations_i=[1, 1], group_i=1,
        )  # fmt: skip


class Convolution(nn.Module):
    """Stands in for a square `nn.Conv2d` or `nn.ConvTranspose2d` without groups or dilation."""

    def __init__(self, source: nn.Conv2d | nn.ConvTranspose2d):
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        self.stride, self.padding = source.stride[0], source.padding[0]
        self.transposed = isinstance(source, nn.ConvTranspose2d)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) to (N, C', H', W')."""
        return _Convolution.apply(states, self.weight, self.bias, self.stride, self.padding, self.transposed)


class MatMulUpscale(nn.Module):
    """A transposed convolution whose stride is its kernel, as a MatMul whose result is laid out as pixels.

        before   ConvTranspose 2x2, stride 2
        after    Reshape -> Transpose -> MatMul -> Add -> Reshape -> Transpose -> Reshape

    No output pixel gets more than one contribution, so the maths is the same. The neck's ConvTranspose is where
    mixed precision OMs of SAM3 were seen to go wrong; on the cube unit this form is an ordinary matrix product.
    """

    def __init__(self, source: nn.ConvTranspose2d, height: int, width: int):
        super().__init__()
        channels, self.channels, self.kernel, _ = source.weight.shape
        self.height, self.width = height, width
        weight = source.weight.detach().reshape(channels, -1).t()
        self.projection = linear(weight.contiguous(), source.bias.detach().repeat_interleave(self.kernel**2))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) to (N, C', kernel * H, kernel * W)."""
        height, width, kernel = self.height, self.width, self.kernel
        tokens = states.reshape(-1, self.projection.in_features, height * width).permute(0, 2, 1)
        pixels = self.projection(tokens).reshape(-1, height, width, self.channels, kernel, kernel)
        return pixels.permute(0, 3, 1, 4, 2, 5).reshape(-1, self.channels, kernel * height, kernel * width)


class _NearestUpsample(torch.autograd.Function):
    """Resize by a whole factor. Its rounding says half_pixel and round_prefer_ceil, the only one ATC knows, and picks
    the same pixels as the asymmetric floor that `F.interpolate` is exported to: floor((i + 0.5) / s) = floor(i / s).
    """

    @staticmethod
    def forward(ctx, states, factor):
        if not states.is_meta:
            return F.interpolate(states, scale_factor=factor, mode="nearest")
        batch, channels, height, width = map(int, states.shape)
        return states.new_empty((batch, channels, factor * height, factor * width))

    @staticmethod
    def symbolic(g, states, factor):
        scales = g.op("Constant", value_t=torch.tensor([1.0, 1.0, factor, factor]))
        empty = g.op("Constant", value_t=torch.zeros(0))
        return g.op(
            "Resize", states, empty, scales, mode_s="nearest",
            coordinate_transformation_mode_s="half_pixel", nearest_mode_s="round_prefer_ceil",
        )  # fmt: skip


def nearest_upsample(states: torch.Tensor, factor: int) -> torch.Tensor:
    """(N, C, H, W) to (N, C, factor * H, factor * W), each pixel repeated."""
    return _NearestUpsample.apply(states, factor)


class GroupNorm(nn.Module):
    """Stands in for `nn.GroupNorm`, whose exported form asks the tensor for its shape."""

    def __init__(self, source: nn.GroupNorm, height: int, width: int):
        super().__init__()
        self.groups, self.eps, self.shape = source.num_groups, source.eps, (source.num_channels, height, width)
        self.weight = nn.Parameter(source.weight.detach().reshape(1, -1, 1, 1), requires_grad=False)
        self.bias = nn.Parameter(source.bias.detach().reshape(1, -1, 1, 1), requires_grad=False)
        self.register_buffer("ones", torch.ones_like(source.weight[: self.groups].detach()))
        self.register_buffer("zeros", torch.zeros_like(self.ones))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) in and out."""
        grouped = states.reshape(-1, self.groups, math.prod(self.shape) // self.groups)
        normed = F.instance_norm(grouped, weight=self.ones, bias=self.zeros, eps=self.eps)
        return normed.reshape(-1, *self.shape) * self.weight + self.bias


class DecomposedLayerNorm(nn.Module):
    """Stands in for `nn.LayerNorm` as the chain that ATC's LayerNormONNXFusionPass looks for:

    ReduceMean -> Sub -> Pow -> ReduceMean -> Add -> Sqrt -> Div -> Mul -> Add
    """

    def __init__(self, source: nn.LayerNorm):
        super().__init__()
        self.weight, self.bias, self.eps = source.weight, source.bias, source.eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(..., C) in and out, normalised over the last dimension."""
        centred = states - states.mean(-1, keepdim=True)
        deviation = torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)
        return centred / deviation * self.weight + self.bias


def decompose_layer_norms(model: nn.Module) -> None:
    """Put a `DecomposedLayerNorm` in the place of every `nn.LayerNorm`."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, DecomposedLayerNorm(child))


class LinearPatchEmbedding(nn.Module):
    """Patch embedding as one MatMul.

        before   Conv 14x14, stride 14 -> Reshape -> Transpose
        after    Reshape -> Transpose -> Reshape -> MatMul

    A convolution with three input channels is padded to 16 on the NPU's cube unit; patches of 588 numbers are not.
    """

    def __init__(self, projection: nn.Conv2d, grid: int):
        super().__init__()
        self.patch, self.grid = projection.weight.shape[-1], grid
        self.projection = linear(projection.weight.flatten(1), projection.bias)  # SAM3's has no bias

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(N, 3, S, S) pictures to (N, grid * grid, hidden) embeddings."""
        patch, grid = self.patch, self.grid
        patches = pixel_values.reshape(-1, 3, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
        return self.projection(patches.reshape(-1, grid * grid, 3 * patch * patch))


class ConvPatchEmbedding(nn.Module):
    """Patch embedding as SAM3 has it, a convolution whose result is laid out as tokens."""

    def __init__(self, projection: nn.Conv2d, grid: int):
        super().__init__()
        self.projection, self.tokens = Convolution(projection), grid * grid

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(N, 3, S, S) pictures to (N, grid * grid, hidden) embeddings."""
        hidden = self.projection.weight.shape[0]
        return self.projection(pixel_values).reshape(-1, hidden, self.tokens).permute(0, 2, 1)


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


def rotate_pairs(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """RoPE on (N, heads, length, head_dim) states as SAM3 has it, neighbouring channels forming a pair."""
    length, head_dim = cos.shape
    even, odd = states.reshape(-1, length, head_dim // 2, 2).split(1, dim=-1)
    rotated = torch.cat([-odd, even], dim=-1).reshape(-1, heads, length, head_dim)
    return states * cos + rotated * sin


def attend(query, key, value, bias=None) -> torch.Tensor:
    """softmax(query key + bias) value, written out for every target: opset 17 has no attention operator, and traced
    SDPA is these nodes plus a scaling pass over query and over key, and NaN checks over the weights.

    Args:
        query: (N, heads, length, head_dim), already scaled. key: (N, heads, head_dim, keys). value: (N, heads, keys,
            head_dim). bias: added to the scores, broadcast.
    """
    scores = query @ key
    return (scores if bias is None else scores + bias).softmax(dim=-1) @ value


class SelfAttention(nn.Module):
    """Self-attention over one input, with RoPE or without, its softmax scale inside the weights or tables.

    With `fuse_qkv` the three projections are one:

        before   3 x (MatMul -> Add -> Reshape -> Transpose)
        after    MatMul -> Add -> Reshape -> Transpose -> Split -> 3 x Squeeze

    which is the form that ATC's ViT QKV fusions look for (they miss three Slices). With `half_rope` the output
    channels of q and k are reordered when the model is loaded, evens before odds in each head: scores, being sums
    over channels, stay the same, and the rotation becomes `rotate_halves`.
    """

    def __init__(self, projections, out, heads, length, scale, rope=None, fuse_qkv=True, half_rope=True):
        """
        Args:
            projections: the `nn.Linear` of q, k and v. out: that of the output.
            length: tokens in a sequence. scale: of the scores.
            rope: (cos, sin), each (length, head_dim), or None.
        """
        super().__init__()
        hidden = projections[0].weight.shape[0]
        self.heads, self.length, self.head_dim = heads, length, hidden // heads
        weights = [projection.weight.detach() for projection in projections]
        biases = [projection.bias.detach() for projection in projections]
        self.rotate = None
        if rope is None:
            weights[0], biases[0] = weights[0] * scale, biases[0] * scale
        elif half_rope:
            order = torch.arange(hidden, device=weights[0].device).reshape(heads, self.head_dim // 2, 2)
            order = order.transpose(1, 2).flatten()
            weights[:2] = [weight[order] for weight in weights[:2]]
            biases[:2] = [bias[order] for bias in biases[:2]]
            self.rotate, rope = rotate_halves, half_rotation_tables(*rope)
        else:
            self.rotate = partial(rotate_pairs, heads=heads)
        if rope is not None:
            for name, table in zip(("cos", "sin"), rope):
                self.register_buffer(f"q_{name}", table * scale)
                self.register_buffer(f"k_{name}", table)
        if fuse_qkv:
            self.qkv = linear(torch.cat(weights), torch.cat(biases))
        else:
            self.qkv = None
            self.q_proj, self.k_proj, self.v_proj = (linear(*pair) for pair in zip(weights, biases))
        self.o_proj = out

    def forward(self, states: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """(N, length, hidden) in and out; `bias` is added to the (N, heads, length, length) scores, broadcast."""
        if self.qkv is not None:
            qkv = self.qkv(states).reshape(-1, self.length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
            query, key, value = qkv.unbind(0)
        else:
            query, key, value = (
                projection(states).reshape(-1, self.length, self.heads, self.head_dim).transpose(1, 2)
                for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
        if self.rotate is not None:
            query = self.rotate(query, self.q_cos, self.q_sin)
            key = self.rotate(key, self.k_cos, self.k_sin)
        output = attend(query, key.transpose(2, 3), value, bias)
        return self.o_proj(output.transpose(1, 2).reshape(-1, self.length, self.heads * self.head_dim))


class Attention(nn.Module):
    """Stands in for transformers' `Sam3Attention` where lengths are fixed; the softmax scale is inside q_proj."""

    def __init__(self, source: nn.Module, length: int, keys: int):
        super().__init__()
        self.heads, self.head_dim, self.length, self.keys = source.num_attention_heads, source.head_dim, length, keys
        scale = source.scaling
        self.q_proj = linear(source.q_proj.weight * scale, source.q_proj.bias * scale)
        self.k_proj, self.v_proj, self.o_proj = source.k_proj, source.v_proj, source.o_proj

    def forward(self, query, key, value, bias=None) -> torch.Tensor:
        """(N, length, hidden) query, (N, keys, hidden) key and value to (N, length, hidden); bias as in `attend`."""
        split = (self.heads, self.head_dim)
        query = self.q_proj(query).reshape(-1, self.length, *split).transpose(1, 2)
        key = self.k_proj(key).reshape(-1, self.keys, *split).permute(0, 2, 3, 1)
        value = self.v_proj(value).reshape(-1, self.keys, *split).transpose(1, 2)
        output = attend(query, key, value, bias)
        return self.o_proj(output.transpose(1, 2).reshape(-1, self.length, self.heads * self.head_dim))


class BoxWaves(nn.Module):
    """Sines, then cosines, of each box coordinate at each frequency: (N, rows, coordinates) to (N, rows, coordinates *
    num_pos_feats) of transformers' encoding."""

    def __init__(self, encoding: nn.Module, rows: int, coordinates: int, device: torch.device):
        super().__init__()
        channels = encoding.num_pos_feats
        self.rows, self.angles = rows, coordinates * channels // 2
        # The angle of coordinate v at frequency k is v * scale / temperature^(2k / channels).
        power = 2 * torch.div(torch.arange(0, channels, 2).float(), 2, rounding_mode="floor") / channels
        self.register_buffer("frequencies", (encoding.scale / encoding.temperature**power).to(device))

    def forward(self, boxes: torch.Tensor) -> torch.Tensor:
        angles = (boxes.unsqueeze(-1) * self.frequencies).reshape(-1, self.rows, self.angles)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)
