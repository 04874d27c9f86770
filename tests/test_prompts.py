# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Phrases become the processor's own tokens; empty, foreign and long ones are handled as stated."""

import logging

import numpy as np
import pytest

from sam3_utils.cli import UsageError
from sam3_utils.prompts import encode_phrases

LONG = "small red circle " * 12


def test_tokens_are_those_of_the_processor(processor):
    phrases = ["star", "Small Red Circle", "dog\n", "a fire hydrant"]
    input_ids, attention_mask, cut = encode_phrases(processor, phrases)
    expected = processor(text=phrases, return_tensors="np")
    assert np.array_equal(input_ids, expected["input_ids"]) and input_ids.dtype == np.int64
    assert np.array_equal(attention_mask, expected["attention_mask"]) and attention_mask.dtype == np.int64
    assert cut == []


def test_case_and_outer_space_do_not_matter(processor):
    input_ids, _, _ = encode_phrases(processor, ["red star", "RED  Star "])
    assert np.array_equal(input_ids[0], input_ids[1])


@pytest.mark.parametrize("phrase", ("", "   ", "\n"))
def test_an_empty_phrase_is_refused(processor, phrase):
    with pytest.raises(UsageError, match="empty"):
        encode_phrases(processor, ["star", phrase])


def test_a_long_phrase_is_refused_or_cut_with_the_end_token_last(processor):
    with pytest.raises(UsageError, match="38 tokens, the model takes 32"):
        encode_phrases(processor, [LONG])
    input_ids, attention_mask, cut = encode_phrases(processor, ["star", LONG], truncate=True)
    assert cut == [LONG]
    assert input_ids.shape == (2, 32) and attention_mask[1].all()
    assert input_ids[1, 0] == processor.tokenizer.bos_token_id and input_ids[1, -1] == processor.tokenizer.eos_token_id


def test_non_latin_phrases_are_kept_with_a_warning(processor, caplog):
    with caplog.at_level(logging.WARNING):
        input_ids, attention_mask, _ = encode_phrases(processor, ["猫", "café"])
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "1 of 2 phrases are not in Latin letters ('猫' …)"
    ]
    # Byte-level BPE: three bytes between start and end, none of them the unknown token.
    assert attention_mask[0].sum() == 5 and processor.tokenizer.eos_token_id not in input_ids[0, 1:4]
