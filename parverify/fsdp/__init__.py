"""Fully sharded weights: every rank holds 1/P of each and gathers the layer in use (arXiv:2606.09377)."""
