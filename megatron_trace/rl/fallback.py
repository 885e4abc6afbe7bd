"""A run that goes on in BF16: rollout and training, from the next step on."""

from __future__ import annotations

import dataclasses

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.rl.run import RlRun, RunSettings


def fall_back_to_bf16(run: RlRun) -> None:
    """Gives a run new parts of method bf16, with its weights, optimizer state and progress.

    The objective stays what it was, also where the method chose it. Hints that were not trained on
    are dropped. There is no way back: BF16 steps move the weights away from what FP4 can hold.
    Both models are in memory for a moment.

    Raises:
        ValueError: The run is in BF16 already.
    """
    settings = run.settings
    if settings.trace.method == "bf16":
        raise ValueError("the run is in BF16 already")
    bf16 = _in_bf16(settings)
    parts = run.build_parts(bf16)
    with torch.no_grad():
        own = dict(run.model.named_parameters())
        for name, parameter in parts.model.named_parameters():
            parameter.copy_(own[name])
    parts.optimizer.load_state_dict(run.optimizer.state_dict())
    run.drop_hints()
    for part in dataclasses.fields(parts):
        setattr(run, part.name, getattr(parts, part.name))
    run.settings = bf16
    run.progress = dataclasses.replace(run.progress, in_bf16=True)
    run.push_weights(run.progress.policy_version)


def _in_bf16(settings: RunSettings) -> RunSettings:
    trace, objective = settings.trace, settings.objective
    loss = dataclasses.replace(
        settings.loss,
        objective=objective.objective,  # pyright: ignore[reportArgumentType]
    )
    plain = TraceConfig(
        method="bf16",
        experts="te" if trace.experts == "te_recipe" else trace.experts,
        check_finite=trace.check_finite,
        implementation=trace.implementation,
        delta_rule=trace.delta_rule,
    )
    return dataclasses.replace(settings, trace=plain, loss=loss)
