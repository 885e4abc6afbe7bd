"""The published models that TRACE was made for.

Sizes are those of public configurations; `inferred` names what is the family's or follows from the
number of parameters. `launch/models/*.args` is generated from these by `tools/model_args.py`.
"""

from __future__ import annotations

from megatron_trace.models.architecture import Architecture

QWEN3_5_35B_A3B = Architecture(
    name="Qwen3.5-35B-A3B",
    num_layers=40,
    hidden_size=2048,
    num_query_heads=16,
    num_kv_heads=2,
    num_experts=256,
    router_topk=8,
    expert_hidden_size=512,
    shared_expert_hidden_size=512,
    gdn_key_heads=16,
    gdn_value_heads=32,
    advertised_parameters=35e9,
    advertised_active=3e9,
)
QWEN3_5_122B_A10B = Architecture(
    name="Qwen3.5-122B-A10B",
    num_layers=48,
    hidden_size=3072,
    num_query_heads=32,
    num_kv_heads=2,
    num_experts=256,
    router_topk=8,
    expert_hidden_size=1024,
    shared_expert_hidden_size=1024,
    gdn_key_heads=16,
    gdn_value_heads=64,
    advertised_parameters=122e9,
    advertised_active=10e9,
    inferred=("num_kv_heads", "head_dim", "expert_hidden_size", "shared_expert_hidden_size"),
)
QWEN3_5_397B_A17B = Architecture(
    name="Qwen3.5-397B-A17B",
    num_layers=60,
    hidden_size=4096,
    num_query_heads=32,
    num_kv_heads=2,
    num_experts=512,
    router_topk=10,
    expert_hidden_size=1024,
    shared_expert_hidden_size=1024,
    gdn_key_heads=16,
    gdn_value_heads=64,
    advertised_parameters=397e9,
    advertised_active=17e9,
)
QWEN3_8_FLASH_NEXT = Architecture(
    name="Qwen3.8-Flash-Next",
    num_layers=48,
    hidden_size=2560,
    num_query_heads=24,
    num_kv_heads=2,
    num_experts=512,
    router_topk=10,
    expert_hidden_size=640,
    shared_expert_hidden_size=640,
    gdn_key_heads=16,
    gdn_value_heads=48,
    left_out=(
        "hyper-connections of 4 branches",
        "sparse attention with an indexer (full attention instead)",
        "n-gram embedding table of 51B parameters",
    ),
)
PRESETS = {
    preset.name: preset
    for preset in (QWEN3_5_35B_A3B, QWEN3_5_122B_A10B, QWEN3_5_397B_A17B, QWEN3_8_FLASH_NEXT)
}


def qwen3_8_2_4t_a95b(
    *,
    gdn_key_heads: int,
    gdn_value_heads: int,
    gdn_key_head_dim: int,
    gdn_value_head_dim: int,
) -> Architecture:
    """Gives Qwen3.8-2.4T-A95B, of whose Gated DeltaNet no public configuration tells the sizes.

    Args:
        gdn_key_heads: Query and key heads.
        gdn_value_heads: Value heads.
        gdn_key_head_dim: Width of a query or key head.
        gdn_value_head_dim: Width of a value head.
    """
    return Architecture(
        name=NAME_2_4T,
        num_layers=92,
        hidden_size=8192,
        num_query_heads=64,
        num_kv_heads=4,
        num_experts=512,
        router_topk=10,
        expert_hidden_size=2048,
        shared_expert_hidden_size=2048,
        gdn_key_heads=gdn_key_heads,
        gdn_value_heads=gdn_value_heads,
        gdn_key_head_dim=gdn_key_head_dim,
        gdn_value_head_dim=gdn_value_head_dim,
        advertised_parameters=2.4e12,
        advertised_active=95e9,
    )


NAME_2_4T = "Qwen3.8-2.4T-A95B"
# Of the one model whose configuration is not known whole.
UNKNOWN_FIELDS = {
    NAME_2_4T: ("gdn_key_heads", "gdn_value_heads", "gdn_key_head_dim", "gdn_value_head_dim")
}
PRESET_NAMES = (*PRESETS, NAME_2_4T)


def preset(name: str, **unknown: int) -> Architecture:
    """Gives a published model by its name, in any case.

    Args:
        name: One of `PRESET_NAMES`.
        **unknown: The fields that `UNKNOWN_FIELDS` lists for it, all of them.

    Raises:
        ValueError: There is no such model, a field is missing, or one is given that is known.
    """
    known = _published_name(name)
    fields = UNKNOWN_FIELDS.get(known, ())
    missing = [field for field in fields if field not in unknown]
    if missing:
        raise ValueError(
            f"{known}: no public configuration tells {', '.join(missing)}; give them, as nothing "
            "here guesses them"
        )
    foreign = [field for field in unknown if field not in fields]
    if foreign:
        raise ValueError(f"{known}: {', '.join(foreign)} is known and cannot be given")
    return qwen3_8_2_4t_a95b(**unknown) if fields else PRESETS[known]


def preset_like(name: str, architecture: Architecture) -> Architecture:
    """Gives a published model, of which the sizes that are not known are those of another one.

    Args:
        name: As for `preset`.
        architecture: The other one, such as what a configuration describes.

    Raises:
        ValueError: There is no such model.
    """
    unknown = UNKNOWN_FIELDS.get(_published_name(name), ())
    return preset(name, **{field: getattr(architecture, field) for field in unknown})


def _published_name(name: str) -> str:
    names = {known.lower(): known for known in PRESET_NAMES}
    known = names.get(name.lower())
    if known is None:
        raise ValueError(f"no preset is called {name!r}; there are {', '.join(PRESET_NAMES)}")
    return known


def refuse_left_out(architecture: Architecture) -> None:
    """Refuses a model that Megatron-Core expresses in part only.

    Args:
        architecture: The model.

    Raises:
        ValueError: Parts are left out; the message names them.
    """
    if architecture.left_out:
        raise ValueError(
            f"{architecture.name} has {', '.join(architecture.left_out)}, which Megatron-Core "
            "0.19.2 cannot express: its weights would compute something else"
        )
