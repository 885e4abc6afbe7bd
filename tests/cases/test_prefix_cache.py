"""Case 39: a prompt that the prefix cache has gives the records of one that is computed.

Elsewhere hits gave other rows, or none. 1 and 5, of exported scales, are in
`tests/unit/conversion/test_modelopt_folder.py`; more situations in
`tests/unit/rollout/test_situations.py`.
"""

from __future__ import annotations

import pytest

from megatron_trace.testing import cpu_runtime
from megatron_trace.testing.exact_products import ExactProducts
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine, tiny_weights

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.skipif(
        not cpu_runtime.is_installed(),
        reason="kernels of a GPU do not go through torch",
    ),
]

SITES = ("fc1", "fc2", "k", "v")


def test_39_the_same_prompt_cold_found_and_dropped_has_the_same_records() -> None:
    weights = tiny_weights(1)
    # The cache has pages for this prompt and one of the two others at a time.
    limits = {"prefix_caching": True, "cache_tokens": 5 * 16}
    engine = tiny_engine(weights, hint_sites=SITES, max_requests=1, limits=limits)
    prompt, *others = (
        random_prompts(1, shortest=40, longest=40, seed=seed)[0] for seed in (1, 2, 3)
    )
    found = []

    def again():
        rollout = roll_out(engine, [prompt], max_new_tokens=8)
        found.append(engine.report.prefix_tokens)
        return rollout

    with ExactProducts():
        cold, hit = again(), again()
        for other in others:
            roll_out(engine, [other], sample_ids=["other"], max_new_tokens=8)
        restored = again()
    assert found == [0, 32, 0], "two pages of 16 tokens, then neither"
    assert_same_rollout(hit, cold)
    assert_same_rollout(restored, cold)
