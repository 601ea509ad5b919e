"""Many instances through the same ranks: stages, a board from which ranks take work, and searches that all share."""
