"""Multi-token prediction of the Qwen family in plain torch, as served models compute it.

`transformers` ignores these tensors. Read from vLLM's `qwen3_5_mtp.py` and `qwen3_next_mtp.py`: the
next token's embedding and the hidden state after the model's final norm, each normalised, are
projected together (the embedding's half first); then come a decoder layer with full attention and a
MoE, a norm, and the model's own output layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch


def published_draft_logits(
    model: Any, tensors: Mapping[str, torch.Tensor], tokens: torch.Tensor
) -> torch.Tensor:
    """Gives the logits [B, S - 1, V] of the token after the next one, but for the last position.

    Args:
        model: A causal language model of `transformers`.
        tensors: Those of multi-token prediction, of its dtype, with an expert's matrices apart.
        tokens: Integer [B, S].
    """
    own = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items()}
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    # Its decoder layer, and the norm after it; its embedding is not called.
    layer = type(model.model)(config).to(model.dtype).eval()
    state = _stacked(own, config.num_experts) | {
        "norm.weight": own["norm.weight"],
        "embed_tokens.weight": model.model.embed_tokens.weight,
    }
    layer.load_state_dict(state)
    norms = {}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        norms[name] = type(layer.norm)(config.hidden_size, eps=config.rms_norm_eps)
        norms[name].load_state_dict({"weight": own[f"{name}.weight"]})
    hidden = model.model(tokens).last_hidden_state[:, :-1]
    embedded = model.model.embed_tokens(tokens[:, 1:])
    both = (norms["pre_fc_norm_embedding"](embedded), norms["pre_fc_norm_hidden"](hidden))
    projected = torch.cat(both, dim=-1) @ own["fc.weight"].T
    return model.lm_head(layer(inputs_embeds=projected).last_hidden_state)


def _stacked(own: Mapping[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """Gives the layer's state with its experts in one tensor, as `transformers` holds them."""
    experts = "layers.0.mlp.experts."
    state = {
        name: tensor
        for name, tensor in own.items()
        if name.startswith("layers.0.") and not name.startswith(experts)
    }
    gate, up, down = (
        torch.stack([own[f"{experts}{n}.{part}_proj.weight"] for n in range(num_experts)])
        for part in ("gate", "up", "down")
    )
    return state | {
        f"{experts}gate_up_proj": torch.cat((gate, up), dim=1),
        f"{experts}down_proj": down,
    }
