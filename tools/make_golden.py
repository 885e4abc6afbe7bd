"""Makes the golden files of libraries that are not installed beside ours.

Each library runs in an environment of its own that has torch 2.11:

    python -m pip install --no-deps --target /tmp/torchao torchao==0.18.0
    SKIP_CUDA_BUILD=1 python -m pip install --no-deps --no-build-isolation \
        --target /tmp/fouroversix fouroversix==1.0.5
    PYTHONPATH=.:/tmp/torchao .venv/bin/python tools/make_golden.py torchao
    PYTHONPATH=.:/tmp/fouroversix .venv/bin/python tools/make_golden.py fouroversix
    PYTHONPATH=. TE_VENV/bin/python tools/make_golden.py transformer_engine

TE_VENV is an environment with transformer-engine 2.20.2; no GPU is needed. The files go to
tests/golden/; tests/unit/formats/test_golden.py compares and explains every difference.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megatron_trace.formats import global_scale_from_amax, unpack_codes
from megatron_trace.testing import golden
from megatron_trace.testing.golden import Encoded, Input

DIRECTORY = Path(__file__).parent.parent / "tests" / "golden"


def transformer_engine() -> dict[str, Callable[[Input], Encoded]]:
    """Gives the formats of Transformer Engine's Python reference."""
    import transformer_engine.pytorch  # noqa: F401
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

    def quantise(x: torch.Tensor, amax: torch.Tensor, size: int = 16, **settings) -> Encoded:
        settings = {"pow_2_scales": False, "eps": 0.0} | settings
        packed, scales = NVFP4QuantizerRef._quantize_blockwise_reference(
            x, amax, size, 1, **settings
        )
        if settings["pow_2_scales"]:
            # It gives powers of two in FP32, whose logarithms are whole numbers.
            exponents = torch.log2(scales).nan_to_num(nan=128)
            return unpack_codes(packed), (exponents + 127).to(torch.uint8)
        return unpack_codes(packed), scales.view(torch.uint8)

    def four_over_six(given: Input, *, e4m3_max: int, error: str) -> Encoded:
        return quantise(
            given.x,
            given.amax(e4m3_max),
            nvfp4_use_4over6=True,
            nvfp4_e4m3_max=e4m3_max,
            nvfp4_4over6_err_mode=error,
        )

    return {
        "nvfp4": lambda given: quantise(given.x, given.amax()),
        "nvfp4_rows": lambda given: quantise(
            given.x, given.row_amax().flatten(), row_scaled_nvfp4=True
        ),
        "mxfp4_rceil": lambda given: quantise(
            given.in_blocks_of_32(), torch.ones(1), 32, pow_2_scales=True
        ),
    } | {
        f"four_over_six_{e4m3_max}_{error.lower()}": partial(
            four_over_six, e4m3_max=e4m3_max, error=error
        )
        for e4m3_max in (256, 448)
        for error in ("MSE", "MAE")
    }


def torchao() -> dict[str, Callable[[Input], Encoded]]:
    """Gives the formats of torchao's eager paths."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    def quantise(given: Input, *, element: torch.dtype, mode: ScaleCalculationMode) -> Encoded:
        scales, data = to_mx(given.in_blocks_of_32(), element, 32, mode)
        codes = unpack_codes(data) if element == torch.float4_e2m1fn_x2 else data.view(torch.uint8)
        return codes, scales.view(torch.uint8)

    def nvfp4(given: Input) -> Encoded:
        scale = global_scale_from_amax(given.amax())
        scales, data = nvfp4_quantize(given.x, 16, per_tensor_scale=scale)
        return unpack_codes(data), scales.view(torch.uint8)

    return {"nvfp4": nvfp4} | {
        f"{name}_{mode.value}": partial(quantise, element=element, mode=mode)
        for name, element in (
            ("mxfp4", torch.float4_e2m1fn_x2),
            ("mxfp8", torch.float8_e4m3fn),
        )
        for mode in ScaleCalculationMode
    }


def fouroversix() -> dict[str, Callable[[Input], Encoded]]:
    """Gives the formats of fouroversix's torch path."""
    _stand_in_for_packages("fouroversix", "quantize", "quantize.pytorch")
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import DataType, ScaleRule

    def quantise(
        x: torch.Tensor, amax: torch.Tensor | None, rule: ScaleRule, fmt: DataType = DataType.nvfp4
    ) -> Encoded:
        packed, scales, _ = quantize_to_fp4(
            x, amax, fp4_format=fmt, scale_rule=rule, use_blackwell_scale_layout=False
        )
        return unpack_codes(packed), scales.view(torch.uint8).reshape(x.shape[0], -1)

    return {
        "nvfp4": lambda given: quantise(given.x, given.amax(), ScaleRule.static_6),
        "four_over_six_256_mse": lambda given: quantise(given.x, given.amax(256), ScaleRule.mse),
        "four_over_six_256_mae": lambda given: quantise(given.x, given.amax(256), ScaleRule.mae),
        "mxfp4_rceil": lambda given: quantise(
            given.in_blocks_of_32(), None, ScaleRule.static_6, DataType.mxfp4
        ),
        "mxfp4_ceil": lambda given: quantise(
            given.in_blocks_of_32(), None, ScaleRule.static_4, DataType.mxfp4
        ),
    }


def _stand_in_for_packages(package: str, *subpackages: str) -> None:
    """Makes modules importable without their packages, which import transformers."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise LookupError(f"{package} is not installed here; see the commands at the top")
    root = Path(spec.origin).parent
    for name in ("", *subpackages):
        module = types.ModuleType(f"{package}.{name}".rstrip("."))
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[module.__name__] = module


LIBRARIES = {
    "transformer_engine": transformer_engine,
    "torchao": torchao,
    "fouroversix": fouroversix,
}


def main() -> None:
    """Writes one golden file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=LIBRARIES)
    library = parser.parse_args().library
    torch.set_num_threads(1)
    inputs, cases = {}, {}
    theirs = LIBRARIES[library]()
    for given in golden.golden_inputs():
        inputs[given.name] = golden.digest(given.x)
        for name, quantise in theirs.items():
            fmt = golden.FORMATS[name]
            entry = golden.record(fmt.ours(given), quantise(given), fmt)
            cases[f"{name}/{given.name}"] = entry
    header = {
        "library": library,
        "version": importlib.metadata.version(library.replace("_", "-")),
        "torch": torch.__version__,
        "command": f"tools/make_golden.py {library}",
    }
    path = DIRECTORY / f"{library}.json"
    golden.Golden(header, inputs, cases).write(path)
    differing = sum(len(entry["blocks"]) for entry in cases.values())
    print(f"{path}: {len(cases)} cases, {differing} differing blocks, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
