"""Compares the kernels of rows with `ops` in torch; a program, for TRITON_INTERPRET.

python interpreted_rows.py FORMAT DEVICE DTYPE     prints how many inputs were compared
"""

import sys

import torch

from megatron_trace.formats import NUMBER_FORMATS, NumberFormat, kernels_rows, ops
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_rows
from megatron_trace.testing.kernel_equality import row_scales

# The interpreter takes about 20 us a value and candidate.
MAX_VALUES = {"cpu": 96, "cuda": 1 << 20}


def compare(fmt: NumberFormat, dtype: torch.dtype, device: str) -> int:
    """Compares every function on each hard input that holds a block; gives how many do."""
    num_compared = 0
    for case, x in hard_rows(dtype, max_values=MAX_VALUES[device]):
        every = device == "cuda" or (num_compared % 6 == 0 and dtype == torch.float32)
        scales = [case.global_scale, row_scales(x, case.global_scale)]
        if not fmt.has_global_scale:
            scales = [None]
        for scale in scales if every else scales[:1]:
            bits = fmt.hint_bits if every else fmt.hint_bits[num_compared % 3 :][:1]
            _compare(fmt, x, scale, bits, device, f"{case.name} {dtype}")
        num_compared += 1
    # A tile lies in one row.
    x = torch.randn(3, 1024).to(dtype)
    _compare(fmt, x, 0.002 if fmt.has_global_scale else None, (1,), device, f"long rows {dtype}")
    return num_compared


def _compare(fmt: NumberFormat, x: torch.Tensor, scale, all_bits, device: str, what: str) -> None:
    def check(got, expected, name: str) -> None:
        for mine, theirs in zip(got, expected, strict=True):
            assert_same_bytes(mine.cpu(), theirs, f"{what} {name}", any_nan=True)

    def on_device(tensor):
        return tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor

    check(
        kernels_rows.encode(on_device(x), on_device(scale), fmt),
        ops.encode(x, scale, number_format=fmt, implementation="torch"),
        "encode",
    )
    trainer_x = x * 1.02
    for bits in all_bits:
        _, hint, scale_bytes = ops.rtn_record(
            x, scale, num_bits=bits, number_format=fmt, implementation="torch"
        )
        random = torch.randint(0, 256, hint.shape, dtype=torch.uint8)
        for name, payload in (("its hint", hint), ("a random hint", random)):
            some, all_rows = torch.arange(len(x)) % 3 != 1, torch.ones(len(x), dtype=torch.bool)
            for kind in (
                (some,) if device == "cpu" and x.dtype == torch.bfloat16 else (some, all_rows)
            ):
                tensors = (trainer_x, payload, scale_bytes)
                options = {"num_bits": bits}
                given = [on_device(tensor) for tensor in (*tensors, kind, scale)]
                torch_options = options | {
                    "has_hint": kind,
                    "number_format": fmt,
                    "implementation": "torch",
                }
                check(
                    [kernels_rows.guided(*given, fmt, **options)],
                    [ops.guided(*tensors, scale, **torch_options)],
                    f"guided {bits} {name}",
                )
                check(
                    kernels_rows.guided_packed(*given, fmt, **options),
                    ops.guided_packed(*tensors, scale, **torch_options),
                    f"guided_packed {bits} {name}",
                )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, device, dtype = sys.argv[1:]
    if device == "cpu" and dtype == "bfloat16":
        import emulated_ptx

        emulated_ptx.install()
    sys.stdout.write(f"{compare(NUMBER_FORMATS[name], getattr(torch, dtype), device)} inputs")


if __name__ == "__main__":
    main()
