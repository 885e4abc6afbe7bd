"""Published checkpoints (Hugging Face, safetensors) to Megatron's distributed ones, and back."""
