"""What checkpoints cost, and that kills do not harm them."""
