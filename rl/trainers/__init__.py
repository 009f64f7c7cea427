"""Trainers: update a policy with batches of groups, as ranks of an `ft.Session` of which any may die."""
