# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Each rewrite against the module it replaces, at facebook/sam3's sizes."""

import copy
import itertools

import pytest
import torch
from conftest import TINY
from transformers.models.sam3.configuration_sam3 import Sam3ViTConfig
from transformers.models.sam3.modeling_sam3 import (
    Sam3ViTLayer,
    Sam3ViTPatchEmbeddings,
    Sam3ViTRotaryEmbedding,
    apply_rotary_pos_emb_2d,
)

from sam3_export_onnx import REWRITES
from sam3_utils.rewrites import (
    LinearPatchEmbedding,
    ViTAttention,
    apply_rewrites,
    half_rotation_tables,
    rotate_halves,
)

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-8}
CONFIG = Sam3ViTConfig()  # 1024 wide, 16 heads, 1008 px, patch 14, window 24: the defaults are facebook/sam3's


def relative_difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).abs().max() / reference.abs().max())


def rotate_by_formula(states, cos, sin):
    """RoPE as complex multiplication of neighbouring channels, in the states' own dtype (transformers uses float32)."""
    pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos[:, 0::2], sin[:, 0::2])).flatten(-2)


def attention_by_formula(layer, states, dtype):
    """softmax(rotated q k^T / sqrt(d)) v, written out."""
    module, cos, sin = layer.attention, layer.rotary_emb.rope_embeddings_cos, layer.rotary_emb.rope_embeddings_sin
    flat = states.flatten(1, 2)
    query, key, value = (
        projection(flat).unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    query, key = (rotate_by_formula(part, cos.to(dtype), sin.to(dtype)) for part in (query, key))
    weights = (query @ key.transpose(-1, -2) / module.head_dim**0.5).softmax(-1)
    return module.o_proj((weights @ value).transpose(1, 2).flatten(2)).reshape(states.shape)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_patch_embedding_without_convolution_equals_the_convolution_at_1008_px(dtype):
    torch.manual_seed(0)
    original = Sam3ViTPatchEmbeddings(CONFIG).to(dtype)
    pixel_values = torch.rand(1, 3, 1008, 1008, dtype=dtype) * 2 - 1
    with torch.no_grad():
        difference = relative_difference(LinearPatchEmbedding(original, 1008)(pixel_values), original(pixel_values))
    assert difference <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_rotation_of_halves_equals_the_formula_at_72_x_72(dtype):
    torch.manual_seed(1)
    rotary = Sam3ViTRotaryEmbedding(CONFIG, end_x=72, end_y=72, scale=24 / 72)
    cos, sin = rotary.rope_embeddings_cos.to(dtype), rotary.rope_embeddings_sin.to(dtype)
    states = torch.randn(1, 16, 72 * 72, 64, dtype=dtype)
    halves = torch.cat([states[..., 0::2], states[..., 1::2]], dim=-1)
    rotated = rotate_halves(halves, *half_rotation_tables(cos, sin))
    expected = rotate_by_formula(states, cos, sin)
    assert relative_difference(rotated, torch.cat([expected[..., 0::2], expected[..., 1::2]], dim=-1)) <= BOUNDS[dtype]


def test_the_formula_is_transformers_own_rotation():
    torch.manual_seed(2)
    rotary = Sam3ViTRotaryEmbedding(CONFIG, end_x=24, end_y=24)
    cos, sin = rotary.rope_embeddings_cos, rotary.rope_embeddings_sin
    states = torch.randn(1, 16, 576, 64)
    original, _ = apply_rotary_pos_emb_2d(states, states, cos, sin)
    assert relative_difference(rotate_by_formula(states, cos, sin), original) <= 1e-6


@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("fuse_qkv, half_rope", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_window_attention_equals_transformers_in_float32_and_the_formula_in_float64(
    dtype, fuse_qkv, half_rope, attention
):
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIG)
    config._attn_implementation = attention
    layer = Sam3ViTLayer(config, window_size=24).to(dtype).eval()
    states = torch.randn(2, 24, 24, 1024, dtype=dtype)
    with torch.no_grad():
        position = layer.rotary_emb()
        if dtype == torch.float32:
            expected = layer.attention(states, position)[0]
        elif half_rope:
            expected = attention_by_formula(layer, states, dtype)
        else:  # transformers' own rotation stays in, and with it its float32
            expected = layer.attention(states, position)[0]
        rewritten = ViTAttention(layer, 72, fuse_qkv, half_rope)(states, position)[0]
    assert relative_difference(rewritten, expected) <= BOUNDS[dtype]


def test_any_choice_of_rewrites_leaves_the_whole_model_equal():
    from sam3_utils.checkpoint import load_model

    torch.manual_seed(4)
    feeds = {
        "pixel_values": torch.rand(1, 3, 224, 224) * 2 - 1,
        "input_ids": torch.tensor([[512, 5, 9] + [513] * 29]),
        "attention_mask": torch.tensor([[1, 1, 1, 1] + [0] * 28]),
    }
    with torch.no_grad():
        expected = load_model(TINY)(**feeds).pred_masks
        for count in range(1, len(REWRITES) + 1):
            for names in itertools.combinations(REWRITES, count):
                model = load_model(TINY, attention="eager")
                apply_rewrites(model, names)
                assert relative_difference(model(**feeds).pred_masks, expected) <= 1e-5, names
