"""What happens at the quantised sites of one engine: scales, counters, checks, recording.

Legend: N rows (tokens of the step, or dispatched tokens of one expert), K values of a row,
B blocks of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.formats import E4M3_MAX, NumberFormat, ops
from megatron_trace.hints import QuantizerSettings, Site, site_format, stored_bits
from megatron_trace.rollout.recorder import Recorder
from megatron_trace.rollout.watch import Watch

OPERAND_DTYPE = torch.bfloat16


class RolloutSites:
    """Quantises at the sites of one engine and counts the calls.

    Args:
        trace: Settings of TRACE.
        recorder: Gets what the quantisers give at the recorded places.

    Attributes:
        calls: Calls of the quantisers by (decoder layer, site) since the last rollout began.
        quantised_values: Values that they got at the places with static scales, likewise.
        watch: Counts what is beyond the scales, or NaN or Inf.
        settings_version: How often scales were set; what was captured before is of other ones.
    """

    def __init__(self, trace: TraceConfig, recorder: Recorder) -> None:
        self.trace = trace
        self.recorder = recorder
        self.calls: Counter[tuple[int, Site]] = Counter()
        self._scales: dict[tuple[int, Site], torch.Tensor] = {}
        self._largest: dict[tuple[int, Site], float] = {}
        self.watch = Watch()
        self.settings_version = 0
        self.quantised_values: Counter[tuple[int, Site]] = Counter()

    def begin_rollout(self) -> None:
        """Begins to count anew."""
        self.calls.clear()
        self.watch.clear()
        self.quantised_values.clear()

    def saturated_values(self) -> dict[tuple[int, Site], int]:
        """Gives by place with a static scale the values beyond the largest that it has."""
        beyond = self.watch.beyond()
        return {place: beyond.get(place, 0) for place in self.quantised_values}

    def use(self, settings: QuantizerSettings) -> None:
        """Takes the global scales of every place from the settings."""
        self.settings_version += 1
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
        return site_format(self.trace.formats, site)

    def scale(self, layer: int, site: Site) -> torch.Tensor | None:
        """Gives the FP32 global scale of a place, 0-d; None if its format has none."""
        return self._scales[layer, site] if self.format_of(site).has_global_scale else None

    def begin(
        self,
        layer: int,
        site: Site,
        x: torch.Tensor,
        *,
        rows_of_token: int = 1,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Counts a quantiser's call and watches its input: saturation, NaN, Inf.

        Args:
            layer: Decoder layer.
            site: Site.
            x: BF16 [N, K], `rows_of_token` rows of each token of the step, padding included.
            rows_of_token: 1, or at fc2 the expert slots of a token.
            tokens: int64 [N], the token of each row; None if the rows are in the tokens' order.

        Raises:
            RuntimeError: Outside a step, a value is NaN or Inf, if the settings ask for the check.
        """
        place = layer, site
        self.calls[place] += 1
        largest, num_rows = self._largest.get(place), self.recorder.num_rows
        if largest is not None:
            num_real = len(x) if num_rows is None else num_rows * rows_of_token
            self.quantised_values[place] += num_real * x.shape[1]
        of_rows = None if tokens is None else lambda: tokens
        self._observe(place, x, largest, rows_of_token=rows_of_token, tokens=of_rows)

    def record(self, layer: int, site: Site, x: torch.Tensor) -> torch.Tensor:
        """Quantises the rows of the running step once each, and records what came out.

        Args:
            layer: Decoder layer.
            site: fc1, k or v.
            x: BF16 [N, K], a row per token of the step in its order, padding last.

        Returns:
            BF16 [N, K], fake-quantised.
        """
        self.begin(layer, site, x)
        y, hint, scale_bytes = self.quantised(layer, site, x)
        if hint is not None and scale_bytes is not None:
            self.recorder.put_hint(layer, site, hint, scale_bytes)
        return y

    def quantised(
        self, layer: int, site: Site, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Gives fake-quantised rows, and what is recorded of them if the place is recorded.

        Args:
            layer: Decoder layer.
            site: Site.
            x: BF16 [N, K].

        Returns:
            y: BF16 [N, K].
            hint: uint8 [N, bytes], of as many bits as are kept; None if nothing is recorded.
            scale_bytes: uint8 [N, B]; None likewise.
        """
        number_format, scale = self.format_of(site), self.scale(layer, site)
        implementation = self.trace.implementation
        if not self.recorder.keeps(layer, site):
            y = ops.rtn(
                x,
                scale,
                number_format=number_format,
                dtype=OPERAND_DTYPE,
                implementation=implementation,
            )
            return y, None, None
        return ops.rtn_record(
            x,
            scale,
            num_bits=stored_bits(number_format, self.trace.recorded_bits),
            number_format=number_format,
            dtype=OPERAND_DTYPE,
            implementation=implementation,
        )

    def begin_check(self) -> None:
        """Starts to bring to the host what `require_finite` checks after the step's tokens."""
        if self.trace.check_finite:
            self.watch.begin_reading()

    def require_finite(self) -> None:
        """Checks what was watched of the running step, if the settings ask for it.

        Raises:
            RuntimeError: A value was NaN or Inf; names layer, site and sample.
        """
        found = self.watch.first_bad() if self.trace.check_finite else None
        if found is not None:
            (layer, site), token, count = found
            raise RuntimeError(self._not_finite(layer, Site(site), token, count))

    def quantise_slots(
        self,
        layer: int,
        site: Site,
        x: torch.Tensor,
        *,
        tokens: Callable[[], torch.Tensor],
        slots: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        num_slots: int,
    ) -> torch.Tensor:
        """Quantises the rows of one expert, and records them if the place is recorded.

        Args:
            layer: Decoder layer.
            site: fc2.
            x: BF16 [N, K], a row per (token, expert slot) that the expert computes.
            tokens: Gives the token's row in the step for each row of x, int64 [N].
            slots: Gives token and slot of the rows of x, int64 [N] each; called if recorded.
            num_slots: Expert slots of a token.

        Returns:
            BF16 [N, K], fake-quantised.
        """
        place = layer, site
        self.calls[place] += 1
        largest = self._largest.get(place)
        if largest is not None:
            # Rows of padding are among them, which Megatron's experts compute too.
            self.quantised_values[place] += x.numel()
        self._observe(place, x, largest, tokens=tokens)
        y, hint, scale_bytes = self.quantised(layer, site, x)
        if hint is not None and scale_bytes is not None:
            self.recorder.put_slots(
                layer, site, hint, scale_bytes, slots=slots(), num_slots=num_slots
            )
        return y

    def check_finite(self, layer: int, site: Site, x: torch.Tensor) -> None:
        """Watches rows that are not quantised for NaN and Inf.

        Args:
            layer: Decoder layer.
            site: Site.
            x: [N, K], a row per token of the step in its order, padding last.

        Raises:
            RuntimeError: Outside a step, a value is NaN or Inf, if the settings ask for the check.
        """
        self._observe((layer, site), x, None)

    def _observe(
        self,
        place: tuple[int, Site],
        x: torch.Tensor,
        largest: float | None,
        *,
        rows_of_token: int = 1,
        tokens: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Watches rows in a step of the engine; outside of one, checks them at once."""
        finite = self.trace.check_finite
        if self.recorder.num_rows is not None:
            self.watch.observe(
                place,
                x,
                largest=largest,
                finite=finite,
                tokens=None if tokens is None else tokens(),
                rows_of_token=rows_of_token,
            )
        elif finite and not torch.isfinite(x).all():
            rows = (~torch.isfinite(x)).any(-1).nonzero()[:, 0]
            raise RuntimeError(self._not_finite(*place, int(rows[0]), len(rows)))

    def _not_finite(self, layer: int, site: Site, token: int, count: int) -> str:
        return (
            f"NaN or Inf activation in the rollout at layer {layer}, site {site}, "
            f"{self.recorder.sample_of_row(token)} ({count} rows); check the weights that were "
            "pushed"
        )
