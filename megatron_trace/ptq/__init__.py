"""Post-training quantisation of a BF16 policy's experts: what TRACE is compared with."""
