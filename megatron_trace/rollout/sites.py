"""What happens at the quantised sites of one engine: scales, counters, checks, recording.

Legend: N rows (tokens of the step, or dispatched tokens of one expert), K values of a row,
B blocks of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.formats import E4M3_MAX, FORMAT_SETS, NumberFormat, ops
from megatron_trace.hints import QuantizerSettings, Site, site_format
from megatron_trace.rollout.recorder import Recorder

OPERAND_DTYPE = torch.bfloat16


class RolloutSites:
    """Quantises at the sites of one engine and counts the calls.

    Args:
        trace: Settings of TRACE.
        recorder: Gets what the quantisers give at the recorded places.

    Attributes:
        calls: Calls of the quantisers by (decoder layer, site) since the last rollout began.
        quantised_values: Values that they got at the places with static scales, likewise.
    """

    def __init__(self, trace: TraceConfig, recorder: Recorder) -> None:
        self.trace = trace
        self.recorder = recorder
        self.calls: Counter[tuple[int, Site]] = Counter()
        self._scales: dict[tuple[int, Site], torch.Tensor] = {}
        self._largest: dict[tuple[int, Site], float] = {}
        self._saturated: dict[tuple[int, Site], torch.Tensor] = {}
        self.quantised_values: Counter[tuple[int, Site]] = Counter()

    def begin_rollout(self) -> None:
        """Begins to count anew."""
        self.calls.clear()
        self._saturated.clear()
        self.quantised_values.clear()

    def saturated_values(self) -> dict[tuple[int, Site], int]:
        """Gives by place with a static scale the values beyond the largest that it has."""
        return {place: int(count) for place, count in self._saturated.items()}

    def use(self, settings: QuantizerSettings) -> None:
        """Takes the global scales of every place from the settings."""
        self._scales = {
            place: torch.tensor(scale, dtype=torch.float32, device=torch.cuda.current_device())
            for place, scale in settings.global_scales.items()
        }
        self._largest = {
            (layer, site): E4M3_MAX * self.format_of(site).element.largest * scale
            for (layer, site), scale in settings.global_scales.items()
        }

    def format_of(self, site: Site) -> NumberFormat:
        """Gives the number format of a site."""
        return site_format(FORMAT_SETS[self.trace.number_format], site)

    def scale(self, layer: int, site: Site) -> torch.Tensor | None:
        """Gives the FP32 global scale of a place, 0-d; None if its format has none."""
        return self._scales[layer, site] if self.format_of(site).has_global_scale else None

    def begin(self, layer: int, site: Site, x: torch.Tensor) -> None:
        """Counts a quantiser's call, checks its input and watches it for saturation.

        Args:
            layer: Decoder layer.
            site: fc1, k or v.
            x: BF16 [N, K], a row per token of the step in its order, padding last.

        Raises:
            RuntimeError: A value is NaN or Inf, if the settings ask for the check.
        """
        self.calls[layer, site] += 1
        self.check_finite(layer, site, x)
        num_rows = self.recorder.num_rows
        self._watch(layer, site, x if num_rows is None else x[:num_rows])

    def record(
        self, layer: int, site: Site, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantises the rows of the running step once each, and records what came out.

        Args:
            layer: Decoder layer.
            site: fc1, k or v.
            x: BF16 [N, K], a row per token of the step in its order, padding last.

        Returns:
            y: BF16 [N, K], fake-quantised.
            packed_codes: uint8 [N, K * bits of a code / 8].
            scale_bytes: uint8 [N, B].
        """
        self.begin(layer, site, x)
        number_format = self.format_of(site)
        y, packed_codes, scale_bytes = ops.rtn_record(
            x,
            self.scale(layer, site),
            num_bits=number_format.code_bits,
            number_format=number_format,
            dtype=OPERAND_DTYPE,
            implementation=self.trace.implementation,
        )
        self.recorder.put(layer, site, packed_codes, scale_bytes)
        return y, packed_codes, scale_bytes

    def quantise_slots(
        self,
        layer: int,
        site: Site,
        x: torch.Tensor,
        *,
        row_of: Callable[[int], int],
        slots: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        num_slots: int,
    ) -> torch.Tensor:
        """Quantises the rows of one expert, and records them if the place is recorded.

        Args:
            layer: Decoder layer.
            site: fc2.
            x: BF16 [N, K], a row per (token, expert slot) that the expert computes.
            row_of: Gives the token's row in the step for a row of x, for error messages.
            slots: Gives token and slot of the rows of x, int64 [N] each; called if recorded.
            num_slots: Expert slots of a token.

        Returns:
            BF16 [N, K], fake-quantised.
        """
        self.calls[layer, site] += 1
        self.check_finite(layer, site, x, row_of)
        self._watch(layer, site, x)
        scale, number_format = self.scale(layer, site), self.format_of(site)
        implementation = self.trace.implementation
        if not self.recorder.keeps(layer, site):
            return ops.rtn(
                x,
                scale,
                number_format=number_format,
                dtype=OPERAND_DTYPE,
                implementation=implementation,
            )
        y, packed_codes, scale_bytes = ops.rtn_record(
            x,
            scale,
            num_bits=number_format.code_bits,
            number_format=number_format,
            dtype=OPERAND_DTYPE,
            implementation=implementation,
        )
        self.recorder.put_slots(
            layer, site, packed_codes, scale_bytes, slots=slots(), num_slots=num_slots
        )
        return y

    def _watch(self, layer: int, site: Site, x: torch.Tensor) -> None:
        """Counts values of x, [N, K], beyond the largest that a static scale has.

        At fc2 rows of padding are among them, which Megatron's experts compute too.
        """
        largest = self._largest.get((layer, site))
        if largest is None:
            return
        self.quantised_values[layer, site] += x.numel()
        count = (x.abs() > largest).sum()
        before = self._saturated.get((layer, site))
        self._saturated[layer, site] = count if before is None else before + count

    def check_finite(
        self, layer: int, site: Site, x: torch.Tensor, row_of: Callable[[int], int] | None = None
    ) -> None:
        """Checks the rows of x, [N, K], if the settings ask for it; padding rows do not count.

        Args:
            layer: Decoder layer.
            site: Site.
            x: The values.
            row_of: Gives the token's row in the step for a row of x; None if they are the same.

        Raises:
            RuntimeError: A value is NaN or Inf; names layer, site and sample.
        """
        if not self.trace.check_finite or torch.isfinite(x).all():
            return
        bad = (~torch.isfinite(x)).any(-1).nonzero()[:, 0].tolist()
        tokens = [row if row_of is None else row_of(row) for row in bad]
        num_rows = self.recorder.num_rows
        tokens = [token for token in tokens if num_rows is None or token < num_rows]
        if tokens:
            raise RuntimeError(
                f"NaN or Inf activation in the rollout at layer {layer}, site {site}, "
                f"{self.recorder.sample_of_row(tokens[0])} ({len(tokens)} of {len(x)} rows); "
                "check the weights that were pushed"
            )
