"""Which positions, columns, experts, samples and layers a rank holds: index arithmetic only.

Nothing here communicates or knows a process group: sizes and ranks are arguments. Of every
function, the parts of all ranks cover the whole exactly once, except where several ranks hold the
same KV head.

Legend: S positions of a padded sample, R recorded rows of a sample (its tokens but the last).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

PaddingSide = Literal["right", "left"]


def padded_length(longest: int, *, tp_size: int, cp_size: int) -> int:
    """Gives the smallest S >= `longest` that context and sequence parallelism can split.

    Args:
        longest: Positions of the longest sample.
        tp_size: Ranks that split the tokens of a context-parallel rank (sequence parallelism).
        cp_size: Ranks that split a sample, each with two chunks.
    """
    multiple = tp_size * (2 * cp_size if cp_size > 1 else 1)
    return -(-longest // multiple) * multiple


def cp_positions(num_positions: int, cp_size: int, cp_rank: int) -> tuple[range, ...]:
    """Gives the positions of a context-parallel rank, ascending: chunks r and 2 cp - 1 - r.

    The zig-zag gives every rank as much of a causal mask's triangle.

    Args:
        num_positions: S.
        cp_size: Ranks.
        cp_rank: r.

    Raises:
        ValueError: S is not a multiple of 2 cp.

    Source: Megatron-Core 0.19.2, `get_pos_emb_on_this_cp_rank` (rope_utils.py).
    """
    _require_rank("context-parallel", cp_size, cp_rank)
    if cp_size == 1:
        return (range(num_positions),)
    if num_positions % (2 * cp_size):
        raise ValueError(
            f"{num_positions} positions cannot be split into {2 * cp_size} chunks of "
            f"{cp_size} context-parallel ranks; pad to a multiple of {2 * cp_size}"
        )
    size = num_positions // (2 * cp_size)
    return tuple(
        range(chunk * size, (chunk + 1) * size) for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank)
    )


def token_positions(
    num_positions: int, *, tp_size: int = 1, tp_rank: int = 0, cp_size: int = 1, cp_rank: int = 0
) -> tuple[range, ...]:
    """Gives the positions of a rank where sequence parallelism splits those of its CP rank.

    Args:
        num_positions: S.
        tp_size: Tensor-parallel ranks, each with a contiguous part of the CP rank's positions.
        tp_rank: Which part.
        cp_size: Context-parallel ranks.
        cp_rank: This one.

    Returns:
        Ascending ranges of positions, in the order of the rank's rows.

    Raises:
        ValueError: The positions cannot be split evenly.
    """
    _require_rank("tensor-parallel", tp_size, tp_rank)
    chunks = cp_positions(num_positions, cp_size, cp_rank)
    local = sum(len(chunk) for chunk in chunks)
    if local % tp_size:
        enough = padded_length(num_positions, tp_size=tp_size, cp_size=cp_size)
        raise ValueError(
            f"{local} positions of a context-parallel rank cannot be split over {tp_size} "
            f"sequence-parallel ranks; pad to {enough}"
        )
    size = local // tp_size
    return _cut(chunks, tp_rank * size, (tp_rank + 1) * size)


def recorded_rows(
    positions: Sequence[range],
    num_rows: int,
    num_positions: int,
    *,
    padding: PaddingSide = "right",
) -> tuple[range, ...]:
    """Gives the rows of a sample's records that stand at some positions; padding has none.

    Args:
        positions: Ascending ranges of positions.
        num_rows: R of the sample, at most S.
        num_positions: S.
        padding: Side on which the sample is padded to S positions.

    Returns:
        Ascending ranges of 0 to R - 1, without empty ones.
    """
    if num_rows > num_positions:
        raise ValueError(f"{num_rows} rows do not fit into {num_positions} positions")
    first = 0 if padding == "right" else num_positions - num_rows
    rows = (
        range(max(part.start - first, 0), min(part.stop - first, num_rows)) for part in positions
    )
    return tuple(part for part in rows if part)


def packed_length(lengths: Sequence[int], *, tp_size: int, cp_size: int) -> int:
    """Gives the smallest T that holds packed sequences and that ranks can split.

    Each sequence is padded by itself, as context parallelism splits it by itself.

    Args:
        lengths: Positions of each sequence.
        tp_size: Ranks that split the rows of a context-parallel rank (sequence parallelism).
        cp_size: Ranks that split each sequence, each with two chunks.
    """
    total = sum(padded_length(length, tp_size=1, cp_size=cp_size) for length in lengths)
    return padded_length(total, tp_size=tp_size, cp_size=cp_size)


def packed_parts(
    lengths: Sequence[int],
    num_positions: int | None = None,
    *,
    tp_size: int = 1,
    tp_rank: int = 0,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> list[tuple[range, ...]]:
    """Gives the positions of each packed sequence on a rank, and last those of padding after all.

    Each sequence is padded by itself to a multiple of 2 cp, and split in zig-zag; the rank's parts
    stand one after another. What is left of T is a sequence of padding. Sequence parallelism takes
    a contiguous part of a context-parallel rank's rows.

    Args:
        lengths: Positions of each sequence.
        num_positions: T; None takes the least.
        tp_size: Tensor-parallel ranks that split the rows.
        tp_rank: This one.
        cp_size: Context-parallel ranks.
        cp_rank: This one.

    Returns:
        Of each sequence ascending ranges of its padded positions, in the order of the rank's rows;
        one entry more than sequences.

    Raises:
        ValueError: T is too small, or cannot be split.
    """
    _require_rank("tensor-parallel", tp_size, tp_rank)
    padded = [padded_length(length, tp_size=1, cp_size=cp_size) for length in lengths]
    least = packed_length(lengths, tp_size=tp_size, cp_size=cp_size)
    total = least if num_positions is None else num_positions
    if total < least or total != padded_length(total, tp_size=tp_size, cp_size=cp_size):
        raise ValueError(
            f"{total} positions do not hold packed sequences of {list(lengths)}, or cannot be "
            f"split over tp={tp_size}, cp={cp_size}; {least} is the least that can"
        )
    size = total // cp_size // tp_size
    start, parts = tp_rank * size, []
    for length in (*padded, total - sum(padded)):
        chunks = cp_positions(length, cp_size, cp_rank)
        parts.append(_cut(chunks, max(start, 0), max(start + size, 0)))
        start -= length // cp_size
    return parts


def kv_heads(num_heads: int, tp_size: int, tp_rank: int) -> range:
    """Gives the KV heads whose keys and values a tensor-parallel rank computes.

    With fewer KV heads than ranks, several ranks hold the same head, each for other query heads.

    Args:
        num_heads: KV heads (query groups) of a layer.
        tp_size: Ranks.
        tp_rank: This one.

    Raises:
        ValueError: Neither count divides the other.

    Source: Megatron-Core 0.19.2, `Attention.__init__` and
        `SelfAttention.get_query_key_value_tensors` (transformer/attention.py).
    """
    _require_rank("tensor-parallel", tp_size, tp_rank)
    larger, smaller = max(num_heads, tp_size), min(num_heads, tp_size)
    if larger % smaller:
        raise ValueError(
            f"{num_heads} KV heads cannot be split over {tp_size} tensor-parallel ranks: neither "
            "is a multiple of the other"
        )
    if num_heads < tp_size:
        head = tp_rank // (tp_size // num_heads)
        return range(head, head + 1)
    size = num_heads // tp_size
    return range(tp_rank * size, (tp_rank + 1) * size)


def expert_columns(num_columns: int, etp_size: int, etp_rank: int, *, block_size: int) -> range:
    """Gives the columns of an expert's activation (fc2's input) of an expert-tensor-parallel rank.

    Args:
        num_columns: Hidden size of an expert.
        etp_size: Ranks.
        etp_rank: This one.
        block_size: Neighbouring columns that share a block scale.

    Raises:
        ValueError: A shard would split a block.
    """
    _require_rank("expert-tensor-parallel", etp_size, etp_rank)
    if num_columns % (etp_size * block_size):
        blocks = num_columns // block_size
        possible = [n for n in range(1, blocks + 1) if num_columns % (n * block_size) == 0]
        choice = f"choose one of {possible}" if possible else "no size is possible"
        raise ValueError(
            f"expert_tensor_parallel_size={etp_size} would split blocks of {block_size} of the "
            f"experts' {num_columns} columns, and a block has one scale; {choice}"
        )
    size = num_columns // etp_size
    return range(etp_rank * size, (etp_rank + 1) * size)


def local_experts(num_experts: int, ep_size: int, ep_rank: int) -> range:
    """Gives the experts of an expert-parallel rank.

    Raises:
        ValueError: They cannot be split evenly.
    """
    _require_rank("expert-parallel", ep_size, ep_rank)
    if num_experts % ep_size:
        possible = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise ValueError(
            f"expert_model_parallel_size={ep_size} cannot split {num_experts} experts evenly; "
            f"choose one of {possible}"
        )
    size = num_experts // ep_size
    return range(ep_rank * size, (ep_rank + 1) * size)


def _cut(parts: Sequence[range], start: int, stop: int) -> tuple[range, ...]:
    """Gives elements start to stop - 1 of ranges that stand one after another."""
    found, before = [], 0
    for part in parts:
        piece = part[max(start - before, 0) : max(stop - before, 0)]
        if piece:
            found.append(piece)
        before += len(part)
    return tuple(found)


def _require_rank(kind: str, size: int, rank: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"{kind} rank must be 0 to {size - 1}; got {rank}")
