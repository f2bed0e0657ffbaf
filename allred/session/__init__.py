"""The training loop, and what it shows and writes: progress, rates, summaries, averages of parameters."""
