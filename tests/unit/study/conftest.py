"""A study of a tiny model with random weights, which the tests of a module share."""

from __future__ import annotations

import pytest

from megatron_trace.study.cells import StudySettings
from megatron_trace.study.model import StudyModel
from megatron_trace.study.run import Study
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.testing.tiny_rollout import (
    EOD_TOKEN,
    MAX_SEQUENCE_LENGTH,
    VOCAB_SIZE,
    calibration_tokens,
    random_prompts,
    tiny_weights,
)

PATTERN = "*E*E"


@pytest.fixture(scope="module", autouse=True)
def _one_rank(one_rank):
    """Every module builds models."""


@pytest.fixture(scope="module")
def study_model():
    return StudyModel(
        name="random",
        config=tiny_moe_config(PATTERN),
        pattern=PATTERN,
        vocab_size=VOCAB_SIZE,
        context=MAX_SEQUENCE_LENGTH,
        weights=tiny_weights(seed=1, pattern=PATTERN),
        prompts=random_prompts(8),
        calibration=calibration_tokens(),
        eod_token=EOD_TOKEN,
    )


@pytest.fixture(scope="module")
def make_study(study_model, tmp_path_factory):
    """Gives a function that builds a study of 8 samples in a folder."""

    def make(folder=None, say=lambda line: None):
        work = folder or tmp_path_factory.mktemp("work")
        return Study(study_model, StudySettings("test", 8, 4), work, header=HEADER, say=say)

    return make


HEADER = {
    "machine": "test",
    "commit": "none",
    "date": "today",
    "versions": {"torch": "2"},
    "command": "pytest",
}
