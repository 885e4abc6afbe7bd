"""The distributed optimizer's state survives a save and a load into a fresh optimizer."""

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

from megatron_trace import compat
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.testing.single_process import tiny_moe_config

PATTERN = "*E"


@pytest.fixture(scope="module", autouse=True)
def resumable():
    with compat.distributed_optimizer_resumes_with_torch_adam():
        yield


def build(dtype):
    torch.manual_seed(0)
    bf16 = dtype is torch.bfloat16
    model = build_hybrid_model(
        tiny_moe_config(PATTERN, params_dtype=dtype, bf16=bf16, pipeline_dtype=dtype),
        pattern=PATTERN,
        vocab_size=32,
        max_sequence_length=16,
        modules=HybridModules(),
    ).to(dtype)
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=bf16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return model, ddp, get_megatron_optimizer(config, [ddp])


def step(ddp, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    ddp.zero_grad_buffer()
    for parameter in ddp.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    ddp.finish_grad_sync()
    optimizer.step()


def masters_and_moments(optimizer):
    """Gives copies of master weights, moments and steps."""
    found = []
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                # Transformer Engine's Adam counts the steps of a group.
                state = group | part.optimizer.state[parameter]
                found.append(
                    [
                        parameter.detach().clone(),
                        *(torch.as_tensor(state[k]).clone() for k in STATES),
                    ]
                )
    return found


REPLACED = ["load_state_dict"]
if not HAVE_APEX_OR_TE:
    REPLACED += ["state_dict", "_set_main_param_and_optimizer_states"]
STATES = ("step", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sharding", ["dp_reshardable", "fully_reshardable"])
def test_a_fresh_optimizer_continues_bit_equal(sharding, dtype, tmp_path):
    metadata = {"distrib_optim_sharding_type": sharding}
    model, ddp, optimizer = build(dtype)
    step(ddp, optimizer, 1)
    step(ddp, optimizer, 2)
    sharded = model.sharded_state_dict()
    state = {
        "model": sharded,
        "optimizer": optimizer.sharded_state_dict(sharded, metadata=metadata),
    }
    with compat.checkpoint_writes_in_process():
        dist_checkpointing.save(state, str(tmp_path))

    model2, ddp2, optimizer2 = build(dtype)
    sharded = model2.sharded_state_dict()
    state = {
        "model": sharded,
        "optimizer": optimizer2.sharded_state_dict(sharded, is_loading=True, metadata=metadata),
    }
    loaded = dist_checkpointing.load(state, str(tmp_path))
    model2.load_state_dict(loaded["model"])
    optimizer2.load_state_dict(loaded["optimizer"])
    for third in ((ddp, optimizer), (ddp2, optimizer2)):
        step(*third, 3)

    pairs = zip(masters_and_moments(optimizer), masters_and_moments(optimizer2), strict=True)
    for own, resumed in pairs:
        assert own[1] == 3, "three steps were made"
        for name, a, b in zip(("master", *STATES), own, resumed, strict=True):
            assert torch.equal(a, b), name


def test_megatrons_methods_are_put_back_after_an_exception():
    def methods():
        return [getattr(DistributedOptimizer, name) for name in REPLACED]

    def replace_and_fail():
        with compat.distributed_optimizer_resumes_with_torch_adam():
            assert all(new is not old for new, old in zip(methods(), before, strict=True))
            raise KeyError

    before = methods()
    with pytest.raises(KeyError):
        replace_and_fail()
    assert methods() == before
