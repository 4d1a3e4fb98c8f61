"""Building corpora on disk: from the running installation, or from a user's own text files."""
