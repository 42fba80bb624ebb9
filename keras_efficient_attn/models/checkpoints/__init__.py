"""Checkpoints in the format of transformers, read into and written from backbones."""
