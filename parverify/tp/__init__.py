"""Tensor parallelism: products divided by channels."""
