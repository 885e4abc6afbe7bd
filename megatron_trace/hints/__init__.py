"""What rollout and training exchange: typed hints, their codec, the row guard and the store."""

from megatron_trace.hints.codec import (
    decode_bits,
    decode_codes,
    encode_hint,
    payload_bits,
    stack_rows,
)
from megatron_trace.hints.guard import RowHealth, accept_rows
from megatron_trace.hints.store import HintStore, RecordKind
from megatron_trace.hints.types import (
    HintKey,
    QuantizerSettings,
    RolloutSample,
    Site,
    SiteHint,
)

__all__ = [
    "HintKey",
    "HintStore",
    "QuantizerSettings",
    "RecordKind",
    "RolloutSample",
    "RowHealth",
    "Site",
    "SiteHint",
    "accept_rows",
    "decode_bits",
    "decode_codes",
    "encode_hint",
    "payload_bits",
    "stack_rows",
]
