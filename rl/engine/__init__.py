"""Starts actors in processes of their own and calls them, over forks of the zygote or over Monarch."""
