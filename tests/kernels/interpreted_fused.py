"""Compares the fused kernels of a format with `fused`; a program, for TRITON_INTERPRET.

python interpreted_fused.py FORMAT DEVICE DTYPE     prints how many inputs were compared

Triton's interpreter has another exp than torch. So the gates are there numbers whose silu is exact
whatever the last bits of exp are.
"""

import sys
from collections.abc import Iterator

import torch

from megatron_trace.formats import NUMBER_FORMATS, NumberFormat, fused, kernels_fused
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.kernel_equality import row_scales

EPS = 1e-6
# Each length of a row is compiled anew. The norm keeps 8192 values of a row in registers.
SHAPES = {
    "cpu": [(3, 32), (1, 2, 96), (0, 64)],
    "cuda": [(17, 2048), (2, 3, 1056), (0, 64), (3, 9248)],
}
EXACT_GATES = (0.0, -0.0, 100.0, 128.0, -200.0, -1e30, 3e30)


def compare(fmt: NumberFormat, dtype: torch.dtype, device: str) -> int:
    """Compares every function on every shape, under every kind of global scale."""
    num_compared = 0
    for index, shape in enumerate(SHAPES[device]):
        if fmt.block_size == 16 and shape[-1] == 1056:
            # An odd number of blocks.
            shape = (2, 3, 1040)
        x = (3 * torch.randn(*shape)).to(dtype)
        every = index == 0
        for scale in _scales(fmt, x) if every else list(_scales(fmt, x))[:1]:
            all_bits = fmt.hint_bits if every or device == "cuda" else fmt.hint_bits[index:][:1]
            what = f"{fmt.name} {dtype} {shape}"
            _compare_norm(fmt, x, scale, all_bits, device, what)
            _compare_swiglu(fmt, _gate_up(x, device), scale, all_bits, device, what)
            num_compared += 1
    return num_compared


def _scales(fmt: NumberFormat, x: torch.Tensor) -> Iterator[torch.Tensor | float | None]:
    if not fmt.has_global_scale:
        yield None
        return
    yield 0.002
    yield row_scales(x, 0.002)
    yield 1e3
    # All usual, so that BF16 goes in pairs.
    yield 0.002 * (1 + torch.arange(x.shape[:-1].numel()).reshape(*x.shape[:-1], 1) % 7)


def _gate_up(x: torch.Tensor, device: str) -> torch.Tensor:
    if device == "cpu":
        exact = torch.tensor(EXACT_GATES)
        gate = exact[torch.randint(len(exact), x.shape)].to(x.dtype)
    else:
        gate = (3 * torch.randn(x.shape)).to(x.dtype)
    return torch.cat((gate, x), dim=-1)


def _compare_norm(fmt, x, scale, all_bits, device: str, what: str) -> None:
    weight = (torch.rand(x.shape[-1]) + 0.5).to(x.dtype)
    noisy = (x.float() * 1.01).to(x.dtype)
    _compare(fmt, "rms_norm", (x, weight), (noisy, weight), scale, all_bits, device, what, eps=EPS)


def _compare_swiglu(fmt, gate_up, scale, all_bits, device: str, what: str) -> None:
    gate, up = gate_up.chunk(2, dim=-1)
    noisy = torch.cat((gate, (up.float() * 1.01).to(up.dtype)), dim=-1)
    _compare(fmt, "swiglu", (gate_up,), (noisy,), scale, all_bits, device, what)


def _compare(
    fmt, name: str, values, trainer_values, scale, all_bits, device: str, what: str, **options
) -> None:
    options["number_format"] = fmt
    on_device = _to(values, device)
    # The reference too: the exp of a GPU is not that of a CPU.
    given_scale = _to((scale,), device)[0]

    def check(function: str, *arguments, **more) -> list[torch.Tensor]:
        arguments = (*_to(arguments, device), given_scale)
        got, expected = (
            getattr(module, f"{name}_{function}")(*arguments, **options, **more)
            for module in (kernels_fused, fused)
        )
        got, expected = ((t,) if isinstance(t, torch.Tensor) else t for t in (got, expected))
        for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            where = f"{what} {name}_{function} {more.get('num_bits', '')}, result {index}"
            assert_same_bytes(mine, theirs, where, any_nan=True)
        return list(expected)

    check("rtn", *on_device)
    for bits in all_bits:
        *_, hint, scale_bytes = check("rtn_record", *on_device, num_bits=bits)
        random = torch.randint_like(hint, 0, 256)
        for payload in (hint, random):
            check("guided", *trainer_values, payload, scale_bytes, num_bits=bits)


def _to(values, device: str):
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]


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
