"""Placeholder while the layers are being written."""
