"""Why a job would fail, before it waits in a queue: one sentence for each reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_trace.config import TraceConfig
from megatron_trace.formats.number_format import FORMAT_SETS
from megatron_trace.hints.types import Site, site_format
from megatron_trace.launching.model_flags import RunFlags
from megatron_trace.models.fla_backward import FlaSetup, missing_fla, why_fla_cannot_train
from megatron_trace.planning.sizes import ROUTING_ID_BYTES, hint_row_bytes

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job asks for, and what its place offers; None where it is not known.

    Attributes:
        training_nodes: Nodes that train.
        rollout_nodes: Nodes that roll out meanwhile; 0 if the same ones do, by turns.
        gpus_per_node: GPUs of a node; ranks of a node where there are none.
        slurm_nodes: Nodes that Slurm gave, of both components.
        visible_devices: CUDA_VISIBLE_DEVICES.
        steps_kept: Steps whose hints are on disk at a time.
        run: Folder of the run.
        samples_per_step: Samples of a step.
        free_disk_bytes: Free where the run's folder is, or taken by hints that the run drops.
        host_memory_bytes: Memory of a node.
        time_limit_s: Time limit of the job.
        signal_s: Seconds before the limit at which the job is told to save.
        step_s: Seconds that a step takes, with its checkpoint, as far as one knows.
        needed: Files and folders that must be there, by the name of the setting that names them.
        export_bytes: What the job exports, upper bound.
    """

    training_nodes: int
    rollout_nodes: int = 0
    gpus_per_node: int = 8
    slurm_nodes: int | None = None
    visible_devices: str | None = None
    steps_kept: int = 2
    run: Path | None = None
    samples_per_step: int | None = None
    free_disk_bytes: int | None = None
    host_memory_bytes: int | None = None
    time_limit_s: float | None = None
    signal_s: float = 300.0
    step_s: float = 0.0
    needed: Mapping[str, Path] = field(default_factory=dict)
    export_bytes: int = 0


def reasons_against(job: Job, flags: RunFlags) -> list[str]:
    """Gives why the job cannot run as asked for; nothing if nothing speaks against it."""
    if wrong := [*_settings(flags)]:
        # The other checks compute with these settings.
        return wrong
    checks = (_paths, _metrics, _layout, _devices, _divisibility, _batch, _storage, _time)
    return [reason for check in checks for reason in check(job, flags)]


def reasons_against_node(flags: RunFlags, fla: FlaSetup | None) -> list[str]:
    """Gives why a node with GPUs cannot train the model; nothing if nothing speaks against it.

    Args:
        flags: Flags of the trainer.
        fla: What decides whether fla's backward pass works on the node; None if it has no fla.
    """
    if not flags.trains_with_fla:
        return []
    reason = missing_fla() if fla is None else why_fla_cannot_train(fla)
    return [] if reason is None else [reason]


def hint_bytes_per_token(flags: RunFlags) -> int:
    """Gives the bytes of hints and routing that one token leaves on disk, upper bound.

    Upper bound: layers chosen by numbers count as all.
    """
    pattern = flags.decoder_pattern
    routing = pattern.count("E") * flags.moe_router_topk * ROUTING_ID_BYTES
    if flags.trace_method != "trace" or flags.trace_number_format not in FORMAT_SETS:
        return routing
    formats = FORMAT_SETS[flags.trace_number_format]
    if flags.trace_hint_layers == "latter_half":
        pattern = pattern.replace("|", "")[len(pattern.replace("|", "")) // 2 :]
    widths = {
        "fc1": (flags.hidden_size, pattern.count("E")),
        "fc2": (flags.moe_router_topk * flags.expert_width, pattern.count("E")),
        "k": (flags.kv_width, pattern.count("*")),
        "v": (flags.kv_width, pattern.count("*")),
    }
    return routing + sum(
        layers
        * hint_row_bytes(
            values,
            site_format(formats, Site(site)),
            bits=flags.trace_hint_bits,
            scales=flags.trace_hint_scales,
        )
        for site in flags.trace_hint_sites
        for values, layers in [widths[site]]
    )


def _settings(flags: RunFlags) -> Iterator[str]:
    try:
        TraceConfig(**flags.trace_settings)
    except ValueError as error:
        yield f"the --trace-* flags: {error}"


def _paths(job: Job, flags: RunFlags) -> Iterator[str]:
    for name, path in job.needed.items():
        if not path.exists():
            yield f"{name}={path} does not exist: correct it in the run's file of settings"


def _metrics(job: Job, flags: RunFlags) -> Iterator[str]:
    if not flags.trace_metrics_dir:
        return
    path = Path(flags.trace_metrics_dir)
    if path.exists() and not path.is_dir():
        yield f"--trace-metrics-dir {path} is no folder: give one that is, or will be"
    if job.run is not None and path.resolve() == job.run.resolve():
        yield (
            f"--trace-metrics-dir {path} is the run's own folder, whose run.json says what all of "
            "the run must agree on: leave it out, or give another folder"
        )


def _layout(job: Job, flags: RunFlags) -> Iterator[str]:
    ranks = job.training_nodes * job.gpus_per_node
    for what, size in (
        ("tensor x pipeline x context parallelism", flags.model_ranks),
        ("expert-tensor x expert x pipeline parallelism", flags.expert_ranks),
    ):
        if ranks % size:
            yield (
                f"{what} takes {size} GPUs, and the training's {ranks} ({job.training_nodes} nodes "
                f"of {job.gpus_per_node}) are no multiple of that: change the layout or the nodes"
            )
    if flags.tensor_model_parallel_size > job.gpus_per_node:
        yield (
            f"tensor parallelism over {flags.tensor_model_parallel_size} GPUs leaves a node of "
            f"{job.gpus_per_node}: its all-reduces would cross the network in every layer; use at "
            f"most {job.gpus_per_node}"
        )
    expected = job.training_nodes + job.rollout_nodes
    if job.slurm_nodes is not None and job.slurm_nodes != expected:
        yield (
            f"Slurm gave {job.slurm_nodes} nodes, but the run is for {expected} "
            f"({job.training_nodes} that train, {job.rollout_nodes} that roll out): set "
            "TRAIN_NODES and ROLLOUT_NODES to what sbatch is asked for"
        )


def _devices(job: Job, flags: RunFlags) -> Iterator[str]:
    if job.visible_devices:
        devices = job.visible_devices.split(",")
        if all(device.isdigit() for device in devices):
            numbers = [int(device) for device in devices]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                yield (
                    f"CUDA_VISIBLE_DEVICES={job.visible_devices} is not contiguous: ranks of a "
                    "node take GPUs by their number; ask for whole nodes, or let Slurm bind them "
                    "(--gpus-per-task=1)"
                )
        if len(devices) != job.gpus_per_node:
            yield (
                f"CUDA_VISIBLE_DEVICES={job.visible_devices} shows {len(devices)} GPUs, but "
                f"GPUS_PER_NODE={job.gpus_per_node} processes would share them"
            )
        ranks = job.training_nodes * job.gpus_per_node
        trains = flags.global_batch_size is not None
        if trains and ranks > 1 and any(device.startswith("MIG") for device in devices):
            yield (
                f"CUDA_VISIBLE_DEVICES={job.visible_devices} shows parts of GPUs (MIG), between "
                f"which NCCL does not communicate, but the training has {ranks} ranks: ask for "
                "whole GPUs, or train on one rank"
            )


def _divisibility(job: Job, flags: RunFlags) -> Iterator[str]:
    tp, ep, etp = (
        flags.tensor_model_parallel_size,
        flags.expert_model_parallel_size,
        flags.expert_tp,
    )
    groups = flags.num_query_groups or flags.num_attention_heads
    parts = [
        ("--num-attention-heads", flags.num_attention_heads, tp, "tensor-parallel ranks"),
        ("--num-query-groups", groups, tp, "tensor-parallel ranks"),
        ("--hidden-size", flags.hidden_size, tp, "tensor-parallel ranks"),
        ("--linear-num-key-heads", flags.linear_num_key_heads, tp, "tensor-parallel ranks"),
        ("--linear-num-value-heads", flags.linear_num_value_heads, tp, "tensor-parallel ranks"),
    ]
    if flags.num_experts:
        parts += [
            ("--num-experts", flags.num_experts, ep, "expert-parallel ranks"),
            ("--moe-ffn-hidden-size", flags.expert_width, etp, "expert-tensor-parallel ranks"),
        ]
    for name, size, ranks, what in parts:
        if size and size % ranks:
            yield f"{name} {size} cannot be divided over {ranks} {what}"
    if flags.trace_method != "bf16" and flags.trace_number_format in FORMAT_SETS:
        yield from _whole_blocks(flags)
    stages = flags.decoder_pattern.count("|") + 1
    if flags.decoder_pattern and stages % flags.pipeline_model_parallel_size:
        yield (
            f"--hybrid-layer-pattern has {stages} stages, which is no multiple of the "
            f"{flags.pipeline_model_parallel_size} of the pipeline (tools/model_args.py --stages "
            "writes a pattern with stages)"
        )
    if flags.context_parallel_size > 1 and flags.seq_length % (2 * flags.context_parallel_size):
        yield (
            f"--seq-length {flags.seq_length} must be a multiple of twice the "
            f"{flags.context_parallel_size} context-parallel ranks"
        )


def _whole_blocks(flags: RunFlags) -> Iterator[str]:
    formats = FORMAT_SETS[flags.trace_number_format]
    tp = flags.tensor_model_parallel_size
    widths = [("a tensor-parallel rank's part of K and V", flags.kv_width // tp, formats.kv_cache)]
    if flags.num_experts:
        width = flags.expert_width // flags.expert_tp
        widths += [
            ("--hidden-size", flags.hidden_size, formats.activations),
            ("an expert-tensor-parallel rank's part of an expert", width, formats.activations),
        ]
    for what, width, number_format in widths:
        if width % number_format.block_size:
            yield (
                f"{what} is {width} wide, which is no whole number of "
                f"{flags.trace_number_format}'s blocks of {number_format.block_size}"
            )


def _batch(job: Job, flags: RunFlags) -> Iterator[str]:
    ranks = job.training_nodes * job.gpus_per_node
    if flags.global_batch_size is None or ranks % flags.model_ranks:
        return
    unit = flags.micro_batch_size * (ranks // flags.model_ranks)
    if flags.global_batch_size % unit:
        yield (
            f"--global-batch-size {flags.global_batch_size} is no multiple of {unit}: "
            f"--micro-batch-size {flags.micro_batch_size} times {ranks // flags.model_ranks} "
            "data-parallel ranks"
        )
    if job.samples_per_step not in (None, flags.global_batch_size):
        yield (
            f"--global-batch-size {flags.global_batch_size} differs from the "
            f"{job.samples_per_step} samples that workers roll out for a step (batches x prompts x "
            "samples)"
        )


def _storage(job: Job, flags: RunFlags) -> Iterator[str]:
    if job.free_disk_bytes is not None and job.export_bytes > job.free_disk_bytes:
        yield (
            f"what is exported takes up to {job.export_bytes / GIB:.3g} GiB, and the run's folder "
            f"has {job.free_disk_bytes / GIB:.3g} free: ask for fewer recipes, or use another disk"
        )
    samples = job.samples_per_step or flags.global_batch_size or 0
    needed = hint_bytes_per_token(flags) * flags.seq_length * samples * job.steps_kept
    if job.free_disk_bytes is not None and needed > job.free_disk_bytes:
        yield (
            f"hints and routing of {job.steps_kept} steps of {samples} samples of "
            f"{flags.seq_length} tokens take up to {needed / GIB:.3g} GiB, and the run's folder "
            f"has {job.free_disk_bytes / GIB:.3g} free: record fewer sites or layers, or use "
            "another disk"
        )
    if job.host_memory_bytes is not None and flags.trace_hint_memory_mb is not None:
        asked = flags.trace_hint_memory_mb * 2**20 * job.gpus_per_node
        if asked > job.host_memory_bytes // 2:
            yield (
                f"--trace-hint-memory-mb {flags.trace_hint_memory_mb} on {job.gpus_per_node} ranks "
                f"is {asked / GIB:.3g} GiB, more than half of the host's "
                f"{job.host_memory_bytes / GIB:.3g}: lower it"
            )


def _time(job: Job, flags: RunFlags) -> Iterator[str]:
    if job.time_limit_s is None:
        return
    if job.time_limit_s <= job.signal_s + job.step_s:
        yield (
            f"a time limit of {job.time_limit_s:.0f} s leaves less than a step ({job.step_s:.0f} "
            f"s) before the signal to save, {job.signal_s:.0f} s ahead of it: no attempt would get "
            "on"
        )
    if job.step_s > job.signal_s:
        yield (
            f"a step takes {job.step_s:.0f} s, but the signal to save comes only "
            f"{job.signal_s:.0f} s before the time limit: the step that is under way would be "
            "lost; raise SIGNAL_S"
        )
