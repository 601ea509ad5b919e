"""auto_LiRPA, extended over many devices."""
