"""Measures what residues of block scales cost: scales and values restored wrongly, guarded rows.

Values are synthetic, of the kinds of fc1, fc2, K and V in `docs/measurements.md`; the trainer's
are the rollout's plus noise of a share of the row's root mean square, both rounded to BF16.

    python tools/measure_residues.py --rows 2048
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import torch
from torch.distributions import StudentT

from megatron_trace.formats import (
    decode,
    encode,
    global_scale_from_amax,
    narrowed,
    ops,
    pack_codes,
    residues,
)
from megatron_trace.hints import THRESHOLDS, accept_rows

NOISES = (0.003, 0.01, 0.03, 0.1)
WIDTHS = (64, 128, 2048)


def main() -> None:
    """Prints the two tables."""
    arguments = _arguments()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    print("other scale bytes / values, of 1-bit and 2-bit hints with raw scales and residues")
    for (name, make), noise in product(KINDS.items(), NOISES):
        rollout = make(arguments.rows, 2048)
        print(f"{name} {noise:6.3f}  {_restored_wrongly(rollout, _noisy(rollout, noise))}")
    print("rows accepted by the guard: raw, residue")
    for width in WIDTHS:
        rows = arguments.rows * 2048 // max(width, 512)
        sizes = torch.exp(0.5 * torch.randn(rows, 1))
        rollout = torch.randn(rows, width) * sizes
        cases = {f"noise {noise}": _noisy(rollout, noise) for noise in (*NOISES, 0.3, 1.0)}
        cases["another row's"] = rollout.roll(1, 0)
        for name, trainer in cases.items():
            raw, residue = (_accepted(rollout, trainer, form) for form in ("raw", "residue"))
            print(f"K = {width:4}  {name:14} {raw:.4f} {residue:.4f}")


def _fc1(rows: int, columns: int) -> torch.Tensor:
    gains = torch.exp(0.5 * torch.randn(columns))
    gains[torch.rand(columns) < 0.01] *= 20
    return StudentT(4.0).sample((rows, columns)) * gains


def _fc2(rows: int, columns: int) -> torch.Tensor:
    gate, up = StudentT(5.0).sample((2, rows, columns))
    return torch.nn.functional.silu(gate) * up


def _k(rows: int, columns: int) -> torch.Tensor:
    offsets = torch.randn(columns)
    offsets[torch.rand(columns) < 0.05] *= 8
    return torch.randn(rows, columns) + offsets


def _v(rows: int, columns: int) -> torch.Tensor:
    return StudentT(6.0).sample((rows, columns))


KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "fc1": _fc1,
    "fc2": _fc2,
    "K  ": _k,
    "V  ": _v,
}


def _noisy(x: torch.Tensor, noise: float) -> torch.Tensor:
    size = x.square().mean(-1, keepdim=True).sqrt()
    return (x + noise * size * torch.randn(x.shape)).bfloat16()


def _restored_wrongly(rollout: torch.Tensor, trainer: torch.Tensor) -> str:
    scale = global_scale_from_amax(1.25 * rollout.abs().max())
    codes, scale_bytes = encode(rollout.bfloat16(), scale)
    values = decode(codes, scale_bytes, scale)
    _, own_bytes = encode(trainer, scale)
    parts = [f"own {(own_bytes != scale_bytes).float().mean():.1e}"]
    for num_bits in (1, 2):
        hint, of_scales = residues.to_residues(
            narrowed(pack_codes(codes), num_bits), scale_bytes, num_bits=num_bits
        )
        restored = residues.restored(trainer, hint, of_scales, scale, num_bits=num_bits)
        for form, scales in (("raw", scale_bytes), ("residue", restored)):
            got = ops.guided(trainer.float(), hint, scales, scale, num_bits=num_bits)
            other = (scales != scale_bytes).float().mean()
            wrong = (got != values).float().mean()
            error = (got - values).norm() / values.norm()
            parts.append(f"| {num_bits} bit {form} {other:.1e} / {wrong:.1e} ({error:.1e})")
    return " ".join(parts)


def _accepted(rollout: torch.Tensor, trainer: torch.Tensor, form: str) -> float:
    scale = global_scale_from_amax(rollout.abs().max())
    codes, scale_bytes = encode(rollout.bfloat16(), scale)
    hint, of_scales = residues.to_residues(narrowed(pack_codes(codes), 1), scale_bytes, num_bits=1)
    if form == "residue":
        scale_bytes = residues.restored(trainer, hint, of_scales, scale, num_bits=1)
    health = accept_rows(
        trainer,
        hint,
        scale_bytes,
        scale,
        num_bits=1,
        thresholds=THRESHOLDS["nvfp4"],
    )
    return health.accepted.float().mean().item()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048, help="tokens of each kind")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
