"""Quantiser settings as JSON, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_trace.hints.durable import write_file
from megatron_trace.hints.types import QuantizerSettings, Site

SETTINGS_FILE = "settings.json"


def settings_record(settings: QuantizerSettings) -> dict[str, Any]:
    """Gives the settings in plain values that JSON can hold."""
    # Hexadecimal: a scale that loses a bit gives other codes.
    scales = [
        [layer, str(site), float(scale).hex()]
        for (layer, site), scale in sorted(settings.global_scales.items())
    ]
    return dataclasses.asdict(settings) | {"global_scales": scales}


def settings_from_record(record: Mapping[str, Any]) -> QuantizerSettings:
    """Gives the settings that a record describes.

    Raises:
        ValueError: The record has other fields than this version, or values of another kind.
    """
    known = {field.name for field in dataclasses.fields(QuantizerSettings)}
    # Settings that were written before there was compensation had none.
    values: dict[str, Any] = {"residual_share": QuantizerSettings.residual_share, **record}
    if set(values) != known:
        raise ValueError(
            f"quantiser settings must have the fields {sorted(known)}; got {sorted(values)}: they "
            "were written by another version"
        )
    try:
        scales = {
            (int(layer), Site(site)): float.fromhex(scale)
            for layer, site, scale in values["global_scales"]
        }
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"global_scales must be [layer, site, hexadecimal float] each ({error})"
        ) from error
    values["global_scales"] = scales
    return QuantizerSettings(**values)


def save_settings(settings: QuantizerSettings, folder: str | Path) -> Path:
    """Writes `settings.json` into a folder, whole or not at all, and gives its path.

    Raises:
        ValueError: The folder has other settings already, which its samples were made under.
    """
    path = Path(folder) / SETTINGS_FILE
    if path.is_file():
        existing = load_settings(folder)
        if existing != settings:
            raise ValueError(
                f"{path} has quantiser settings {existing.digest()}, but these are "
                f"{settings.digest()}; write samples of other settings to another folder"
            )
        return path
    write_file(path, json.dumps(settings_record(settings), indent=1).encode())
    return path


def load_settings(folder: str | Path) -> QuantizerSettings:
    """Reads `settings.json` of a folder.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged or of another version.
    """
    path = Path(folder) / SETTINGS_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold an object; got {type(record).__name__}")
    try:
        return settings_from_record(record)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
