"""Compares the kernels of a MX format with it on the hard inputs; a program, for TRITON_INTERPRET.

python interpreted_mx.py FORMAT DEVICE        prints how many inputs were compared
"""

import sys
from dataclasses import replace

import torch

from megatron_trace.formats import NUMBER_FORMATS, NumberFormat, kernels_whole
from megatron_trace.formats.kernels_inputs import Launch
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_rows

RULES = ("rceil", "floor", "even", "ceil")
# The interpreter takes about 20 us a value.
MAX_VALUES = {"cpu": 320, "cuda": 1 << 20}
# A GPU goes over several tiles of a program, as with more values than these.
LAUNCHES = {"cpu": None, "cuda": Launch(tiles=2, num_warps=4)}


def compare(fmt: NumberFormat, dtype: torch.dtype, device: str) -> int:
    """Compares every function on each hard input that holds a block; gives how many do."""
    num_compared = 0
    for case, x in hard_rows(dtype, max_values=MAX_VALUES[device]):
        every_rule = dtype == torch.float32 and (device == "cuda" or num_compared % 4 == 0)
        for rule in RULES if every_rule else RULES[:1]:
            rounded = replace(fmt, rules={"scale_rule": rule})
            _compare(rounded, x, device, f"{case.name} {dtype} {rule}")
        num_compared += 1
    return num_compared


def _compare(fmt: NumberFormat, x: torch.Tensor, device: str, what: str) -> None:
    def check(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        assert_same_bytes(got.cpu(), expected, f"{what} {name}", any_nan=True)

    specified, launch = fmt.specification, LAUNCHES[device]
    given, trainer_x = (x.to(device), None, fmt), x * 1.02
    check(kernels_whole.rtn(*given, launch=launch), specified.rtn(x, **fmt.rules), "rtn")
    for bits in fmt.hint_bits:
        got = kernels_whole.rtn_record(*given, num_bits=bits, launch=launch)
        expected = specified.rtn_record(x, num_bits=bits, **fmt.rules)
        for name, mine, theirs in zip(("y", "hint", "bytes"), got, expected, strict=True):
            check(mine, theirs, f"record {bits} {name}")
        _, hint, scale_bytes = expected
        random = torch.randint(0, 256, hint.shape, dtype=torch.uint8)
        for name, payload in (("its hint", hint), ("a random hint", random)):
            tensors = [tensor.to(device) for tensor in (trainer_x, payload, scale_bytes)]
            y = kernels_whole.guided(*tensors, None, fmt, num_bits=bits, launch=launch)
            check(
                y,
                specified.guided(trainer_x, payload, scale_bytes, num_bits=bits),
                f"{bits} {name}",
            )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, device = sys.argv[1:]
    # The interpreter truncates FP32 to BF16; a GPU does not.
    dtypes = [torch.float32, torch.bfloat16, torch.float16][: 3 if device == "cuda" else 1]
    sys.stdout.write(
        f"{sum(compare(NUMBER_FORMATS[name], dtype, device) for dtype in dtypes)} inputs"
    )


if __name__ == "__main__":
    main()
