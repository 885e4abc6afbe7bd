"""RL runs whose engine captures its decode steps."""

import argparse

import pytest
import torch

from megatron_trace.arguments import add_cuda_graphs_argument
from megatron_trace.config import TraceConfig
from megatron_trace.rl.run import RunSettings
from megatron_trace.rl.step import rl_step

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@needs_no_gpu
def test_the_flag_is_refused_in_one_line_where_there_is_no_gpu(capsys):
    parser = argparse.ArgumentParser()
    add_cuda_graphs_argument(parser)
    assert parser.parse_args([]).rollout_cuda_graphs is False
    with pytest.raises(SystemExit):
        parser.parse_args(["--rollout-cuda-graphs"])
    assert capsys.readouterr().err == (
        "error: --rollout-cuda-graphs requires a GPU, and there is none; leave it out\n"
    )


@needs_no_gpu
def test_the_setting_reaches_the_engine(build):
    with pytest.raises(ValueError, match="cuda_graphs needs a GPU, and the model lies on cpu"):
        build(cuda_graphs=True)


def test_a_method_whose_steps_cannot_be_captured_is_refused_before_anything_is_built():
    with pytest.raises(ValueError, match="cuda_graphs contradicts method=quads"):
        RunSettings(trace=TraceConfig(method="quads"), cuda_graphs=True)


@pytest.mark.gpu
def test_steps_roll_out_by_graphs_and_train_on_the_hints_that_these_recorded(started):
    run = started("trace", cuda_graphs=True)
    for _ in range(3):
        metrics = rl_step(run)
        sites = metrics["quantisers"]["sites"]
        guided = {site for site, counts in sites.items() if counts["coverage"] == 1.0}
        assert guided == {"fc1", "k", "v"}, "a hint of another row would be rejected"
    assert run.engine._server.forward.num_replayed > 0
