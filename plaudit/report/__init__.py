"""What a person looks at: progress in the terminal, curves of the run."""
