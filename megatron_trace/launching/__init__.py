"""What is checked before a job asks for GPUs, and what a machine can do; no model is built."""
