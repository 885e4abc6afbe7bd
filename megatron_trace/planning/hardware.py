"""GPUs and their nodes, as their makers describe them, and what of it a program gets."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A GPU in its node. Rates are peaks, of dense matrices and of one direction.

    Attributes:
        name: Name of the GPU.
        memory_gib: Memory of a GPU.
        bf16_tflops: Products of BF16 matrices.
        fp4_tflops: Products of FP4 matrices; that of BF16 where FP4 is unpacked first.
        memory_tb_s: Memory bandwidth.
        gpus_per_node: GPUs of a host.
        scale_up_gpus: GPUs that the fast interconnect joins.
        scale_up_gb_s: Its rate, a GPU.
        scale_out_gb_s: Rate of the network between these groups, a GPU.
        host_gib: Memory of a host.
        host_gb_s: Rate between a GPU and its host's memory.
        disk_tib: Fast storage for hints, a host.
        disk_gb_s: Its rate, a host.
        launch_us: Host time of an operation that PyTorch launches by itself, with Megatron's
            Python around it; measured on an H200's host, see docs/planner.md.
        decode_layer_us: Time of a decoder layer in a captured step of decoding beside what its
            bytes take, a share of sampling included; measured on an H200, see there. 0 is an
            engine whose kernels do nothing but read.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    fp4_tflops: float
    memory_tb_s: float
    gpus_per_node: int = 8
    scale_up_gpus: int = 8
    scale_up_gb_s: float
    scale_out_gb_s: float
    host_gib: float = 2048
    host_gb_s: float = 50
    disk_tib: float = 14
    disk_gb_s: float = 10
    launch_us: float = 38
    decode_layer_us: float = 180

    def __post_init__(self) -> None:
        """Raises ValueError on a number that no machine has."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or (value == 0 and field.name.endswith("_us")):
                continue
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name} must be above 0 and finite; got {value}")

    @property
    def memory_bytes(self) -> float:
        """Memory of a GPU."""
        return self.memory_gib * GIB


# Makers' data sheets; memory is what the driver reports, where we saw it (H200) or else that of
# the data sheet in GiB. Hosts and disks are usual ones: give your own.
HARDWARE = {
    gpu.name: gpu
    for gpu in (
        Hardware(
            name="H100",
            memory_gib=79,
            bf16_tflops=989,
            fp4_tflops=989,
            memory_tb_s=3.35,
            scale_up_gb_s=450,
            scale_out_gb_s=50,
        ),
        Hardware(
            name="H200",
            memory_gib=139,
            bf16_tflops=989,
            fp4_tflops=989,
            memory_tb_s=4.8,
            scale_up_gb_s=450,
            scale_out_gb_s=50,
        ),
        Hardware(
            name="B200",
            memory_gib=167,
            bf16_tflops=2250,
            fp4_tflops=9000,
            memory_tb_s=8.0,
            scale_up_gb_s=900,
            scale_out_gb_s=50,
        ),
        Hardware(
            name="B300",
            memory_gib=268,
            bf16_tflops=2250,
            fp4_tflops=13500,
            memory_tb_s=8.0,
            scale_up_gb_s=900,
            scale_out_gb_s=100,
        ),
        Hardware(
            name="GB200",
            memory_gib=173,
            bf16_tflops=2500,
            fp4_tflops=10000,
            memory_tb_s=8.0,
            gpus_per_node=4,
            scale_up_gpus=72,
            scale_up_gb_s=900,
            scale_out_gb_s=50,
            host_gib=960,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What share of a peak a program gets; assumptions, not measurements.

    Attributes:
        compute: Of matrix products in training and prefill.
        memory: Of memory bandwidth in decoding.
        network: Of the rates of interconnect and network.
        disk: Of the rates of storage and between GPU and host.
        usable_memory: Of a GPU's memory, after the runtime, the libraries and fragmentation.
        usable_host: Of a host's memory, for hints and for what waits there.
    """

    compute: float = 0.4
    memory: float = 0.7
    network: float = 0.7
    disk: float = 0.7
    usable_memory: float = 0.9
    usable_host: float = 0.7

    def __post_init__(self) -> None:
        """Raises ValueError on what is no share."""
        for name, share in vars(self).items():
            if not 0 < share <= 1:
                raise ValueError(f"{name} is a share of a peak, in (0, 1]; got {share}")
