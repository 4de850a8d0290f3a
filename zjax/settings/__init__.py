"""What a user may say: every setting, typed and within its range."""
