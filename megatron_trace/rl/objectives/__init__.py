"""What an RL step maximises: one file per family of objectives."""
