"""What a key may use: limits and plans, the windows they are counted in, and who counts: this worker, or a Redis."""
