"""Parts of the byte-level language model in `examples/train_byte_lm.py`."""
