"""Agreement of rollout and training: log-probabilities and codes.

Legend: B samples, S positions, N rows, K values of a row, C blocks of a row.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

import torch

from megatron_trace.formats import pack_bits
from megatron_trace.formats.number_format import NVFP4, NumberFormat


@dataclass(frozen=True)
class Sums:
    """Counts and sums that are added up field by field."""

    def __add__(self, other: Self) -> Self:
        """Gives the sums of both."""
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class LogprobGap:
    """How far training's log-probabilities of the sampled tokens are from the rollout's (nats).

    Attributes:
        num_tokens: Tokens compared; the other numbers are NaN if there are none.
        mean: Mean of |train - rollout|.
        p99: 99th percentile of it.
        max: Largest of it.
        kl: Estimate of KL(rollout || train) in nats per token, mean of r - 1 - log r with
            r = train / rollout probability: unbiased, and never negative.
        kl_naive: Mean of rollout - train; the same in expectation, with more variance.
        ratio_mean: Mean of r.
        ratio_min: Smallest r.
        ratio_max: Largest r.
    """

    num_tokens: int
    mean: float
    p99: float
    max: float
    kl: float
    kl_naive: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float

    def as_dict(self) -> dict[str, float | None]:
        """Gives plain numbers for a JSON line; None for what is NaN."""
        return {name: None if math.isnan(of) else of for name, of in asdict(self).items()}


def logprob_gap(rollout: torch.Tensor, train: torch.Tensor, mask: torch.Tensor) -> LogprobGap:
    """Gives the gap between log-probabilities of the same tokens.

    Args:
        rollout: float [B, S]; the rollout's log-probabilities.
        train: float [B, S]; training's.
        mask: bool [B, S]; tokens that count.

    Raises:
        ValueError: Shapes differ, or mask is not boolean.
    """
    if mask.dtype != torch.bool or not rollout.shape == train.shape == mask.shape:
        raise ValueError(
            f"rollout, train and a boolean mask must have one shape; got {tuple(rollout.shape)}, "
            f"{tuple(train.shape)} and {mask.dtype} {tuple(mask.shape)}"
        )
    mask = mask.cpu()
    delta = train.detach().cpu()[mask].double() - rollout.detach().cpu()[mask].double()
    if delta.numel() == 0:
        return LogprobGap(0, *[float("nan")] * (len(fields(LogprobGap)) - 1))
    size, ratio = delta.abs(), delta.exp()
    return LogprobGap(
        num_tokens=delta.numel(),
        mean=size.mean().item(),
        p99=_quantile(size, 0.99),
        max=size.max().item(),
        kl=(torch.expm1(delta) - delta).mean().item(),
        kl_naive=-delta.mean().item(),
        ratio_mean=ratio.mean().item(),
        ratio_min=ratio.min().item(),
        ratio_max=ratio.max().item(),
    )


def _quantile(values: torch.Tensor, share: float) -> float:
    """Gives a quantile as `torch.quantile` does, which refuses more than 2**24 values."""
    below, rest = divmod(share * (values.numel() - 1), 1)
    lower = values.kthvalue(int(below) + 1).values
    upper = values.kthvalue(min(int(below) + 2, values.numel())).values
    return lower.lerp(upper, rest).item()


@dataclass(frozen=True)
class CodeMismatch(Sums):
    """Counts of how training's codes differ from the rollout's full codes; -0 equals +0.

    Attributes:
        values: Values whose rounding to nearest was compared.
        rtn_different: Those that rounding to nearest under training's own scale gives another
            code.
        rtn_one_step: Those of them that are neighbours on the signed ladder.
        blocks: Blocks of these values.
        scale_bytes_different: Blocks for which training's own scale byte is another.
        guided_values: Values that were guided.
        guided_different: Those that the hints used give another code or block scale; the sum of
            the next four.
        out_of_bracket: The rollout's magnitude is neither candidate of training's value.
        sign_flip: It is a candidate, but the rollout's value has the other sign.
        misread_scale: The hint's residue stood for another block scale than the rollout's, which
            is more than 3 steps from training's own.
        unexplained: None of these; must be 0, and is not where a hint belongs to another row.
    """

    values: int = 0
    rtn_different: int = 0
    rtn_one_step: int = 0
    blocks: int = 0
    scale_bytes_different: int = 0
    guided_values: int = 0
    guided_different: int = 0
    out_of_bracket: int = 0
    sign_flip: int = 0
    misread_scale: int = 0
    unexplained: int = 0

    @property
    def rtn_share(self) -> float:
        """Share of the values with another code under rounding to nearest."""
        return self.rtn_different / self.values if self.values else float("nan")

    @property
    def one_step_share(self) -> float:
        """Share of these mismatches that are one step."""
        return self.rtn_one_step / self.rtn_different if self.rtn_different else float("nan")

    @property
    def scale_byte_share(self) -> float:
        """Share of the blocks with another scale byte."""
        return self.scale_bytes_different / self.blocks if self.blocks else float("nan")

    @property
    def guided_share(self) -> float:
        """Share of the guided values with another code."""
        return self.guided_different / self.guided_values if self.guided_values else float("nan")


@dataclass(frozen=True)
class UsedHints:
    """The hints by which training rounded some of the compared rows.

    Attributes:
        rows: bool [N]; rows that were guided.
        payload: uint8 [N, K * num_bits / 8].
        scale_bytes: uint8 [N, C].
        num_bits: Bits per value.
        restored: Whether the block scales are what their residues stood for.
    """

    rows: torch.Tensor
    payload: torch.Tensor
    scale_bytes: torch.Tensor
    num_bits: int
    restored: bool = False


@torch.no_grad()
def compare_codes(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: float | None,
    used: UsedHints | None,
    number_format: NumberFormat = NVFP4,
) -> CodeMismatch:
    """Counts where training's values get other codes than the rollout gave.

    Args:
        x: float [N, K]; the values at the site in training's forward.
        codes: uint8 [N, K]; the rollout's full codes.
        scale_bytes: uint8 [N, C]; the rollout's block scales.
        global_scale: Static decode-side scale of both sides; None if the format has none.
        used: Hints that training used, so that a wrong hint shows; None if it used none.
        number_format: Format of the values.
    """
    by_row = compare_rows(x, codes, scale_bytes, global_scale, used, number_format)
    # The device is asked once.
    sums = torch.stack([counts.sum() for counts in by_row.values()]).tolist()
    return CodeMismatch(**dict(zip(by_row, sums, strict=True)))


@torch.no_grad()
def compare_rows(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: float | None,
    used: UsedHints | None,
    number_format: NumberFormat = NVFP4,
) -> dict[str, torch.Tensor]:
    """Gives what `compare_codes` counts for every row, by the name of its field.

    Args:
        x: float [N, K].
        codes: uint8 [N, K].
        scale_bytes: uint8 [N, C].
        global_scale: Static decode-side scale of both sides; None if the format has none.
        used: Hints that training used; None if it used none, and the fields of guided values are
            then left out.
        number_format: Format of the values.

    Returns:
        int64 [N] each; rows that no hint guided have 0 in the fields of guided values.
    """
    rtn_codes, rtn_bytes = number_format.specification.encode(
        x, global_scale, **number_format.rules
    )
    different = ~_same_value(rtn_codes, codes, number_format)
    steps, wanted = (_signed_steps(of, number_format) for of in (rtn_codes, codes))
    one_step = (steps - wanted).abs() <= 1
    by_row = {
        "values": torch.full_like(codes[:, 0], codes.shape[1], dtype=torch.int64),
        "rtn_different": different.sum(-1),
        "rtn_one_step": (different & one_step).sum(-1),
        "blocks": torch.full_like(codes[:, 0], scale_bytes.shape[1], dtype=torch.int64),
        "scale_bytes_different": (rtn_bytes != scale_bytes).sum(-1),
    }
    if used is None:
        return by_row
    rows = used.rows.nonzero()[:, 0]
    used = replace(used, payload=used.payload[rows], scale_bytes=used.scale_bytes[rows])
    compared = x[rows], codes[rows], scale_bytes[rows], global_scale
    guided = _guided_mismatch(*compared, used, number_format)
    for name, counts in guided.items():
        by_row[name] = torch.zeros_like(by_row["values"]).index_copy_(0, rows, counts)
    return by_row


def _guided_mismatch(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: float | None,
    used: UsedHints,
    number_format: NumberFormat,
) -> dict[str, torch.Tensor]:
    guided_codes, sign = number_format.specification.guided_codes, number_format.element.sign_code
    guided = guided_codes(x, used.payload, used.scale_bytes, global_scale, num_bits=used.num_bits)
    other_scale = (used.scale_bytes != scale_bytes).repeat_interleave(number_format.block_size, -1)
    misread = other_scale & _misread(x, scale_bytes, global_scale, used, number_format)
    different = ~_same_value(guided, codes, number_format) | other_scale
    # The two candidates are what the two values of the mantissa bit choose.
    lower, upper = (
        guided_codes(x, pack_bits(bits), scale_bytes, global_scale, num_bits=1) & (sign - 1)
        for bits in (torch.zeros_like(codes), torch.ones_like(codes))
    )
    magnitude = codes & (sign - 1)
    outside = (magnitude != lower) & (magnitude != upper) & ~other_scale
    flipped = ((codes >= sign) != torch.signbit(x)) & (magnitude != 0) & ~other_scale
    counted = {
        "guided_values": torch.ones_like(different),
        "guided_different": different,
        "out_of_bracket": different & outside,
        "sign_flip": different & ~outside & flipped,
        "misread_scale": misread,
        "unexplained": different & ~outside & ~flipped & ~misread,
    }
    return {name: values.sum(-1) for name, values in counted.items()}


def _misread(
    x: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: float | None,
    used: UsedHints,
    number_format: NumberFormat,
) -> torch.Tensor:
    """Gives bool [N, K]: values whose block scale was read wrongly for the only known reason."""
    distance = number_format.specification.scale_distance(x, scale_bytes, global_scale)
    same_residue = ((scale_bytes ^ used.scale_bytes) & 7) == 0
    blocks = same_residue & (distance > 3) & used.restored
    return blocks.repeat_interleave(number_format.block_size, -1)


def _same_value(a: torch.Tensor, b: torch.Tensor, number_format: NumberFormat) -> torch.Tensor:
    return (a == b) | (((a | b) & (number_format.element.sign_code - 1)) == 0)


def _signed_steps(codes: torch.Tensor, number_format: NumberFormat) -> torch.Tensor:
    """Gives int16: the place on the ladder of magnitudes, negative for negative values."""
    sign = number_format.element.sign_code
    steps = (codes & (sign - 1)).to(torch.int16)
    return torch.where(codes >= sign, -steps, steps)
