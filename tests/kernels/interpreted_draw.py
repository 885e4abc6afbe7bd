"""Compares the kernel that draws tokens with their definition; a program, for TRITON_INTERPRET.

python interpreted_draw.py DEVICE BLOCK_TOKENS     prints how many rows were compared
"""

import sys

import torch

from megatron_trace.rollout.kernels.draw import draw

# Between them no sum of equal numbers, which roundings decide.
EDGES = [0.0, 2.0**-50, 0.123456789, 1 - 2.0**-50]


def rows(num_tokens: int) -> torch.Tensor:
    """Gives log-probs: of any token, of every third, of one at either end, of tiny numbers."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = 3 * torch.randn(6, num_tokens, generator=generator)
    logits[1, torch.arange(num_tokens) % 3 != 0] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3, :-1] = -torch.inf
    logits[4] = 100 * logits[4]
    logits[5] = 0.0
    return logits.log_softmax(-1)


def by_definition(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Gives the first token with which the probabilities, added up, pass a number (`sampling`)."""
    sums = logprobs.double().exp().cumsum(-1)
    return (sums <= uniform[:, None] * sums[:, -1:]).sum(-1)


def compare(device: str, block: int) -> int:
    """Gives the number of rows; vocabularies of a token, a block, a token more, several blocks."""
    num_compared = 0
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (1, block, block + 1, 5 * block // 2):
        logprobs = rows(num_tokens)
        numbers = torch.tensor(EDGES, dtype=torch.float64)
        drawn = torch.rand(4, generator=generator, dtype=torch.float64)
        for number in torch.cat((numbers, drawn)).split(8):
            of_rows = logprobs.repeat_interleave(len(number), dim=0)
            uniform = number.repeat(len(logprobs))
            expected = by_definition(of_rows, uniform)
            tokens = draw(of_rows.to(device), uniform.to(device), block_tokens=block).cpu()
            assert torch.equal(tokens, expected), (num_tokens, tokens, expected)
            assert of_rows.gather(1, tokens[:, None]).isfinite().all(), "it has no probability"
            num_compared += len(of_rows)
        bad = torch.full((1, num_tokens), torch.nan, device=device)
        token = draw(bad, uniform[:1].to(device), block_tokens=block)
        assert 0 <= int(token) < num_tokens, "a row of NaN"
    return num_compared


if __name__ == "__main__":
    sys.stdout.write(f"{compare(sys.argv[1], int(sys.argv[2]))} rows")
