"""The samples of a run on which an export calibrates."""

from pathlib import Path

import pytest
import torch

from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.types import RolloutSample
from megatron_trace.rl.exchange import Exchange, ExchangeSettings
from megatron_trace.rl.rollout_folder import Reward
from megatron_trace.testing.programs import load_program

TOOL = Path(__file__).parents[3] / "tools" / "export_rollout_weights.py"


@pytest.fixture(scope="module")
def tool():
    return load_program(TOOL)


def sample(number, policy_version):
    """Gives a sample whose second token is its number."""
    return RolloutSample(
        f"s{number}",
        prompt_tokens=(1, number),
        response_tokens=(4, 5),
        logprobs=torch.zeros(2),
        routing=torch.zeros(3, 1, 2, dtype=torch.int16),
        policy_version=policy_version,
        settings_digest="",
        finish_reason="stop",
    )


def test_a_run_calibrates_on_its_newest_batches_as_far_as_they_are_there(tmp_path, tool):
    settings = ExchangeSettings(steps=3, prompts_per_batch=1, samples_per_prompt=2)
    run = Exchange.create(tmp_path / "run", settings)
    folder = run.worker_folder("0")
    with HintFilesWriter(folder) as files:
        for batch in range(3):
            (run.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(batch))
            claim = run.claim("0")
            numbers = (2 * batch, 2 * batch + 1)
            files.commit([sample(number, batch) for number in numbers])
            run.commit(claim, folder, [Reward(f"s{n}", f"g{batch}", 2, 0.0) for n in numbers])
        files.expire(before=1)
    tokens = tool.sample_tokens(tmp_path / "run", 8)
    assert [row[0, 1].item() for row in tokens] == [4, 5, 2, 3]
    assert len(tool.sample_tokens(tmp_path / "run", 3)) == 3
