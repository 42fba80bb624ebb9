"""Linear attention kernels for specific accelerators; loaded on first use."""
