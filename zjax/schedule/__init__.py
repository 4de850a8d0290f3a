"""What each step of a run is: lengths, kept tokens, difficulties and learning rates."""
