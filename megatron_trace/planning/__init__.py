"""What a TRACE run of a model would take: memory, traffic and time, from arithmetic alone."""
