"""Strategies: how the weights and rows of a sweep are divided over ranks, as data, and what is made of them."""
