"""Read journals, compare them, and show them."""
