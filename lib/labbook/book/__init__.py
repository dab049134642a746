"""Notebooks as files: their parameters, a batch of them, executing one, pages, copies to learn from."""
