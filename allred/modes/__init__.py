"""The decorator, and how an optimizer becomes a distributed one in each mode."""
