"""Tiny RL runs: two decoder layers, ten problems with one-character answers."""

import pytest

from megatron_trace.config import TraceConfig
from megatron_trace.rl.optimizer import OptimizerSettings
from megatron_trace.rl.run import RunSettings, build_run, calibration_batches, start
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.testing.sums import CONTEXT, ITEMS, TOKENIZER, warm_weights

PATTERN = "*E*E"


@pytest.fixture(scope="module")
def weights(one_rank):
    """Weights that answer some problems right: samples of a group differ in reward."""
    return warm_weights(tiny_moe_config(PATTERN), pattern=PATTERN)


@pytest.fixture(scope="module")
def build(one_rank):
    """Builds a run that has no weights yet."""

    def build(method="trace", hint_folder=None, max_hint_bytes=None, hint_reader="auto", **changes):
        trace = TraceConfig(
            method=method,
            hint_layers="all",
            diagnostic_share=0.0 if method in ("bf16", "quads") else 0.5,
        )
        settings = {
            "trace": trace,
            "optimizer": OptimizerSettings(learning_rate=1e-3),
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "micro_batch_samples": 8,
            "max_response_tokens": 3,
            "context": CONTEXT,
            "max_requests": 16,
        }
        return build_run(
            RunSettings(**(settings | changes)),
            tiny_moe_config(PATTERN),
            pattern=PATTERN,
            items=ITEMS,
            tokenizer=TOKENIZER,
            hint_folder=hint_folder,
            max_hint_bytes=max_hint_bytes,
            hint_reader=hint_reader,
        )

    return build


@pytest.fixture(scope="module")
def started(build, weights):
    """Builds a run and gives it the warm-started weights."""

    def started(method="trace", **changes):
        run = build(method, **changes)
        start(run, weights, calibration_batches(ITEMS, TOKENIZER, num_samples=10))
        return run

    return started
