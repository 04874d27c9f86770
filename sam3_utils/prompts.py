# Copyright 2026 The SAM3 offline inference kit authors
# SPDX-License-Identifier: Apache-2.0
"""Phrases to input_ids and attention_mask."""

import logging

import numpy as np

from sam3_utils.cli import UsageError
from sam3_utils.contract import TEXT_LENGTH

logger = logging.getLogger(__name__)


def encode_phrases(processor, phrases: list[str], truncate: bool = False) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Tokenise phrases as `Sam3Processor` does.

    Args:
        truncate: cut a phrase of over 32 tokens, the end token kept last (evaluators, which must not lose a sample);
            transformers would pass it on whole and the model would refuse its shape.

    Returns:
        input_ids and attention_mask, (N, 32) int64, and the phrases that were cut.

    Raises:
        UsageError: a phrase is empty or blank, or too long while `truncate` is off.
    """
    foreign = []
    for phrase in phrases:
        if not phrase.strip():
            raise UsageError(f"phrase {phrase!r} is empty; give at least one word")
        if any(character.isalpha() and ord(character) > 0x24F for character in phrase):
            foreign.append(phrase)
    if foreign:
        logger.warning(
            "%d of %d phrases are not in Latin letters (%r …): SAM3 was trained on English and may find nothing",
            len(foreign), len(phrases), foreign[0],
        )  # fmt: skip
    lengths = [len(ids) for ids in processor.tokenizer(phrases)["input_ids"]]
    long = [phrase for phrase, length in zip(phrases, lengths) if length > TEXT_LENGTH]
    if long and not truncate:
        raise UsageError(f"phrase {long[0]!r} has {max(lengths)} tokens, the model takes {TEXT_LENGTH}; shorten it")
    encoded = processor.tokenizer(
        phrases, padding="max_length", max_length=TEXT_LENGTH, truncation=True, return_tensors="np"
    )
    return encoded["input_ids"].astype(np.int64), encoded["attention_mask"].astype(np.int64), long
