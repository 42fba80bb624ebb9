"""The devices that share a sequence, for each backend that has them."""
