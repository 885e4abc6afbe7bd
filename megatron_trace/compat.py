"""Every private upstream name and work-around that we rely on, with its version and reason.

Each entry checks the version it was written against: an upgrade fails here, by name, before it
changes a number silently.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

MEGATRON_CORE = "0.19."
MODELOPT = "0.47."
TORCH = "2.11."


def require_version(package: str, prefix: str, reason: str) -> None:
    """Raises RuntimeError unless the installed package is of the version we know.

    Args:
        package: Distribution name.
        prefix: How its version must begin.
        reason: What relies on it.
    """
    installed = _installed_version(package)
    if not installed.startswith(prefix):
        raise RuntimeError(
            f"{reason} was written against {package} {prefix}x, but {installed} is installed; "
            "install the version of constraints.txt, or check the entry in megatron_trace/compat.py"
        )


@functools.cache
def _installed_version(package: str) -> str:
    return version(package)


def backward_is_running() -> bool:
    """Whether autograd runs a backward pass on this thread.

    torch has no public name for it; its own multi-tensor gradient hooks ask the same way.
    """
    require_version("torch", TORCH, "backward_is_running")
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls back when the backward pass that runs now has ended; not if it raises.

    FSDP and DDP of torch end their backward passes this way; there is no public name either.
    """
    require_version("torch", TORCH, "at_end_of_backward")
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives a name of a module or class another value, inside the context."""
    previous = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)


@contextlib.contextmanager
def flash_attention_not_needed() -> Iterator[None]:
    """Lets Megatron's dynamic batching run without the flash-attn package, inside the context.

    `Attention.forward` asserts that flash-attn is installed whenever the context is dynamic, also
    if a subclass brings its own paged attention. The assertion reads the module's flag only.
    """
    require_version("megatron-core", MEGATRON_CORE, "flash_attention_not_needed")
    from megatron.core.transformer import attention

    with _replaced(attention, "HAVE_FA3", True):
        yield


@contextlib.contextmanager
def fla_not_needed() -> Iterator[None]:
    """Lets Megatron build a Gated DeltaNet without flash-linear-attention, inside the context.

    `_GDNBase.__init__` raises unless fla is installed, also if a subclass brings its own kernels.
    The check reads the module's flag only; which kernels are there the package's own `HAVE_FLA`
    still tells.
    """
    require_version("megatron-core", MEGATRON_CORE, "fla_not_needed")
    from megatron.core.ssm.gated_delta_net import common

    with _replaced(common, "HAVE_FLA", True):
        yield


def head_order_of_cp(sections: tuple[int, ...], cp_size: int) -> torch.Tensor:
    """Gives the order of the columns in which equal parts are the heads of a context-parallel rank.

    Args:
        sections: Columns of each part of Gated DeltaNet's input projection on this rank.
        cp_size: Context-parallel ranks.
    """
    require_version("megatron-core", MEGATRON_CORE, "head_order_of_cp")
    from megatron.core.ssm.gated_delta_net import common

    return common._build_head_perm_for_split_sections(
        sections, cp_size, torch.cuda.current_device()
    )


def restore_attention_methods(attention: torch.nn.Module) -> None:
    """Undoes ModelOpt's replacement of two methods on an attention instance.

    `mtq.quantize` sets `flash_decode` and `flash_decode_and_prefill` of every Megatron attention
    to functions that raise, because K/V quantisers inside `core_attention` would be bypassed by
    the engine. Ours quantise when the cache is written.
    """
    require_version("nvidia-modelopt", MODELOPT, "restore_attention_methods")
    for name in ("flash_decode", "flash_decode_and_prefill"):
        attention.__dict__.pop(name, None)


def restore_linear_functions() -> None:
    """Undoes what ModelOpt leaves behind when a quantised linear raises.

    Its linears replace Megatron's linear functions in their module during each forward and put
    them back only if nothing was raised (`utils/core_utils.py`, `replace_function`); every other
    model of the process would then use the quantisers of the linear that failed.
    """
    require_version("nvidia-modelopt", MODELOPT, "restore_linear_functions")
    from megatron.core.tensor_parallel import layers

    for name in ("linear_with_grad_accumulation_and_async_allreduce", "linear_with_frozen_weight"):
        original = getattr(layers, f"_{name}", None)
        if original is not None:
            setattr(layers, name, original)
            delattr(layers, f"_{name}")


def set_sampler(controller: Any, sampler: Any) -> None:
    """Gives Megatron's text generation controller another sampler.

    The constructor offers a choice by name only; the attribute is private.
    """
    require_version("megatron-core", MEGATRON_CORE, "set_sampler")
    assert hasattr(controller, "_sampling"), "TextGenerationController has no _sampling"
    controller._sampling = sampler


@contextlib.contextmanager
def inference_mode_of_process() -> Iterator[None]:
    """Sets Megatron's process-wide inference flag inside the context, then what it was before.

    `InferenceMode.active()` clears the flag at its end whatever it was, and the constructor of
    `DynamicInferenceEngine` leaves it set.
    """
    require_version("megatron-core", MEGATRON_CORE, "inference_mode_of_process")
    from megatron.core.inference.utils import InferenceMode

    was_active = InferenceMode.is_active()
    InferenceMode.set_active()
    try:
        yield
    finally:
        if not was_active:
            InferenceMode.unset_active()


def forget_moe_layers() -> None:
    """Drops the MoE layers of an earlier engine's model, which Megatron keeps for ever.

    Megatron 0.19.2 looks for them once in a process (inference/utils.py, `moe_layer_cache`): their
    weights are never freed, and switches for decode are set in them instead of a later model's.
    """
    require_version("megatron-core", MEGATRON_CORE, "forget_moe_layers")
    from megatron.core.inference import utils

    utils.moe_layer_cache = None


def set_quantizer_action(quantizer: Any, action: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Gives a ModelOpt quantiser the function that our backend calls for it.

    ModelOpt saves every attribute of a quantiser in the model's state but for one slot, meant for
    what a backend keeps.
    """
    require_version("nvidia-modelopt", MODELOPT, "set_quantizer_action")
    quantizer._quantizer_cache = action


def quantizer_action(quantizer: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Gives what `set_quantizer_action` set; None if nothing."""
    return quantizer._quantizer_cache


def let_help_be_printed(parser: Any) -> None:
    """Lets an argparse parser with Megatron's flags print its help.

    argparse formats a help text with `%`; that of `--moe-paged-stash-buffer-size-factor-cuda` says
    "10%)", so that `--help` ends in a ValueError.
    """
    require_version("megatron-core", MEGATRON_CORE, "let_help_be_printed")
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"(?<!%)%(?![(%])", "%%", action.help)


@contextlib.contextmanager
def checkpoint_writes_in_process() -> Iterator[None]:
    """Lets a synchronous checkpoint be written without a helper process, inside the context.

    Megatron's writer hands results over through a queue of a spawned manager process, also when it
    writes in this process. The manager imports the main program again (4 s) and, terminated at the
    end, prints a traceback, as Megatron's inference modules register one on SIGTERM.
    """
    require_version("megatron-core", MEGATRON_CORE, "checkpoint_writes_in_process")
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with _replaced(filesystem_async, "_results_queue", queue.Queue()):
        yield


@dataclass(frozen=True)
class StepOutcome:
    """What Megatron's loop says of a training step after its update.

    Attributes:
        iteration: Its number, from 1.
        losses: What the loss function reported, means over the step; empty but on the last stage.
        grad_norm: Gradient norm before clipping, of the whole model; None if it has none.
        learning_rate: Learning rate; None if the rank trains nothing.
        skipped: Whether the update was skipped.
    """

    iteration: int
    losses: Mapping[str, float]
    grad_norm: float | None
    learning_rate: float | None
    skipped: bool


@contextlib.contextmanager
def training_steps_told(tell: Callable[[StepOutcome], None]) -> Iterator[None]:
    """Calls `tell` after each training step of Megatron's loop, on every rank, inside the context.

    The loop has no hook after an update, and gives its outcome to `training_log` (training.py)
    only, which prints means over several steps.
    """
    require_version("megatron-core", MEGATRON_CORE, "training_steps_told")
    from megatron.training import training

    original = training.training_log
    signature = inspect.signature(original)

    @functools.wraps(original)
    def told(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        of = signature.bind(*args, **kwargs).arguments
        tell(
            StepOutcome(
                iteration=of["iteration"],
                losses={name: float(loss) for name, loss in of["loss_dict"].items()},
                grad_norm=of["grad_norm"],
                learning_rate=of["learning_rate"],
                skipped=bool(of["skipped_iter"]),
            )
        )
        return result

    with _replaced(training, "training_log", told):
        yield


@contextlib.contextmanager
def checkpoint_flags_told(tell: Callable[[Any], None]) -> Iterator[None]:
    """Calls `tell` with the flags in a checkpoint that Megatron goes on from, on every rank.

    Not with `--finetune`. Megatron keeps none of the flags: it compares some of them in
    `check_checkpoint_args` (checkpointing.py), the one function that gets them of every kind of
    checkpoint, wherever that lies.
    """
    require_version("megatron-core", MEGATRON_CORE, "checkpoint_flags_told")
    from megatron.training import checkpointing

    original = checkpointing.check_checkpoint_args

    @functools.wraps(original)
    def told(checkpoint_args: Any, *args: Any, **kwargs: Any) -> None:
        original(checkpoint_args, *args, **kwargs)
        tell(checkpoint_args)

    with _replaced(checkpointing, "check_checkpoint_args", told):
        yield


def data_set_helpers_not_compiled() -> None:
    """Keeps Megatron from compiling its helpers of data sets, of which TRACE uses none.

    `initialize_megatron` runs `make` beside Megatron's own source and ends the program when that
    fails. The wheel brings the helpers compiled, and no Makefile.
    """
    require_version("megatron-core", MEGATRON_CORE, "data_set_helpers_not_compiled")
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None


@contextlib.contextmanager
def distributed_optimizer_resumes_with_torch_adam() -> Iterator[None]:
    """Lets the distributed optimizer's state be loaded in a fresh process, inside the context.

    Without Apex and Transformer Engine the inner optimizer is `torch.optim.Adam`, whose `step` is a
    tensor of each parameter's state. `DistributedOptimizer` (core/optimizer/distrib_optimizer.py)
    asserts it before the first step, when a checkpoint is loaded; writes into leaves that need
    gradients; gives all parameters one and the same `step` tensor, which Adam would advance once
    for each of them; and overwrites it with a zero, or misses it in the reshardable form. With the
    Adam of either, only the writes into leaves are to be mended.
    """
    require_version("megatron-core", MEGATRON_CORE, "distributed_optimizer_resumes_with_torch_adam")
    from megatron.core.optimizer import distrib_optimizer

    cls = distrib_optimizer.DistributedOptimizer
    originals = {
        name: getattr(cls, name)
        for name in ("state_dict", "load_state_dict", "_set_main_param_and_optimizer_states")
    }

    def load_without_gradients(self: Any, saved: Any) -> None:
        with torch.no_grad():
            originals["load_state_dict"](self, saved)

    def state_dict_with_steps(self: Any) -> Any:
        if not self.optimizer.state:
            self.init_state_fn(self.optimizer)
            for state in self.optimizer.state.values():
                state["step"] = torch.zeros(())
        return originals["state_dict"](self)

    def load_own_steps(self: Any, saved: Any) -> None:
        load_without_gradients(self, saved)
        for group in self.optimizer.param_groups:
            step = group.pop("step")
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(float(step))

    def set_without_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # Only tensors are taken; the step is set afterwards.
        originals["_set_main_param_and_optimizer_states"](
            self, model_param, {**tensors, "step": None}
        )

    if distrib_optimizer.HAVE_APEX_OR_TE:
        replacements = {"load_state_dict": load_without_gradients}
    else:
        replacements = dict(
            zip(originals, (state_dict_with_steps, load_own_steps, set_without_step), strict=True)
        )
    for name, replacement in replacements.items():
        setattr(cls, name, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(cls, name, original)
