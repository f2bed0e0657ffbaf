"""Parameter servers: which server holds what (placement)."""
