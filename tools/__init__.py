"""What only the authors use; README.md lists it. Not in the wheel."""
