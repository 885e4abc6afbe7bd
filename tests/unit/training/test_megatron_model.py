"""What Megatron's flags may say of a trainer model."""

from argparse import Namespace

import pytest

from megatron_trace.training.megatron_model import require_vocabulary_of_one_rank


def flags(vocab_size, divisible_by, tensor_parallel):
    return Namespace(
        vocab_size=vocab_size,
        make_vocab_size_divisible_by=divisible_by,
        tensor_model_parallel_size=tensor_parallel,
    )


def test_padding_of_the_vocabulary_by_tensor_parallelism_is_refused():
    """Measured with 16 tokens: a log-prob gap of 0.49 instead of 9e-4."""
    with pytest.raises(ValueError, match=r"size 2 pads .* to 32 tokens, one .* to 16; set"):
        require_vocabulary_of_one_rank(flags(16, 16, 2))


@pytest.mark.parametrize("same", [(16, 8, 2), (16, 16, 1), (50048, 64, 2), (None, 128, 2)])
def test_a_vocabulary_of_one_size_is_accepted(same):
    require_vocabulary_of_one_rank(flags(*same))
