"""pytest imports this, and so tests/__init__.py, before it starts workers: they share one
folder."""
