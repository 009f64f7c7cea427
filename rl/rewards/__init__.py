"""Rewards of single-turn tasks: functions, rubrics, and ensembles of weak verifiers."""
