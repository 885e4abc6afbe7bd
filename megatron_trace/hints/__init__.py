"""What rollout and training exchange: hints, their codec, row guard, store and files."""

from megatron_trace.hints.codec import (
    decode_bits,
    decode_codes,
    decode_residues,
    encode_hint,
    encode_packed_hint,
    payload_bits,
    stack_rows,
)
from megatron_trace.hints.files import HintFiles, HintSource
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.guard import THRESHOLDS, GuardThresholds, RowHealth, accept_rows
from megatron_trace.hints.store import HintSink, HintStore, RecordKind
from megatron_trace.hints.types import (
    HintKey,
    QuantisedParts,
    QuantizerSettings,
    RolloutSample,
    ScaleForm,
    Site,
    SiteHint,
    VersionSpan,
    site_format,
    stored_bits,
    version_spans,
)

__all__ = [
    "THRESHOLDS",
    "GuardThresholds",
    "HintFiles",
    "HintFilesWriter",
    "HintKey",
    "HintSink",
    "HintSource",
    "HintStore",
    "QuantisedParts",
    "QuantizerSettings",
    "RecordKind",
    "RolloutSample",
    "RowHealth",
    "ScaleForm",
    "Site",
    "SiteHint",
    "VersionSpan",
    "accept_rows",
    "decode_bits",
    "decode_codes",
    "decode_residues",
    "encode_hint",
    "encode_packed_hint",
    "payload_bits",
    "site_format",
    "stack_rows",
    "stored_bits",
    "version_spans",
]
