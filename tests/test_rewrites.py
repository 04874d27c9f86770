# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Each rewrite against the module it replaces, at facebook/sam3's sizes, and the whole branch against Sam3Model."""

import copy
import itertools

import pytest
import torch
from conftest import TINY
from transformers.models.clip.configuration_clip import CLIPTextConfig
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.sam3.configuration_sam3 import Sam3DETREncoderConfig, Sam3ViTConfig
from transformers.models.sam3.modeling_sam3 import (
    Sam3Attention,
    Sam3FPNLayer,
    Sam3ViTLayer,
    Sam3ViTPatchEmbeddings,
    Sam3ViTRotaryEmbedding,
    apply_rotary_pos_emb_2d,
)

from sam3_utils import contract
from sam3_utils.rewrites import (
    Attention,
    Convolution,
    DecomposedLayerNorm,
    GroupNorm,
    LinearPatchEmbedding,
    MatMulUpscale,
    half_rotation_tables,
    nearest_upsample,
    rotate_halves,
)
from sam3_utils.static_model import MASKED, REWRITES, TextBranch, TextLayer, ViTLayer

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
        rewritten = LinearPatchEmbedding(original.projection, 72)(pixel_values)
        difference = relative_difference(rewritten, original(pixel_values))
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
        rewritten = ViTLayer(layer, 72, fuse_qkv, half_rope).attention(states.flatten(1, 2)).reshape(states.shape)
    assert relative_difference(rewritten, expected) <= BOUNDS[dtype]


@pytest.mark.parametrize("fuse_qkv", (True, False))
def test_text_layer_with_a_shared_bias_equals_transformers_causal_masked_layer(fuse_qkv):
    torch.manual_seed(5)
    config = CLIPTextConfig(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, hidden_act="gelu")
    config._attn_implementation = "eager"
    layer = CLIPEncoderLayer(config).eval()
    states, tokens = torch.randn(2, 32, 1024), torch.tensor([5, 32])
    hidden = torch.full((32, 32), True).triu(1) | (torch.arange(32) >= tokens[:, None, None])
    with torch.no_grad():
        expected = layer(states, hidden[:, None].float() * torch.finfo(torch.float32).min)
        expected = expected[0] if isinstance(expected, tuple) else expected
        rewritten = TextLayer(layer, fuse_qkv)(states, hidden[:, None].float() * MASKED)
    assert relative_difference(rewritten, expected) <= 1e-5


@pytest.mark.parametrize("dtype", BOUNDS)
def test_attention_with_the_scale_in_its_weights_equals_transformers(dtype):
    torch.manual_seed(6)
    config = Sam3DETREncoderConfig()
    config._attn_implementation = "eager"
    original = Sam3Attention(config).to(dtype).eval()
    query, text, bias = torch.randn(2, 576, 256), torch.randn(2, 32, 256), torch.randn(2, 1, 1, 32)
    query, text, bias = query.to(dtype), text.to(dtype), bias.to(dtype)
    with torch.no_grad():
        expected = original(query, text, text, attention_mask=bias)[0]
        rewritten = Attention(original, 576, 32)(query, text, text, bias)
    assert relative_difference(rewritten, expected) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_transposed_convolution_as_a_matrix_product_equals_the_convolution_at_72_x_72(dtype):
    torch.manual_seed(7)
    original = Sam3FPNLayer(1024, 256, 4.0).to(dtype).scale_layers[0]
    states = torch.randn(1, 1024, 72, 72, dtype=dtype)
    with torch.no_grad():
        assert relative_difference(MatMulUpscale(original, 72, 72)(states), original(states)) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_norms_upsampling_and_convolutions_equal_torch_s_own(dtype):
    torch.manual_seed(8)
    states = torch.randn(2, 256, 12, 12, dtype=dtype) * 3 + 1
    group, layer = torch.nn.GroupNorm(8, 256).to(dtype), torch.nn.LayerNorm(12).to(dtype)
    convolutions = (
        torch.nn.Conv2d(256, 64, 3, padding=1).to(dtype),
        torch.nn.Conv2d(256, 64, 4, stride=4, bias=False).to(dtype),
        torch.nn.ConvTranspose2d(256, 64, 2, stride=2).to(dtype),
    )
    for parameter in (group.weight, group.bias, layer.weight, layer.bias):
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        assert relative_difference(GroupNorm(group, 12, 12)(states), group(states)) <= BOUNDS[dtype]
        assert relative_difference(DecomposedLayerNorm(layer)(states), layer(states)) <= BOUNDS[dtype]
        assert torch.equal(nearest_upsample(states, 2), torch.nn.functional.interpolate(states, scale_factor=2))
        for convolution in convolutions:
            real = Convolution(convolution)(states)
            assert torch.equal(real, convolution(states))
            # On the meta device only the shape is computed: it must be the real one.
            assert Convolution(convolution).to("meta")(states.to("meta")).shape == real.shape
            convolution.to("cpu")


def load():
    from sam3_utils.checkpoint import load_model

    return load_model(TINY)


def test_any_choice_of_rewrites_leaves_all_outputs_and_feature_levels_equal():
    torch.manual_seed(4)
    feeds = {
        "pixel_values": torch.rand(2, 3, 224, 224) * 2 - 1,
        "input_ids": torch.tensor([[512, 5, 9] + [513] * 29, [512, 7] + [513] * 30]),
        "attention_mask": torch.tensor([[1, 1, 1, 1] + [0] * 28, [1, 1, 1] + [0] * 29]),
    }
    choices = [
        (names, "operator", "operator")
        for count in range(len(REWRITES) + 1) for names in itertools.combinations(REWRITES, count)
    ]  # fmt: skip
    choices += [(REWRITES, "matmul", "operator"), (REWRITES, "operator", "decomposed"), ((), "matmul", "decomposed")]
    with torch.no_grad():
        model = load()
        outputs = model(**feeds)
        expected = [outputs[name] for name in contract.OUTPUTS]
        vision = model.vision_encoder(feeds["pixel_values"])
        side = vision.fpn_hidden_states[2].shape[-1]
        states = vision.last_hidden_state.transpose(1, 2).unflatten(2, (side, side))
        expected += [*vision.fpn_hidden_states[:-1], states]
        expected.append(
            model.get_text_features(feeds["input_ids"], feeds["attention_mask"], return_dict=True).pooler_output
        )
        for choice in choices:
            for found, wanted in zip(TextBranch(load(), *choice)(**feeds), expected, strict=True):
                assert relative_difference(found, wanted) <= 1e-5, choice


def test_boxes_at_the_picture_s_edge_stay_equal_although_they_travel_as_logits():
    """Reference points far outside of transformers' clamp: its logit and ours differ by up to 1e-3 there, 1e-6 of the
    picture; the bound is what two later layers make of it."""
    torch.manual_seed(9)
    feeds = {
        "pixel_values": torch.rand(1, 3, 224, 224) * 2 - 1,
        "input_ids": torch.tensor([[512, 5, 9] + [513] * 29]),
        "attention_mask": torch.tensor([[1, 1, 1, 1] + [0] * 28]),
    }
    pair = [load(), load()]
    with torch.no_grad():
        for model in pair:
            torch.manual_seed(10)
            model.detr_decoder.reference_points.weight.uniform_(-12, 12)
            model.detr_decoder.box_head.layer3.bias.uniform_(-6, 6)
        expected = pair[0](**feeds).pred_boxes
        found = TextBranch(pair[1])(**feeds)[2]
    assert float(((expected < 1e-3) | (expected > 1 - 1e-3)).float().mean()) > 0.2  # the clamp is at work
    assert float((found - expected).abs().max()) <= 1e-4


def test_a_phrase_of_padding_only_gives_finite_answers():
    """ais_bench feeds zeros when it measures speed; a NaN there would look like a broken model."""
    zeros = torch.zeros(1, 32, dtype=torch.int64)
    with torch.no_grad():
        outputs = TextBranch(load())(torch.zeros(1, 3, 224, 224), zeros, zeros)
    assert all(bool(output.isfinite().all()) for output in outputs)


def test_a_picture_size_that_windows_do_not_divide_is_refused():
    from sam3_utils.cli import UsageError

    model = load()
    model.vision_encoder.backbone.config.image_size = 210
    with pytest.raises(UsageError, match="210.*multiple of patch 14 x window"):
        TextBranch(model)
