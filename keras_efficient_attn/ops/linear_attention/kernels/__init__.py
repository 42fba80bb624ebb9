"""Linear attention as kernels of one kind of accelerator; loaded when first used."""
