"""A reference trainer for recurrent-state sequence models on mixed data streams."""
