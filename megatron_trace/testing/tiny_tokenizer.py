"""A small Hugging Face tokenizer with a chat template, made on the spot."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

START, END, BOS = "<|im_start|>", "<|im_end|>", "<|bos|>"
_SPECIAL = [BOS, START, END, "user", "assistant", "system", "tool"]
# Like Qwen's: a turn ends with an end token and a newline; earlier turns lose their thoughts.
CHAT_TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{- raise_exception('no role ' + m.role) }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{- '!' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def save_tiny_tokenizer(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, adds_bos: bool = False
) -> Path:
    """Writes a tokenizer of characters, with a token for each role, and gives the folder.

    Args:
        folder: Where to.
        chat_template: Its chat template; None for none.
        adds_bos: Whether it puts a token before a text.
    """
    words = ["?", *_SPECIAL, *string.digits, *string.ascii_letters, *"\n +-*=!.,:'/_()<>|{}[]\""]
    tokenizer = Tokenizer(
        models.WordLevel({word: row for row, word in enumerate(words)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
            single=f"{BOS} $A", special_tokens=[(BOS, words.index(BOS))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        bos_token=BOS,
        additional_special_tokens=_SPECIAL[1:2] + _SPECIAL[3:],
        chat_template=chat_template,
    )
    fast.save_pretrained(str(folder))
    return folder
