"""Routed experts of a plain training as two products: torch's grouped one.

Megatron's `SequentialMLP` calls a module per expert and matrix, and its grouped experts need
Transformer Engine. Where experts are small, launching costs more than computing.

Legend: N dispatched rows, H hidden size, F hidden size of an expert, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_trace.models.moe import UnweightedSequentialMLP


class GroupedExperts(UnweightedSequentialMLP):
    """`UnweightedSequentialMLP` with two products for all experts; same parameters and function.

    Gated SiLU experts without bias on one rank of tensor parallelism; in BF16 on a GPU.
    """

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Gives the weighted outputs of the local experts, [N, H], and no bias."""
        rows = permuted_local_hidden_states
        ends_E = tokens_per_expert.to(rows.device, non_blocking=True).cumsum(0).to(torch.int32)
        experts: Any = self.local_experts
        fc1_EHF = torch.stack([expert.linear_fc1.weight for expert in experts]).transpose(1, 2)
        fc2_EFH = torch.stack([expert.linear_fc2.weight for expert in experts]).transpose(1, 2)
        gate, linear = F.grouped_mm(rows, fc1_EHF, offs=ends_E).chunk(2, dim=-1)
        output = F.grouped_mm(F.silu(gate) * linear, fc2_EFH, offs=ends_E)
        return (output * permuted_probs.unsqueeze(-1)).to(output.dtype), None
