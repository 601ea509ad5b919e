"""Fold: rows, their alphas and the weights divided over one axis of ranks (after arXiv:2604.26294)."""
