"""Models of other packages behind the trainer's protocol."""
