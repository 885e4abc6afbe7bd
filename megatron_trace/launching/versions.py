"""Installed versions, and how they differ from the tested ones; nothing is imported for it."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path

# What decides the numbers of a run; the first four are needed, the others are used where they are.
PACKAGES = (
    "torch",
    "triton",
    "megatron-core",
    "nvidia-modelopt",
    "transformer-engine",
    "flash-linear-attention",
    "tilelang",
    "apex",
    "numpy",
)


def installed_versions() -> dict[str, str | None]:
    """Gives the version of each of `PACKAGES`; None for what is not installed."""
    return {name: _version(name) for name in PACKAGES}


def tested_versions(constraints: Path) -> dict[str, str]:
    """Gives the versions that a file of constraints pins, by normalised name.

    Raises:
        OSError: The file cannot be read.
    """
    pins = re.findall(r"^([\w.-]+)==(\S+)$", constraints.read_text(), flags=re.MULTILINE)
    return {_normalised(name): version for name, version in pins}


def differences(
    installed: Mapping[str, str | None], tested: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Gives installed and tested version of each package whose release differs."""
    return {
        name: (version, tested[_normalised(name)])
        for name, version in installed.items()
        if version is not None
        and _normalised(name) in tested
        # 2.11.0+cu130 is a build of 2.11.0.
        and version.partition("+")[0] != tested[_normalised(name)]
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
