"""Other libraries' names for what allred does, each with its own arguments; thin, over the rooms below."""
