"""One self-contained HTML page of one or several RL runs, also of partial or crashed ones."""
