"""The catalogue of versions: its records, all changes to them, and the register cell that keeps them."""
