"""Surgery on traced programs."""
