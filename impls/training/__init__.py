"""Training on one device: what a step keeps, and in which precision it computes."""
